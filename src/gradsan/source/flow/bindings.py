"""Bindings that carry a value into the next iteration, or out to the callers of the function that computed it.

A round is an iteration of a loop, or a call of a function whose state outlives the call (attributes, globals,
nonlocals, a notebook cell run again).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gradsan.model import Frame
from gradsan.source.flow.reaching import reaching
from gradsan.source.flow.scopes import arguments_of, as_key
from gradsan.source.identifiers import (
    Binding,
    assigned_names,
    bindings_in,
    bindings_of,
    binds,
    chain_key,
    consumed_names,
    leaf_name,
    local_nodes,
    parameters,
)
from gradsan.source.locate import Statement, at_span, expression_at, expressions_at, frame_of, statement_at
from gradsan.source.methods import (
    ADDING,
    ALIASING_ATTRIBUTES,
    ALIASING_METHODS,
    CONVERSIONS,
    CUTTING,
    MADE_FROM_NOTHING,
    PIECES,
    is_inplace_method,
)
from gradsan.source.tree import FunctionNode, SourceFile, header_nodes, is_cell

_KEEPING_NO_GRAPH = frozenset({"no_grad", "inference_mode"})
_BEFORE_ANY_CALL = frozenset({"__init__", "__new__", "__post_init__"})


@dataclass(frozen=True, slots=True)
class Carried:
    """``name`` is read at ``consumed_line`` and was bound, a round earlier, at ``bound_at``.

    That is the binding statement as a frame, for ``detach_at``; its function need not be that of the reading frame.
    """

    name: str
    consumed_line: int
    bound_at: Frame


def carried_names(frame: Frame, round_at: Frame | None = None) -> list[Carried]:
    """The names read by the statement at ``frame`` that an earlier round computed, in reading order.

    A round is an iteration of a loop around ``round_at`` in that function, if there is one; else of any loop around
    ``frame``. Bindings to constants, to detached values and under ``no_grad`` carry no graph and are left out.
    Empty where the source is missing or the statement is ambiguous.
    """
    statement = statement_at(frame)
    if statement is None or isinstance(statement.function, ast.Lambda):
        return []
    source, node = statement.source, statement.node
    other = None if round_at is None else statement_at(round_at)
    loops: set[ast.AST] = set(other.loops) if other is not None and other.function is statement.function else set()
    found: dict[tuple[str, ast.stmt], Carried] = {}
    across = _across_rounds(statement, loops)
    for name, bound in [*_within_comprehensions(statement), *across, *_across_methods(statement)]:
        found.setdefault((name, bound), Carried(name, node.lineno, frame_of(source, bound, frame)))
    for before in [] if found else _rebinding(statement):
        earlier = carried_names(frame_of(source, before, frame), round_at)
        found |= {(one.name, before): one for one in earlier if one.name in assigned_names(before)}
    for before in [] if found else _second_names(statement):
        found |= {(one.name, before): one for one in carried_names(frame_of(source, before, frame), round_at)}
    order = consumed_names(node)
    return sorted(found.values(), key=lambda one: order.index(one.name) if one.name in order else len(order))


def _across_rounds(statement: Statement, loops: set[ast.AST]) -> Iterator[tuple[str, ast.stmt]]:
    source, function = statement.source, statement.function
    in_cell = function is None and is_cell(source.file)
    lasting = _filled_parameters(function)
    state = reaching(_body(statement), statement.node, lambda name: in_cell or _outlives_call(function, name, lasting))
    for name in _names_of_values(statement.node):
        for key, definitions in state.items():
            if not _concerns(key, name):
                continue
            for definition in sorted(definitions, key=lambda found: found.statement.lineno if found.statement else 0):
                is_carried = definition.rounds & {None, *loops} if loops else definition.carried
                if is_carried and definition.statement is not None:
                    bindings = [one for one in bindings_of(definition.statement) if one.name == key]
                    if any(_carries_graph(source, binding) for binding in bindings):
                        yield name, definition.statement


def _rebinding(statement: Statement) -> Iterator[ast.stmt]:
    """What stands between a round and the value that it is given: ``h = repackage(h)`` before ``rnn(x, h)``."""
    state = reaching(_body(statement), statement.node)
    for name in _names_of_values(statement.node):
        bound = [one.statement for one in state.get(name, ()) if not one.carried and one.statement is not None]
        if len(bound) == 1 and bound[0] is not statement.node and name in consumed_names(bound[0]):
            given = [one for one in bindings_of(bound[0]) if one.name == name]
            carries = bool(given) and all(_carries_graph(statement.source, one) for one in given)
            if carries and not _calls_cut(statement, bound[0]):
                yield bound[0]


def _body(statement: Statement) -> list[ast.stmt]:
    function = statement.function
    return statement.source.module.body if function is None or isinstance(function, ast.Lambda) else function.body


def _second_names(statement: Statement) -> Iterator[ast.stmt]:
    """What binds, in this round, a name that the statement reads to another variable: ``word = last``."""
    state = reaching(_body(statement), statement.node)
    for name in _names_of_values(statement.node):
        for node in (one.statement for one in state.get(name, ()) if not one.carried):
            value = node.value if isinstance(node, ast.Assign) else None
            values = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
            if node is not None and any(isinstance(part, ast.Name | ast.Attribute) for part in values):
                yield node


def _calls_cut(statement: Statement, node: ast.stmt) -> bool:
    """Whether a function of the file that a statement calls detaches something."""
    called = {leaf_name(one.func) for one in header_nodes(node) if isinstance(one, ast.Call)}
    functions = [one for one in statement.source.nodes if isinstance(one, ast.FunctionDef) and one.name in called]
    return any(leaf_name(one) in CUTTING for function in functions for one in ast.walk(function))


def _across_methods(statement: Statement) -> Iterator[tuple[str, ast.stmt]]:
    """Attributes of ``self`` that other methods of the class bind, where they reach the statement unchanged."""
    source, method = statement.source, statement.function
    owner = None if method is None else source.parents[method][0]
    if not isinstance(owner, ast.ClassDef) or not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    own = parameters(method)[:1]
    state = reaching(method.body, statement.node)
    for name in _names_of_values(statement.node):
        if name.split(".")[0] not in own or "." not in name:
            continue
        before = [found for key, found in state.items() if key == name or name.startswith((f"{key}.", f"{key}["))]
        if any(all(definition.statement is not None for definition in found) for found in before):
            continue
        for other in owner.body:
            if not isinstance(other, ast.FunctionDef | ast.AsyncFunctionDef) or other is method:
                continue
            if other.name in _BEFORE_ANY_CALL or parameters(other)[:1] != own:
                continue
            for binding in bindings_in(local_nodes(other)):
                if _concerns(binding.name, name) and _carries_graph(source, binding):
                    yield name, binding.statement


def _within_comprehensions(statement: Statement) -> Iterator[tuple[str, ast.stmt]]:
    """``[h := cell(x, h) for x in xs]``."""
    for node in header_nodes(statement.node):
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            bound = [inner.target.id for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr)]
            for name in consumed_names(node):
                if name in bound:
                    yield name, statement.node


def _names_of_values(node: ast.stmt) -> list[str]:
    return [name for name in consumed_names(node) if name not in ("self", "cls")]


def _concerns(bound: str, read: str) -> bool:
    """Whether binding ``bound`` affects the value of ``read``: the same chain, its container, or an element of it."""
    return bound == read or read.startswith((f"{bound}.", f"{bound}[")) or bound.startswith(f"{read}[")


def _outlives_call(function: FunctionNode | None, name: str, lasting: set[str]) -> bool:
    if function is None:
        return False
    root = name.replace("[", ".").split(".")[0]
    declared = {
        declaration_name
        for node in local_nodes(function)
        if isinstance(node, ast.Global | ast.Nonlocal)
        for declaration_name in node.names
    }
    if root in declared or not binds(function, root) or root in lasting:
        return True
    return root != name and root in parameters(function)


def _filled_parameters(function: FunctionNode | None) -> set[str]:
    """Parameters to which the function appends, so that the caller's container holds the value afterwards."""
    if function is None:
        return set()
    return {
        node.func.value.id
        for node in local_nodes(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ADDING
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in parameters(function)
    }


def _carries_graph(source: SourceFile, binding: Binding) -> bool:
    if not binding.computed:
        return False
    if binding.value is not None and _is_cut(binding.value):
        return isinstance(binding.statement, ast.AugAssign) and _is_bound_otherwise(source, binding)
    for parent, name in source.ancestors(binding.statement):
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            break
        if isinstance(parent, ast.With) and name == "body":
            calls = [item.context_expr for item in parent.items if isinstance(item.context_expr, ast.Call)]
            if any(leaf_name(call.func) in _KEEPING_NO_GRAPH for call in calls):
                return False
    return True


def _is_bound_otherwise(source: SourceFile, binding: Binding) -> bool:
    """Whether anything but augmented assignments gives the name a graph, so that ``h *= 0.5`` passes it on."""
    scope = source.function(binding.statement) or source.module
    nodes = (one for one in local_nodes(scope) if not isinstance(one, ast.AugAssign))
    return any(_carries_graph(source, other) for other in bindings_in(nodes, binding.name))


def _is_cut(value: ast.expr) -> bool:
    """Whether ``value`` has no graph: a constant, or detached by ``detach()``, ``item()``, ``.data``."""
    if isinstance(value, ast.Constant):
        return True
    if isinstance(value, ast.Tuple | ast.List | ast.Set):
        return all(_is_cut(element) for element in value.elts)
    if isinstance(value, ast.ListComp | ast.SetComp | ast.GeneratorExp):
        return _is_cut(value.elt)
    if isinstance(value, ast.DictComp):
        return _is_cut(value.value)
    if isinstance(value, ast.Dict):
        return all(_is_cut(element) for element in value.values)
    if isinstance(value, ast.IfExp):
        return _is_cut(value.body) and _is_cut(value.orelse)
    if isinstance(value, ast.Attribute):
        return value.attr == "data" or _is_cut(value.value)
    if isinstance(value, ast.Subscript):
        return _is_cut(value.value)
    if isinstance(value, ast.Call):
        name = leaf_name(value.func) or ""
        if name in CUTTING or "detach" in name:
            return True
        if name in ("tuple", "list", "dict") and isinstance(value.func, ast.Name):
            return all(_is_cut(argument) for argument in value.args)
        if (
            name in MADE_FROM_NOTHING
            and isinstance(value.func, ast.Attribute)
            and chain_key(value.func.value) == "torch"
        ):
            return True
        return isinstance(value.func, ast.Attribute) and _is_cut(value.func.value)
    return False


def bound_name(frames: Sequence[Frame]) -> tuple[str, Frame] | None:
    """The name bound to the result of the call at the innermost of ``frames`` (outermost first), and the binding frame.

    ``feats`` of ``feats = F.silu(x)``; for ``return F.silu(x)`` the name that the caller binds. None where the result
    is consumed within an expression, and where the source is ambiguous.
    """
    for frame in reversed(frames):
        found, statement = expression_at(frame), statement_at(frame)
        if found is None or statement is None:
            return None
        if isinstance(statement.node, ast.Return) and statement.node.value is found.node:
            continue
        names = [one.name for one in bindings_of(statement.node) if one.value is found.node]
        if len(names) != 1:
            return None
        return names[0], at_span(frame, statement.span)
    return None


def binding_of(frames: Sequence[Frame], name: str) -> Frame | None:
    """The innermost of ``frames`` (outermost first) whose statement binds ``name``."""
    for frame in reversed(frames):
        statement = statement_at(frame)
        if statement is not None and name in assigned_names(statement.node):
            return frame
    return None


def binds_result(frame: Frame) -> bool:
    """Whether the statement at ``frame`` binds the result of its operation, or a view of it, and computes nothing more.

    Also True where the statement unpacks the result, since the source is then ambiguous.
    """
    statement = statement_at(frame)
    if statement is None:
        return False
    operations = {place.node for place in expressions_at(frame)}
    values = [one.value for one in bindings_of(statement.node)]
    return (
        any(value is None for value in values)
        or any(part in operations for value in values if value is not None for part in _same_memory(value))
        or statement.node in operations
    )


def returns_argument(frame: Frame, name: str) -> bool:
    """Whether the function at ``frame`` returns ``name`` itself, or what a method of it or ``out=name`` gives."""
    statement = statement_at(frame)
    if statement is None or statement.function is None or isinstance(statement.function, ast.Lambda):
        return False
    nodes = local_nodes(statement.function)
    returned = [node.value for node in nodes if isinstance(node, ast.Return | ast.Yield) and node.value]
    parts = [one for value in returned for one in (value.elts if isinstance(value, ast.Tuple | ast.List) else [value])]
    return any(_is_made_of(one, as_key(name)) for one in parts)


def _is_made_of(value: ast.expr, name: str) -> bool:
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        written = next((one.value for one in value.keywords if one.arg == "out"), None)
        value = value.func.value if written is None else written
    return chain_key(value) == name


def takes_result(frame: Frame) -> bool:
    """Whether the result of the call at ``frame`` is used: False for a call that is a statement of its own."""
    call, statement = expression_at(frame), statement_at(frame)
    if call is None or statement is None or not isinstance(call.node, ast.Call):
        return False
    return not (isinstance(statement.node, ast.Expr) and statement.node.value is call.node)


def _same_memory(value: ast.expr) -> Iterator[ast.expr]:
    """``value``, then the expressions that it is a view of or writes to, one after another."""
    yield value
    if isinstance(value, ast.IfExp):
        yield from _same_memory(value.body)
        yield from _same_memory(value.orelse)
        return
    part: ast.expr | None = None
    if isinstance(value, ast.NamedExpr | ast.Subscript | ast.Attribute):
        is_same = not isinstance(value, ast.Attribute) or value.attr in ALIASING_ATTRIBUTES
        part = value.value if is_same else None
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        name = value.func.attr
        part = value.func.value if name in ALIASING_METHODS | PIECES or is_inplace_method(name) else None
    if part is not None:
        yield from _same_memory(part)


def method_receiver(frame: Frame) -> str | None:
    """``loss`` of ``loss.backward()`` at ``frame``; None where it is not a method call on a named object."""
    found = expression_at(frame)
    call = found.node if found is not None else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    return chain_key(call.func.value)


def taken_for_own(frame: Frame, name: str) -> Literal["conversion", "element"] | None:
    """The origin of ``name`` in the function at ``frame``: a conversion, or an element of something larger.

    None for any other origin, or for several.
    """
    binding = last_binding(frame, name)
    if binding is None:
        statement = statement_at(frame)
        inner = (
            () if statement is None else (one for one in ast.walk(statement.node) if isinstance(one, ast.comprehension))
        )
        return "element" if any(isinstance(one.target, ast.Name) and one.target.id == name for one in inner) else None
    return "element" if isinstance(binding.statement, ast.For | ast.AsyncFor) else _own_by(binding.value)


def passed_for_own(inner: Frame, outer: Frame, name: str) -> Literal["conversion", "element"] | None:
    """The same as ``taken_for_own`` for an argument that the call at ``outer`` spells out: ``scaled(data[i])``."""
    call, statement = expression_at(outer), statement_at(inner)
    function = None if statement is None else statement.function
    if call is None or not isinstance(call.node, ast.Call) or function is None or isinstance(function, ast.Lambda):
        return None
    return _own_by(dict(arguments_of(function, call.node)).get(name))


def _own_by(value: ast.expr | None) -> Literal["conversion", "element"] | None:
    name = leaf_name(value.func) if isinstance(value, ast.Call) else None
    if name in CONVERSIONS:
        return "conversion"
    return "element" if isinstance(value, ast.Subscript) or name in ("narrow", "select") else None


def last_binding(frame: Frame, name: str) -> Binding | None:
    """The last binding of ``name`` before the statement at ``frame``, in its function; None where there is none."""
    statement = statement_at(frame)
    scope = None if statement is None else statement.scope
    if statement is None or scope is None:
        return None
    found: Binding | None = None
    nodes = [node for node in local_nodes(scope) if isinstance(node, ast.Assign | ast.AnnAssign | ast.For)]
    for node in sorted(nodes, key=lambda one: one.lineno):
        if node.lineno < statement.node.lineno:
            found = next((one for one in bindings_of(node) if one.name == name), found)
    return found
