"""Files with changes that are not committed are asked about where somebody can answer."""

import io

from cases import each
from gradsan.cli import fix as command
from gradsan.model import Fix, Message, Verification
from gradsan.repair import Patch
from gradsan.repair.search import Found


class Terminal(io.StringIO):
    def isatty(self):
        return True


@each(("answer", "stands"), [("y\n", True), ("YES\n", True), ("n\n", False), ("", False)])
def test_the_answer_decides(tmp_path, monkeypatch, capsys, answer, stands):
    file = tmp_path / "main.py"
    file.write_text("a = 1\n")
    monkeypatch.setattr(command, "dirty_files", lambda patch: tuple(patch.files))
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    patch = Patch({str(file): b"a = 2\n"})
    assert command.apply_fix([patch], 1, lambda: True, asks=True, language="en") is stands
    assert file.read_text() == ("a = 2\n" if stands else "a = 1\n")
    assert "not committed" in capsys.readouterr().err


def test_a_program_that_fails_gets_all_its_files_back(tmp_path, capsys):
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    for file in files:
        file.write_text("a = 1\n")
    patch = Patch({str(file): b"a = 2\n" for file in files})
    assert command.apply_fix([patch], 1, lambda: files[1].read_text() == "?", asks=False, language="en") is False
    assert [file.read_text() for file in files] == ["a = 1\n", "a = 1\n"]
    assert "put back" in capsys.readouterr().err


def fix(kind, training, meaning="changed"):
    verification = Verification("passed", training=training)
    return Fix(
        kind,
        meaning,
        Message("fix.reorder_step"),
        how_changed=Message("fix.reorder_step_how"),
        verification=verification,
    )


@each(
    ("kind", "training", "number", "asks", "answer", "is_wanted"),
    [
        ("out_of_place", "same", None, True, None, True),
        ("recompute_forward", "changed", None, True, None, False),
        ("recompute_forward", "changed", None, True, "n\n", False),
        ("recompute_forward", "changed", None, True, "y\n", True),
        ("recompute_forward", "changed", None, False, None, True),
        ("recompute_forward", "changed", 1, True, None, True),
        # Nobody meant this change: not without being asked for by its number.
        ("sum_losses", "changed", None, False, None, False),
        ("sum_losses", "changed", 1, False, None, True),
    ],
)
def test_patches_that_change_the_training_need_an_answer(
    monkeypatch, capsys, kind, training, number, asks, answer, is_wanted
):
    monkeypatch.setattr("sys.stdin", io.StringIO() if answer is None else Terminal(answer))
    found = command.is_wanted(fix(kind, training), number, asks=asks, language="en")
    assert found is is_wanted
    assert ("--apply 1" in capsys.readouterr().err) is not is_wanted


def test_a_training_that_could_not_be_compared_is_not_said_to_change(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert not command.is_wanted(fix("no_grad", None), None, asks=False, language="en")
    assert "is not known" in capsys.readouterr().err


def test_processes_that_were_let_through_are_not_said_to_have_no_fault(capsys):
    assert command.say_nothing_found(Found(), "en") == 0
    assert "other processes" not in capsys.readouterr().err
    assert command.say_nothing_found(Found(lets_through=True), "en") == 0
    assert "other processes that the program starts are not searched" in " ".join(capsys.readouterr().err.split())
