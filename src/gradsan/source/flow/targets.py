"""Targets, callees and operands of an operation, as source expressions."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradsan.model import Frame
from gradsan.source.flow.modules import is_elementwise_module
from gradsan.source.identifiers import chain_key, constant_key, leaf_name, standing_of
from gradsan.source.locate import Expression, expression_at, expressions_at, statement_at
from gradsan.source.methods import (
    ACTIVATION_OPS,
    ALIASING_ATTRIBUTES,
    ALIASING_METHODS,
    PIECES,
    SETITEM_OPS,
    augmented_names,
    is_inplace_method,
    is_inplace_name,
    operation_name,
    same_operation,
)
from gradsan.source.tree import SourceFile

_ALIAS = re.compile(r"\.(data\b|detach\(\))")
_FIRST_PARAMETERS = ("input", "self", "tensor")


@dataclass(frozen=True, slots=True)
class Target:
    """The expression that holds the written tensor, and whether the write goes through a view of it."""

    node: ast.expr
    through_view: bool = False


def written_expression(frame: Frame, op: str, inner: Sequence[Frame] = ()) -> str | None:
    """The expression that the in-place operation ``op`` at ``frame`` writes to.

    ``x`` of ``x[:, 0].mul_(2)``, ``self.h`` of ``self.h[i] = v``, ``buf`` of ``torch.add(a, b, out=buf)``.
    ``op`` is the operation as PyTorch or Python calls it (``add_``, ``aten::add_.Tensor``, ``__setitem__``).
    ``inner`` are the frames below ``frame``, outermost first, where known: they show whether ``self.act(x)`` reached a
    single module. None for a temporary, and where the source is ambiguous.
    """
    found = target_at(frame, op, inner)
    return None if found is None else found[0].source.text(found[1].node)


def target_at(frame: Frame, op: str, inner: Sequence[Frame] = ()) -> tuple[Expression, Target] | None:
    """The writing operation at ``frame`` and its target, decided as in ``written_expression``."""
    found: dict[str, tuple[Expression, Target]] = {}
    for expression in expressions_at(frame):
        target = written_target(expression.source, expression.node, op, inner)
        if target is not None:
            found[expression.source.text(target.node)] = (expression, target)
    return next(iter(found.values())) if len(found) == 1 else None


def target_and_operand(frame: Frame, op: str) -> tuple[str, str] | None:
    """``average`` and ``weight`` of ``average.lerp_(weight, 0.1)``; None for one name on both sides, or none."""
    operand, own, read = _update_at(frame, op)
    if not isinstance(operand, ast.Name | ast.Attribute | ast.Subscript | ast.Call):
        return None
    other = _ALIAS.sub("", read(operand))
    return (own, other) if own != other else None


def _update_at(frame: Frame, op: str) -> tuple[ast.expr | None, str, Callable[[ast.AST], str]]:
    """The operand of the write at ``frame``, the written name, and what gives the text of expressions there."""
    found, statement = target_at(frame, op), statement_at(frame)
    if op == "data =" and statement is not None and isinstance(statement.node, ast.Assign):
        return (
            statement.node.value,
            _ALIAS.sub("", statement.source.text(statement.node.targets[0])),
            statement.source.text,
        )
    if found is None:
        return None, "", ast.unparse
    node, read = found[0].node, found[0].source.text
    operand = node.args[0] if isinstance(node, ast.Call) and node.args else getattr(node, "value", None)
    return operand, _ALIAS.sub("", read(found[1].node)), read


def mixed_operand(frame: Frame, op: str) -> tuple[str, str] | None:
    """``mean`` and ``w`` of ``mean.mul_(d).add_((1 - d) * w.data)``, ``mean.copy_(d * mean + (1 - d) * w)``, or
    of ``mean.data = d * mean.data + (1 - d) * w.data``.

    None where the tensor cannot be told from the factors: ``1 - d`` here or just before shows one; ``w.data`` is none.
    """
    (operand, own, read), statement = _update_at(frame, op), statement_at(frame)
    if not isinstance(operand, ast.BinOp | ast.Call) or statement is None:
        return None
    chains, near = {read(one) for one in _parts_of(operand)}, statement.source.ahead(statement.node)[-1:]
    sums = [one for node in (*near, statement.node) for one in ast.walk(node) if isinstance(one, ast.BinOp)]
    rests = [one.right for one in sums if isinstance(one.op, ast.Div)]
    rests += [one.right for one in sums if isinstance(one.op, ast.Sub) and isinstance(one.left, ast.Constant)]
    rests += [one.left for one in sums if isinstance(one.right, ast.Constant) and isinstance(one.op, ast.Add | ast.Sub)]
    factors = {read(part) for one in rests for part in _parts_of(one)}
    others = {_ALIAS.sub("", one) for one in chains if one not in factors or _ALIAS.search(one)} - {own}
    is_own = own in {_ALIAS.sub("", one) for one in chains}
    return (own, others.pop()) if len(others) == 1 and is_own == (op in ("copy_", "data =")) else None


def own_difference(frame: Frame, op: str) -> tuple[str, str] | None:
    """``mean`` and ``w`` of ``mean += (w - mean) / n`` and ``mean.sub_(0.1 * (mean - w.data))``; else None."""
    operand, own, read = _update_at(frame, op)
    for one in ast.walk(operand) if operand is not None else ():
        sides: list[ast.expr] = []
        if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Sub):
            sides = [one.left, one.right]
        elif isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in ("sub", "subtract"):
            sides = [one.func.value, *one.args][-2:]
        parts = [{_ALIAS.sub("", read(part)) for part in _parts_of(side)} for side in sides]
        names = [_ALIAS.sub("", read(side)) for side in sides]
        # ``w - decay * w`` is a difference from itself as it stands.
        if own in names and sum(own in one for one in parts) == 1:
            return own, next(name for name in names if name != own)
    return None


def _parts_of(node: ast.AST) -> Iterator[ast.expr]:
    """The names, attributes and elements that an expression is computed from, with ``.data`` and ``.detach()``."""
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        yield node
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield from (node,) if node.func.attr == "detach" else _parts_of(node.func.value)
        for given in node.args:
            yield from _parts_of(given)
    else:
        for inner in ast.iter_child_nodes(node):
            yield from _parts_of(inner)


def assigned_data(frame: Frame) -> tuple[str, str] | None:
    """``target`` and ``network`` of ``target.data = network.data``."""
    statement = statement_at(frame)
    node = None if statement is None else statement.node
    if statement is None or not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    names = [_ALIAS.sub("", statement.source.text(one)) for one in (node.targets[0], node.value)]
    return (names[0], names[1]) if names[0] != names[1] and chain_key(node.targets[0]) is not None else None


def operand_expressions(frame: Frame) -> list[str]:
    """The names, attributes and elements which the operation at ``frame`` reads directly, in source order.

    Views are followed to their bases; a nested computation is a temporary and is left out.
    """
    expression = expression_at(frame)
    if expression is None:
        return []
    source = expression.source
    found = [root for node in _operands(source, expression) for root in _roots(source, node)]
    return list(dict.fromkeys(source.text(node) for node in found))


def called_operand(frame: Frame) -> str | None:
    """``quantised(w)`` of ``quantised(w) - w``: the only call among the operands of a difference; None without one."""
    expression = expression_at(frame)
    operands = [] if expression is None else _operands(expression.source, expression)
    calls = [one for one in operands if isinstance(one, ast.Call)]
    return expression.source.text(calls[0]) if expression is not None and len(calls) == 1 < len(operands) else None


@dataclass(frozen=True, slots=True)
class Operation:
    """The operation of a line: ``called``, its callee (``torch.exp``, ``self.fc``, ``@``), and its operands in order.

    For ``x.exp()`` the ``receiver`` is x, for a function it is None. Views are followed to their bases; None
    stands for an operand without a name. Keywords are left out.
    """

    called: str
    receiver: str | None
    arguments: tuple[str | None, ...]


def operation_at(frame: Frame) -> Operation | None:
    """The call or the operator at ``frame``; None where the source is ambiguous."""
    expression = expression_at(frame)
    if expression is None:
        return None
    source, node = expression.source, expression.node
    if isinstance(node, ast.BinOp):
        # An operator with a number on its left is a method of its right operand.
        sides = [node.right] if isinstance(node.left, ast.Constant) else [node.left, node.right]
        sign = _SIGNS.get(type(node.op))
        return None if sign is None else Operation(sign, None, tuple(_named(source, side) for side in sides))
    if not isinstance(node, ast.Call) or any(isinstance(argument, ast.Starred) for argument in node.args):
        return None
    receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
    if receiver is not None and standing_of(source, receiver) == "namespace":
        receiver = None
    arguments = tuple(_named(source, argument) for argument in node.args)
    return Operation(source.text(node.func), None if receiver is None else _named(source, receiver) or "", arguments)


_SIGNS: Mapping[type[ast.operator], str] = {
    ast.MatMult: "@",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Pow: "**",
}


def _named(source: SourceFile, node: ast.expr) -> str | None:
    found = _root(source, node)
    return None if found is None else source.text(found.node)


def written_target(source: SourceFile, node: ast.AST, op: str, inner: Sequence[Frame] = ()) -> Target | None:
    """The target of ``node`` if it is the operation ``op``; None where it is not, or writes to a temporary."""
    op = operation_name(op)
    if isinstance(node, ast.AugAssign):
        is_same = any(same_operation(op, name) for name in augmented_names(node.op))
        return _root(source, node.target) if is_same else None
    if isinstance(node, ast.Subscript):
        is_store = isinstance(node.ctx, ast.Store) and op in SETITEM_OPS
        return _root(source, node.value) if is_store else None
    if isinstance(node, ast.Attribute):
        is_store = isinstance(node.ctx, ast.Store) and node.attr == "data" and op == "data ="
        return _root(source, node.value) if is_store else None
    return _written_by_call(source, node, op, inner) if isinstance(node, ast.Call) else None


def aliased_expression(source: SourceFile, value: ast.expr) -> ast.expr | None:
    """The base that ``value`` is, or is a view of: ``x`` for ``x``, ``x[:, 0]``, ``x.view(-1)``; None if new."""
    target = _root(source, value)
    return None if target is None else target.node


def _written_by_call(source: SourceFile, call: ast.Call, op: str, inner: Sequence[Frame]) -> Target | None:
    out = _keyword(call, "out")
    if out is not None and not (isinstance(out, ast.Constant) and out.value is None):
        return _root(source, out)
    function = call.func
    if isinstance(function, ast.Attribute) and standing_of(source, function.value) == "value":
        is_special = function.attr.startswith("__") and function.attr.endswith("__")
        if is_inplace_name(function.attr) or (is_special and function.attr == op):
            is_same = same_operation(function.attr, op) or function.attr == op
            return _root(source, function.value) if is_same else None
    elif _writes_first_argument(function, op):
        return _first_argument(source, call) if _is_function(source, function) else None
    inplace = _keyword(call, "inplace")
    if inplace is not None:
        is_true = isinstance(inplace, ast.Constant) and inplace.value is True
        return _first_argument(source, call) if is_true else None
    if op in ACTIVATION_OPS and _is_single_module(source, call, inner):
        return _first_argument(source, call)
    return None


def _writes_first_argument(function: ast.expr, op: str) -> bool:
    """Whether a function, not a method, is in place by its name: ``torch.relu_``, ``aten.add_.Tensor``, ``iadd``."""
    name = leaf_name(function)
    if name is None:
        return False
    above = leaf_name(function.value) if isinstance(function, ast.Attribute) else None
    if is_inplace_name(name) or (above is not None and is_inplace_name(above)):
        return True
    return (op.startswith("__i") and f"__{name}__" == op) or name == op in ("__setitem__", "all_reduce", "broadcast")


def _is_function(source: SourceFile, function: ast.expr) -> bool:
    """Whether ``function`` is surely not a method: its owner is a namespace, or the file does not rebind its name."""
    if isinstance(function, ast.Attribute):
        return standing_of(source, function.value) == "namespace"
    name = leaf_name(function)
    return not any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store) for node in source.nodes
    )


def _is_single_module(source: SourceFile, call: ast.Call, inner: Sequence[Frame]) -> bool:
    if inner:
        paths = [frame.file.replace("\\", "/") for frame in inner]
        files = {path.rsplit("/", 1)[-1] for path in paths if "/nn/modules/" in path}
        # module.py holds __call__; container.py runs several modules one after another.
        return bool(files - {"module.py"}) and files <= {"module.py", "activation.py", "dropout.py"}
    return is_elementwise_module(source, call.func)


def _first_argument(source: SourceFile, call: ast.Call) -> Target | None:
    if call.args:
        return None if isinstance(call.args[0], ast.Starred) else _root(source, call.args[0])
    named = [value for name in _FIRST_PARAMETERS if (value := _keyword(call, name)) is not None]
    return _root(source, named[0]) if len(named) == 1 else None


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _root(source: SourceFile, node: ast.expr, through_view: bool = False) -> Target | None:
    """Follow in-place methods and views from ``node`` to the name, attribute or element that holds the tensor."""
    if isinstance(node, ast.NamedExpr):
        return Target(node.target, through_view)
    if isinstance(node, ast.Name):
        return Target(node, through_view) if standing_of(source, node) == "value" else None
    if isinstance(node, ast.Attribute):
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if node.attr in ALIASING_ATTRIBUTES and not is_own and standing_of(source, node.value) == "value":
            return _root(source, node.value, True)
        if chain_key(node) is None and not _is_readable(node):
            return None
        return Target(node, through_view) if standing_of(source, node) != "namespace" else None
    if isinstance(node, ast.Subscript):
        if _takes_piece(node) or _is_slice_of_tensor(node.slice):
            inside = node.value.func.value if _takes_piece(node) else node.value  # type: ignore[attr-defined]
            return _root(source, inside, True)
        return Target(node, through_view) if _is_readable(node) else None
    if isinstance(node, ast.Call):
        return _root_of_call(source, node, through_view)
    return None


def _root_of_call(source: SourceFile, call: ast.Call, through_view: bool) -> Target | None:
    function = call.func
    name = leaf_name(function)
    if name is None:
        return None
    if isinstance(function, ast.Attribute) and standing_of(source, function.value) == "value":
        if is_inplace_method(name):
            return _root(source, function.value, through_view)
        return _root(source, function.value, True) if name in ALIASING_METHODS else None
    is_inplace = isinstance(value := _keyword(call, "inplace"), ast.Constant) and value.value is True
    if (is_inplace_name(name) and _is_function(source, function)) or is_inplace:
        target = _first_argument(source, call)
    elif name in ALIASING_METHODS and isinstance(function, ast.Attribute):
        target = _first_argument(source, call)
        through_view = True
    else:
        return None
    return None if target is None else Target(target.node, target.through_view or through_view)


def _takes_piece(node: ast.Subscript) -> bool:
    function = node.value.func if isinstance(node.value, ast.Call) else None
    return isinstance(function, ast.Attribute) and function.attr in PIECES


def _is_slice_of_tensor(index: ast.expr) -> bool:
    """Whether an index can only be one into a tensor: a slice, an ellipsis, several indices, ``None``.

    ``xs[0]`` and ``xs[i]`` may be a tensor's row or a list's element.
    """
    if isinstance(index, ast.Tuple):
        return not any(isinstance(constant_key(element), str) for element in index.elts)
    if isinstance(index, ast.Slice):
        return True
    return isinstance(index, ast.Constant) and (index.value is Ellipsis or index.value is None)


def _is_readable(node: ast.expr) -> bool:
    """Whether the expression can name the tensor in a report: names, attributes and simple indices only."""
    if isinstance(node, ast.Attribute):
        return _is_readable(node.value)
    if isinstance(node, ast.Subscript):
        is_simple = constant_key(node.slice) is not None or isinstance(node.slice, ast.BinOp)
        return (is_simple or _is_readable(node.slice)) and _is_readable(node.value)
    return isinstance(node, ast.Name)


def _operands(source: SourceFile, expression: Expression) -> list[ast.expr]:
    node = expression.node
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.AugAssign):
        return [node.target, node.value]
    if isinstance(node, ast.Attribute):
        return [node.value] if isinstance(node.ctx, ast.Load) else _stored_value(source, node)
    if isinstance(node, ast.Subscript):
        return [node.value, *([] if isinstance(node.ctx, ast.Load) else _stored_value(source, node))]
    if isinstance(node, ast.Call):
        receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
        is_part = receiver is None or _is_self(receiver) or standing_of(source, receiver) != "value"
        first = [] if receiver is None or is_part else [receiver]
        return [*first, *node.args, *(keyword.value for keyword in node.keywords)]
    return []


def _stored_value(source: SourceFile, target: ast.expr) -> list[ast.expr]:
    """The expression assigned to ``target`` in a list; empty where it is not one expression."""
    parent, name = source.parents[target]
    if isinstance(parent, ast.Assign) or (isinstance(parent, ast.AugAssign | ast.AnnAssign) and name == "target"):
        return [parent.value] if parent.value is not None else []
    if isinstance(parent, ast.Tuple | ast.List):
        outer, _ = source.parents[parent]
        value = outer.value if isinstance(outer, ast.Assign) else None
        if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(parent.elts):
            return [value.elts[parent.elts.index(target)]]
    return []


def _is_self(node: ast.expr) -> bool:
    name = node.func if isinstance(node, ast.Call) else node
    return isinstance(name, ast.Name) and name.id in (("super",) if isinstance(node, ast.Call) else ("self", "cls"))


def _roots(source: SourceFile, node: ast.expr) -> list[ast.expr]:
    """The named values that ``node`` passes to the operation; several for a list or tuple of them."""
    if isinstance(node, ast.Starred):
        return _roots(source, node.value)
    if isinstance(node, ast.List | ast.Tuple):
        return [root for element in node.elts for root in _roots(source, element)]
    if isinstance(node, ast.IfExp):
        return [*_roots(source, node.body), *_roots(source, node.orelse)]
    target = _root(source, node)
    return [] if target is None else [target.node]
