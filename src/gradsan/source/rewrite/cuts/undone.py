"""Graphs restored where a value left them: numbers taken from tensors, ``no_grad``, samples, reads past the graph."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from gradsan.model import Frame, Lines
from gradsan.source.change import Change, Edit, changed_lines, edited, edited_lines, with_keyword
from gradsan.source.flow.cuts import NEW_TENSOR, cut_of
from gradsan.source.flow.reaching import reaching
from gradsan.source.flow.scopes import flag_owner
from gradsan.source.identifiers import assigned_names, bindings_of, chain_key, consumed_names, leaf_name, local_nodes
from gradsan.source.imports import torch_name
from gradsan.source.intent.conditions import context_around
from gradsan.source.locate import Expression, Statement, expression_at, statement_at
from gradsan.source.rewrite.cuts.uncut import uncut_edits
from gradsan.source.rewrite.moving import computed_outside, is_whole_lines
from gradsan.source.rewrite.renewing import fresh_name
from gradsan.source.tree import SourceFile, Span, header_nodes, source_lines

_OFF = frozenset({"no_grad", "inference_mode"})
_LISTS = (ast.List, ast.ListComp, ast.Tuple)
_IS_OPERAND = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)


def flag_before_use(frame: Frame, name: str) -> Lines:
    """``x.requires_grad_()`` moved before the first statement of its block that computes with ``x``.

    ``frame`` is a later statement, which asks for the gradient. Empty where nothing in the block reads ``x`` before it.
    """
    statement = statement_at(frame)
    scope = None if statement is None else statement.scope
    if statement is None or scope is None:
        return ()
    source, nodes = statement.source, [one for one in local_nodes(scope) if isinstance(one, ast.stmt)]
    earlier = [(one, flag_owner(one)) for one in nodes if one.lineno < frame.line]
    setting = [one for one, owner in earlier if owner is not None and chain_key(owner) == name]
    if not setting or not is_whole_lines(source, setting[-1]):
        return ()
    before = source.ahead(setting[-1])
    bound = [at for at, one in enumerate(before) if name in assigned_names(one)]
    reading = [one for one in before[bound[-1] + 1 if bound else 0 :] if name in consumed_names(one)]
    if not reading or not is_whole_lines(source, reading[0]) or len(setting) > 1:
        return ()
    own, first = source.span(setting[-1]), source.span(reading[0])
    text = f"{source.indent(first)}{source.text(setting[-1])}\n{source.lines[first.line - 1]}"
    gone = [(source.file, line, "") for line in range(own.line, own.end_line + 1)]
    return ((source.file, first.line, text), *gone)


def undone(frame: Frame, kind: str, operand: str = "") -> Change | None:
    """The line of ``frame``, the place of a cut of this kind, with a graph; None where the source does not show how.

    ``x.item()`` and ``float(x)`` become ``x``, ``torch.tensor(losses)`` of a list becomes ``torch.stack(losses)``,
    ``autograd.grad`` is asked for a graph, and a decorator ``@torch.no_grad()`` is removed; it replaces a
    ``torch.set_grad_enabled(False)`` in a function. What computes ``operand`` leaves a ``with torch.no_grad():``.
    ``detach()`` and ``.data`` are written on purpose: these stay.
    """
    if kind == "grad_left_off":
        return as_decorator(frame)
    line = next(iter(source_lines(frame.file)[frame.line - 1 : frame.line]), "")
    if kind in ("no_grad", "inference_mode"):
        is_decorator = line.lstrip().startswith("@")
        return Change(frame.line, line, "", "undone") if is_decorator else computed_outside(frame, operand)
    place = expression_at(frame)
    edit = None if place is None else _edit(place, kind)
    return None if place is None or edit is None else edited(place.source, [edit], "undone")


def as_decorator(frame: Frame) -> Change | None:
    """``torch.set_grad_enabled(False)`` at ``frame``, with which a function begins that computes no gradients.

    It is put before the function, as its decorator. Calls as ``model.eval()`` may stand before it.
    """
    statement = statement_at(frame)
    function = None if statement is None else statement.function
    call = None if statement is None else getattr(statement.node, "value", None)
    if statement is None or not isinstance(function, ast.FunctionDef) or not isinstance(call, ast.Call):
        return None
    source, node = statement.source, statement.node
    module = source.text(call.func).removesuffix("set_grad_enabled")
    computes = {leaf_name(one.func) for one in ast.walk(function) if isinstance(one, ast.Call)} & {"backward", "grad"}
    before = function.body[: function.body.index(node)] if node in function.body else [node]
    is_begin = all(isinstance(one, ast.Expr) and _sets_mode(one.value) for one in before)
    if computes or not module or not is_begin or function.body[-1] is node or function.decorator_list:
        return None
    if source.lines[node.lineno - 1].strip() != source.text(node):
        return None
    whole = Span(node.lineno - 1, len(source.lines[node.lineno - 2]) + 1, node.lineno, source.span(node).end_column)
    head = Edit.before(source.span(function), f"@{module}no_grad()\n{source.indent(function)}")
    return edited(source, [head, Edit(whole, "")], "undone")


def with_gradients(frame: Frame, text: str) -> Change | None:
    """``@torch.enable_grad()`` before the function at ``frame``, which itself computes what ``text`` reads."""
    statement = statement_at(frame)
    function = None if statement is None else statement.function
    if statement is None or not isinstance(function, ast.FunctionDef) or not text:
        return None
    source, torch = statement.source, torch_name(statement.source)
    read = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    bound = {name for node in local_nodes(function) if isinstance(node, ast.stmt) for name in assigned_names(node)}
    if not read & bound:
        return None
    # Innermost: a property or a static method is made of it.
    line = source.lines[function.lineno - 1]
    return Change(function.lineno, line, f"{source.indent(function)}@{torch}.enable_grad()\n{line}", "undone")


def _sets_mode(value: ast.expr) -> bool:
    """Whether it is a docstring, or a call without a tensor."""
    name = leaf_name(value.func) if isinstance(value, ast.Call) else None
    return isinstance(value, ast.Constant) or name in ("eval", "manual_seed", "print")


def graph_restored(frames: Sequence[Frame], how: str | None, joined: Frame | None = None) -> Lines:
    """The lines with which the value computed at ``frames`` (outermost first) has a graph; ``how`` it left that.

    ``how`` is ``number``, ``drawn``, ``no_grad``, ``discrete`` or ``flat``, which no line mends, or anything else for a
    read past the graph (``.data``). A number that other statements read stays one: the statement at ``joined``, which
    makes a loss of it, gets the tensor by a name of its own. Empty where the source does not show how.
    """
    place = expression_at(frames[-1]) if frames else None
    if place is None or how in ("discrete", "flat"):
        return ()
    source = place.source
    if how == "no_grad":
        around = context_around(frames, _OFF)
        return () if around is None else _recorded(around[0], place)
    if how == "drawn":
        call = place.node.func if isinstance(place.node, ast.Call) else None
        is_draw = isinstance(call, ast.Attribute) and call.attr == "sample"
        end = source.span(call) if call is not None and is_draw else None
        at = None if end is None else Span(end.end_line, end.end_column - len("sample"), end.end_line, end.end_column)
        return () if at is None else edited_lines(source, [Edit(at, "rsample")])
    if how != "number":
        nodes = [one for one in header_nodes(place.statement) if isinstance(one, ast.expr)]
        reads = [(one, edits) for one in nodes if (edits := uncut_edits(source, one))]
        # Within argmax or a comparison there is no gradient either way.
        is_left_anyway = any(_leaves_graph(source, parent) for one, _ in reads for parent, _ in source.ancestors(one))
        return () if is_left_anyway else edited_lines(source, [edit for _, edits in reads for edit in edits])
    edit = _edit(place, "item")
    outer = source.parents[place.node][0]
    if edit is None:
        return ()
    if beside := _tensor_beside(place, edit, None if joined is None else statement_at(joined)):
        return beside
    if isinstance(outer, ast.Call) and leaf_name(outer.func) in NEW_TENSOR and outer.args == [place.node]:
        wrapping = _without_new_tensor(replace(place, node=outer))
        return edited_lines(source, [*wrapping, edit]) if wrapping else ()
    return edited_lines(source, [edit])


def _leaves_graph(source: SourceFile, node: ast.AST) -> bool:
    return isinstance(node, ast.expr) and cut_of(source, node)[0] in ("index", "comparison", "integer")


def _tensor_beside(place: Expression, edit: Edit, joined: Statement | None) -> Lines:
    """``kl_term = ...`` before ``kl = float(kl_term)``, ``kl_term`` in the sum; empty where no other reads ``kl``."""
    source, made = place.source, place.statement
    if (
        joined is None
        or joined.source is not source
        or not isinstance(made, ast.Assign)
        or made.value is not place.node
    ):
        return ()
    target, scope = made.targets[0], source.function(made)
    if not isinstance(target, ast.Name) or len(made.targets) > 1 or source.function(joined.node) is not scope:
        return ()
    reads = [one for one in ast.walk(scope or source.module) if isinstance(one, ast.Name) and one.id == target.id]
    reads = [one for one in reads if isinstance(one.ctx, ast.Load)]
    own = [one for one in reads if source.statement(one) is joined.node]
    if not own or len(own) == len(reads) or source.indent(made).strip():
        return ()
    name, whole = fresh_name(source, f"{target.id}_term"), source.text(place.node)
    number = whole.replace(edit.text, name) if whole.startswith("float(") else f"{name}.item()"
    made_anew = Edit(source.span(made), f"{name} = {edit.text}\n{source.indent(made)}{target.id} = {number}")
    return edited_lines(source, [made_anew, *(Edit(source.span(one), name) for one in own)])


def _recorded(mode: Frame, place: Expression) -> Lines:
    """The statement of ``place`` outside of the ``no_grad`` at ``mode``, or all where they compute one value in steps.

    What a teacher computes beside it has its reason to stay.
    """
    change = undone(mode, "no_grad", place.text)
    if change is not None:
        return changed_lines(mode.file, change)
    source = place.source
    block = next((one for one, _ in source.ancestors(place.node) if isinstance(one, ast.With)), None)
    if block is None or len(block.items) != 1 or source.span(block).line != mode.line or mode.file != source.file:
        return ()
    around, first = source.span(block), source.span(block.body[0])
    names = set(assigned_names(place.statement))
    for one in block.body[block.body.index(place.statement) :] if place.statement in block.body else ():
        names |= set(assigned_names(one)) if names & set(consumed_names(one)) else set()
    is_one_value = all(isinstance(one, ast.Assign) and names >= set(assigned_names(one)) for one in block.body)
    if first.line == around.line or not is_one_value:
        return ()
    deeper, last = first.column - around.column, source.span(block.body[-1]).end_line
    edits = [Edit(Span(around.line, 1, first.line, 1), "")]
    edits += [Edit(Span(line, 1, line, deeper + 1), "") for line in range(first.line, last + 1)]
    return edited_lines(source, edits)


def undone_numbers(numbers: Sequence[Frame], tensor: Frame) -> Lines:
    """The changed lines where ``numbers`` taken from tensors make a new ``tensor``: all stay tensors.

    ``total += loss.item()`` and ``torch.tensor(total / n)`` become ``total += loss`` and ``total / n``. Empty where the
    source does not show how.
    """
    places = [expression_at(one) for one in dict.fromkeys(numbers)]
    around = expression_at(tensor)
    edits = [None if place is None else _edit(place, "item") for place in places]
    outer = [] if around is None else _without_new_tensor(around)
    if around is None or not outer or any(place is None or place.source is not around.source for place in places):
        return ()
    known = [one for one in edits if one is not None]
    return edited_lines(around.source, [*outer, *known]) if len(known) == len(edits) else ()


def _without_new_tensor(place: Expression) -> list[Edit]:
    """``torch.tensor(x)`` as ``x``, of a list of tensors as ``torch.stack(xs)``, around any change of ``x``."""
    source, call = place.source, place.node
    is_plain = isinstance(call, ast.Call) and len(call.args) == 1
    if not isinstance(call, ast.Call) or not is_plain or any(one.arg != "requires_grad" for one in call.keywords):
        return []
    value = call.args[0]
    whole, inner = source.span(call), source.span(value)
    head, tail = "(", ")"
    if _is_list(source, place.statement, value):
        if not isinstance(call.func, ast.Attribute):
            return []
        head = f"{source.text(call.func.value)}.stack("
    elif isinstance(source.parents[call][0], ast.Return | ast.Assign | ast.keyword):
        head = tail = ""
    before = Span(whole.line, whole.column, inner.line, inner.column)
    return [Edit(before, head), Edit(Span(inner.end_line, inner.end_column, whole.end_line, whole.end_column), tail)]


def _edit(place: Expression, kind: str) -> Edit | None:
    source, node = place.source, place.node
    if not isinstance(node, ast.Call):
        return None
    if kind == "gradient":
        return with_keyword(source, node, "create_graph", "True")
    if kind == "new_tensor":
        return _stacked(place, node)
    if kind != "item" or node.keywords:
        return None
    is_method = isinstance(node.func, ast.Attribute) and not node.args
    value = node.func.value if isinstance(node.func, ast.Attribute) and is_method else next(iter(node.args), None)
    if value is None or len(node.args) > 1:
        return None
    is_alone = isinstance(value, _IS_OPERAND) or isinstance(source.parents[node][0], ast.Assign)
    return Edit(source.span(node), source.text(value) if is_alone else f"({source.text(value)})")


def _stacked(place: Expression, call: ast.Call) -> Edit | None:
    """``torch.stack(xs)`` for ``torch.tensor(xs)`` of a list of tensors; only if nothing else determines the result."""
    source, value = place.source, call.args[0] if len(call.args) == 1 else None
    kept = [one for one in call.keywords if one.arg != "requires_grad"]
    if (
        value is None
        or kept
        or not isinstance(call.func, ast.Attribute)
        or not _is_list(source, place.statement, value)
    ):
        return None
    return Edit(source.span(call), f"{source.text(call.func.value)}.stack({source.text(value)})")


def _is_list(source: SourceFile, at: ast.stmt, value: ast.expr) -> bool:
    key = chain_key(value)
    if key is None:
        return isinstance(value, _LISTS)
    function = source.function(at)
    body = source.module.body if function is None else function.body
    state = reaching(body, at, lambda _: function is None) if isinstance(body, list) else {}
    bound = [
        binding.value
        for one in state.get(key, ())
        for binding in (bindings_of(one.statement) if one.statement is not None else ())
        if binding.name == key and binding.method is None
    ]
    return bool(bound) and all(isinstance(one, _LISTS) for one in bound)
