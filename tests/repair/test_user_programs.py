"""What gradsan advises and would try for programs in the style of users, held against versions made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import user_programs as programs

from gradsan.repair.patch import Patch, PatchError


def patched(lines: programs.Lines, file: Path) -> str | None:
    try:
        return Patch().with_lines(lines).files[str(file)].decode()
    except PatchError:
        return None


@pytest.mark.parametrize("name", programs.NAMES)
def test_the_first_help_does_no_harm_and_some_candidate_is_right(name: str, tmp_path: Path) -> None:
    case, file, other = programs.case(name), tmp_path / "train.py", tmp_path / "changed.py"
    found = programs.watched(case.broken, file)
    right = [programs.outcome(text, other) for text in case.right]
    harmful = [programs.outcome(text, other) for text in case.harmful]
    assert all(not isinstance(one, str) for one in right)
    assert not any(programs.is_one_of(one, right) for one in harmful)

    known: dict[str, programs.Outcome] = {}

    def comes_to(lines: programs.Lines) -> programs.Outcome:
        text = patched(lines, file)
        if text is None:
            return "PatchError"
        if text not in known:
            known[text] = programs.outcome(text, other)
        return known[text]

    shown = [lines for one in found for lines in one.shown[:1] if lines]
    assert not any(programs.is_one_of(comes_to(lines), harmful) for lines in shown)
    tried = [lines for one in found for lines in one.tried]
    assert any(programs.is_one_of(comes_to(lines), right) for lines in tried)
