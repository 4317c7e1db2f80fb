"""Checkpoints that run no backward of their own: ``use_reentrant=False``."""

from __future__ import annotations

import ast

from gradsan.model import Diagnosis, Fix, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import changed_lines, edited, with_keyword
from gradsan.source.identifiers import leaf_name
from gradsan.source.locate import expressions_at
from gradsan.source.tree import SourceFile

_CALLED = frozenset({"checkpoint", "checkpoint_sequential"})


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Say so in every call of checkpoint that the labels name, where the diagnosis advises it."""
    if blocks.advice(diagnosis, "not_reentrant") is None:
        return ()
    calls = {call: source for label in diagnosis.labels for source, call in _calls(label)}
    lines: list[tuple[str, int, str]] = []
    for source in dict.fromkeys(calls.values()):
        own = [call for call, where in calls.items() if where is source]
        edits = [with_keyword(source, call, "use_reentrant", "False") for call in own]
        change = edited(source, [edit for edit in edits if edit is not None], "not_reentrant")
        lines += () if change is None else changed_lines(source.file, change)
    return (blocks.fix("not_reentrant", tuple(lines)),) if lines else ()


def _calls(label: Label) -> list[tuple[SourceFile, ast.Call]]:
    return [
        (place.source, place.node)
        for frame in (label.frame, *(one for one in label.site.frames if one.is_user))
        for place in expressions_at(frame)
        if isinstance(place.node, ast.Call) and leaf_name(place.node.func) in _CALLED
    ]
