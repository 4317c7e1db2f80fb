"""Files after ``gradsan fix --apply``, for all kinds of files and whatever the program does afterwards."""

import subprocess

import pytest

HEAD = "import torch\nw = torch.ones(3, requires_grad=True)\n"
TAIL = "a.sum().backward()\n"


@pytest.mark.parametrize(
    ("content", "old", "new"),
    [
        # A byte order mark, carriage returns, tabs, and a last line without an end.
        (
            b"\xef\xbb\xbf"
            + (HEAD + "if True:\n\ta = w.exp()\n\ta += 1\t# mehr \xe4\n" + TAIL.rstrip())
            .replace("\n", "\r\n")
            .encode(),
            b"\ta += 1\t#",
            b"\ta = a + 1\t#",
        ),
        (
            b"# -*- coding: latin-1 -*-\n" + (HEAD + "a = w.exp()\n\fa += 1  # größer\n" + TAIL).encode("latin-1"),
            b"\fa += 1",
            b"\fa = a + 1",
        ),
    ],
    ids=["bom-crlf-tabs", "latin1-formfeed"],
)
def test_all_but_the_change_stays_byte_for_byte(tmp_path, run_warm_search, content, old, new):
    file = tmp_path / "main.py"
    file.write_bytes(content)
    done = run_warm_search("fix", "--patch", "fix.diff", "--apply", "main.py")
    assert done.status == 0, done.stderr
    assert file.read_bytes() == content.replace(old, new)
    # The diff is in the file's own encoding, so that it leads to the same bytes.
    file.write_bytes(content)
    subprocess.run(["git", "apply", "--whitespace=nowarn", "fix.diff"], cwd=tmp_path, check=True)
    assert file.read_bytes() == content.replace(old, new)


def test_a_program_that_fails_from_disk_gets_its_files_back(tmp_path, run_warm_search):
    text = (
        HEAD
        + "from pathlib import Path\na = w.exp()\na += 1\n"
        + TAIL
        + "if 'a +' '= 1' not in Path(__file__).read_text():\n"
        "    raise ValueError('only from disk')\n"
    )
    (tmp_path / "main.py").write_text(text)
    done = run_warm_search("fix", "--apply", "main.py")
    assert done.status == 1
    assert "put back" in done.stderr
    assert (tmp_path / "main.py").read_text() == text
    assert sorted(one.name for one in tmp_path.iterdir()) == ["main.py"]


PACKAGE = {
    "__init__.py": "",
    "layers.py": "def scaled(x):\n    x *= 3\n    return x\n\n\ndef shifted(x):\n    x += 1\n    return x\n",
    "train.py": """\
import argparse

import torch

from nets.layers import scaled, shifted

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int)
size = parser.parse_args().size
w = torch.ones(size, requires_grad=True)
scaled(w.exp()).sum().backward()
shifted(w.sigmoid()).sum().backward()
""",
}


def test_several_faults_in_other_files_of_a_module_with_arguments(tmp_path, run_warm_search, run_python):
    (tmp_path / "nets").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "nets" / name).write_text(text)
    done = run_warm_search("fix", "--apply", "-m", "nets.train", "--size", "4")
    assert done.status == 0, done.stderr
    assert "fault 1 of 2" in done.stderr
    assert "fault 2 of 2" in done.stderr
    text = (tmp_path / "nets" / "layers.py").read_text()
    assert text == PACKAGE["layers.py"].replace("x *= 3", "x = x * 3").replace("x += 1", "x = x + 1")
    assert (tmp_path / "nets" / "train.py").read_text() == PACKAGE["train.py"]
    assert run_python("-m", "nets.train", "--size", "4", is_warm=True).status == 0
    # The second fault is told by the lines of the file as it lies there.
    assert "a/nets/layers.py" in done.stderr
    assert "layers.py:7" in done.stderr
