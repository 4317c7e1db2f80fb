"""Files with changes that are not committed are asked about where somebody can answer."""

import io

import pytest

from gradsan.cli import _applying
from gradsan.repair import Patch


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("answer", "stands"), [("y\n", True), ("YES\n", True), ("n\n", False), ("", False)])
def test_the_answer_decides(tmp_path, monkeypatch, capsys, answer, stands):
    file = tmp_path / "main.py"
    file.write_text("a = 1\n")
    monkeypatch.setattr(_applying, "dirty_files", lambda patch: tuple(patch.files))
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    patch = Patch({str(file): b"a = 2\n"})
    assert _applying.apply_fix([patch], 1, lambda: True, asks=True, language="en") is stands
    assert file.read_text() == ("a = 2\n" if stands else "a = 1\n")
    assert "not committed" in capsys.readouterr().err


def test_a_program_that_fails_gets_all_its_files_back(tmp_path, capsys):
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    for file in files:
        file.write_text("a = 1\n")
    patch = Patch({str(file): b"a = 2\n" for file in files})
    assert _applying.apply_fix([patch], 1, lambda: files[1].read_text() == "?", asks=False, language="en") is False
    assert [file.read_text() for file in files] == ["a = 1\n", "a = 1\n"]
    assert "put back" in capsys.readouterr().err
