"""Suggestions for values that were changed without autograd's knowledge. Nothing here was run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradsan import source
from gradsan.diagnose.facts import Facts
from gradsan.diagnose.levels import place
from gradsan.model import Fix, Frame, Message, Site

Lines = tuple[tuple[str, int, str], ...]


def for_unrecorded(facts: Facts, name: str | Message) -> tuple[Fix, ...]:
    """Let autograd record the change, or change a copy of the value."""
    values = {"name": name}
    if facts.first is not None and not facts.first.grad_enabled:
        return (_fix("record_the_change", values), _fix("change_a_copy", values))
    return (_fix("change_a_copy", values), _fix("record_the_change", values))


def recorded(facts: Facts, name: str | Message) -> tuple[Fix, ...]:
    """Compute a new tensor where the old one was written past autograd."""
    frame, write = _written_at(facts), facts.first
    change = None if frame is None or write is None else source.recorded(frame, write.op)
    places = {(one.user_frame.file, one.user_frame.line) for one in _sites(facts) if one.user_frame is not None}
    if change is None or frame is None or change.notes or len(places) != 1:
        return (_fix("record_the_change", {"name": name}),)
    return (_fix("record_the_change", {"name": name}, source.changed_lines(frame.file, change)),)


def _sites(facts: Facts) -> list[Site]:
    return [write.site for write in facts.writes or facts.missed]


def for_argument(facts: Facts, values: Mapping[str, Any]) -> tuple[Fix, ...]:
    """Compute a new tensor in the function instead of changing the argument."""
    frame, write = _written_at(facts), facts.first
    lines: Lines = ()
    if frame is not None and write is not None:
        change = source.out_of_place(frame, write.op)
        change = change if change is not None else source.clone_before(frame, write.op)
        lines = () if change is None else source.changed_lines(frame.file, change)
    return (_fix("leave_the_argument", values, lines),)


def _written_at(facts: Facts) -> Frame | None:
    return None if facts.first is None else place(facts.first.site)


def _fix(kind: str, values: Mapping[str, Any], lines: Lines = ()) -> Fix:
    return Fix(
        kind=kind,
        meaning="changed",
        summary=Message(f"help.{kind}", values),
        how_changed=Message(f"help.{kind}_how", values),
        applicability="review" if lines else "manual",
        lines=lines,
    )
