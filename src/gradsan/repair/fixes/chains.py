"""Several networks trained by losses of one forward, each with an optimizer of its own that steps right away.

Every backward but the first needs values that an earlier step has changed. All backwards run first, each for the
parameters of its own optimizer only (``inputs=``), and the steps after the last of them: no loss is changed or
computed again, and no gradient reaches the parameters of another optimizer.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from gradsan.model import Diagnosis, Fix, Label, Message, Site
from gradsan.repair.fixes import _blocks as blocks
from gradsan.repair.fixes.steps import reorder_step
from gradsan.source.locate import at_span
from gradsan.source.rewrite.asked import keep_graph_from
from gradsan.source.rewrite.given import networks_of, stepped_optimizer
from gradsan.source.rewrite.moving import is_whole_lines
from gradsan.source.tree import SourceFile

ALL_AT_ONCE = "fix.steps_behind_all"
"""The message key of this fix."""

_FEWEST_MOVED = 2
"""One step that moves past one backward is what ``steps.reorder_step`` suggests."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """The ``backwards`` of one optimizer and the ``step`` that follows them, as statements of one block."""

    backwards: tuple[ast.stmt, ...]
    step: ast.stmt
    optimizer: str


def steps_behind_all(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Move all steps after the last backward, and restrict each backward to the parameters of its own optimizer."""
    used = blocks.first(diagnosis, "used")
    written = blocks.labels(diagnosis, "written")
    if used is None or not written or diagnosis.cause not in blocks.STEPPED:
        return ()
    pairs = blocks.each_in_one_block(written, used)
    if not pairs or any(pair[0].block is not pairs[0][0].block for pair in pairs):
        return ()
    first = min((pair[0] for pair in pairs), key=lambda place: place.index)
    source = first.source
    turns = _turns(source, first.block)
    start = next((number for number, turn in enumerate(turns) if turn.step is first.statement), None)
    turns = turns[start:] if start is not None else []
    moved = [turn.step for turn in turns[:-1]]
    if len(moved) < _FEWEST_MOVED or len({turn.optimizer for turn in turns}) < len(turns):
        return ()
    if _loses_gradients(source, first.block, turns):
        return ()
    changes: dict[int, str] = {}
    for turn in turns:
        for node in turn.backwards:
            text = blocks.with_inputs(source, node, turn.optimizer)
            if text is None:
                return ()
            changes[source.span(node).line] = text
    until = first.block.index(turns[-1].step)
    placed = [replace(first, statement=node, index=first.block.index(node)) for node in moved]
    moved += blocks.schedules_between(source, placed, until)
    moved.sort(key=lambda node: node.lineno)
    if not all(is_whole_lines(source, node) for node in moved):
        return ()
    for node in moved:
        changes |= blocks.removed(source, node)
    last = source.span(turns[-1].backwards[-1]).line
    changes[last] = "\n".join([changes[last], *(blocks.text_of(source, node) for node in moved)])
    found = blocks.fix("reorder_step", blocks.lines_changed(source, changes), "steps_behind_all")
    return blocks.with_one_update(replace(first, statement=turns[-1].step, index=until), moved, found)


def _loses_gradients(source: SourceFile, block: list[ast.stmt], turns: list[_Turn]) -> bool:
    """Whether gradients that a moved step is to find are cleared before it, or added to by another optimizer's loss."""
    given = [networks_of(source, turn.optimizer) for turn in turns]
    pairs = ((f"{a}.", f"{b}.") for one, other in combinations(given, 2) for a in one for b in other)
    if any(a.startswith(b) or b.startswith(a) for a, b in pairs):
        return True
    for at in range(block.index(turns[0].backwards[0]), block.index(turns[-1].backwards[-1])):
        cleared = blocks.owner_of(source, block[at], "zero_grad") or ""
        later = (number for number, turn in enumerate(turns) if block.index(turn.backwards[0]) > at)
        if cleared and not any(cleared in (turns[number].optimizer, *given[number]) for number in later):
            return True
    return False


def backward_for_own(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Restrict the later backward to the parameters of the optimizer that steps next: it leaves the other graph out.

    Where the shared values are in a list of states, or carried by loops, no argument of a call could be detached.
    """
    used = blocks.first(diagnosis, "used")
    place = None if used is None else next(blocks.placements(used), None)
    if place is None or diagnosis.cause not in (blocks.SHARED, *blocks.STEPPED):
        return ()
    source, optimizer = place.source, _optimizer_after(place, used)
    text = blocks.with_inputs(source, place.statement, optimizer) if is_cleared(source, optimizer) else None
    if text is None:
        return ()
    lines = blocks.lines_changed(source, {source.span(place.statement).line: text})
    found = blocks.fix("backward_for_own", lines, optimizer=optimizer)
    # What both losses go through of the optimizer's own network is needed twice.
    return (found, *_with_kept_graph(diagnosis, (found,)))


def _optimizer_after(place: blocks.Placed, used: Label | None) -> str:
    """The optimizer of the first step behind a backward: in its block, or behind the call of the method that it is in.

    There, it is an attribute of the object that both methods belong to.
    """
    for one in () if used is None else blocks.placements(used):
        optimizer = blocks.next_optimizer(one)
        if optimizer is not None:
            source, inner, outer = place.source, place.statement, one.statement
            owner = source.owner_class(inner)
            is_own = optimizer.startswith("self.") and owner is not None and owner is source.owner_class(outer)
            return optimizer if is_own or source.function(outer) is source.function(inner) else ""
    return ""


def steps_behind_kept_graph(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Keep the graph in the earlier backward, and move the steps between both backwards behind the later one.

    Kept alone, the graph would lead to the values that those steps overwrite.
    """
    used = blocks.first(diagnosis, "used")
    updated = [one for one in blocks.labels(diagnosis, "note") if one.message.key == "label.updated_between"]
    if diagnosis.cause != blocks.SHARED or used is None or not updated:
        return ()
    stepped = replace(diagnosis, cause=blocks.STEP_BETWEEN, labels=(*_steps_until(updated[0], used), used), fixes=())
    return _with_kept_graph(diagnosis, reorder_step(stepped))


def _with_kept_graph(diagnosis: Diagnosis, fixes: Sequence[Fix]) -> tuple[Fix, ...]:
    """The fixes, each with ``retain_graph=True`` in the earlier backward."""
    freed = blocks.first(diagnosis, "freed")
    kept = () if freed is None or diagnosis.cause != blocks.SHARED else keep_graph_from(blocks.user_frames(freed))
    taken = {(file, line) for file, line, _ in kept}
    return tuple(
        replace(fix, summary=Message("fix.and_keep_graph", {"fix": fix.summary}), lines=(*kept, *fix.lines))
        for fix in (fixes if kept else ())
        if not taken & {(file, line) for file, line, _ in fix.lines}
    )


def _steps_until(first: Label, used: Label) -> list[Label]:
    """Labels of the ``first`` step as written, and of every later one in its block before the statement of ``used``."""
    written = replace(first, role="written")
    pair = blocks.in_one_block(first, used)
    if pair is None:
        return [written]
    place, source, frames = pair[0], pair[0].source, blocks.user_frames(first)
    span = source.span(place.statement)
    depth = [
        number
        for number, one in enumerate(frames)
        if one.file == source.file and span.line <= one.line <= span.end_line
    ]
    found = [written]
    for node in place.block[place.index + 1 : pair[1].index] if depth else ():
        optimizer = stepped_optimizer(source, node)
        if optimizer is None or not is_cleared(source, optimizer):
            continue
        frame = at_span(frames[depth[-1]], source.span(node))
        found.append(replace(written, frame=frame, site=Site((*frames[: depth[-1]], frame))))
    return found


def _turns(source: SourceFile, block: list[ast.stmt]) -> list[_Turn]:
    """The steps of optimizers in a block, each with the backwards since the step before it."""
    found: list[_Turn] = []
    waiting: list[ast.stmt] = []
    for node in block:
        if blocks.backward_call(node) is not None:
            waiting.append(node)
        optimizer = stepped_optimizer(source, node) if blocks.is_plain_step(source, node) else None
        if waiting and optimizer is not None and is_cleared(source, optimizer):
            found.append(_Turn(tuple(waiting), node, optimizer))
            waiting = []
    return found


def is_cleared(source: SourceFile, optimizer: str) -> bool:
    """Whether it clears gradients: other objects with a ``step`` (a schedule, an environment) do not."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == "zero_grad" and source.text(node.value) == optimizer
        for node in source.nodes
    )
