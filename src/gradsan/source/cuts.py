"""Which operation cut a value off its graph: followed back from the value through the statements that computed it.

Functions of files that can be read are followed into what they return, and parameters to what was passed. What live
variables tell (whether they require grad now, and what is called) is asked of ``Live``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gradsan.model import Frame
from gradsan.source.chains import chain_key, leaf_name, local_nodes, standing_of
from gradsan.source.cut_kinds import cut_of, mode_around, mode_of, mode_of_decorators
from gradsan.source.cut_scopes import (
    Live,
    Scope,
    arguments_of,
    callee_of,
    definitions_of,
    requires,
    scope_at,
    set_later,
    trains,
)
from gradsan.source.locate import expression_at, statement_at
from gradsan.source.tree import FunctionNode, SourceFile

__all__ = ["Cut", "Live", "find_cuts", "grad_switched_off"]

_DEEPEST = 40
_MOST = 4_000
_METADATA = frozenset({"shape", "device", "dtype", "ndim", "size", "dim", "numel", "requires_grad", "grad"})


@dataclass(frozen=True, slots=True)
class Cut:
    """An operation after which a value has no graph: its kind, its place, and what it was applied to, as written.

    ``kind``: ``detach``, ``data``, ``item``, ``numpy``, ``index`` (argmax and the like), ``comparison``, ``integer``,
    ``new_tensor``, ``no_grad``, ``inference_mode``, ``grad_mode_off``, ``set_late`` (requires_grad set after the value
    was used). ``is_certain``: what it was applied to is known to require grad.
    """

    kind: str
    frame: Frame
    operand: str
    is_certain: bool = False


def find_cuts(frames: Sequence[Frame], live: Sequence[Live]) -> tuple[Cut, ...]:
    """The operations that cut a loss off its graph, the likeliest first.

    The innermost of ``frames`` (outermost first) is the call of the loss's ``backward``; ``live`` tells of each frame.
    Cuts whose operand is known to require grad come first, then the earliest one.
    """
    scope = scope_at(frames, live, len(frames) - 1)
    found = expression_at(frames[-1]) if frames else None
    if scope is None or found is None or not isinstance(found.node, ast.Call):
        return ()
    walk = _Walk()
    for root in _roots(found.node):
        walk.follow(root, scope)
    cuts = sorted(walk.cuts, key=lambda item: (not item[1].is_certain, -item[0]))
    return tuple(dict.fromkeys(cut for _, cut in cuts))


def _roots(call: ast.Call) -> list[ast.expr]:
    if (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "backward"
        and leaf_name(call.func.value) != "autograd"
    ):
        return [call.func.value]
    return list(call.args[:1])


class _Walk:
    """Collects the cuts met on the way back; deeper ones are earlier in time."""

    def __init__(self) -> None:
        self.cuts: list[tuple[int, Cut]] = []
        self.visited = 0

    def follow(self, node: ast.expr, scope: Scope) -> bool:
        """Look behind an expression; whether anything behind it may require grad."""
        self.visited += 1
        if self.visited > _MOST or scope.depth > _DEEPEST:
            return True
        kind, operands = cut_of(scope.source, node)
        if kind is not None:
            return self._cut(kind, node, operands, scope)
        key = chain_key(node)
        if key is not None and not (isinstance(node, ast.Attribute) and node.attr in _METADATA):
            return self._name(node, key, scope)
        if isinstance(node, ast.Call):
            return self._call(node, scope)
        results = [self.follow(child, scope) for child in _children(node)]
        return any(results)

    def _cut(self, kind: str, node: ast.expr, operands: list[ast.expr], scope: Scope) -> bool:
        behind = [(operand, self.follow(operand, scope)) for operand in operands]
        for operand, may_require in behind:
            if may_require:
                known = requires(operand, scope)
                self._add(kind, node, scope, operand, known is True)
        return False

    def _name(self, node: ast.expr, key: str, scope: Scope) -> bool:
        known = requires(node, scope)
        if known:
            late = self._set_late(node, key, scope)
            return late is None
        mark = (f"{scope.source.file}:{key}", id(scope.at))
        if mark in scope.seen:
            return False
        inner = replace(scope, seen=scope.seen | {mark}, depth=scope.depth + 1)
        may_require = False
        root = key.replace("[", ".").split(".")[0]
        definitions = list(definitions_of(scope, key))
        for statement, value in definitions:
            there = replace(inner, at=statement)
            mode = mode_around(scope.source, statement, scope.function)
            behind = self.follow(value, there)
            if mode is not None and behind:
                self._add(mode[0], mode[1], scope, value, True)
            elif behind:
                may_require = True
        if not definitions and root in scope.given:
            value, outer = scope.given[root]
            return self.follow(value, replace(outer, depth=scope.depth + 1, seen=inner.seen))
        return may_require or (not definitions and known is None and "." in key)

    def _call(self, call: ast.Call, scope: Scope) -> bool:
        arguments = [one.value if isinstance(one, ast.Starred) else one for one in call.args]
        arguments += [keyword.value for keyword in call.keywords]
        target = callee_of(call, scope)
        if target is not None:
            source, function = target
            mark = (f"{source.file}:{getattr(function, 'lineno', 0)}", 0)
            if mark not in scope.seen:
                return self._function(source, function, call, scope, scope.seen | {mark})
        results = [self.follow(argument, scope) for argument in arguments]
        if isinstance(call.func, ast.Attribute) and standing_of(scope.source, call.func.value) != "namespace":
            results.append(self.follow(call.func.value, scope))
        return any(results) or trains(call.func, scope)

    def _function(
        self,
        source: SourceFile,
        function: FunctionNode,
        call: ast.Call,
        scope: Scope,
        seen: frozenset[tuple[str, int]],
    ) -> bool:
        given = {name: (value, scope) for name, value in arguments_of(function, call)}
        has_parameters = trains(call.func, scope)
        live = Live(
            {"self": has_parameters}, {name: one for name, one in scope.live.callees.items() if "." not in name}
        )
        decorator = mode_of_decorators(source, function)
        may_require = has_parameters
        for node in local_nodes(function):
            value = getattr(node, "value", None)
            if isinstance(node, ast.Return | ast.Yield) and isinstance(value, ast.expr):
                at = node if isinstance(node, ast.stmt) else source.statement(node)
                if at is None:
                    continue
                inner = Scope(source, function, at, live, given, seen, scope.depth + 1)
                behind = self.follow(value, inner)
                mode = mode_around(source, at, function)
                if mode is not None and (behind or has_parameters):
                    self._add(mode[0], mode[1], inner, value, True)
                    behind = False
                may_require = may_require or behind
        if decorator is not None:
            if may_require:
                self._add(
                    decorator[0],
                    decorator[1],
                    replace(scope, source=source, function=function),
                    call.func,
                    has_parameters,
                )
            return False
        return may_require

    def _set_late(self, node: ast.expr, key: str, scope: Scope) -> Cut | None:
        """Where a variable that requires grad now was told so only after the value had been computed from it."""
        lines = [one for one in set_later(scope, key) if one.lineno > scope.at.lineno]
        if not lines or scope.depth == 0:
            return None
        self._add("set_late", lines[0], scope, node, True)
        return self.cuts[-1][1]

    def _add(self, kind: str, node: ast.AST, scope: Scope, operand: ast.expr, is_certain: bool) -> None:
        span = scope.source.span(node)
        has_block = hasattr(node, "body")
        frame = Frame(
            scope.source.file,
            span.line,
            scope.source.scope_name(node),
            None if has_block else span.column,
            None if has_block else span.end_line,
            None if has_block else span.end_column,
            True,
        )
        text = scope.source.text(operand) if kind != "no_grad" or chain_key(operand) else ast.unparse(operand)
        self.cuts.append((scope.depth, Cut(kind, frame, text, is_certain)))


def _children(node: ast.AST) -> Iterator[ast.expr]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.comprehension):
            yield child.iter
        elif isinstance(child, ast.expr) and not (isinstance(node, ast.Subscript) and child is node.slice):
            yield child


def grad_switched_off(frames: Sequence[Frame]) -> Frame | None:
    """The last call of ``torch.set_grad_enabled(False)`` before the statements of ``frames`` (outermost first)."""
    for frame in reversed(frames):
        statement = statement_at(frame)
        if statement is None:
            continue
        scope: FunctionNode | ast.Module = statement.function or statement.source.module
        calls = [
            node
            for node in local_nodes(scope)
            if isinstance(node, ast.Call) and mode_of(node) == "no_grad" and leaf_name(node.func) == "set_grad_enabled"
        ]
        before = [call for call in calls if call.lineno < frame.line]
        if before:
            span = statement.source.span(max(before, key=lambda call: call.lineno))
            return replace(
                frame, line=span.line, column=span.column, end_line=span.end_line, end_column=span.end_column
            )
    return None
