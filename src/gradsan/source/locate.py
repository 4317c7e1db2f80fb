"""Statement and operation at a frame's position.

With columns the answer is one node or none. Without them (Python 3.10, ``-X no_debug_ranges``) there may be several
candidates; functions that return one node then return None unless only one remains. A position that matches no node,
or a function whose name differs from the frame's, means that the source is not the one that ran: None.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass, replace
from typing import TypeAlias

from gradsan.model import Frame
from gradsan.source.tree import FunctionNode, ScopeNode, SourceFile, Span, header_nodes, read_source

_OPERATIONS = (ast.AugAssign, ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript, ast.Attribute)
_DYNAMO_RESUME = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+$")
_NOTEBOOK_CELL = re.compile(r"<cell line: \d+>$")


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement: its node, its text (of a compound statement the header), and its enclosing nodes.

    ``function`` is the function whose body contains it, None at module or class level. ``loops`` are the loop
    statements of that same body which repeat it, outermost first; the ``while`` itself counts for its test.
    """

    source: SourceFile
    node: ast.stmt
    text: str
    span: Span
    function: FunctionNode | None
    loops: tuple[ast.For | ast.AsyncFor | ast.While, ...]

    @property
    def scope(self) -> ScopeNode | None:
        """The function or module whose variables it binds; None in a lambda."""
        if isinstance(self.function, ast.Lambda):
            return None
        return self.source.module if self.function is None else self.function


@dataclass(frozen=True, slots=True)
class Expression:
    """An operation of a statement: a call, an operator, an element access, or an augmented assignment as a whole."""

    source: SourceFile
    node: ast.expr | ast.AugAssign
    text: str
    span: Span
    statement: ast.stmt


def statement_at(frame: Frame) -> Statement | None:
    """The statement at the position of ``frame``, or None where the source is ambiguous."""
    found = statements_at(frame)
    return found[0] if len(found) == 1 else None


def statements_at(frame: Frame) -> tuple[Statement, ...]:
    """The candidate statements for the position of ``frame``: at most one with columns, all of its line without."""
    source = read_source(frame.file)
    return () if source is None else _statements(source, frame)


@functools.lru_cache(maxsize=256)
def _statements(source: SourceFile, frame: Frame) -> tuple[Statement, ...]:
    """The candidates in this version of the file: one diagnosis asks for the same few frames many times."""
    statements, operations = _places(source, frame)
    enclosing = [source.statement(node) for node in operations]
    unique = dict.fromkeys(node for node in [*enclosing, *statements] if node is not None)
    return tuple(_statement(source, node, frame) for node in sorted(unique, key=source.span))


def expression_at(frame: Frame) -> Expression | None:
    """The operation ``frame`` was executing, or None where the source is ambiguous."""
    found = expressions_at(frame)
    return found[0] if len(found) == 1 else None


def expressions_at(frame: Frame) -> tuple[Expression, ...]:
    """The candidate operations that ``frame`` was executing, in source order: at most one with columns."""
    source = read_source(frame.file)
    if source is None:
        return ()
    _, operations = _places(source, frame)
    return tuple(
        Expression(source, node, source.text(node), source.span(node), statement)
        for node in sorted(dict.fromkeys(operations), key=source.span)
        if (statement := source.statement(node)) is not None
    )


def call_at(frame: Frame, name: str | None = None) -> tuple[SourceFile, ast.Call] | None:
    """The one call, or the one of a function or method ``name``, that ``frame`` was executing, and its file."""
    calls = [(one.source, one.node) for one in expressions_at(frame) if isinstance(one.node, ast.Call)]
    called = [one for one in calls if name in (None, getattr(one[1].func, "attr", getattr(one[1].func, "id", None)))]
    return called[0] if len(called) == 1 else None


def scope_of(frame: Frame) -> str:
    """The name of the frame's code object as the source spells it; empty where the frame has none."""
    name = frame.function.rsplit(".", 1)[-1]
    if resumed := _DYNAMO_RESUME.match(name):
        return resumed.group(1)
    return "<module>" if _NOTEBOOK_CELL.match(name) else name


_Operation: TypeAlias = ast.AugAssign | ast.Call | ast.BinOp | ast.UnaryOp | ast.Compare | ast.Subscript | ast.Attribute


def _places(source: SourceFile, frame: Frame) -> tuple[list[ast.stmt], list[_Operation]]:
    """The candidate statements and operations for the position of ``frame``."""
    scope = scope_of(frame)
    span = _span_of(frame)
    if span is None:
        return _on_line(source, frame.line, scope)
    nodes = [node for node in source.by_span.get(span, ()) if scope in ("", source.scope_name(node))]
    operations = [node for node in nodes if isinstance(node, _OPERATIONS)]
    statements = [node for node in nodes if isinstance(node, ast.stmt)]
    if operations:
        return [], operations
    if statements:
        # pytest's rewritten assertions give their operations the place of the whole statement.
        is_assert = isinstance(statements[0], ast.Assert)
        return statements, _operations_of(source, statements[0], scope) if is_assert else []
    enclosing = [source.statement(node) for node in nodes]
    return [node for node in enclosing if node is not None], []


def _on_line(source: SourceFile, line: int, scope: str) -> tuple[list[ast.stmt], list[_Operation]]:
    statements: list[ast.stmt] = []
    operations: list[_Operation] = []
    for node in source.nodes:
        if not isinstance(node, ast.stmt) or line not in _header_lines(node):
            continue
        if scope in ("", source.scope_name(node)) or any(scope == source.scope_name(n) for n in header_nodes(node)):
            statements.append(node)
            operations.extend(op for op in _operations_of(source, node, scope) if line in _lines_in_code(op))
    return statements, operations


def _operations_of(source: SourceFile, statement: ast.stmt, scope: str) -> list[_Operation]:
    return [
        node
        for node in header_nodes(statement)
        if isinstance(node, _OPERATIONS) and scope in ("", source.scope_name(node))
    ]


def _header_lines(statement: ast.stmt) -> set[int]:
    """The lines on which ``statement`` itself, not a statement in its blocks, is executed."""
    if not hasattr(statement, "body") and not isinstance(statement, ast.Match):
        return set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    lines = {statement.lineno}
    for node in header_nodes(statement):
        if isinstance(node, ast.expr | ast.pattern):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _lines_in_code(node: _Operation) -> tuple[int, int]:
    """The lines to which CPython may attribute the execution of ``node``: its first, or its attribute name's."""
    attribute = node.func if isinstance(node, ast.Call) else node
    return node.lineno, (attribute.end_lineno or node.lineno) if isinstance(attribute, ast.Attribute) else node.lineno


def _span_of(frame: Frame) -> Span | None:
    if frame.column is None or frame.end_line is None or frame.end_column is None:
        return None
    return Span(frame.line, frame.column, frame.end_line, frame.end_column)


def _statement(source: SourceFile, node: ast.stmt, frame: Frame) -> Statement:
    loops: list[ast.For | ast.AsyncFor | ast.While] = [node] if isinstance(node, ast.While) else []
    for parent, name in source.ancestors(node):
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            break
        if isinstance(parent, ast.For | ast.AsyncFor | ast.While) and name == "body":
            loops.insert(0, parent)
    function = source.function(node)
    if scope_of(frame) == "<lambda>":
        span = _span_of(frame)
        around = [inner for inner in _lambdas_of(node) if span is None or source.span(inner.body).contains(span)]
        function = max(around, key=source.span) if around and (span is not None or len(around) == 1) else None
    return Statement(source, node, statement_text(source, node), source.span(node), function, tuple(loops))


def at_span(frame: Frame, span: Span) -> Frame:
    """The frame, moved to another place of its function."""
    return replace(frame, line=span.line, column=span.column, end_line=span.end_line, end_column=span.end_column)


def at_line(frame: Frame, line: int) -> Frame:
    """The frame, moved to another line of its function, whatever statement of that."""
    return replace(frame, line=line, column=None, end_line=None, end_column=None)


def frame_of(source: SourceFile, node: ast.stmt, like: Frame) -> Frame:
    """The frame at a statement of the file of ``like``."""
    place, scope = source.span(node), source.scope_name(node)
    # A compound statement is located at its header's line, though it ends with its block.
    found = at_line(like, place.line) if hasattr(node, "body") else at_span(like, place)
    return found if scope_of(like) == scope else replace(found, function=scope)  # with its class, as other frames of it


@functools.lru_cache(maxsize=64)
def _lambdas_of(statement: ast.stmt) -> tuple[ast.Lambda, ...]:
    return tuple(node for node in header_nodes(statement) if isinstance(node, ast.Lambda))


def statement_text(source: SourceFile, node: ast.stmt) -> str:
    """The text of a statement as written; of a compound one its header."""
    span = source.span(node)
    block = [*getattr(node, "body", ()), *(case.pattern for case in getattr(node, "cases", ()))]
    if not block:
        return source.slice(span)
    first = min([block[0], *getattr(block[0], "decorator_list", ())], key=source.span)
    start = source.span(first)
    ends = [(span.line, span.column)]
    for part in header_nodes(node):
        if isinstance(part, ast.expr | ast.arg) and source.span(part) < start:
            ends.append((source.span(part).end_line, source.span(part).end_column))
    last = max(ends)
    # Only closing brackets, the colon and a comment can follow the last expression.
    rest = source.slice(Span(*last, start.line, start.column))
    closing = "".join(line.partition("#")[0] for line in rest.partition(":")[0].split("\n")) + ":"
    return source.slice(Span(span.line, span.column, *last)) + closing


def is_call_alone(frame: Frame) -> bool:
    """Whether the statement at ``frame`` is one call whose result nothing uses: ``act(x)``, ``x.sigmoid_()``."""
    statement = statement_at(frame)
    call = statement.node.value if statement is not None and isinstance(statement.node, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    return not any(isinstance(one, ast.Call) for one in ast.walk(call) if one is not call)


def names_in_function(frame: Frame, name: str) -> bool:
    """Whether the function at ``frame`` has an argument, a variable or an attribute ``name``."""
    statement = statement_at(frame)
    if statement is None or statement.function is None:
        return False
    inside = ast.walk(statement.function)
    return any(name in (getattr(one, "id", ""), getattr(one, "attr", ""), getattr(one, "arg", "")) for one in inside)


def is_argument(frame: Frame, name: str) -> bool:
    """Whether ``name`` is an argument of the function at ``frame``."""
    statement = statement_at(frame)
    if statement is None or statement.function is None:
        return False
    given = statement.function.args
    return any(one.arg == name for one in (*given.posonlyargs, *given.args, *given.kwonlyargs))
