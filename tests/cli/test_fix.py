"""``gradsan fix`` as people call it."""

import json

import pytest

from cases import each

BROKEN = """\
import torch
w = torch.ones(3, requires_grad=True)
a = w.exp()
a += 1\t# more
a.sum().backward()
print("gradient", w.grad.sum().item())
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "main.py"
    file.write_text(BROKEN)
    return file


def test_shown_fixes_are_kept_for_the_commands_that_write_them(program, run_warm_search, run_python):
    done = run_warm_search("fix", "--json", "out.json", "main.py")
    assert done.status == 0
    assert "+a = a + 1" in done.stderr
    assert "tried:" in done.stderr
    assert program.read_text() == BROKEN
    report = json.loads((program.parent / "out.json").read_text())
    best = report["diagnoses"][0]["fixes"][0]
    assert best["kind"] == "out_of_place"
    assert best["verification"]["status"] == "passed"
    assert best["meaning"] == "preserved"
    assert best["verification"]["gradient_difference"] == 0
    used = "it found is used"
    kept = run_warm_search("fix", "--patch", "fix.diff", "--json", "again.json", "main.py")
    assert (kept.status, used in kept.stderr, "trying" in kept.stderr) == (0, True, False)
    assert "+a = a + 1\t# more" in (program.parent / "fix.diff").read_text()
    assert json.loads((program.parent / "again.json").read_text())["diagnoses"] == report["diagnoses"]
    # With other arguments, or where a file has changed, it is searched anew.
    program.write_text(BROKEN.replace("more", "changed"))
    anew = run_warm_search("fix", "--apply", "2", "main.py")
    assert (anew.status, used in anew.stderr) == (0, False)
    assert "a = a.clone()\na += 1" in program.read_text()
    program.write_text(BROKEN)
    applied = run_warm_search("fix", "--apply", "main.py")
    assert (applied.status, used in applied.stderr) == (0, False)
    assert program.read_text() == BROKEN.replace("a += 1", "a = a + 1")
    assert run_python("main.py", is_warm=True).status == 0
    again = run_warm_search("fix", "main.py")
    assert again.status == 0
    assert "nothing to mend" in again.stderr


@each(
    ("words", "said"),
    [
        (("fix",), "program"),
        (("fix", "missing.py"), "missing.py"),
        (("fix", "--steps", "x", "main.py"), "steps"),
        (("fix", "--steps", "-1", "main.py"), "--steps"),
        (("fix", "--apply", "9", "main.py"), "9"),
        (("fix", "--patch", "no/such/folder/x", "main.py"), "no/such/folder"),
        (("fix", "-"), "standard input"),
    ],
)
def test_wrong_use_is_one_sentence(program, run_warm_search, words, said):
    done = run_warm_search(*words)
    assert done.status == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_with_another_error(program, run_warm_search):
    program.write_text("import torch\nraise ValueError('mine')\n")
    done = run_warm_search("fix", "main.py")
    assert done.status == 1
    assert "mine" in done.stderr
    assert "ValueError" in done.stderr


def test_uncommitted_changes_are_not_overwritten_unasked(program, run_warm_search):
    import subprocess

    for words in (["init", "-q"], ["add", "main.py"], ["commit", "-qm", "a"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=program.parent, check=True)
    program.write_text(BROKEN + "\n")
    done = run_warm_search("fix", "--apply", "main.py")
    assert done.status == 1
    assert program.read_text() == BROKEN + "\n"
    assert run_warm_search("fix", "--apply", "--yes", "main.py").status == 0
    assert "a = a + 1" in program.read_text()
