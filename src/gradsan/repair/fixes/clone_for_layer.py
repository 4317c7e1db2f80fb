"""A copy for a layer that works in place: what it is called with stays as autograd has saved it."""

from __future__ import annotations

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.calls import clone_given
from gradsan.source.change import changed_lines


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Where the user's code calls the layer or the function with one tensor, ``.clone()`` behind that tensor."""
    if diagnosis.cause != "inplace_module":
        return ()
    lines: list[tuple[str, int, str]] = []
    for label in blocks.labels(diagnosis, "written"):
        change = clone_given(label.frame, lambda call: next(iter(call.args), None))
        if change is None:
            return ()
        lines += changed_lines(label.frame.file, change)
    name = diagnosis.tensor.name if diagnosis.tensor is not None else None
    return (blocks.fix("clone_before_mutation", tuple(dict.fromkeys(lines)), "clone_for_layer", name=name or "?"),)
