"""Out-of-place form of a line that writes in place."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, augmented_value, edited, text_with, without_keyword
from gradsan.source.flow.aliases import is_just_made, is_read_whole_after, set_back
from gradsan.source.flow.targets import target_at
from gradsan.source.identifiers import chain_key, constant_key, dotted_path, leaf_name, parameters, standing_of
from gradsan.source.imports import torch_name
from gradsan.source.locate import expressions_at, statement_at
from gradsan.source.methods import (
    CHANGING_METADATA,
    OVERWRITING,
    WITHOUT_COUNTERPART,
    is_inplace_method,
    is_inplace_name,
    same_operation,
)
from gradsan.source.rewrite.rebinding import (
    bound_ahead,
    bound_to_result,
    can_rebind,
    is_repeated,
    is_written_for_caller,
    is_written_for_others,
    notes_on_rebinding,
)
from gradsan.source.tree import SourceFile, Span

_KIND = "out_of_place"


def out_of_place(frame: Frame, op: str) -> Change | None:
    """The line of ``frame`` with the in-place operation ``op`` made out of place, its result bound to the same name.

    ``x += y`` becomes ``x = x + y``, ``x.mul_(2).sigmoid_()`` becomes ``x = x.mul(2).sigmoid()``. None where no such
    line is equivalent: a write through a view or an index (see ``clone_before``), a module's parameter, a variable of
    another scope, an operation without a counterpart. The change's notes say who may still see the old values.
    ``torch.exp(x).mul_(y)`` writes a value that nothing else holds: ``torch.exp(x).mul(y)``. Of ``x.detach().abs_()``
    the result is meant, where it is used: ``x.detach().abs()``.
    """
    found = target_at(frame, op)
    if found is None:
        return _temporary(frame, op)
    source, node, target = found[0].source, found[0].node, found[1].node
    if found[1].through_view:
        return _of_detached(source, node, target) if isinstance(node, ast.Call) else None
    if isinstance(node, ast.AugAssign):
        return _augmented(source, node)
    return _call(source, node, target) if isinstance(node, ast.Call) else None


def _temporary(frame: Frame, op: str) -> Change | None:
    """A chain of in-place methods of a value just computed in the same expression, made out of place."""
    found = [
        (one.source, one.node)
        for one in expressions_at(frame)
        if isinstance(one.node, ast.Call)
        and is_inplace_method(name := leaf_name(one.node.func) or "")
        and same_operation(name, op)
    ]
    if len(found) != 1:
        return None
    source, call = found[0]
    _, base, edits = _methods_around(source, call)
    return edited(source, edits, _KIND) if edits and is_just_made(source, base) else None


def _of_detached(source: SourceFile, call: ast.Call, target: ast.expr) -> Change | None:
    """The same for methods of ``x.detach()`` whose result is used."""
    outermost, base, edits = _methods_around(source, call)
    inner = _called_on(base)
    if not edits or inner is None or isinstance(source.parents[outermost][0], ast.Expr):
        return None
    if leaf_name(getattr(base, "func", base)) != "detach" or chain_key(inner) != chain_key(target):
        return None
    return edited(source, edits, _KIND, notes_on_rebinding(source, target))


def _methods_around(source: SourceFile, call: ast.Call) -> tuple[ast.Call, ast.expr, list[Edit]]:
    """The outermost of a chain of in-place methods, what the first is called on, and edits that make all new."""
    while (outer := _outer_call(source, call)) is not None:
        call = outer
    base: ast.expr = call
    edits: list[Edit] = []
    while isinstance(base, ast.Call) and isinstance(base.func, ast.Attribute) and is_inplace_method(base.func.attr):
        if base.func.attr in OVERWRITING | CHANGING_METADATA | WITHOUT_COUNTERPART:
            return call, base, []
        edits.append(_drop_underscore(source, base.func))
        base = base.func.value
    return call, base, edits


def result_out_of_place(frame: Frame, op: str) -> Change | None:
    """``s = self.p.exp_()`` as ``s = self.p.exp()``: the tensor keeps its values, and the name holds the result.

    None where a part was written, ``s = p[:2].exp_()``, and the whole of ``p`` is read afterwards.
    """
    found = target_at(frame, op)
    if found is None or not isinstance(found[0].node, ast.Call):
        return None
    if found[1].through_view and is_read_whole_after(found[0].source, found[0].statement, found[1].node):
        return None
    source, chain = found[0].source, _rewrite_chain(found[0].source, found[0].node)
    return None if chain is None else edited(source, chain.edits, _KIND)


def runs_again_on_result(frame: Frame, op: str) -> bool:
    """Whether a loop runs the write at ``frame`` again, on what it has written: bound to the name, too."""
    found = target_at(frame, op)
    if found is None or not isinstance(found[1].node, ast.Name) or isinstance(found[0].node, ast.AugAssign):
        return False
    return is_repeated(found[0].source, found[1].node, found[0].node)


def runs_again_after_backward(frame: Frame, op: str) -> bool:
    """Whether a loop with a backward in it writes a variable at ``frame`` in every round, and binds it in none.

    Bound to a new value, it would be a result whose graph that backward has freed.
    """
    found, statement = target_at(frame, op), statement_at(frame)
    name = None if found is None or not isinstance(found[1].node, ast.Name) else found[1].node.id
    if statement is None or name is None:
        return False
    for loop in statement.loops:
        inside = list(ast.walk(loop))
        named = [one for one in inside if isinstance(one, ast.Name) and one.id == name]
        is_own = all(
            isinstance(one.ctx, ast.Load) or isinstance(statement.source.parents[one][0], ast.AugAssign)
            for one in named
        )
        calls = {leaf_name(one.func) for one in inside if isinstance(one, ast.Call)}
        if is_own and calls & {"backward", "grad"}:
            return True
    return False


def argument_out_of_place(frame: Frame, op: str) -> Change | None:
    """``args[0].add_(y)``, where ``args`` is an argument of the function, as ``args = (args[0].add(y), *args[1:])``."""
    found = target_at(frame, op)
    if found is None or found[1].through_view:
        return None
    source, call, element = found[0].source, found[0].node, found[1].node
    statement = found[0].statement
    position = constant_key(element.slice) if isinstance(element, ast.Subscript) else None
    chain = chain_value(source, call) if isinstance(call, ast.Call) and isinstance(statement, ast.Expr) else None
    if not isinstance(element, ast.Subscript) or not isinstance(statement, ast.Expr) or chain is None:
        return None
    if chain[0] is not statement.value:
        return None
    function, name = source.function(element), source.text(element.value)
    if not isinstance(position, int) or position < 0 or function is None or name not in parameters(function):
        return None
    before = f"*{name}[:{position}], " if position else ""
    text = f"{name} = ({before}{chain[1]}, *{name}[{position + 1}:])"
    return edited(source, [Edit(source.span(found[0].statement), text)], _KIND)


def recorded(frame: Frame, op: str) -> Change | None:
    """The line of ``frame`` that wrote through ``.data`` or ``detach()``, computing a new tensor that autograd records.

    ``x.data *= y`` and ``x.detach().mul_(y)`` become ``x = x * y`` and ``x = x.mul(y)``. None as for ``out_of_place``.
    """
    found = target_at(frame, op)
    if found is None:
        return None
    source, node = found[0].source, found[0].node
    written = node.target if isinstance(node, ast.AugAssign) else _called_on(node)
    name = None if written is None else past_the_graph(written)
    if name is None or not can_rebind(source, name):
        return None
    value: str | None = None
    if isinstance(node, ast.AugAssign):
        value = augmented_value(source, node)
        value = value and value.removeprefix(source.text(node.target))
    elif isinstance(node, ast.Call) and source.parents[node][0] is found[0].statement:
        value = _out_of_place_call(source, node)
    if not value:
        return None
    new = source.text(name)
    change = [Edit(source.span(found[0].statement), f"{new} = {new}{value}")]
    return edited(source, change, _KIND, notes_on_rebinding(source, name))


def _out_of_place_call(source: SourceFile, call: ast.Call) -> str | None:
    """``.mul(2)`` of ``x.data.mul_(2)``."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if not is_inplace_method(method) or method in (OVERWRITING | CHANGING_METADATA):
        return None
    new = f"clone().{method}" if method in WITHOUT_COUNTERPART else method[:-1]
    return f".{new}{source.text(call).removeprefix(source.text(call.func))}"


def _called_on(node: ast.AST) -> ast.expr | None:
    return node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None


def past_the_graph(written: ast.expr) -> ast.Name | ast.Attribute | None:
    """``x`` of ``x.data`` and ``x.detach()``."""
    inner = _called_on(written) if isinstance(written, ast.Call) else written
    kind = "detach" if isinstance(written, ast.Call) else "data"
    attribute = written.func if isinstance(written, ast.Call) else written
    if inner is None or not isinstance(attribute, ast.Attribute) or attribute.attr != kind:
        return None
    return attribute.value if isinstance(attribute.value, ast.Name | ast.Attribute) else None


def written_for_others(frame: Frame, op: str) -> bool:
    """Whether the operation ``op`` at ``frame`` writes to a loop variable that the body does not read afterwards.

    ``for p in parameters: p.mul_(2)`` is meant for the parameters: rebinding a name would not be equivalent.
    """
    found = target_at(frame, op)
    return found is not None and is_written_for_others(found[0].source, found[1].node, found[0].node)


def written_for_caller(frame: Frame, op: str) -> bool:
    """The same for an argument that is neither returned nor read afterwards: ``def clip(w): w.clamp_(-1, 1)``."""
    found = target_at(frame, op)
    return found is not None and is_written_for_caller(found[0].source, found[1].node, found[0].node)


def chain_value(source: SourceFile, call: ast.Call) -> tuple[ast.Call, str] | None:
    """The outermost call of the chain of in-place calls around ``call``, and its text made out of place."""
    rewritten = _rewrite_chain(source, call)
    if rewritten is None:
        return None
    return rewritten.outermost, text_with(source, source.span(rewritten.outermost), rewritten.edits)


def _augmented(source: SourceFile, node: ast.AugAssign) -> Change | None:
    value = augmented_value(source, node)
    if value is None or not can_rebind(source, node.target):
        return None
    new, back = f"{source.text(node.target)} = {value}", set_back(source, node.target)
    if back is not None and not source.indent(source.span(node)).strip():
        return edited(source, [Edit(source.span(node), f"{new}\n{source.indent(source.span(node))}{back}")], _KIND)
    return edited(source, [Edit(source.span(node), new)], _KIND, notes_on_rebinding(source, node.target))


@dataclass(frozen=True, slots=True)
class _Rewritten:
    """The edits that make a chain of in-place calls out of place, and the outermost call of the chain."""

    edits: list[Edit]
    outermost: ast.Call


def _call(source: SourceFile, call: ast.Call, target: ast.expr) -> Change | None:
    rewritten = _rewrite_chain(source, call)
    if rewritten is None:
        return _step_by_step(source, call, target)
    top, name = rewritten.outermost, source.text(target)
    notes = notes_on_rebinding(source, target)
    binding = bound_to_result(source, top, target, name)
    if binding is not None:
        return edited(source, [*rewritten.edits, *binding], _KIND, notes)
    ahead = bound_ahead(source, top, target, text_with(source, source.span(top), rewritten.edits))
    return None if ahead is None else edited(source, ahead, _KIND, notes)


def _step_by_step(source: SourceFile, call: ast.Call, target: ast.expr) -> Change | None:
    """``x = x.sub(x.mean())`` and ``x = x.div(x.std())`` for the statement ``x.sub_(x.mean()).div_(x.std())``.

    Each step reads what those before have left in ``x``.
    """
    while (outer := _outer_call(source, call)) is not None:
        call = outer
    statement, name = source.parents[call][0], source.text(target)
    head = source.indent(source.span(statement))
    rows: list[str] = []
    base: ast.expr = call
    while isinstance(base, ast.Call) and isinstance(base.func, ast.Attribute):
        edits = _method(source, base, target, is_fresh=True)
        if not edits:
            return None
        made = text_with(source, source.span(base), edits)
        rows = [f"{name} = {name}{made.removeprefix(source.text(base.func.value))}", *rows]
        base = base.func.value
    if not isinstance(statement, ast.Expr) or head.strip() or chain_key(base) != chain_key(target):
        return None
    if len(rows) < 2 or not can_rebind(source, target):
        return None
    return edited(
        source, [Edit(source.span(statement), f"\n{head}".join(rows))], _KIND, notes_on_rebinding(source, target)
    )


def _rewrite_chain(source: SourceFile, call: ast.Call) -> _Rewritten | None:
    outermost = call
    while (outer := _outer_call(source, outermost)) is not None:
        outermost = outer
    chain: list[ast.Call] = []
    base: ast.expr = outermost
    while isinstance(base, ast.Call):
        chain.append(base)
        if isinstance(base.func, ast.Attribute) and standing_of(source, base.func.value) == "value":
            base = base.func.value
            continue
        first = _first_tensor(base)
        if first is None:
            return None
        base = first
    if any(_reads(step, base) for step in chain[:-1]):
        # ``x.mul_(2).add_(x[0])`` reads the result of ``mul_``.
        return None
    edits: list[Edit] = []
    is_fresh = False
    for step in reversed(chain):
        is_method = isinstance(step.func, ast.Attribute) and standing_of(source, step.func.value) == "value"
        new = _method(source, step, base, is_fresh) if is_method else _function(source, step)
        if new is None:
            return None
        edits.extend(new)
        is_fresh = True
    return _Rewritten(edits, outermost)


def _reads(call: ast.Call, base: ast.expr) -> bool:
    """Whether an argument of ``call`` reads the object of ``base``, or one that contains it."""
    keys = {chain_key(base), chain_key(base.value) if isinstance(base, ast.Subscript) else None} - {None}
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(isinstance(node, ast.expr) and chain_key(node) in keys for one in given for node in ast.walk(one))


def _outer_call(source: SourceFile, call: ast.Call) -> ast.Call | None:
    attribute = source.parents[call][0]
    if not isinstance(attribute, ast.Attribute) or not is_inplace_method(attribute.attr):
        return None
    outer, field = source.parents[attribute]
    return outer if isinstance(outer, ast.Call) and field == "func" else None


def _method(source: SourceFile, call: ast.Call, base: ast.expr, is_fresh: bool) -> list[Edit] | None:
    name = leaf_name(call.func)
    if name is None or not is_inplace_method(name) or name in CHANGING_METADATA or name.startswith("_"):
        return None
    if name not in OVERWRITING and name not in WITHOUT_COUNTERPART:
        return [_drop_underscore(source, call.func)]
    if is_fresh:
        return []
    torch, text = torch_name(source), source.text(base)
    if name in OVERWRITING:
        if name == "zero_" and not call.args:
            return [Edit(source.span(call), f"{torch}.zeros_like({text})")]
        if name == "fill_" and len(call.args) == 1 and _is_number(call.args[0]):
            return [Edit(source.span(call), f"{torch}.full_like({text}, {source.text(call.args[0])})")]
        return [Edit(source.span(base), f"{torch}.empty_like({text})")]
    return [Edit(source.span(base), f"{text}.clone()")]


def _function(source: SourceFile, call: ast.Call) -> list[Edit] | None:
    if any(keyword.arg == "out" for keyword in call.keywords):
        edit = without_keyword(source, call, "out")
        return None if edit is None else [edit]
    inplace = next((keyword.value for keyword in call.keywords if keyword.arg == "inplace"), None)
    if isinstance(inplace, ast.Constant) and inplace.value is True:
        return [Edit(source.span(inplace), "False")]
    path = dotted_path(source, call.func)
    name = leaf_name(call.func)
    if (
        path is None
        or name is None
        or name in CHANGING_METADATA | OVERWRITING | WITHOUT_COUNTERPART
        or (name.startswith("_") and not name.startswith("_foreach_"))
        or name in ("_foreach_copy_", "_foreach_zero_")
    ):
        return None
    is_plain = path.rsplit(".", 1)[0] in ("torch", "torch.nn.functional", "torch.special", "torch.Tensor")
    if not is_plain or not is_inplace_name(name) or not isinstance(call.func, ast.Attribute):
        return None
    return [_drop_underscore(source, call.func)]


def _first_tensor(call: ast.Call) -> ast.expr | None:
    out = next((keyword.value for keyword in call.keywords if keyword.arg == "out"), None)
    if out is not None:
        return out
    if call.args:
        return call.args[0]
    return next((keyword.value for keyword in call.keywords if keyword.arg in ("input", "self")), None)


def _drop_underscore(source: SourceFile, function: ast.expr) -> Edit:
    span = source.span(function)
    return Edit(Span(span.end_line, span.end_column - 1, span.end_line, span.end_column), "")


def _is_number(node: ast.expr) -> bool:
    value = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
    return isinstance(value, ast.Constant) and isinstance(value.value, int | float)
