"""Gradients: returned as new tensors, cleared in every round, or released."""

from __future__ import annotations

import ast
from dataclasses import replace

from gradsan.model import Diagnosis, Fix, Frame, Label, Lines
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import (
    Change,
    Edit,
    changed_lines,
    edited,
    edited_lines,
    insert_after,
    insert_before,
    text_with,
)
from gradsan.source.flow.bindings import last_binding
from gradsan.source.flow.targets import target_at
from gradsan.source.identifiers import chain_key, leaf_name, local_nodes
from gradsan.source.intent.flags import is_gradient_read
from gradsan.source.locate import expressions_at, statement_at
from gradsan.source.methods import BACKWARDS, has_attribute, is_inplace_method
from gradsan.source.rewrite.moving import is_whole_lines, names_bound, names_read
from gradsan.source.rewrite.out_of_place import out_of_place
from gradsan.source.rewrite.scatter import member_out_of_place, part_out_of_place
from gradsan.source.rewrite.suggest import clone_before
from gradsan.source.tree import SourceFile, Span


def return_new_gradient(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """The write out of place, and the same write to a copy; a hook that returned nothing returns the result."""
    advice = blocks.advice(diagnosis, "return_new_gradient")
    if diagnosis.cause != "gradient_overwritten" or advice is None:
        return ()
    found: list[Fix] = []
    for label in blocks.labels(diagnosis, "written"):
        frame, op = label.frame, label.op or ""
        new = out_of_place(frame, op) or member_out_of_place(frame, op) or part_out_of_place(frame, op)
        for change in (new, clone_before(frame, op)):
            lines = () if change is None else _returned(label, change)
            if lines:
                found.append(replace(advice, lines=lines, applicability="review"))
    return tuple(found)


def _returned(label: Label, change: Change) -> Lines:
    """``change``, with a ``return`` of its target at the end of a function without a result."""
    statement = statement_at(label.frame)
    target = target_at(label.frame, label.op or "")
    if statement is None or target is None:
        return ()
    source, function = statement.source, statement.function
    # A new value for the variable of a loop goes nowhere, and a hook may be given several gradients.
    handed_out = (one.target for one in statement.loops if not isinstance(one, ast.While))
    root = next((one.id for one in ast.walk(target[1].node) if isinstance(one, ast.Name)), None)
    if any(isinstance(one, ast.Name) and one.id == root for each in handed_out for one in ast.walk(each)):
        return ()
    changes = blocks.texts_of(source, change)
    if isinstance(function, ast.FunctionDef) and not _has_result(function):
        name = target[1].node.value if isinstance(target[1].node, ast.Subscript) else target[1].node
        if not isinstance(name, ast.Name) or not is_whole_lines(source, function.body[-1]):
            return ()
        last = source.span(function.body[-1])
        indent = source.lines[source.span(function.body[0]).line - 1][: source.span(function.body[0]).column - 1]
        standing = changes.get(last.end_line, source.lines[last.end_line - 1])
        changes[last.end_line] = "\n".join(filter(None, (standing, f"{indent}return {name.id}")))
    return blocks.lines_changed(source, changes)


def _has_result(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Return) and node.value is not None for node in local_nodes(function))


def clear_gradients(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``zero_grad()`` before the step's own backwards, or after the step; ``w.grad = None`` for manual updates."""
    if diagnosis.cause != "gradient_never_cleared":
        return ()
    used = blocks.first(diagnosis, "used")
    written = blocks.first(diagnosis, "written")
    if used is None or written is None:
        return ()
    by_step = blocks.advice(diagnosis, "clear_by_optimizer") or blocks.advice(diagnosis, "clear_between")
    if by_step is not None:
        return _with_lines(by_step, written, _by_optimizer(used, written))
    by_hand = blocks.advice(diagnosis, "clear_gradient")
    return () if by_hand is None else _with_lines(by_hand, written, _by_hand(written))


def _with_lines(advice: Fix, label: Label, changes: list[Change]) -> tuple[Fix, ...]:
    lines = [changed_lines(label.frame.file, change) for change in changes]
    return tuple(replace(advice, lines=one, applicability="review") for one in lines if one)


def _by_optimizer(used: Label, written: Label) -> list[Change]:
    step = next(iter(blocks.placements(written)), None)
    call = None if step is None else blocks.method_call(step.statement, "step")
    if step is None or call is None or not isinstance(call.func, ast.Attribute):
        return []
    # A scaler steps with its optimizer argument; an optimizer may take a closure. A run tells them apart.
    names = [*call.args[:1], call.func.value]
    first = _first_backward(step, used, written)
    found: list[Change | None] = []
    for name in names:
        text = f"{step.source.text(name)}.zero_grad()"
        if first is not None:
            found.append(insert_before(step.source, first, text, "clear_gradients"))
        else:
            found.append(insert_after(step.source, step.statement, text, "clear_gradients"))
    return [change for change in found if change is not None]


def _first_backward(step: blocks.Placed, used: Label, written: Label) -> ast.stmt | None:
    """The first statement of the step's block that runs the backward of a loss for this step.

    A backward before the step of another optimizer, or by another function, belongs to that one: the loss of a
    generator, whose backward leaves gradients in the critic, too. Cleared after the step, they would stay. None where
    ``used``, the backward that accumulates, runs around the block: the step may wait for several of them.
    """
    index = blocks.at_block(used, step.block)
    helpers = {
        one.name for one in step.source.nodes if isinstance(one, ast.FunctionDef) and has_attribute(one, *BACKWARDS)
    }
    found: list[int] = []
    for position, node in enumerate(step.block[: step.index]):
        calls = {leaf_name(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)}
        if has_attribute(node, *BACKWARDS) or calls & helpers:
            found.append(position)
        if "step" in calls:
            found.clear()
    around = {(one.file, one.function) for one in blocks.user_frames(written)}
    is_around = index is None and (used.frame.file, used.frame.function) in around
    return step.block[found[0]] if found and not is_around else None


def _by_hand(written: Label) -> list[Change]:
    """The clearing lines after the last update of the block: updates of several parameters are often adjacent."""
    update = next(iter(blocks.placements(written)), None)
    if update is None:
        return []
    source = update.source
    names = [name for place in expressions_at(written.frame) for name in _updated(source, place.statement)]
    last = update.statement
    for node in update.block:
        read = _gradients_read(source, node)
        more = [name for name in _updated(source, node) if name in read]
        if more:
            names += more
            last = max(last, node, key=source.span)
    text = " = ".join(f"{name}.grad" for name in dict.fromkeys(names))
    change = insert_after(source, last, f"{text} = None", "clear_gradients") if text else None
    return [] if change is None else [change]


def _gradients_read(source: SourceFile, node: ast.stmt) -> set[str]:
    attributes = [one for one in ast.walk(node) if isinstance(one, ast.Attribute) and one.attr == "grad"]
    return {source.text(one.value) for one in attributes}


def _updated(source: SourceFile, node: ast.stmt) -> list[str]:
    """The variables that a statement updates: ``w`` of ``w -= …``, ``w.data = …``, ``w.data[0] = …``, ``w.sub_(…)``."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.AugAssign):
        targets = [node.target]
    elif isinstance(node, ast.Assign):
        targets = [one for one in node.targets if isinstance(one, ast.Attribute | ast.Subscript)]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        if isinstance(function, ast.Attribute) and is_inplace_method(function.attr):
            targets = [function.value]
    found: list[str] = []
    for target in targets:
        while isinstance(target, ast.Subscript) or (isinstance(target, ast.Attribute) and target.attr == "data"):
            target = target.value
        if isinstance(target, ast.Name | ast.Attribute):
            found.append(source.text(target))
    return found


_MISPLACED = (("clip_between", "created", "note"), ("clear_elsewhere", "written", "used"))
"""Kinds of advice, with the roles of the statement that stands elsewhere, and of the one before which it belongs."""


def before_step_or_backward(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """A clip without effect right before the step that uses the gradients, a clearing before the backward."""
    found: list[Fix] = []
    for kind, role, other in _MISPLACED:
        advice, label = blocks.advice(diagnosis, kind), blocks.first(diagnosis, role)
        if advice is not None and label is not None and (kind != "clear_elsewhere" or not _reads_beside(label)):
            found += _moved_before(advice, label, blocks.first(diagnosis, other))
    return tuple(found)


def _reads_beside(cleared: Label) -> bool:
    """Whether the function that clears gradients reads them as well, and so belongs after the backward."""
    statement = statement_at(cleared.frame)
    if statement is None or statement.function is None:
        return False
    return any(is_gradient_read(statement.source, node) for node in ast.walk(statement.function))


def clear_once(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """The round without the clearing that comes before its step."""
    advice, cleared = blocks.advice(diagnosis, "clear_once"), blocks.first(diagnosis, "written")
    place = None if cleared is None else next(blocks.placements(cleared), None)
    if advice is None or place is None or blocks.method_call(place.statement, "zero_grad") is None:
        return ()
    if not is_whole_lines(place.source, place.statement):
        return ()
    changes = blocks.removed(place.source, place.statement)
    if len(place.block) == 1:
        changes[place.statement.lineno] = f"{place.source.indent(place.statement)}pass"
    return (replace(advice, lines=blocks.lines_changed(place.source, changes), applicability="review"),)


def unscale_before_clip(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``scaler.unscale_(optimizer)`` before a clip of gradients which ``scaler.step(optimizer)`` then uses."""
    advice, clip = blocks.advice(diagnosis, "clip_unscaled"), blocks.first(diagnosis, "created")
    stepped = blocks.first(diagnosis, "note")
    pair = None if advice is None or clip is None or stepped is None else blocks.in_one_block(clip, stepped)
    step = None if pair is None else blocks.method_call(pair[1].statement, "step")
    if advice is None or pair is None or step is None or len(step.args) != 1:
        return ()
    source = pair[0].source
    text = f"{source.text(step.func).removesuffix('step')}unscale_({source.text(step.args[0])})"
    lines = changed_lines(source.file, insert_before(source, pair[0].statement, text, "clip_unscaled"))
    return (replace(advice, lines=lines, applicability="review"),) if lines else ()


def clear_after_step(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """A statement that clears gradients each round, moved after the step that waits for several (under an ``if``)."""
    advice, cleared = blocks.advice(diagnosis, "clear_after_step"), blocks.first(diagnosis, "written")
    stepped = blocks.first(diagnosis, "note")
    if advice is None or cleared is None or stepped is None:
        return ()
    clear, step = (next(blocks.placements(one), None) for one in (cleared, stepped))
    if clear is None or step is None or blocks.at_block(stepped, clear.block) is None or step.block is clear.block:
        return ()
    source, nodes = step.source, (clear.statement, step.statement)
    is_plain = (
        blocks.method_call(nodes[0], "zero_grad") is not None and blocks.method_call(nodes[1], "step") is not None
    )
    if not is_plain or not all(is_whole_lines(source, node) for node in nodes):
        return ()
    span = source.span(step.statement)
    indent = source.indent(span)
    behind = f"{source.lines[span.end_line - 1]}\n{indent}{source.text(clear.statement)}"
    lines = blocks.lines_changed(source, {**blocks.removed(source, clear.statement), span.end_line: behind})
    return (replace(advice, lines=lines, applicability="review"),)


def _moved_before(advice: Fix, label: Label, other: Label | None) -> tuple[Fix, ...]:
    """``advice`` with the statement of ``label`` right before that of ``other``, where both are in one block.

    Empty where a statement in between binds a name that the moved one reads, or reads one that it binds.
    """
    pair = None if other is None else blocks.in_one_block(label, other)
    if pair is None:
        return ()
    moved, target = pair
    source, node = moved.source, moved.statement
    first, last = sorted((moved.index, target.index))
    passed = [one for one in moved.block[first:last] if one is not node]
    if not isinstance(node, ast.Expr | ast.Assign) or names_bound(passed) & names_read([node]):
        return ()
    if names_bound([node]) & names_read(passed) or not is_whole_lines(source, node):
        return ()
    start = source.span(target.statement).line
    if not is_whole_lines(source, target.statement):
        return ()
    text = f"{blocks.text_of(source, node)}\n{source.lines[start - 1]}"
    lines = blocks.lines_changed(source, {**blocks.removed(source, node), start: text})
    return (replace(advice, lines=lines, applicability="review"),)


def set_to_none(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``zero_grad(set_to_none=True)`` where the run shows that ``zero_grad(set_to_none=False)`` wrote."""
    lines: list[tuple[str, int, str]] = []
    for label in blocks.labels(diagnosis, "written"):
        lines += [line for line in _let_go(label) if line not in lines]
    return (blocks.fix("set_to_none", tuple(lines)),) if lines else ()


def _let_go(label: Label) -> Lines:
    for place in expressions_at(label.frame):
        call = place.node
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "zero_grad":
            given = [*call.args, *(one.value for one in call.keywords if one.arg == "set_to_none")]
            kept = [one for one in given if isinstance(one, ast.Constant) and one.value is False]
            change = edited(place.source, [Edit(place.source.span(one), "True") for one in kept], "set_to_none")
            if change is not None:
                return changed_lines(label.frame.file, change)
    return ()


def differentiate_base(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """The gradient with respect to the base of a slice, sliced: the output does not depend on the slice itself.

    ``grad(u, xt)[0][:, :1]`` for ``grad(u, x)[0]`` after ``x = xt[:, :1]``; likewise for each slice of the function.
    """
    used = blocks.first(diagnosis, "used")
    place = None if used is None or diagnosis.cause != "input_not_in_graph" else statement_at(used.frame)
    if used is None or place is None or isinstance(place.function, ast.Lambda):
        return ()
    source, edits, bases, names = place.source, list[Edit](), set[str](), list[str]()
    asked = next((one.node for one in expressions_at(used.frame)), None)
    calls = [one for one in local_nodes(place.function or source.module) if isinstance(one, ast.Call)]
    for call in sorted(calls, key=lambda one: one is not asked):
        parent, given = source.parents[call][0], _asked_for(call)
        binding = None if given is None else last_binding(used.frame, given.id)
        part = None if binding is None else binding.value
        is_sliced = isinstance(part, ast.Subscript) and isinstance(parent, ast.Subscript) and parent.value is call
        if given is not None and is_sliced and isinstance(part, ast.Subscript) and (call is asked or bases):
            whole, end, at = source.span(part), source.span(part.value), source.span(parent)
            index = source.slice(Span(end.end_line, end.end_column, whole.end_line, whole.end_column))
            bases.add(source.text(part.value))
            names.append(given.id)
            edits.append(Edit(source.span(given), source.text(part.value)))
            edits.append(Edit.after(at, index))
    lines = edited_lines(source, edits) if len(bases) == 1 else ()
    if not lines and isinstance(asked, ast.Call):
        parts = _of_parts(source, asked, used.frame)
        return () if parts is None else (blocks.fix("differentiate_base", parts[0], name=parts[1], base=parts[2]),)
    return (blocks.fix("differentiate_base", lines, name=names[0], base=bases.pop()),) if lines else ()


def _asked_for(call: ast.Call) -> ast.Name | None:
    """The one variable with respect to which a call of ``grad`` differentiates."""
    inputs = [*call.args[1:2], *(one.value for one in call.keywords if one.arg == "inputs")]
    given = inputs[0] if inputs and leaf_name(call.func) == "grad" else None
    while isinstance(given, ast.List | ast.Tuple) and len(given.elts) == 1:
        given = given.elts[0]
    return given if isinstance(given, ast.Name) else None


_PARTING = frozenset({"chunk", "split", "tensor_split", "unbind"})


def _of_parts(source: SourceFile, call: ast.Call, frame: Frame) -> tuple[Lines, str, str] | None:
    """``a, b = grad(u, (q, p))`` where ``q, p = x.split(1, -1)``, or slices of ``x``: of ``x``, parted the same way.

    The changed lines, the names of the parts, and that of the whole.
    """
    given = next(iter([*call.args[1:2], *(one.value for one in call.keywords if one.arg == "inputs")]), None)
    statement = source.parents[call][0]
    names = [one.id for one in getattr(given, "elts", ()) if isinstance(one, ast.Name)]
    bound = [last_binding(frame, name) for name in names]
    if not isinstance(statement, ast.Assign) or given is None or None in bound or not names:
        return None
    if leaf_name(call.func) != "grad" or len(names) != len(getattr(given, "elts", ())):
        return None
    whole = blocks.fresh_name(source, "whole")
    parts = [one.value for one in bound if one is not None and isinstance(one.value, ast.Subscript)]
    made = bound[0].statement if bound[0] is not None else None
    base: ast.expr | None = None
    text = ""
    if len(parts) == len(names) and len({source.text(one.value) for one in parts}) == 1:
        base = parts[0].value
        text = ", ".join(whole + source.text(one)[len(source.text(base)) :] for one in parts)
    elif isinstance(made, ast.Assign) and all(one is not None and one.statement is made for one in bound):
        cut, targets = made.value, getattr(made.targets[0], "elts", ())
        method = cut.func if isinstance(cut, ast.Call) else None
        is_all = [getattr(one, "id", None) for one in targets] == names
        if is_all and isinstance(method, ast.Attribute) and method.attr in _PARTING and chain_key(method.value):
            base = method.value
            text = whole + source.text(cut)[len(source.text(base)) :]
    if base is None or source.text(base) == "torch" or not is_whole_lines(source, statement):
        return None
    span, name = source.span(statement), source.text(base)
    edits = [Edit(source.span(given), name), Edit.after(source.span(call), "[0]")]
    asked = text_with(source, source.span(call), edits)
    head = source.slice(Span(span.line, span.column, source.span(call).line, source.span(call).column))
    indent = source.indent(span)
    gone = dict.fromkeys(range(span.line + 1, span.end_line + 1), "")
    lines = {**gone, span.line: f"{indent}{whole} = {asked}\n{indent}{head}{text}"}
    return blocks.lines_changed(source, lines), ", ".join(names), name
