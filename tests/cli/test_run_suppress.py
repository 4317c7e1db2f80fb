"""Findings that are not wanted, on the command line."""

import json

import pytest

from cases import each

SILENT = """\
import torch
w = torch.ones(3, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
    z = (w * 1).exp()
with torch.no_grad():
    z.add_(1){comment}
z.sum().backward()
"""


@pytest.fixture
def program(tmp_path):
    def write(comment=""):
        (tmp_path / "main.py").write_text(SILENT.format(comment=comment))
        return tmp_path

    write()
    return write


def test_a_comment(program, run_warm):
    assert run_warm("run", "main.py").status == 66
    program("  # gradsan: ignore[GS201]")
    done = run_warm("run", "main.py")
    assert done.status == 0
    assert "one finding is left out by GS201" in done.stderr
    assert "error[GS201]" not in done.stderr


def test_an_option_and_what_it_does_not_meet(program, run_warm):
    done = run_warm("run", "--ignore", "GS2xx,GS120:main.py", "main.py")
    assert done.status == 0
    assert "left out by GS2xx" in done.stderr
    assert "GS120:main.py (ignore) left nothing out" in done.stderr


def test_comments_of_libraries_are_not_looked_at(program, run_warm, tmp_path):
    folder = tmp_path / "lib" / "site-packages"
    folder.mkdir(parents=True)
    (folder / "borrowed.py").write_text("kept = 1  # gradsan: ignore[GS101]\n")
    (tmp_path / "own.py").write_text("kept = 1  # gradsan: ignore[GS102]\n")
    file = program() / "main.py"
    file.write_text("import borrowed, own\n" + file.read_text())
    said = run_warm("run", "main.py", env={"PYTHONPATH": str(folder)}).stderr
    assert "GS102" in said
    assert "GS101" not in said


def test_pyproject(program, run_warm):
    folder = program()
    (folder / "pyproject.toml").write_text('[tool.gradsan]\nignore = ["GS201"]\nquiet = true\n')
    done = run_warm("run", "main.py")
    assert (done.status, done.stderr) == (0, "")


def test_a_suppression_file(program, run_warm):
    folder = program()
    (folder / "known.txt").write_text("GS201:main.py:6\n")
    assert run_warm("run", "--suppressions", "known.txt", "main.py").status == 0


def test_hits_are_counted_and_what_nothing_met_is_said(program, run_warm):
    folder = program()
    rounds = "".join(f"    {line}\n" for line in SILENT.format(comment="").splitlines()[1:])
    source = f"import torch  # gradsan: ignore[GS120]\nfor _ in range(3):\n{rounds}"
    (folder / "main.py").write_text(source)
    (folder / "rules.txt").write_text("# known\nGS201:main.py  # meant\nGS111:old/*.py\n")
    (folder / "known.json").write_text(
        json.dumps({"schema": "gradsan.baseline/1", "known": [{"code": "GS101", "fingerprint": "0" * 16}]})
    )
    words = ["--ignore", "GS103", "--suppressions", "rules.txt", "--baseline", "known.json"]
    done = run_warm("run", *words, "main.py")
    assert done.status == 0
    assert [line.replace(str(folder), "…") for line in done.stderr.splitlines()] == [
        "gradsan: 3 findings are left out by GS201:main.py (rules.txt:2)",
        "gradsan: GS103 (ignore) left nothing out in this run",
        "gradsan: GS111:old/*.py (rules.txt:3) left nothing out in this run",
        "gradsan: GS120:1 (…/main.py:1) left nothing out in this run",
        "gradsan: one entry of the baseline was not found in this run",
    ]


def test_a_baseline(program, run_warm):
    folder = program()
    assert run_warm("run", "--write-baseline", "known.json", "main.py").status == 66
    assert json.loads((folder / "known.json").read_text())["known"][0]["code"] == "GS201"
    done = run_warm("run", "--baseline", "known.json", "main.py")
    assert done.status == 0
    assert "one finding is in the baseline" in done.stderr


@each(
    ("words", "said"),
    [
        (("--ignore", "101"), "GS101:train.py:30"),
        (("--suppressions", "missing.txt"), "missing.txt"),
        (("--suppressions", "wrong.txt"), "wrong.txt:1"),
        (("--baseline", "wrong.txt"), "wrong.txt"),
    ],
)
def test_wrong_use_is_one_sentence(program, run_warm, words, said):
    (program() / "wrong.txt").write_text("all of it\n")
    done = run_warm("run", *words, "main.py")
    assert done.status == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
