"""Statements in the post-mortem analysis: both branches of an ``if``, two iterations of a loop."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from gradsan.postmortem.expressions import Expressions
from gradsan.postmortem.lookup import Namespace, Value, joined
from gradsan.postmortem.script import ScriptFullError

_ROUNDS = 2
_STATEMENTS_READ = 50_000
_LEAVING = (ast.Return, ast.Raise, ast.Break, ast.Continue)


class Walk(Expressions):
    """Interpreter of blocks of statements, which adds to a script."""

    def block(self, body: Sequence[ast.stmt], space: Namespace) -> list[Value]:
        """Analyse ``body`` in ``space``; the values that it may return."""
        returned: list[Value] = []
        for statement in body:
            self.statements_read += 1
            if self.statements_read > _STATEMENTS_READ:
                raise ScriptFullError
            self.statement = statement
            returned += self._statement(statement, space)
            if isinstance(statement, _LEAVING):
                break
        return returned

    def _statement(self, node: ast.stmt, space: Namespace) -> list[Value]:
        if isinstance(node, ast.Return):
            return [Value(None) if node.value is None else self.value(node.value, space)]
        if isinstance(node, ast.Assign):
            self.bound = tuple(name for target in node.targets for name in _names(target))
            value = self.value(node.value, space)
            self.bound = ()
            for target in node.targets:
                self.assign(target, value, space)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.bound = _names(node.target)
                value = self.value(node.value, space)
                self.bound = ()
                self.assign(node.target, value, space)
        elif isinstance(node, ast.AugAssign):
            self.augment(node, space)
        elif isinstance(node, ast.Expr):
            self.value(node.value, space)
        elif isinstance(node, ast.If):
            return self._choice(node, space)
        elif isinstance(node, ast.For | ast.AsyncFor):
            return self._for(node, space)
        elif isinstance(node, ast.While):
            return self._rounds(node.body, space, node.test) + self.block(node.orelse, space)
        elif isinstance(node, ast.With | ast.AsyncWith):
            return self._with(node, space)
        elif isinstance(node, ast.Try):
            returned = self.block(node.body, space)
            for handler in node.handlers:
                returned += self.block(handler.body, space)
            return returned + self.block(node.orelse, space) + self.block(node.finalbody, space)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            space.names[node.name] = self.defined(node, space)
        elif isinstance(node, ast.Match):
            self.value(node.subject, space)
            return [value for case in node.cases for value in self.block(case.body, space)]
        elif isinstance(node, ast.Assert):
            self.value(node.test, space)
        return []

    def _choice(self, node: ast.If, space: Namespace) -> list[Value]:
        known = self.truth(node.test, space)
        if known is not None:
            return self.block(node.body if known else node.orelse, space)
        before = dict(space.names)
        returned = self.block(node.body, space)
        after, space.names = space.names, before
        leaves = bool(node.body) and isinstance(node.body[-1], _LEAVING)
        returned += self.block(node.orelse, space)
        if not leaves:
            for name, value in after.items():
                other = space.names.get(name)
                space.names[name] = value if other is None or other is value else joined([other, value])
        return returned

    def _for(self, node: ast.For | ast.AsyncFor, space: Namespace) -> list[Value]:
        rounds = self.rounds_of(node.iter, space)
        returned: list[Value] = []
        start = 0
        for item in rounds:
            start = len(self.script.events)
            self.assign(node.target, item, space)
            returned += self.block(node.body, space)
        self.script.note_round(start)
        return returned + self.block(node.orelse, space)

    def _rounds(self, body: Sequence[ast.stmt], space: Namespace, test: ast.expr) -> list[Value]:
        returned: list[Value] = []
        if self.truth(test, space) is False:
            return returned
        start = 0
        for _ in range(_ROUNDS):
            start = len(self.script.events)
            self.value(test, space)
            returned += self.block(body, space)
        self.script.note_round(start)
        return returned

    def _with(self, node: ast.With | ast.AsyncWith, space: Namespace) -> list[Value]:
        recorded = self.records
        for item in node.items:
            value = self.value(item.context_expr, space)
            switch = self.grad_switch(item.context_expr)
            if switch is not None:
                self.records = switch
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value, space)
        returned = self.block(node.body, space)
        self.records = recorded
        return returned


def _names(target: ast.expr) -> tuple[str, ...]:
    if isinstance(target, ast.Tuple | ast.List):
        return tuple(name for element in target.elts for name in _names(element))
    if isinstance(target, ast.Starred):
        return _names(target.value)
    return (ast.unparse(target),) if isinstance(target, ast.Name | ast.Attribute) else ()
