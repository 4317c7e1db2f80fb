"""All backwards before any step: ``optimizer.step()`` moves behind the backward that needs the old values.

The later backward would add its own gradients to those of the optimizer that now steps after it. Where the next
optimizer's parameters are all that it should reach, ``inputs=`` keeps them apart; else a copy of the gradients does.
"""

from __future__ import annotations

import ast

from gradsan.model import Diagnosis, Fix, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.identifiers import leaf_name


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Move the steps that wrote, and do the same with ``inputs=`` where another optimizer steps afterwards."""
    used = next(iter(blocks.labels(diagnosis, "used")), None)
    if used is None or diagnosis.cause not in blocks.STEPPED:
        return ()
    if swapped := _later_call_first(blocks.labels(diagnosis, "written"), used):
        return swapped
    steps: dict[ast.stmt, blocks.Placed] = {}
    place = None
    for written in blocks.labels(diagnosis, "written"):
        pair = blocks.in_one_block(written, used)
        if pair is None or pair[0].index >= pair[1].index or blocks.method_call(pair[0].statement, "step") is None:
            return ()
        if place is not None and place.statement is not pair[1].statement:
            return ()
        steps[pair[0].statement], place = pair
    if place is None:
        return ()
    source, backward = place.source, place.statement
    if not all(blocks.is_whole_lines(source, node) for node in (*steps, backward)):
        return ()
    moved = "\n".join(blocks.text_of(source, node) for node in steps)
    away = {line: text for node in steps for line, text in blocks.removed(source, node).items()}
    span = source.span(backward)
    last = source.lines[span.end_line - 1]
    found = [blocks.fix("reorder_step", blocks.lines_changed(source, {**away, span.end_line: f"{last}\n{moved}"}))]
    apart = _with_inputs(place, set(steps))
    if apart is not None:
        texts = {**away, span.line: f"{apart}\n{moved}"}
        texts.update(dict.fromkeys(range(span.line + 1, span.end_line + 1), ""))
        found.append(blocks.fix("reorder_step", blocks.lines_changed(source, texts), "reorder_step_apart"))
    found += _with_kept_gradients(place, list(steps))
    return tuple(found)


def _later_call_first(written: tuple[Label, ...], used: Label) -> tuple[Fix, ...]:
    """Two calls of helpers that each walk a loss and step: the later one moved before the one whose step wrote."""
    pairs = [pair for one in written if (pair := _outermost_pair(one, used)) is not None]
    if len(pairs) < len(written) or len({pair[0].index for pair in pairs}) != 1:
        return ()
    earlier, later = pairs[0]
    calls = [place.statement.value for place in (earlier, later) if isinstance(place.statement, ast.Expr)]
    source, between = later.source, later.block[earlier.index : later.index]
    if len(calls) != 2 or earlier.index > later.index or not all(isinstance(one, ast.Call) for one in calls):
        return ()
    # A backward or step that stands here by itself is told apart from its optimizer's; the others know what moves.
    if any(isinstance(one, ast.Call) and leaf_name(one.func) in ("backward", "step") for one in calls):
        return ()
    if any(blocks.names_bound(node) & blocks.names_read([later.statement]) for node in between):
        return ()
    if not all(blocks.is_whole_lines(source, node) for node in (earlier.statement, later.statement)):
        return ()
    start = source.span(earlier.statement).line
    changes = blocks.removed(source, later.statement)
    changes[start] = f"{blocks.text_of(source, later.statement)}\n{source.lines[start - 1]}"
    values = {"later": source.text(calls[1]), "earlier": source.text(calls[0])}
    return (blocks.fix("reorder_step", blocks.lines_changed(source, changes), "reorder_calls", **values),)


def _outermost_pair(first: Label, second: Label) -> tuple[blocks.Placed, blocks.Placed] | None:
    """Where the stacks of two labels part: within a helper that both went through, they stand in two calls of it."""
    others = list(blocks.placements(second))[::-1]
    for one in list(blocks.placements(first))[::-1]:
        for other in others:
            if one.block is other.block and one.statement is not other.statement:
                return one, other
    return None


def _with_kept_gradients(backward: blocks.Placed, steps: list[ast.stmt]) -> list[Fix]:
    """A copy of the gradients where the step stood, put back right before it: without what the later backward adds."""
    source = backward.source
    call = blocks.method_call(steps[0], "step")
    if len(steps) != 1 or call is None or call.args or call.keywords:
        return []
    assert isinstance(call.func, ast.Attribute)
    optimizer = source.text(call.func.value)
    params, kept, p, grad = (blocks.fresh_name(source, name) for name in ("params", "kept", "p", "grad"))
    start, end = source.span(steps[0]), source.span(backward.statement).end_line
    indent = source.lines[start.line - 1][: start.column - 1]
    changes = {
        **blocks.removed(source, steps[0]),
        start.line: f'{indent}{params} = [{p} for group in {optimizer}.param_groups for {p} in group["params"]]\n'
        f"{indent}{kept} = [None if {p}.grad is None else {p}.grad.clone() for {p} in {params}]",
        end: f"{source.lines[end - 1]}\n{indent}for {p}, {grad} in zip({params}, {kept}):\n"
        f"{indent}{blocks.indentation_of(source)}{p}.grad = {grad}\n{blocks.text_of(source, steps[0])}",
    }
    return [blocks.fix("reorder_step", blocks.lines_changed(source, changes), "reorder_step_kept")]


def _with_inputs(place: blocks.Placed, moved: set[ast.stmt]) -> str | None:
    """The backward's lines with ``inputs=`` naming the parameters of the optimizer that steps next."""
    call = blocks.method_call(place.statement, "backward")
    following = place.block[place.index + 1 :]
    step = next((one for node in following if node not in moved and (one := blocks.method_call(node, "step"))), None)
    if call is None or step is None or any(keyword.arg == "inputs" for keyword in call.keywords):
        return None
    assert isinstance(step.func, ast.Attribute)
    source = place.source
    optimizer = source.text(step.func.value)
    inputs = f'inputs=[p for group in {optimizer}.param_groups for p in group["params"]]'
    span = source.span(call)
    text = blocks.text_of(source, place.statement)
    if span.line != span.end_line:
        return None
    at = span.end_column - 2
    comma = ", " if call.args or call.keywords else ""
    return f"{text[:at]}{comma}{inputs}{text[at:]}"
