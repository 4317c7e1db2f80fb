"""Layers that work in place, told not to: where one of several of a class wrote, or a loop set the flag afterwards."""

from __future__ import annotations

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import changed_lines
from gradsan.source.modules import inplace_attribute_false, inplace_layers_false

_MOST_PLACES = 5


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Each place alone in which the program makes a layer of the writing class, all of them, and set flags.

    Which of several layers wrote cannot be read off a stack; that a single one is enough, a run shows.
    """
    writer = diagnosis.title.values.get("writer") or diagnosis.explanation.values.get("writer")
    if diagnosis.cause != "inplace_module" or not isinstance(writer, str):
        return ()
    found: list[Fix] = []
    for file in _files(diagnosis):
        changes = inplace_layers_false(file, writer)
        flags = inplace_attribute_false(file)
        kept = changes if len(changes) <= _MOST_PLACES else changes[-1:]
        for change in (*kept, *(() if flags is None else (flags,))):
            fix = blocks.fix("disable_inplace_module", changed_lines(file, change), writer=writer)
            found.append(fix)
    return tuple(found)


def _files(diagnosis: Diagnosis) -> list[str]:
    """The user's files that the stacks pass through, those nearest to the write first."""
    labels = (*blocks.labels(diagnosis, "written"), *blocks.labels(diagnosis, "saved", "used"))
    frames = [frame for label in labels for frame in reversed(label.site.frames) if frame.is_user]
    return list(dict.fromkeys(frame.file for frame in frames))
