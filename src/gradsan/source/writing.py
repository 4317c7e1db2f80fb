"""In-place write of the statement at a frame, for errors that stopped it before anything was recorded."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited
from gradsan.source.flow import reaching
from gradsan.source.identifiers import bindings_of, imported_as, leaf_name, local_nodes
from gradsan.source.inplace import augmented_names, is_inplace_name
from gradsan.source.locate import Expression, expressions_at, statement_at
from gradsan.source.targets import written_target
from gradsan.source.tree import SourceFile, Span, header_nodes

__all__ = ["Made", "Written", "attribute_owner", "definition_of", "reads_gradient", "under_no_grad", "writing_at"]


@dataclass(frozen=True, slots=True)
class Written:
    """A write that the source shows: ``op`` as PyTorch names it, ``target`` the name that holds the tensor.

    ``expression`` is the written part as it stands there (``p[h : 2 * h]``), equal to ``target`` where it is all of it.
    """

    op: str
    target: str
    expression: str


@dataclass(frozen=True, slots=True)
class Made:
    """The statement that gave a name its value: where, and the text of the value. ``is_loop`` for a loop's variable.

    ``elements`` are the names that it stands for in turn, where the loop goes over a display of names: ``(row, col)``.
    """

    frame: Frame
    value: str
    is_loop: bool = False
    elements: tuple[str, ...] = ()


def writing_at(frame: Frame, inner: Sequence[Frame] = ()) -> Written | None:
    """The in-place operation that ``frame`` was executing; None where there is none, or not one alone.

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


def reads_gradient(frame: Frame) -> bool:
    """Whether the statement at ``frame`` reads some ``.grad``, or a name that says it is one: it is an update."""
    statement = statement_at(frame)
    if statement is None:
        return False
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "grad")
        or (isinstance(node, ast.Name) and (node.id in {"g", "lr"} or "grad" in node.id.lower()))
        for node in header_nodes(statement.node)
    )


def definition_of(frame: Frame, name: str) -> Made | None:
    """The one statement that gave ``name`` (``x``, ``self.w``) the value it had at ``frame``, in the same function.

    A name that only the module binds is looked for there. None where there are several such statements, or none.
    """
    statement = statement_at(frame)
    if statement is None or isinstance(statement.function, ast.Lambda):
        return None
    source = statement.source
    module = source.module.body
    body = module if statement.function is None else statement.function.body
    found = reaching(body, statement.node, lambda _: False).get(name, frozenset())
    nodes = {definition.statement for definition in found}
    if None in nodes:
        return None
    if any(node is not None and not _gives_value(node, name) for node in nodes):
        # An update in place reached the statement; what it updated was bound elsewhere in this body.
        scope = source.module if statement.function is None else statement.function
        nodes = {node for node in local_nodes(scope) if isinstance(node, ast.stmt) and _gives_value(node, name)}
    if not nodes and body is not module:
        nodes = {node for node in module if _gives_value(node, name)}
    node = next(iter(nodes)) if len(nodes) == 1 else None
    return None if node is None else _made(source, node, name, frame)


def under_no_grad(frame: Frame) -> Change | None:
    """The statement at ``frame`` put under ``with torch.no_grad():``; None where it shares its lines with others.

    With it the in-place statements right behind it that belong to the same update: those that write the same variable
    again, or read gradients.
    """
    statement = statement_at(frame)
    if statement is None or hasattr(statement.node, "body"):
        return None
    source = statement.source
    torch = imported_as(source, "torch")
    parent, field = source.parents[statement.node]
    block = getattr(parent, field, None)
    if torch is None or not isinstance(block, list) or not _has_own_line(source, statement.node):
        return None
    root = _written_root(statement.node)
    last = at = block.index(statement.node)
    for index in range(at + 1, len(block)):
        other = _written_root(block[index]) if _has_own_line(source, block[index]) else None
        if other is None:
            break
        if other == root or _mentions_gradient(block[index]):
            last = index
    first, end = source.span(statement.node), source.span(block[last])
    # Lines between, comments among them, go along.
    within = [f"    {line}" if line.strip() else line for line in source.lines[first.line - 1 : end.end_line - 1]]
    tail = source.lines[end.end_line - 1][: end.end_column - 1]
    text = "\n".join([f"with {torch}.no_grad():", *within, f"    {tail}"])
    whole = Span(first.line, first.column, end.end_line, end.end_column)
    return edited(source, [Edit(whole, text)], "no_grad")


def _has_own_line(source: SourceFile, node: ast.stmt) -> bool:
    span = source.span(node)
    tail = source.lines[span.end_line - 1][span.end_column - 1 :].strip()
    head = source.lines[span.line - 1][: span.column - 1]
    return span.line == span.end_line and not head.strip() and (not tail or tail.startswith("#"))


def _written_root(node: ast.stmt) -> str | None:
    """The variable whose tensor, or part of one, a statement writes in place; None where it is no such statement."""
    target: ast.expr | None = None
    if isinstance(node, ast.AugAssign):
        target = node.target
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        if isinstance(function, ast.Attribute) and is_inplace_name(function.attr):
            target = function.value
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        target = node.targets[0]
    while isinstance(target, ast.Subscript | ast.Call | ast.Attribute):
        # ``w.mul_(a).add_(b)`` writes w; ``self.w`` is a variable of its own.
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.attr != "data":
            return f"{target.value.id}.{target.attr}"
        target = target.func if isinstance(target, ast.Call) else target.value
    return target.id if isinstance(target, ast.Name) else None


def _mentions_gradient(node: ast.stmt) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in ast.walk(node))


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
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_inplace_name(node.func.attr):
        return place.source.text(node.func.value)
    return None


def _gives_value(node: ast.stmt, name: str) -> bool:
    """Whether ``node`` binds ``name`` to a new value, rather than changing what it has."""
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
    # A compound statement's own place would reach over its whole block.
    place: Span = source.span(value) if is_loop else source.span(node)
    frame = replace(
        like,
        line=place.line,
        function=like.function
        if like.function.rsplit(".", 1)[-1] == source.scope_name(node)
        else source.scope_name(node),
        column=place.column,
        end_line=place.end_line,
        end_column=place.end_column,
    )
    return Made(frame, source.text(value), is_loop, _names_in_turn(node))


def _names_in_turn(node: ast.stmt) -> tuple[str, ...]:
    if not isinstance(node, ast.For) or not isinstance(node.target, ast.Name):
        return ()
    elements = node.iter.elts if isinstance(node.iter, ast.Tuple | ast.List) else []
    names = tuple(element.id for element in elements if isinstance(element, ast.Name))
    return names if len(names) == len(elements) else ()
