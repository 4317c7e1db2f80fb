"""Fixes of one conflict completed by those of the others at which the same backward would have stopped next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gradsan.model import Diagnosis, Fix, Message
from gradsan.source.change import Change, checked
from gradsan.source.tree import read_source

_AT_SAVE = ("help.clone_at_save", "help.clone_result")
"""Fixes of one use of the value; others change what is written, and with it every use."""
_OF_ONE = (*_AT_SAVE, "help.copy_handed_out")
"""Fixes that leave other tensors of the same lines as they are."""
_NAMESAKES = 4


def completed(diagnosis: Diagnosis, others: Sequence[Diagnosis]) -> Diagnosis:
    """The diagnosis with fixes that mend ``others``, too, first; where some do not, with a note that names these."""
    left: dict[str, None] = {}
    fixes: list[Fix] = []
    partial: list[int] = []
    for fix in diagnosis.fixes:
        is_whole = True
        for other in others if fix.lines else ():
            if _places(other) <= _places(diagnosis) and fix.summary.key not in _OF_ONE:
                continue
            more = joined(fix, other.fixes)
            if more is None:
                is_whole = False
                left[(other.tensor and other.tensor.name) or "?"] = None
            else:
                fix = more
        partial += [] if is_whole else [len(fixes)]
        fixes.append(fix)
    whole = [fix for number, fix in enumerate(fixes) if number not in partial]
    if any(fix.lines and fix.meaning == "preserved" for fix in whole):
        fixes = [*whole, *(fixes[number] for number in partial)]
    notes = (Message("note.others_overwritten", {"names": ", ".join(left)}),) if left else ()
    return replace(diagnosis, fixes=tuple(fixes), notes=(*diagnosis.notes, *notes))


def of_one_line(found: Sequence[Diagnosis]) -> tuple[Diagnosis, ...]:
    """``found``, with copies at a save for all silent findings of that line: each alone would leave the others."""
    said = []
    for one in found:
        fixes = one.fixes
        for other in found if one.silent else ():
            if other is not one and (other.code, other.silent) == (one.code, True) and _saved(other) == _saved(one):
                fixes = tuple((fix.summary.key in _AT_SAVE and joined(fix, other.fixes)) or fix for fix in fixes)
        said.append(replace(one, fixes=fixes))
    return tuple(said)


def _saved(one: Diagnosis) -> set[tuple[str, int]]:
    return {(label.frame.file, label.frame.line) for label in one.labels if label.role == "saved"}


class Namesakes:
    """Conflicts of equal lines whose tensors differ: each name is completed into the first one once."""

    def __init__(self, first: Diagnosis) -> None:
        self._names = {_name(first)}

    def added(self, known: Diagnosis, again: Diagnosis) -> Diagnosis:
        """``known``, with the fixes of ``again`` where that is of a tensor not seen yet, and changes other lines."""
        name = _name(again)
        if name in self._names or len(self._names) > _NAMESAKES:
            return known
        self._names.add(name)
        is_other = [fix.lines for fix in known.fixes] != [fix.lines for fix in again.fixes]
        return completed(known, [again]) if is_other else known


def _name(diagnosis: Diagnosis) -> str | None:
    return diagnosis.tensor.name if diagnosis.tensor else None


def joined(fix: Fix, others: Iterable[Fix]) -> Fix | None:
    """The fix with the lines of the one of its kind among ``others``; None without one, or where they clash."""
    keys = _AT_SAVE if fix.summary.key in _AT_SAVE else (fix.summary.key,)
    other = next((one for one in others if one.summary.key in keys and one.lines), None)
    lines = {(file, line): text for file, line, text in fix.lines}
    if other is None or not lines:
        return None
    for file, line, text in other.lines:
        merged = _merged(file, line, lines.setdefault((file, line), text), text)
        if merged is None:
            return None
        lines[file, line] = merged
    mine, theirs = (one.summary.values.get("name") for one in (fix, other))
    named = isinstance(mine, str) and isinstance(theirs, str) and theirs not in mine.split(", ")
    values = {**fix.summary.values, "name": f"{mine}, {theirs}"} if named else fix.summary.values
    whole = tuple((*place, text) for place, text in lines.items())
    return replace(fix, summary=replace(fix.summary, values=values), lines=whole)


def _merged(file: str, line: int, first: str, second: str) -> str | None:
    """Two changes of one line in one, ``u.clone() @ w @ v.clone()``; None where they change the same part of it."""
    if first == second:
        return first
    source = read_source(file)
    if source is None or not 0 < line <= len(source.lines):
        return None
    row = source.lines[line - 1]
    (start, end, text), (later_start, later_end, later) = sorted((_edit(row, first), _edit(row, second)))
    if "\n" in first + second or end >= later_start:
        return None
    whole = row[:start] + text + row[end:later_start] + later + row[later_end:]
    return None if checked(source, Change(line, row, whole, "")) is None else whole


def _edit(row: str, changed: str) -> tuple[int, int, str]:
    """What a changed line has in place of ``row[start:end]``: (start, end, text). No difflib: programs shadow it."""
    most = min(len(row), len(changed))
    start = next((at for at in range(most) if row[at] != changed[at]), most)
    tail = next((at for at in range(most - start) if row[-1 - at] != changed[-1 - at]), most - start)
    return start, len(row) - tail, changed[start : len(changed) - tail]


def _places(diagnosis: Diagnosis) -> set[tuple[str, int]]:
    return {(label.frame.file, label.frame.line) for label in diagnosis.labels if label.role == "written"}
