"""A custom Function that keeps a copy on ``ctx``, so that whoever writes the tensor later leaves the copy as it is."""

from __future__ import annotations

from dataclasses import replace

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import changed_lines
from gradsan.source.rewrite.suggest import clone_at_save


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``.clone()`` where the attribute of ``ctx`` is given its value."""
    name = diagnosis.tensor.name if diagnosis.tensor is not None else None
    kept = [label for label in blocks.labels(diagnosis, "note") if label.message.key == "label.kept_here"]
    if diagnosis.cause != "context_attribute" or not kept or not name:
        return ()
    change = clone_at_save(kept[0].frame, name)
    lines = () if change is None else changed_lines(kept[0].frame.file, change)
    fix = blocks.fix("clone_before_mutation", lines, "copy_on_context", name=name)
    return (replace(fix, meaning="preserved", how_changed=None),) if lines else ()
