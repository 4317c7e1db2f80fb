"""Earlier backward, or one backward of two: the call before the statements that overwrite its saved values.

The usual shape: weights are swapped, merged or pruned for an evaluation between the loss and its backward. The
write cannot be delayed, since code in between reads it; the backward can run first, as nothing in between is
computed from gradients.

A loss that trains several networks is often sent back once for each of their optimizers. The first backward fills the
gradients of all, so the later one only repeats it.

And the ``step()`` that is missing behind a backward whose gradients are cleared unused.
"""

from __future__ import annotations

import ast
from dataclasses import replace

from gradsan.model import Diagnosis, Fix, Lines
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.identifiers import leaf_name
from gradsan.source.methods import BACKWARDS, has_attribute
from gradsan.source.rewrite.given import networks_of, stepped_optimizer
from gradsan.source.rewrite.moving import is_whole_lines, names_bound, names_read
from gradsan.source.tree import SourceFile

_LEAVING = (ast.Return, ast.Continue, ast.Break, ast.Raise, ast.Yield, ast.YieldFrom, ast.Await)
_OF_GRADIENTS = BACKWARDS | {"grad", "step", "unscale_", "update"}


def backward_first(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Call the backward, and the ``zero_grad()`` in between, before the first statement that writes.

    Only where nothing simpler preserves the training: a copy, or a new tensor instead of the write.
    """
    if any(fix.lines and fix.meaning == "preserved" for fix in diagnosis.fixes):
        return ()
    used, written = blocks.first(diagnosis, "used"), blocks.labels(diagnosis, "written")
    # The intention of a silent write is unknown.
    is_conflict = diagnosis.severity == "error" and not diagnosis.silent and diagnosis.cause not in blocks.STEPPED
    pairs = blocks.each_in_one_block(written, used) if used is not None and is_conflict else []
    if not pairs or any(pair[1].statement is not pairs[0][1].statement for pair in pairs):
        return ()
    first, backward = min((pair[0] for pair in pairs), key=lambda place: place.index), pairs[0][1]
    source, between = backward.source, backward.block[first.index : backward.index]
    clearing = [node for node in between if blocks.method_call(node, "zero_grad") is not None]
    staying = [node for node in between if node not in clearing]
    moved = [*clearing, backward.statement]
    attributes = _attributes(staying, ast.Store) & _attributes(moved, ast.Load)
    if not staying or not isinstance(backward.statement, ast.Expr):
        return ()
    if attributes or names_bound(staying) & names_read(moved):
        return ()
    if any(isinstance(one, _LEAVING) or _is_of_gradients(one) for node in staying for one in ast.walk(node)):
        return ()
    if not all(is_whole_lines(source, node) for node in (first.statement, *moved)):
        return ()
    away = {line: text for node in moved for line, text in blocks.removed(source, node).items()}
    start = source.span(first.statement).line
    texts = [*(blocks.text_of(source, node) for node in moved), source.lines[start - 1]]
    return (
        blocks.fix("reorder_update", blocks.lines_changed(source, {**away, start: "\n".join(texts)}), "backward_first"),
    )


def one_backward(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Leave a second backward of the same loss out, and clear before the first what is cleared in between.

    Only where another optimizer steps in between, and the gradients for the later one are cleared there: then both
    backwards give it the same ones, each once.
    """
    used = blocks.first(diagnosis, "used")
    place = None if used is None or diagnosis.silent else next(blocks.placements(used), None)
    later = None if place is None else blocks.backward_call(place.statement)
    if place is None or later is None or not isinstance(later.func, ast.Attribute):
        return ()
    source, loss = place.source, _call_as_written(place.source, later)
    first = next((at for at in range(place.index - 1, -1, -1) if has_attribute(place.block[at], *BACKWARDS)), None)
    call = None if first is None else blocks.backward_call(place.block[first])
    if first is None or call is None or _call_as_written(source, call) != loss:
        return ()
    between = place.block[first + 1 : place.index]
    cleared = [node for node in between if blocks.method_call(node, "zero_grad") is not None]
    stepped = {owner for node in between if (owner := stepped_optimizer(source, node))}
    follower = blocks.next_optimizer(place)
    if not cleared or not stepped or follower is None or follower in stepped:
        return ()
    if any(blocks.owner_of(source, node, "zero_grad") in stepped for node in cleared):
        return ()
    if names_bound(between) & names_read([place.statement]) or any(map(_reads_gradients, between)):
        return ()
    if any(_clips_others(source, node, stepped) for node in between) or any(
        has_attribute(one, *BACKWARDS) for one in place.block[:first]
    ):
        return ()  # gradients of an earlier backward would be cleared before the first step
    whole = [place.block[first], place.statement, *cleared]
    if not all(is_whole_lines(source, node) for node in whole):
        return ()
    return (Fix.worded("fix.one_backward", {}, _merged(source, whole), keeps=True),)


def _merged(source: SourceFile, whole: list[ast.stmt]) -> Lines:
    """The lines of the first of two backwards, with the arguments of the second, and behind what is cleared."""
    first, second, *cleared = whole
    away = {line: text for node in whole for line, text in blocks.removed(source, node).items()}
    texts = [*(blocks.text_of(source, node) for node in cleared), blocks.text_of(source, second)]
    return blocks.lines_changed(source, {**away, source.span(first).line: "\n".join(texts)})


def _call_as_written(source: SourceFile, call: ast.Call) -> tuple[str, ...]:
    """What a backward starts from, and its arguments but for ``retain_graph``, as written."""
    keywords = (source.text(one) for one in call.keywords if one.arg != "retain_graph")
    return source.text(call.func), *(source.text(one) for one in call.args), *keywords


def _clips_others(source: SourceFile, node: ast.stmt, optimizers: set[str]) -> bool:
    """Whether a statement clips gradients of more than the networks of these optimizers, as far as the file shows."""
    networks = set[str]().union(*(networks_of(source, one) for one in optimizers))
    for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
        if (leaf_name(call.func) or "").startswith("clip_grad"):
            given = call.args[0] if call.args else call
            owner = given.func.value if isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) else None
            if owner is None or source.text(owner) not in networks:
                return True
    return False


def _reads_gradients(node: ast.stmt) -> bool:
    """Whether a statement reads gradients otherwise than by a step, or leaves the block."""
    return any(
        isinstance(one, _LEAVING) or (isinstance(one, ast.Attribute) and one.attr in _OF_GRADIENTS - {"step"})
        for one in ast.walk(node)
    )


def _attributes(nodes: list[ast.stmt], context: type[ast.expr_context]) -> set[str]:
    """The attributes, as written, that ``nodes`` bind or read."""
    parts = (one for node in nodes for one in ast.walk(node) if isinstance(one, ast.Attribute))
    return {ast.unparse(one) for one in parts if isinstance(one.ctx, context)}


def _is_of_gradients(node: ast.AST) -> bool:
    """Whether a part of a statement reads, computes, or acts on gradients."""
    return isinstance(node, ast.Attribute) and node.attr in _OF_GRADIENTS


def step_after_backward(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """The step of the optimizer whose ``zero_grad()`` clears the gradients, after the backward and what clips."""
    advice, cleared = blocks.advice(diagnosis, "step_after_backward"), blocks.first(diagnosis, "written")
    used = blocks.first(diagnosis, "used")
    clear = None if cleared is None else next(blocks.placements(cleared), None)
    place = None if used is None else next(blocks.placements(used), None)
    if advice is None or clear is None or place is None or clear.source is not place.source:
        return ()
    if (named := _named_step(place)) is not None:
        line = place.source.span(named).end_line
        changed = blocks.lines_changed(place.source, {line: f"{place.source.lines[line - 1].rstrip()}()"})
        return (replace(advice, lines=changed, applicability="review"),)
    source, call = clear.source, blocks.method_call(clear.statement, "zero_grad")
    function = source.function(clear.statement)
    if call is None or not isinstance(call.func, ast.Attribute) or function is not source.function(place.statement):
        return ()
    receiver = source.text(call.func.value)
    if _is_network(source, receiver) or not is_whole_lines(source, place.statement):
        return ()
    end = source.span(blocks.behind_clipping(place)).end_line
    text = f"{source.lines[end - 1]}\n{source.indent(place.statement)}{receiver}.step()"
    if scalers := _scalers(source, place, function or source.module):
        # A scaler steps by itself, with gradients that are no longer scaled, and before its ``update()``.
        update = next((one for one in place.block[place.index :] if blocks.method_call(one, "update")), None)
        owner = source.text(update).partition(".update(")[0] if update is not None else None
        if update is None or owner not in scalers or not is_whole_lines(source, update):
            return ()
        end = source.span(update).line
        text = f"{source.indent(update)}{owner}.step({receiver})\n{source.lines[end - 1]}"
    return (replace(advice, lines=blocks.lines_changed(source, {end: text}), applicability="review"),)


def _scalers(source: SourceFile, place: blocks.Placed, function: ast.AST) -> set[str]:
    """The objects that scale the loss of this backward, or unscale gradients in its function."""
    calls = [(one, "scale") for one in ast.walk(place.statement)] + [(one, "unscale_") for one in ast.walk(function)]
    return {
        source.text(one.func.value)
        for one, name in calls
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr == name
    }


def _named_step(place: blocks.Placed) -> ast.stmt | None:
    """The statement ``optimizer.step`` that follows in the block, without its call, on lines of its own."""
    following = place.block[place.index + 1 :]
    named = (one for one in following if isinstance(one, ast.Expr) and isinstance(one.value, ast.Attribute))
    found = next((one for one in named if leaf_name(one.value) == "step"), None)
    is_alone = found is not None and place.source.lines[place.source.span(found).end_line - 1].rstrip().endswith(
        ".step"
    )
    return found if found is not None and is_alone and is_whole_lines(place.source, found) else None


def _is_network(source: SourceFile, name: str) -> bool:
    """Whether the file calls ``name``, or asks it for its parameters: ``model.zero_grad()`` names no optimizer."""
    return any(
        (isinstance(node, ast.Call) and source.text(node.func) == name)
        or (isinstance(node, ast.Attribute) and node.attr == "parameters" and source.text(node.value) == name)
        for node in source.nodes
    )
