"""Calls of ``autograd.grad`` and ``backward``: outputs reduced to one number, a graph kept by the caller's argument.

And gradients that are assigned or passed, in their tensor's shape, a graph kept for a gradient that is differentiated,
and leaves made of floating-point numbers or where their value is bound.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from gradsan.model import Frame, Lines
from gradsan.source.change import (
    Change,
    Edit,
    changed_lines,
    edited,
    followed,
    insert_after,
    insert_before,
    with_keyword,
)
from gradsan.source.flow.cuts import cut_of, mode_around, mode_of_decorators
from gradsan.source.flow.reaching import reaching
from gradsan.source.flow.rounds import keep_graph
from gradsan.source.flow.writing import definition_of
from gradsan.source.identifiers import (
    Binding,
    assigned_names,
    bindings_of,
    chain_key,
    consumed_names,
    leaf_name,
    local_nodes,
)
from gradsan.source.imports import torch_name
from gradsan.source.intent.gradients import holders
from gradsan.source.locate import Expression, Statement, call_at, expression_at, expressions_at, statement_at
from gradsan.source.tree import SourceFile, header_nodes


def differentiated(frame: Frame) -> str | None:
    """``u`` of the one call ``autograd.grad(u, x)`` at ``frame``; None for several outputs, or without a call."""
    found = _outputs(frame)
    return None if found is None else found[0].text(found[1])


def sum_differentiated(frame: Frame) -> Change | None:
    """``autograd.grad(u.sum(), x)`` for ``autograd.grad(u, x)``."""
    found = _outputs(frame)
    return None if found is None else edited(found[0], followed(*found, ".sum()"), "sum_differentiated")


def _outputs(frame: Frame) -> tuple[SourceFile, ast.expr] | None:
    found = call_at(frame, "grad")
    if found is None:
        return None
    source, call = found
    named = [one.value for one in call.keywords if one.arg == "outputs"]
    value = next(iter([*call.args[:1], *named]), None)
    return None if value is None or isinstance(value, ast.List | ast.Tuple | ast.Starred) else (source, value)


def keep_graph_from(frames: Sequence[Frame]) -> Lines:
    """The lines with ``retain_graph=True`` in the call of ``backward`` or ``grad`` at the last of ``frames``.

    Where that call hands on ``**kw`` of its function, it is the function's own call that gets the argument.
    """
    for frame in reversed(frames):
        change = keep_graph(frame)
        if change is not None or not _hands_on_keywords(frame):
            return changed_lines(frame.file, change)
    return ()


def _hands_on_keywords(frame: Frame) -> bool:
    """Whether the call at ``frame`` passes its function's ``**kw`` on."""
    place, statement = expression_at(frame), statement_at(frame)
    function = None if statement is None else statement.function
    taken = None if function is None else function.args.kwarg
    call = None if place is None else place.node
    if taken is None or not isinstance(call, ast.Call):
        return False
    return any(
        one.arg is None and isinstance(one.value, ast.Name) and one.value.id == taken.arg for one in call.keywords
    )


def gradient_in_shape(frame: Frame, *, is_transposed: bool = False) -> Change | None:
    """``p.grad = flat[i:j].view_as(p)`` for ``p.grad = flat[i:j]``; ``p.grad = g.t()`` of the transpose."""
    statement = statement_at(frame)
    node = None if statement is None else statement.node
    if statement is None or not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    target, source = node.targets[0], statement.source
    if not isinstance(target, ast.Attribute) or target.attr != "grad":
        return None
    method = ".t()" if is_transposed else f".view_as({source.text(target.value)})"
    return edited(source, followed(source, node.value, method), "gradient_in_shape")


def passed_gradient_in_shape(frame: Frame, index: int, *, is_scalar: bool) -> Change | None:
    """``loss.backward(one.reshape_as(loss))`` for ``loss.backward(one)``, and alike for ``grad_outputs``.

    A variable that is passed to several calls of the file gets it in all of them, and so does what is computed from it.
    """
    calls = [(one.source, call) for one in expressions_at(frame) if (call := _passing(one.node, index)) is not None]
    if len(calls) != 1:
        return None
    source, first = calls[0]
    output, gradient = first
    others = [found for one in source.nodes if (found := _passing(one, 0)) is not None and found[1] is not gradient]
    names = _same_variable(source, gradient)
    alike = [one for one in others if isinstance(one[1], ast.Name) and one[1].id in names and _is_chain(one[0])]
    if not _is_chain(output):
        return edited(source, followed(source, gradient, ".squeeze()"), "passed_in_shape") if is_scalar else None
    edits = [edit for to, one in (first, *alike) for edit in followed(source, one, f".reshape_as({source.text(to)})")]
    return edited(source, edits, "passed_in_shape")


def _is_chain(value: ast.expr) -> bool:
    return all(isinstance(one, ast.Name | ast.Attribute | ast.expr_context) for one in ast.walk(value))


def _passing(node: ast.AST, index: int) -> tuple[ast.expr, ast.expr] | None:
    """The output of this index and the gradient passed for it, of a call of ``backward`` or ``grad``."""
    if not isinstance(node, ast.Call) or leaf_name(node.func) not in ("backward", "grad"):
        return None
    given = [*node.args, *[None] * 3]
    named = {one.arg: one.value for one in node.keywords}
    if leaf_name(node.func) == "grad":
        outputs, gradients = given[0] or named.get("outputs"), given[2] or named.get("grad_outputs")
    elif isinstance(node.func, ast.Attribute) and leaf_name(node.func.value) != "autograd":
        outputs, gradients = node.func.value, given[0] or named.get("gradient")
    else:
        outputs, gradients = given[0] or named.get("tensors"), given[1] or named.get("grad_tensors")
    output, gradient = (_at(one, index) for one in (outputs, gradients))
    if output is None or gradient is None or any(isinstance(one, ast.Starred) for one in (output, gradient)):
        return None
    return None if isinstance(gradient, ast.Constant) else (output, gradient)


def _at(value: ast.expr | None, index: int) -> ast.expr | None:
    if isinstance(value, ast.List | ast.Tuple):
        return value.elts[index] if index < len(value.elts) else None
    return value if index == 0 else None


def _same_variable(source: SourceFile, gradient: ast.expr) -> set[str]:
    """The name of ``gradient``, and those that the file computes from it alone or it from them: ``mone = one * -1``."""
    names = {gradient.id} if isinstance(gradient, ast.Name) else set[str]()
    assigned = [
        {node.targets[0].id, *(one.id for one in ast.walk(node.value) if isinstance(one, ast.Name))}
        for node in source.nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.BinOp | ast.UnaryOp)
    ]
    for both in assigned:
        if len(both) == 2 and both & names:
            names |= both
    return names


_MAKING = frozenset({"arange", "full", "randint", "tensor"})
_INDEXING = re.compile(r"\b(Embedding\w*|embedding|one_hot|index_select|gather|scatter\w*|index_\w+)\(")


def floating_from_start(frame: Frame) -> Change | None:
    """``torch.tensor([1, 2], requires_grad=True)`` with ``dtype=torch.float32``; ``Parameter(x.float())``.

    None where they may be indices: read by the file as such, or with functions that take indices in the file.
    """
    place = expression_at(frame)
    call = None if place is None else place.node
    if place is None or not isinstance(call, ast.Call) or _are_indices(place):
        return None
    source, torch = place.source, torch_name(place.source)
    is_set = any(leaf_name(one) in _DEFAULTS for one in source.nodes if isinstance(one, ast.Attribute | ast.Name))
    if leaf_name(call.func) == "Parameter" and len(call.args) == 1:
        made = f".to({torch}.get_default_dtype())" if is_set else ".float()"
        return edited(source, followed(source, call.args[0], made), "floating")
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    is_typed = any(one.arg in ("dtype", None) for one in call.keywords)
    if not isinstance(owner, ast.Name) or leaf_name(call.func) not in _MAKING or is_typed:
        return None
    edit = with_keyword(source, call, "dtype", f"{owner.id}.{'get_default_dtype()' if is_set else 'float32'}")
    return None if edit is None else edited(source, [edit], "floating")


_DEFAULTS = frozenset({"set_default_dtype", "set_default_tensor_type"})


def _are_indices(place: Expression) -> bool:
    """Whether the value made at ``place`` may be indices: numbers that are no floating-point numbers on purpose."""
    statement, source = place.statement, place.source
    names = {chain_key(one) for one in statement.targets} if isinstance(statement, ast.Assign) else set()
    reads = [
        one
        for one in source.nodes
        if isinstance(one, ast.Name | ast.Attribute) and isinstance(one.ctx, ast.Load) and chain_key(one) in names
    ]
    parents = [source.parents[one] for one in reads]
    if any(isinstance(parent, ast.Subscript) and field == "slice" for parent, field in parents):
        return True
    is_passed = any(isinstance(parent, ast.Call) and field == "args" for parent, field in parents)
    return is_passed and any(_INDEXING.search(line) for line in source.lines)


_CONSTANT = frozenset({"sign", "sgn", "round", "floor", "ceil"})
"""Operations whose derivative is zero: their result is data, too."""


_FIELDS = frozenset({"grad", "data"})


def graph_for_gradient(frame: Frame) -> Change | None:
    """The call of ``autograd.grad`` at ``frame`` with ``create_graph=True``, where its result is used with a graph.

    That is a result which is returned, differentiated, or kept on an object without ``detach()``: nothing in
    the source marks it as a constant. None where everything computed from it in this function is
    detached, read as numbers, written under ``no_grad`` or into ``.data`` and ``.grad``.
    """
    place = expression_at(frame)
    call = None if place is None else place.node
    if place is None or not isinstance(call, ast.Call) or leaf_name(call.func) != "grad":
        return None
    edit = with_keyword(place.source, call, "create_graph", "True")
    return None if edit is None or not _is_used(place.source, call) else edited(place.source, [edit], "create_graph")


def is_differentiated_later(stack: Sequence[Frame]) -> bool:
    """Whether a backward goes through what is computed from the call at the end of a stack, outermost frame first.

    A result that a function returns is followed into its caller, up to a function that keeps it to itself.
    """
    called = "grad"
    for frame in reversed(stack):
        calls = [(one.source, one.node) for one in expressions_at(frame) if isinstance(one.node, ast.Call)]
        found = next((one for one in calls if leaf_name(one[1].func) == called), None)
        statement = statement_at(frame)
        if found is None and statement is not None and isinstance(statement.node, ast.For):
            # A generator runs at the head of the loop that asks it for values.
            walked = [one for one in ast.walk(statement.node.iter) if isinstance(one, ast.Call)]
            found = next(((statement.source, one) for one in walked if leaf_name(one.func) == called), None)
        way = None if found is None else _way_of(*found)
        if way != "returned":
            return way == "differentiated"
        called = frame.function.rpartition(".")[2]
    return False


def _is_used(source: SourceFile, call: ast.Call) -> bool:
    return _way_of(source, call) is not None


def _way_of(source: SourceFile, call: ast.Call) -> Literal["returned", "differentiated", "kept"] | None:
    """The first way in which the result of a call, or what is computed from it, is used with a graph."""
    function = source.function(call)
    if function is not None and mode_of_decorators(function) is not None:
        return None
    scope = function if function is not None else source.module
    if isinstance(scope, ast.Lambda):
        return "returned"
    nodes = (node for node in local_nodes(scope) if isinstance(node, ast.stmt))
    statements = sorted(nodes, key=lambda node: (node.lineno, node.col_offset))
    first = source.statement(call)
    names: set[str] = set()
    for statement in statements[statements.index(first) :] if first in statements else ():
        reads = {id(call)} if statement is first else set()
        reads |= {id(node) for node in header_nodes(statement) if isinstance(node, ast.Name) and node.id in names}
        reads -= {id(node) for part in _cut_parts(source, statement) for node in ast.walk(part)}
        if mode_around(source, statement, function) is not None:
            continue
        bound = assigned_names(statement)
        if not any(
            id(node) in reads
            for node in header_nodes(statement)
            if isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        ):
            names.difference_update(() if isinstance(statement, ast.AugAssign) else bound)
            continue
        value = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(statement, ast.Return) or isinstance(value, ast.Yield | ast.YieldFrom):
            return "returned"
        if _begins_backward(statement, reads):
            return "differentiated"
        for name in bound:
            field = name.rpartition(".")[2]
            if "." in name and field not in _FIELDS:
                return "kept"
            if "." not in name:
                names.add(name)
        names |= set(holders(statement))
    return None


def _cut_parts(source: SourceFile, statement: ast.stmt) -> Iterator[ast.expr]:
    """The operands of a statement's detaching operations, and its calls without a derivative."""
    for node in header_nodes(statement):
        if not isinstance(node, ast.expr):
            continue
        kind, operands = cut_of(source, node)
        yield from operands if kind is not None else ()
        if isinstance(node, ast.Call) and leaf_name(node.func) in _CONSTANT:
            yield node


def _begins_backward(statement: ast.stmt, reads: set[int]) -> bool:
    """Whether the statement calls ``backward`` or ``grad`` on a value that it reads."""
    return any(
        isinstance(node, ast.Call)
        and leaf_name(node.func) in ("backward", "grad")
        and any(id(one) in reads for one in ast.walk(node) if one is not node)
        for node in header_nodes(statement)
    )


def wanted_where_bound(frame: Frame, name: str) -> Change | None:
    """A line that makes ``name`` a leaf that requires grad, after the statement that bound what ``frame`` reads by it.

    Of a loop's variable at the start of its body, of an argument at that of the function. A tensor of its own, so that
    one of a data set stays as it is. None where several statements may have bound it.
    """
    statement = statement_at(frame)
    if statement is None or not name.isidentifier() or name not in consumed_names(statement):
        return None
    source, text = statement.source, f"{name} = {name}.detach().requires_grad_()"
    made = definition_of(frame, name)
    bound = None if made is None else statement_at(made.frame)
    if made is not None and bound is not None and bound.function is statement.function:
        if made.is_loop:
            return (
                insert_before(source, bound.node.body[0], text, "wanted") if isinstance(bound.node, ast.For) else None
            )
        if _is_computed_before(statement, bound.span.end_line):
            return None
        return insert_after(source, bound.node, text, "wanted")
    function = statement.function
    if made is None and isinstance(function, ast.FunctionDef) and statement.node in function.body:
        is_given = name in {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
        start = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
        is_bound = any(one.name == name for node in ast.walk(function) for one in _bound_by(node))
        is_bound = is_bound or _is_computed_before(statement, function.lineno)
        return insert_before(source, start[0], text, "wanted") if is_given and not is_bound and start else None
    return None


def input_itself(frame: Frame) -> Change | None:
    """``grad(loss, w.clone())`` as ``grad(loss, w)``: what the call itself makes cannot have been used for the loss."""
    statement = statement_at(frame)
    calls = [] if statement is None else [one for one in header_nodes(statement.node) if isinstance(one, ast.Call)]
    asked = [one for one in calls if leaf_name(one.func) == "grad"]
    if statement is None or len(asked) != 1:
        return None
    given = [*asked[0].args[1:2], *(one.value for one in asked[0].keywords if one.arg == "inputs")]
    parts = [part for one in given for part in (one.elts if isinstance(one, ast.List | ast.Tuple) else [one])]
    edits: list[Edit] = []
    for part in parts:
        base, called = part, set[str]()
        while isinstance(base, ast.Call) and isinstance(base.func, ast.Attribute) and base.func.attr in _COPYING:
            called.add(base.func.attr)
            base = base.func.value
        made = None if chain_key(base) is None else _bound_last(statement, chain_key(base) or "")
        if made is not None and _is_computed_before(statement, made.lineno):
            return None
        if "clone" in called and (chain_key(base) is not None or isinstance(base, ast.Subscript)):
            edits.append(Edit(statement.source.span(part), statement.source.text(base)))
    return edited(statement.source, edits, "input_itself")


_COPYING = frozenset({"clone", "contiguous"})


def _bound_last(statement: Statement, name: str) -> ast.stmt | None:
    """The one statement of the function that may have bound ``name`` for a read at ``statement``."""
    if statement.scope is None:
        return None
    found = [one.statement for one in reaching(statement.scope.body, statement.node).get(name, ())]
    return found[0] if len(found) == 1 else None


def _is_computed_before(statement: Statement, line: int) -> bool:
    """Whether what ``torch.autograd.grad`` differentiates was computed before ``line``: by a caller, or further up."""
    calls = [one for one in header_nodes(statement.node) if isinstance(one, ast.Call) and leaf_name(one.func) == "grad"]
    given = [
        *(one.args[0] for one in calls if one.args),
        *(pair.value for one in calls for pair in one.keywords if pair.arg == "outputs"),
    ]
    if len(given) != 1 or not isinstance(given[0], ast.Name) or statement.scope is None:
        return False
    found = reaching(statement.scope.body, statement.node).get(given[0].id, frozenset())
    return all(one.statement is None or one.statement.lineno <= line for one in found)


def _bound_by(node: ast.AST) -> list[Binding]:
    return bindings_of(node) if isinstance(node, ast.stmt) else []


def retained(read: Frame, name: str) -> Change | None:
    """A line ``x.retain_grad()`` before the last backward of the block of ``read``, where ``x.grad`` is read."""
    statement = statement_at(read)
    if statement is None:
        return None
    before = statement.source.ahead(statement.node)
    calls = (one for node in reversed(before) for one in header_nodes(node) if isinstance(one, ast.Call))
    call = next((one for one in calls if leaf_name(one.func) == "backward"), None)
    node = None if call is None else statement.source.statement(call)
    if node is None or any(name in assigned_names(one) for one in before[before.index(node) :]):
        return None
    return insert_before(statement.source, node, f"{name}.retain_grad()", "retain_grad")
