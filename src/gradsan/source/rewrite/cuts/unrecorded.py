"""Writes to one tensor past autograd, each made a new tensor that autograd records."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

from gradsan.model import Frame, Lines
from gradsan.source.change import Edit, changed_lines, edited_lines
from gradsan.source.flow.cuts import mode_around, mode_of_decorators
from gradsan.source.identifiers import local_nodes
from gradsan.source.locate import at_line, statement_at
from gradsan.source.rewrite.leaves import reads_later
from gradsan.source.rewrite.moving import is_whole_lines
from gradsan.source.rewrite.out_of_place import out_of_place, past_the_graph
from gradsan.source.rewrite.scatter import part_out_of_place
from gradsan.source.tree import ScopeNode, SourceFile, lines_read_as, parses

_Second: TypeAlias = dict[str, tuple[str, ast.Assign]]


def recorded_by_name(written: Sequence[tuple[Frame, str]]) -> Lines:
    """The lines of the writes, each a frame and an operation, with the tensor bound anew by its own name.

    ``d = z.detach()`` and ``d /= d.norm()`` become ``z = z / z.norm()``, ``z.data[z < 0] = 0`` becomes
    ``z = z.masked_fill(z < 0, 0)``, and a function that only computes leaves its ``@torch.no_grad()``. Empty where the
    second name has another use, where nothing reads the tensor afterwards, where a write has no counterpart, or where
    ``no_grad`` stays around it.
    """
    found = [(statement_at(frame), frame, op) for frame, op in dict.fromkeys(written)]
    places = {one.node: (one, frame, op) for one, frame, op in found if one is not None}
    first = next(iter(places.values()), None)
    if first is None or any(one is None or one.scope is not first[0].scope for one, _, _ in found):
        return ()
    source, scope = first[0].source, first[0].scope
    if scope is None or not all(is_whole_lines(source, node) for node in places):
        return ()
    second = _second_names(source, scope)
    names = {_own_name(node, second) for node in places}
    name = names.pop()
    if name is None or names:
        return ()
    gone = _without_second_name(source, scope, name, second, places)
    left = _without_decorator(source, scope, places)
    if any(_is_under_no_grad(source, node, scope, left) for node in places):
        return ()
    if gone is None or not (gone or left or any(_past_graph(node, name, {}) for node in places)):
        return ()
    lines = {line: text for _, line, text in edited_lines(source, [*_by_name(source, places, name, second)])}
    rows = tuple(lines.get(number, row) for number, row in enumerate(source.lines, 1))
    with lines_read_as({source.file: rows}):
        for node, (_, frame, op) in places.items():
            # The columns of the frame are those of the unchanged line.
            new = _out_of_place(at_line(frame, node.lineno), op, name)
            if not new:
                return ()
            lines |= {line: text for _, line, text in new}
    lines |= {**gone, **left}
    kept = (lines.get(number, row) for number, row in enumerate(source.lines, 1) if lines.get(number) != "")
    return tuple((source.file, *line) for line in sorted(lines.items())) if parses("\n".join(kept)) else ()


def _is_under_no_grad(source: SourceFile, node: ast.stmt, scope: ScopeNode, left: dict[int, str]) -> bool:
    function = None if isinstance(scope, ast.Module) else scope
    if mode_around(source, node, function) is not None:
        return True
    return function is not None and not left and mode_of_decorators(function) is not None


def _second_names(source: SourceFile, scope: ScopeNode) -> _Second:
    """The names bound once in a scope, to ``x.detach()`` or ``x.data``: each with ``x`` and its statement."""
    bound: dict[str, list[ast.AST]] = {}
    for node in local_nodes(scope):
        parent = source.parents[node][0] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None
        if isinstance(node, ast.Name) and parent is not None and not isinstance(parent, ast.AugAssign):
            bound.setdefault(node.id, []).append(parent)
    found: _Second = {}
    for second, (statement, *others) in bound.items():
        value = statement.value if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
        name = None if value is None or others else _past(value)
        if name is not None and isinstance(statement, ast.Assign):
            found[second] = name, statement
    return found


def _past(value: ast.AST) -> str | None:
    """``x`` of ``x.detach()`` and ``x.data``, for a variable."""
    name = past_the_graph(value) if isinstance(value, ast.expr) else None
    return name.id if isinstance(name, ast.Name) else None


def _own_name(node: ast.stmt, second: _Second) -> str | None:
    """``x``, where ``node`` writes to ``x``, to a part of it, past its graph or by a second name."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript):
        target: ast.AST = node.targets[0]
    elif isinstance(node, ast.AugAssign):
        target = node.target
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        target = node.value
    else:
        return None
    while not isinstance(target, ast.Name):
        if (past := _past(target)) is not None:
            return past
        if isinstance(target, ast.Call) and isinstance(target.func, ast.Attribute):
            target = target.func.value
        elif isinstance(target, ast.Subscript):
            target = target.value
        else:
            return None
    return second[target.id][0] if target.id in second else target.id


def _past_graph(node: ast.stmt, name: str, second: _Second) -> list[ast.expr]:
    """What ``node`` reads or writes as ``name`` past its graph: ``name.data``, ``name.detach()`` and second names."""
    nodes = [one for one in ast.walk(node) if isinstance(one, ast.expr)]
    by_name = [one for one in nodes if isinstance(one, ast.Name) and second.get(one.id, ("",))[0] == name]
    return [*by_name, *(one for one in nodes if _past(one) == name)]


def _by_name(source: SourceFile, places: Collection[ast.stmt], name: str, second: _Second) -> Iterator[Edit]:
    for node in places:
        yield from (Edit(source.span(one), name) for one in _past_graph(node, name, second))


def _without_second_name(
    source: SourceFile, scope: ScopeNode, name: str, second: _Second, places: Collection[ast.stmt]
) -> dict[int, str] | None:
    """The lines that bind second names of ``name``, removed; None where one is read for anything but the writes."""
    inside = {one for node in places for one in ast.walk(node)}
    gone: dict[int, str] = {}
    for alias, (own, statement) in second.items():
        reads = [one for one in ast.walk(scope) if isinstance(one, ast.Name) and one.id == alias]
        loads = [one for one in reads if isinstance(one.ctx, ast.Load) or one in inside]
        if own != name or not any(one in inside for one in loads):
            continue
        if any(one not in inside for one in loads) or not is_whole_lines(source, statement):
            return None
        # Bound anew in between, the own name is another tensor than the second one.
        last = max(node.lineno for node in places)
        names = (one for one in ast.walk(scope) if isinstance(one, ast.Name) and one.id == name)
        if any(not isinstance(one.ctx, ast.Load) and statement.lineno < one.lineno <= last for one in names):
            return None
        gone |= dict.fromkeys(range(source.span(statement).line, source.span(statement).end_line + 1), "")
    return gone


def _without_decorator(source: SourceFile, scope: ScopeNode, places: Collection[ast.stmt]) -> dict[int, str]:
    """The line of ``@torch.no_grad()``, removed, where the function does nothing but the writes."""
    if not isinstance(scope, ast.FunctionDef) or mode_of_decorators(scope) is None:
        return {}
    (decorator, *others), rest = scope.decorator_list, set(scope.body) - set(places)
    does_more = any(not isinstance(one, ast.Return) and not _is_docstring(one) for one in rest)
    lines = range(decorator.lineno, source.span(decorator).end_line + 1)
    return {} if others or does_more else dict.fromkeys(lines, "")


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _out_of_place(frame: Frame, op: str, name: str) -> Lines:
    change = out_of_place(frame, op) or part_out_of_place(frame, op)
    return changed_lines(frame.file, change) if change is not None and reads_later(frame, name) else ()
