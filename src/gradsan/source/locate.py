"""Statement and operation at a frame's position.

With columns the answer is one node or none. Without them (Python 3.10, ``-X no_debug_ranges``) there may be several
candidates; functions that return one node then return None unless only one remains. A position that matches no node,
or a function whose name differs from the frame's, means that the source is not the one that ran: None.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from gradsan.model import Frame
from gradsan.source.tree import FunctionNode, ScopeNode, SourceFile, Span, header_nodes, read_source, source_lines

_OPERATIONS = (ast.AugAssign, ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript, ast.Attribute)
_FLAG = "requires_grad"
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Call)
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


def is_argument(frame: Frame, name: str) -> bool:
    """Whether ``name`` is an argument of the function at ``frame``."""
    statement = statement_at(frame)
    if statement is None or statement.function is None:
        return False
    given = statement.function.args
    return any(one.arg == name for one in (*given.posonlyargs, *given.args, *given.kwonlyargs))


def drops_result(frame: Frame) -> bool:
    """Whether the call at ``frame`` is a statement of its own, so that nothing takes its result."""
    call, statement = expression_at(frame), statement_at(frame)
    if call is None or statement is None or not isinstance(call.node, ast.Call):
        return False
    return isinstance(statement.node, ast.Expr) and statement.node.value is call.node


def writes_into_result(frame: Frame, key: str) -> int | None:
    """The line that sets an element of what the call at ``frame`` returns under ``key``, where nothing keeps that.

    ``opt.state_dict()["param_groups"][0]["lr"] = rate``, or a loop over ``opt.state_dict()["param_groups"]`` that reads
    and sets elements of its variable alone.
    """
    call, statement = expression_at(frame), statement_at(frame)
    if call is None or statement is None:
        return None
    parents, node = statement.source.parents, statement.node
    chain = [call.node, parents[call.node][0]]
    while isinstance(chain[-1], ast.Subscript):
        chain.append(parents[chain[-1]][0])
    first, outer = chain[1], chain[-2]
    if not (isinstance(first, ast.Subscript) and isinstance(first.slice, ast.Constant) and first.slice.value == key):
        return None
    if isinstance(outer, ast.Subscript) and isinstance(outer.ctx, ast.Store):
        return node.lineno
    if not (isinstance(node, ast.For) and node.iter is outer and isinstance(node.target, ast.Name)):
        return None
    named = node.target.id
    names = [one for part in node.body for one in ast.walk(part) if isinstance(one, ast.Name) and one.id == named]
    elements = [one for name in names if isinstance(one := parents[name][0], ast.Subscript) and one.value is name]
    stores = [one.lineno for one in elements if isinstance(one.ctx, ast.Store)]
    first_store = min(stores, default=None)
    # What is read behind it was changed for that, as for a log.
    is_read = any(isinstance(one.ctx, ast.Load) and one.lineno > (first_store or 0) for one in elements)
    return first_store if len(elements) == len(names) and not is_read else None


class Flag(NamedTuple):
    """A statement that sets an attribute of ``owner`` to False; ``is_of_parameters`` where a loop goes over these."""

    owner: str
    is_of_parameters: bool
    line: int


def flags_cleared(file: str, name: str) -> list[Flag]:
    """The statements of a file that set an attribute ``name`` to False, but those of ``self``."""
    is_cleared = any(f".{name}" in line and "False" in line for line in source_lines(file))
    source = read_source(file) if is_cleared else None
    found = []
    for node in () if source is None else source.nodes:
        if source is None or not isinstance(node, ast.Attribute) or node.attr != name:
            continue
        statement = source.statement(node)
        value = statement.value if isinstance(statement, ast.Assign) else None
        is_false = isinstance(value, ast.Constant) and value.value is False
        if is_false and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) != "self":
            found.append(Flag(ast.unparse(node.value), _is_of_parameters(source, node), node.lineno))
    return found


def reads_flag(file: str, name: str) -> bool:
    """Whether a file reads the attribute ``name``: by itself, or by its name in a string, as ``getattr`` takes it.

    Parameters have a flag ``requires_grad``: what a loop over these reads is that.
    """
    source = read_source(file) if any(name in line for line in source_lines(file)) else None
    for node in () if source is None else source.nodes:
        if isinstance(node, ast.Constant) and node.value == name:
            return True
        is_read = isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load)
        if is_read and (source is None or name != _FLAG or not _is_of_parameters(source, node)):
            return True
    return False


def sets_own_flag(file: str) -> bool:
    """Whether a class of the file may have its own flag ``requires_grad``, or attributes are set by their names."""
    source = read_source(file)
    for node in () if source is None else source.nodes:
        if isinstance(node, ast.Attribute) and (
            node.attr == "__dict__" or (node.attr == _FLAG and ast.unparse(node) == f"self.{_FLAG}")
        ):
            return True
        if isinstance(node, ast.Name) and node.id in ("setattr", "vars"):
            return True
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == _FLAG:
            return True
    return False


def _is_of_parameters(source: SourceFile, node: ast.AST) -> bool:
    around = (one for one, _ in source.ancestors(node) if isinstance(one, (ast.For, ast.AsyncFor, *_COMPREHENSIONS)))
    return any("parameters(" in ast.unparse(_iterated(one)) for one in around)


_LOGS = frozenset({"print", "info", "debug", "warning", "log", "write", "append", "add_scalar", "set_postfix"})


def reads_scale(file: str) -> bool:
    """Whether a file reads the scale of a ``GradScaler`` for more than a log."""
    source = read_source(file) if any("_scale" in line for line in source_lines(file)) else None
    for node in () if source is None else source.nodes:
        if source is not None and isinstance(node, ast.Attribute) and node.attr in ("get_scale", "_scale"):
            statement = source.statement(node)
            call = statement.value if isinstance(statement, ast.Expr) else None
            if not (isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in _LOGS):
                return True
    return False


def _iterated(node: ast.AST) -> ast.AST:
    return node.iter if isinstance(node, ast.For | ast.AsyncFor) else node
