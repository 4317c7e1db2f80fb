"""A list of parts and one ``torch.stack`` instead of a tensor that a loop fills part by part."""

from __future__ import annotations

from gradsan import source
from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import _blocks as blocks


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Where a loop stores into a part of a variable, keep that variable as a list."""
    for label in blocks.labels(diagnosis, "written"):
        change = source.list_and_stack(label.frame)
        lines = () if change is None else source.changed_lines(label.frame.file, change)
        if lines:
            return (blocks.fix("list_and_stack", lines),)
    return ()
