"""In-place write of the statement at a frame: its target, its operands, and the definitions of both."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gradsan.heuristics import is_gradient
from gradsan.model import Frame
from gradsan.source.flow.bindings import last_binding
from gradsan.source.flow.kept import assignments
from gradsan.source.flow.reaching import reaching
from gradsan.source.flow.targets import target_at, written_target
from gradsan.source.identifiers import (
    assigned_names,
    bindings_in,
    bindings_of,
    chain_key,
    consumed_names,
    leaf_name,
    local_nodes,
)
from gradsan.source.locate import Expression, at_span, expression_at, expressions_at, statement_at
from gradsan.source.methods import augmented_names, is_inplace_method, is_inplace_name
from gradsan.source.tree import SourceFile, header_nodes

_STEPS_BACK = 4
"""Number of consecutive bindings through which a value is followed back."""


@dataclass(frozen=True, slots=True)
class Written:
    """A write that the source shows: ``op`` as PyTorch names it, ``target`` the name that holds the tensor.

    ``expression`` is the written part as spelled there (``p[h : 2 * h]``), equal to ``target`` where it is all of it.
    """

    op: str
    target: str
    expression: str


@dataclass(frozen=True, slots=True)
class Made:
    """The statement that bound a name: its frame, and the text of the value. ``is_loop`` for a loop variable.

    ``elements`` are the names that it iterates over, where the loop's iterable is a display of names: ``(row, col)``.
    """

    frame: Frame
    value: str
    is_loop: bool = False
    elements: tuple[str, ...] = ()


def writing_at(frame: Frame, inner: Sequence[Frame] = ()) -> Written | None:
    """The in-place operation that ``frame`` was executing; None unless there is exactly one.

    ``inner`` are the frames below ``frame``, outermost first.
    """
    found: dict[str, Written] = {}
    for place in expressions_at(frame):
        for op in _possible_operations(place):
            target = written_target(place.source, place.node, op, inner)
            if target is not None:
                name = place.source.text(target.node)
                found.setdefault(name, Written(op, name, _written_part(place) or name))
                break
    return next(iter(found.values())) if len(found) == 1 else None


def attribute_owner(frame: Frame) -> str | None:
    """``w`` of the statement ``w.requires_grad = False``; None where the frame sets no attribute."""
    for place in expressions_at(frame):
        if isinstance(place.node, ast.Attribute) and isinstance(place.node.ctx, ast.Store):
            return place.source.text(place.node.value)
    return None


def reads_gradient(frame: Frame, *, or_beside: bool = False, followed: bool = False) -> bool:
    """Whether the statement at ``frame`` is an update: it reads some ``.grad``, or a name that denotes a gradient.

    Or a result of ``autograd.grad``, unless that has a graph of its own. With ``or_beside``, also where another
    statement of the block does, and writes the same variable: the noise of Langevin dynamics. ``followed``: or a value
    that was computed from gradients, as the velocity of momentum.
    """
    statement = statement_at(frame)
    if statement is None:
        return False
    written = writes_beside(statement.source, statement.node) if or_beside else [statement.node]
    parts = [part for one in written for part in header_nodes(one)]
    names = {node.id for node in parts if isinstance(node, ast.Name)}
    if any(isinstance(node, ast.Attribute) and node.attr == "grad" for node in parts) or any(map(is_gradient, names)):
        return True
    made = [one for one in ast.walk(statement.function or statement.source.module) if isinstance(one, ast.Assign)]
    for _ in range(_STEPS_BACK if followed else 1):
        parts = [part for one in made if names & set(assigned_names(one)) for part in ast.walk(one.value)]
        if any(_gives_gradient(part, statement.source) for part in parts if followed or isinstance(part, ast.Call)):
            return True
        names |= {part.id for part in parts if isinstance(part, ast.Name)}
    return False


def _gives_gradient(node: ast.AST, source: SourceFile) -> bool:
    """Whether ``node`` calls ``autograd.grad`` for no graph of its own, or reads some ``.grad``."""
    if isinstance(node, ast.Call):
        return leaf_name(node.func) == "grad" and all(keyword.arg != "create_graph" for keyword in node.keywords)
    return isinstance(node, ast.Attribute) and node.attr == "grad" and source.parents[node][1] != "func"


def computes_with_result(frame: Frame, op: str) -> bool:
    """Whether the statement uses the result of the in-place call under another name: ``s = self.p.exp_()``."""
    found = target_at(frame, op)
    if found is None or not isinstance(found[0].node, ast.Call):
        return False
    source, node, statement = found[0].source, found[0].node, found[0].statement
    outer: ast.AST = node
    while isinstance(parent := source.parents[outer][0], ast.Attribute | ast.Call) and outer in (
        getattr(parent, "value", None),
        getattr(parent, "func", None),
    ):
        outer = parent
    if isinstance(statement, ast.Expr) and statement.value is outer:
        return False
    return source.text(found[1].node) not in assigned_names(statement)


def definition_of(frame: Frame, name: str) -> Made | None:
    """The one statement that bound ``name`` (``x``, ``self.w``) to the value it had at ``frame``, in the same function.

    Module-level bindings count if the function has none. None where there are several such statements, or none.
    """
    statement = statement_at(frame)
    scope = None if statement is None else statement.scope
    if statement is None or scope is None:
        return None
    source, module = statement.source, statement.source.module.body
    found = reaching(scope.body, statement.node).get(name, frozenset())
    nodes = {definition.statement for definition in found}
    if None in nodes:
        return None
    if any(node is not None and not _gives_value(node, name) for node in nodes):
        # An in-place update reached the statement; its target was bound elsewhere in this body.
        nodes = {node for node in local_nodes(scope) if isinstance(node, ast.stmt) and _gives_value(node, name)}
    if not nodes and scope.body is not module:
        nodes = {node for node in module if _gives_value(node, name)}
    node = next(iter(nodes)) if len(nodes) == 1 else None
    return None if node is None else _made(source, node, name, frame)


def written_root(node: ast.stmt) -> str | None:
    """The variable whose tensor, or part of one, a statement writes in place; None for any other statement."""
    target: ast.expr | None = None
    if isinstance(node, ast.AugAssign):
        target = node.target
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        target = next((one.value for one in node.value.keywords if one.arg == "out"), None)
        if target is None and isinstance(function, ast.Attribute) and is_inplace_method(function.attr):
            target = function.value
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        target = node.targets[0]
    while isinstance(target, ast.Subscript | ast.Call | ast.Attribute):
        # ``w.mul_(a).add_(b)`` writes w; ``self.w`` is a variable of its own.
        if isinstance(target, ast.Call) and isinstance(target.func, ast.Attribute):
            target = target.func.value
            continue
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.attr != "data":
            return f"{target.value.id}.{target.attr}"
        target = target.func if isinstance(target, ast.Call) else target.value
    return target.id if isinstance(target, ast.Name) else None


def writes_beside(source: SourceFile, node: ast.stmt) -> list[ast.stmt]:
    """The statement, and those of its block that write the same variable in place, in order."""
    root = written_root(node)
    return [one for one in source.block(node) if one is node or (root is not None and written_root(one) == root)]


def _possible_operations(place: Expression) -> list[str]:
    node = place.node
    if isinstance(node, ast.AugAssign):
        return sorted(augmented_names(node.op), key=lambda name: not name.startswith("__"))
    if isinstance(node, ast.Subscript):
        return ["__setitem__"]
    if isinstance(node, ast.Attribute):
        return ["data"]
    if isinstance(node, ast.Call):
        name = leaf_name(node.func) or ""
        return [name, f"{name}_"] if name and not is_inplace_name(name) else [name]
    return []


def _written_part(place: Expression) -> str | None:
    node = place.node
    if isinstance(node, ast.AugAssign):
        return place.source.text(node.target)
    if isinstance(node, ast.Subscript):
        return place.source.text(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_inplace_method(node.func.attr):
        return place.source.text(node.func.value)
    return None


def _gives_value(node: ast.stmt, name: str) -> bool:
    """Whether ``node`` binds ``name`` to a new value, rather than modifying its current one."""
    found = any(binding.name == name and binding.replaces for binding in bindings_of(node))
    return found and not isinstance(node, ast.AugAssign)


def _made(source: SourceFile, node: ast.stmt, name: str, like: Frame) -> Made | None:
    binding = next((one for one in bindings_of(node) if one.name == name), None)
    if binding is None:
        return None
    is_loop = isinstance(node, ast.For | ast.AsyncFor)
    value: ast.AST | None = binding.value
    if isinstance(node, ast.For | ast.AsyncFor):
        value = node.iter
    elif value is None:
        value = getattr(node, "value", None)
    if value is None:
        return None
    # A compound statement's own span would cover its whole block.
    frame, scope = at_span(like, source.span(value if is_loop else node)), source.scope_name(node)
    frame = frame if like.function.rsplit(".", 1)[-1] == scope else replace(frame, function=scope)
    return Made(frame, source.text(value), is_loop, _names_in_turn(node))


def _names_in_turn(node: ast.stmt) -> tuple[str, ...]:
    if not isinstance(node, ast.For) or not isinstance(node.target, ast.Name):
        return ()
    elements = node.iter.elts if isinstance(node.iter, ast.Tuple | ast.List) else []
    names = tuple(element.id for element in elements if isinstance(element, ast.Name))
    return names if len(names) == len(elements) else ()


def is_of_itself(frame: Frame, name: str) -> bool:
    """Whether the operation at ``frame`` computes with statistics of ``name`` itself: ``x -= x.mean()``."""
    found, statement = expression_at(frame), statement_at(frame)
    if statement is None:
        return True
    # An update of elements is at the place of its target.
    node: ast.AST = statement.node if found is None or isinstance(found.node, ast.Subscript) else found.node
    inside: list[ast.expr] = []
    if isinstance(node, ast.AugAssign):
        inside = [node.value]
    elif isinstance(node, ast.Call):
        # The receiver is the written tensor itself: only the arguments count.
        inside = [*node.args, *(keyword.value for keyword in node.keywords)]
    else:
        inside = [one for call in ast.walk(node) if isinstance(call, ast.Call) for one in call.args]
    read = {one for expression in inside for one in consumed_names(expression)}
    for _ in range(_STEPS_BACK):
        if name in read:
            return True
        bindings = [last_binding(frame, one) for one in read]
        values = [one.value for one in bindings if one is not None and one.value is not None]
        read = {one for value in values for one in consumed_names(value)}
    return False


def number_given(frame: Frame) -> float | None:
    """The number that is an operand of a write at ``frame``: ``255`` of ``x /= 255`` and ``x.div_(255)``.

    None where it is neither a number nor a name that the file only binds to one number, or there is none.
    """
    found, statement = expression_at(frame), statement_at(frame)
    place = statement if found is None or isinstance(found.node, ast.Subscript) else found
    node = None if place is None else place.node
    if isinstance(node, ast.Call):
        given = node.args[0] if node.args else None
    else:
        given = node.value if isinstance(node, ast.AugAssign) else None
    return None if given is None or place is None else _number(given, place.source)


_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _number(node: ast.expr, source: SourceFile | None = None) -> float | None:
    """The number of an expression; names are looked up in ``source``."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name) if source is not None:
            return _number_bound(source, name)
        case ast.UnaryOp(op=ast.USub()):
            number = _number(node.operand, source)
            return None if number is None else -number
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
            left, right = _number(node.left, source), _number(node.right, source)
            if left is None or right is None or (isinstance(op, ast.Div) and not right):
                return None
            return _ARITHMETIC[type(op)](left, right)
    return None


def _number_bound(source: SourceFile, name: str) -> float | None:
    """The one number that a file binds a name to, by assignments and as the default of an argument."""
    values = [one.value for one in bindings_in(source.nodes, name)]
    for node in source.nodes:
        if isinstance(node, ast.arguments):
            given = [*node.posonlyargs, *node.args]
            defaults = [*[None] * (len(given) - len(node.defaults)), *node.defaults, *node.kw_defaults]
            values += [
                default for one, default in zip((*given, *node.kwonlyargs), defaults, strict=True) if one.arg == name
            ]
    numbers = {None if one is None else _number(one) for one in values}
    return numbers.pop() if len(numbers) == 1 else None


_SCALES = {ast.Div: "__itruediv__", ast.Mult: "__imul__"}


@dataclass(frozen=True, slots=True)
class Scaled:
    """The name that an augmented assignment scales, the operator, and the line."""

    name: str
    op: str
    line: int


def scaled_before(frame: Frame) -> Scaled | None:
    """The last ``x /= 255`` or ``np.log(x, out=x)`` of the function at ``frame`` before it passes ``x`` on there."""
    found, statement = expression_at(frame), statement_at(frame)
    call = None if found is None else found.node
    if statement is None or not isinstance(call, ast.Call) or not call.args:
        return None
    source, name = statement.source, statement.source.text(call.args[0])
    found_at: dict[int, str] = {}
    for node in ast.walk(statement.function or source.module):
        if isinstance(node, ast.AugAssign) and type(node.op) in _SCALES and source.text(node.target) == name:
            found_at[node.lineno] = _SCALES[type(node.op)]
        elif isinstance(node, ast.Call) and any(
            one.arg == "out" and source.text(one.value) == name for one in node.keywords
        ):
            found_at[node.lineno] = leaf_name(node.func) or ""
    last = max((line for line in found_at if line < call.lineno), default=None)
    return None if last is None else Scaled(name, found_at[last], last)


def is_computed_with(frame: Frame) -> bool:
    """Whether arithmetic takes the result of the call at ``frame``, or a name bound there to what is made of it."""
    statement, call = statement_at(frame), expression_at(frame)
    if statement is None or statement.scope is None or call is None:
        return False
    value = getattr(statement.node, "value", None)
    is_bound = value is not None and any(one is call.node for one in ast.walk(value))
    names = set(assigned_names(statement.node)) if is_bound else set()
    return any(
        part is call.node or (isinstance(part, ast.Name) and part.id in names)
        for node in local_nodes(statement.scope)
        if isinstance(node, ast.BinOp | ast.UnaryOp)
        for part in ast.walk(node)
    )


def reads_from(frame: Frame, container: str) -> bool:
    """Whether the statement at ``frame``, or the head of a loop around it, reads the list or dict ``container``."""
    statement = statement_at(frame)
    nodes = [] if statement is None else [statement.node, *statement.loops]
    read = (inner for one in nodes for part in header_nodes(one) for inner in ast.walk(part))
    return any(chain_key(one) == container for one in read if isinstance(one, ast.Name | ast.Attribute))


def given_to_optimizer(frame: Frame) -> frozenset[str]:
    """The modules, parameters and dicts that an optimizer made at ``frame`` is given, as the statement names them.

    Names in it that the file binds once stand for what they are bound to. ``self`` is left out.
    """
    statement = statement_at(frame)
    nodes = [] if statement is None else [statement.node]
    for name in [] if statement is None else consumed_names(statement.node):
        bound = [statement_at(place) for part, place in assignments(frame, name) if part == name]
        nodes += [one.node for one in bound if one is not None and len(bound) == 1]
    given: set[str] = set()
    for node in (inner for one in nodes for inner in ast.walk(one)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("parameters", "named_parameters", "values")
        ):
            given.add(chain_key(node.func.value) or "")
        elif isinstance(node, ast.List | ast.Tuple):
            given.update(chain_key(one) or "" for one in node.elts)
    return frozenset(one.removeprefix("self.") for one in given - {""})
