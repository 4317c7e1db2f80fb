"""One step after the loop: several losses of one forward are backpropagated in a loop that also steps."""

from __future__ import annotations

import ast

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import _blocks as blocks


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Move the step behind the loop whose rounds share a forward; the gradients of all losses add up before it."""
    used = next(iter(blocks.labels(diagnosis, "used")), None)
    written = blocks.labels(diagnosis, "written")
    saved = next(iter(blocks.labels(diagnosis, "saved")), None)
    if used is None or saved is None or len(written) != 1 or diagnosis.cause != "step_between_forward_and_backward":
        return ()
    pair = blocks.in_one_block(used, written[0])
    if pair is None:
        return ()
    backward, step = pair
    source = step.source
    loop = source.parents[step.statement][0]
    if not isinstance(loop, ast.For) or blocks.method_call(step.statement, "step") is None or loop.orelse:
        return ()
    if step.index < backward.index or len(step.block) < 2 or not blocks.is_whole_lines(source, step.statement):
        return ()
    is_shared = blocks.at_block(saved, step.block) is None
    if not is_shared or blocks.names_read([step.statement]) & blocks.names_bound(loop.target):
        return ()
    inside = blocks.text_of(source, step.statement)
    indent = " " * (source.span(loop).column - 1)
    end = source.span(loop).end_line
    changes = blocks.removed(source, step.statement)
    moved = indent + inside.strip()
    if end in changes:
        changes[end] = moved
    else:
        changes[end] = f"{source.lines[end - 1]}\n{moved}"
    return (blocks.fix("reorder_step", blocks.lines_changed(source, changes), "step_after_loop"),)
