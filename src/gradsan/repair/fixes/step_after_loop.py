"""Steps after the loop: several losses of one forward are backpropagated in a loop that also steps.

One step for the sum of all losses is the short way. Where each round has its own gradients (an optimizer of its own, or
zeroing in between), they are kept and stepped with one after the other, which changes no gradient.
"""

from __future__ import annotations

import ast
import textwrap

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.tree import SourceFile


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Move the step behind the loop whose rounds share a forward: once for all, or once for each round."""
    used = next(iter(blocks.labels(diagnosis, "used")), None)
    written = blocks.labels(diagnosis, "written")
    saved = next(iter(blocks.labels(diagnosis, "saved")), None)
    if used is None or saved is None or len(written) != 1 or diagnosis.cause not in blocks.STEPPED:
        return ()
    pair = blocks.in_one_block(used, written[0])
    if pair is None:
        return ()
    backward, step = pair
    source = step.source
    loop = source.parents[step.statement][0]
    if not isinstance(loop, ast.For) or loop.orelse or step.index < backward.index:
        return ()
    is_shared = blocks.at_block(saved, step.block) is None
    if not is_shared or len(step.block) < 2:
        return ()
    call = blocks.method_call(step.statement, "step")
    # An update by hand ends with clearing the gradients: what follows it belongs to it.
    moving = [step.statement] if call is not None else step.block[step.index :]
    if len(moving) == len(step.block) or not all(blocks.is_whole_lines(source, node) for node in moving):
        return ()
    found = []
    if not blocks.names_read(moving) & (blocks.names_bound(loop.target) | _bound_before(step)):
        found.append(_once(source, loop, moving))
    if call is not None and not call.args and not call.keywords:
        found.append(_each_round(source, loop, step.statement, call))
    return tuple(found)


def _bound_before(step: blocks.Placed) -> set[str]:
    """The names that a round binds before its update: behind the loop they would be those of the last round."""
    return {name for node in step.block[: step.index] for name in blocks.names_bound(node)}


def _once(source: SourceFile, loop: ast.For, moving: list[ast.stmt]) -> Fix:
    lines = "\n".join(blocks.text_of(source, node) for node in moving)
    moved = textwrap.indent(textwrap.dedent(lines), " " * (source.span(loop).column - 1))
    changes = {line: text for node in moving for line, text in blocks.removed(source, node).items()}
    end = source.span(loop).end_line
    changes[end] = moved if end in changes else f"{source.lines[end - 1]}\n{moved}"
    return blocks.fix("reorder_step", blocks.lines_changed(source, changes), "step_after_loop")


def _each_round(source: SourceFile, loop: ast.For, step: ast.stmt, call: ast.Call) -> Fix:
    assert isinstance(call.func, ast.Attribute)
    optimizer = source.text(call.func.value)
    names = ("pending", "optimizer", "params", "p", "grads", "grad")
    kept, stepping, params, p, grads, grad = (blocks.fresh_name(source, name) for name in names)
    start, place = source.span(loop), source.span(step)
    outer, inner = source.lines[start.line - 1][: start.column - 1], source.lines[place.line - 1][: place.column - 1]
    unit = inner[len(outer) :] or "    "
    # A gradient that is not taken away in between is added to where it lies.
    value = f"{p}.grad" if _clears(loop) else f"None if {p}.grad is None else {p}.grad.clone()"
    keep = (
        f'{inner}{params} = [{p} for group in {optimizer}.param_groups for {p} in group["params"]]\n'
        f"{inner}{kept}.append(({optimizer}, [({p}, {value}) for {p} in {params}]))"
    )
    changes = {
        **blocks.removed(source, step),
        start.line: f"{outer}{kept} = []\n{source.lines[start.line - 1]}",
        place.line: keep,
    }
    after = (
        f"{outer}for {stepping}, {grads} in {kept}:\n"
        f"{outer}{unit}for {p}, {grad} in {grads}:\n"
        f"{outer}{unit}{unit}{p}.grad = {grad}\n"
        f"{outer}{unit}{stepping}.step()"
    )
    end = start.end_line
    changes[end] = f"{changes.get(end, source.lines[end - 1])}\n{after}"
    return blocks.fix("reorder_step", blocks.lines_changed(source, changes), "step_after_loop_apart")


def _clears(loop: ast.For) -> bool:
    """Whether every round sets gradients to None, so that the next round's are new tensors."""
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return any(
        isinstance(call.func, ast.Attribute) and call.func.attr == "zero_grad" and not call.args and not call.keywords
        for call in calls
    )
