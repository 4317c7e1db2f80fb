"""Source files as text and as syntax trees, from any origin: on disk, in a notebook cell, in an archive.

``ast`` counts columns in UTF-8 bytes from 0; everything here counts characters from 1, ends exclusive, as
``model.Frame`` does.

A line is the text that Python compiled, decoded by the file's own encoding declaration, without its line end. All
functions here return None (or an empty tuple) where the source is not available.
"""

from __future__ import annotations

import ast
import functools
import io
import linecache
import os
import sys
import tokenize
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TypeAlias

from gradsan._imports import modules_loaded, stored_in

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
ScopeNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
_COMPREHENSIONS = {
    ast.ListComp: "<listcomp>",
    ast.SetComp: "<setcomp>",
    ast.DictComp: "<dictcomp>",
    ast.GeneratorExp: "<genexpr>",
}
_COMPREHENSIONS_ARE_INLINED = sys.version_info >= (3, 12)


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A range of source: lines and columns from 1, columns in characters, the end exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int

    def contains(self, other: Span) -> bool:
        """Whether ``other`` lies within this span."""
        return (self.line, self.column) <= (other.line, other.column) and (other.end_line, other.end_column) <= (
            self.end_line,
            self.end_column,
        )


@dataclass(frozen=True, slots=True, eq=False)
class SourceFile:
    """A file's lines and its syntax tree.

    ``nodes`` are all nodes of the tree in the order of ``ast.walk``; ``parents`` maps a node to (parent, name of the
    field that contains it).
    """

    file: str
    lines: tuple[str, ...]
    module: ast.Module
    nodes: tuple[ast.AST, ...] = field(repr=False)
    parents: dict[ast.AST, tuple[ast.AST, str]] = field(repr=False)
    by_span: dict[Span, list[ast.AST]] = field(repr=False)

    def span(self, node: ast.AST) -> Span:
        """The span of ``node``, which must have a position."""
        return _span(self.lines, node)

    def text(self, node: ast.AST) -> str:
        """The source of an expression on one line; from ``ast.unparse`` where it spans several."""
        span = self.span(node)
        # Before Python 3.12 positions inside an f-string may be wrong.
        if span.line != span.end_line or self.inside(node, ast.JoinedStr):
            return ast.unparse(node)
        return self.lines[span.line - 1][span.column - 1 : span.end_column - 1]

    def indent(self, at: ast.AST | Span) -> str:
        """The text before ``at`` on its line: its indentation, where it begins the line."""
        span = at if isinstance(at, Span) else self.span(at)
        return self.lines[span.line - 1][: span.column - 1]

    def slice(self, span: Span) -> str:
        """The characters of ``span``, line ends as ``\\n``."""
        if span.line == span.end_line:
            return self.lines[span.line - 1][span.column - 1 : span.end_column - 1]
        first, *middle = self.lines[span.line - 1 : span.end_line - 1]
        return "\n".join([first[span.column - 1 :], *middle, self.lines[span.end_line - 1][: span.end_column - 1]])

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
        """(parent, field) pairs from ``node`` outwards; the field is the one that contains the previous node."""
        step = self.parents.get(node)
        while step is not None:
            yield step
            step = self.parents.get(step[0])

    def inside(self, node: ast.AST, kind: type[ast.AST]) -> bool:
        """Whether any ancestor of ``node`` is a ``kind``."""
        return any(isinstance(parent, kind) for parent, _ in self.ancestors(node))

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """The innermost statement that ``node`` is part of (itself where it is one)."""
        if isinstance(node, ast.stmt):
            return node
        return next((parent for parent, _ in self.ancestors(node) if isinstance(parent, ast.stmt)), None)

    def block(self, node: ast.stmt) -> list[ast.stmt]:
        """The statements of the block that ``node`` is one of."""
        parent, name = self.parents[node]
        block: list[ast.stmt] = getattr(parent, name)
        return block

    def ahead(self, node: ast.stmt) -> list[ast.stmt]:
        """The statements of the block of ``node`` that stand before it."""
        return self.block(node)[: self.block(node).index(node)]

    def behind(self, node: ast.stmt) -> list[ast.stmt]:
        """The statements of the block of ``node`` that stand after it."""
        return self.block(node)[self.block(node).index(node) + 1 :]

    def function(self, node: ast.AST) -> FunctionNode | None:
        """The innermost function whose body ``node`` is in (a class body in between hides it), else None."""
        for parent, name in self.ancestors(node):
            if name == "body" and isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                return parent
            if name == "body" and isinstance(parent, ast.ClassDef):
                return None
        return None

    def owner_class(self, node: ast.AST) -> ast.ClassDef | None:
        """The innermost class around ``node``, with or without functions in between."""
        return next((parent for parent, _ in self.ancestors(node) if isinstance(parent, ast.ClassDef)), None)

    def scope_name(self, node: ast.AST) -> str:
        """The ``co_name`` of the code object in which ``node`` is executed."""
        came_from: ast.AST = node
        for parent, name in self.ancestors(node):
            if name == "body" and isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                return parent.name
            if name == "body" and isinstance(parent, ast.Lambda):
                return "<lambda>"
            comprehension = _COMPREHENSIONS.get(type(parent))
            if comprehension is not None and not self._is_first_iterable(parent, came_from, node):
                inlined = _COMPREHENSIONS_ARE_INLINED and comprehension != "<genexpr>"
                if not inlined:
                    return comprehension
            came_from = parent
        return "<module>"

    def _is_first_iterable(self, comprehension: ast.AST, generator: ast.AST, node: ast.AST) -> bool:
        """Whether ``node`` is in the first iterable, which the surrounding scope evaluates."""
        generators: list[ast.comprehension] = getattr(comprehension, "generators", [])
        if not generators or generators[0] is not generator:
            return False
        first = generators[0].iter
        return node is first or any(parent is first for parent, _ in self.ancestors(node))


def read_source(file: str) -> SourceFile | None:
    """The parsed source of ``file``, or None where it is missing or is not Python of this version."""
    lines = source_lines(file)
    return _parse(file, lines) if lines else None


def header_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """All nodes of ``statement`` except those of the statements in its blocks and of function bodies."""
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt))


def parses(text: str) -> bool:
    """Whether ``text`` is a Python module."""
    return _module(text) is not None


@contextmanager
def no_warnings() -> Iterator[None]:
    """A block in which no warning is shown or raised.

    ``warnings.catch_warnings`` would reset the registry of lines that have warned: each would warn again.
    """
    before = warnings.filters
    warnings.filters = [("ignore", None, Warning, None, 0)]
    try:
        yield
    finally:
        warnings.filters = before


def _module(text: str) -> ast.Module | None:
    try:
        # -W error must not make a source unreadable by a warning about it.
        with no_warnings():
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@functools.lru_cache(maxsize=64)
def _parse(file: str, lines: tuple[str, ...]) -> SourceFile | None:
    module = _module("\n".join(lines) + "\n")
    if module is None:
        return None
    parents: dict[ast.AST, tuple[ast.AST, str]] = {}
    by_span: dict[Span, list[ast.AST]] = {}
    pending: list[ast.AST] = [module]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.stmt | ast.expr | ast.pattern | ast.excepthandler):
            for span in _spans_in_code(lines, node):
                by_span.setdefault(span, []).append(node)
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and not isinstance(node, ast.ClassDef):
                value[:] = map(_without_annotation, value)
            for child in value if isinstance(value, list) else [value]:
                # Contexts and operators are shared objects without a position of their own.
                if isinstance(child, ast.AST) and not isinstance(
                    child, ast.expr_context | ast.operator | ast.boolop | ast.unaryop | ast.cmpop
                ):
                    parents[child] = (node, name)
                    pending.append(child)
    return SourceFile(file, lines, module, tuple(ast.walk(module)), parents, by_span)


def _without_annotation(node: object) -> object:
    """``x = f()`` instead of ``x: Tensor = f()``; the annotations of a class, which are its fields, stay."""
    if not isinstance(node, ast.AnnAssign) or node.value is None:
        return node
    return ast.copy_location(ast.Assign(targets=[node.target], value=node.value, type_comment=None), node)


def _spans_in_code(lines: tuple[str, ...], node: ast.AST) -> Iterator[Span]:
    """The spans by which compiled code may refer to ``node``.

    In an expression over several lines CPython 3.11+ lets an attribute access or a method call start at the
    attribute's name (``update_start_location_to_match_attr`` in CPython's compile.c).
    """
    yield _span(lines, node)
    attribute = node.func if isinstance(node, ast.Call) else node
    if not isinstance(attribute, ast.Attribute) or node.lineno == attribute.end_lineno:  # type: ignore[attr-defined]
        return
    end_line, end_offset = attribute.end_lineno, attribute.end_col_offset
    if end_line is None or end_offset is None:
        return
    start = _characters(lines, end_line, end_offset - len(attribute.attr))
    whole = _span(lines, node)
    yield Span(end_line, start, whole.end_line, whole.end_column)


def _span(lines: tuple[str, ...], node: ast.AST) -> Span:
    line: int = node.lineno  # type: ignore[attr-defined]
    offset: int = node.col_offset  # type: ignore[attr-defined]
    end_line: int = node.end_lineno  # type: ignore[attr-defined]
    end_offset: int = node.end_col_offset  # type: ignore[attr-defined]
    return Span(line, _characters(lines, line, offset), end_line, _characters(lines, end_line, end_offset))


def _characters(lines: tuple[str, ...], line: int, offset: int) -> int:
    """The column (characters from 1) at byte ``offset`` of ``line``."""
    text = lines[line - 1] if line <= len(lines) else ""
    if text.isascii():
        return offset + 1
    return len(text.encode("utf-8", "surrogatepass")[:offset].decode("utf-8", "replace")) + 1


_NOTHING: Mapping[str, Mapping[int, str]] = MappingProxyType({})
_read_as: ContextVar[Mapping[str, tuple[str, ...]]] = ContextVar("read_as", default=MappingProxyType({}))
_recorded: ContextVar[Mapping[str, Mapping[int, str]]] = ContextVar("recorded", default=_NOTHING)


@contextmanager
def recorded_lines(lines: Mapping[tuple[str, int], str]) -> Iterator[None]:
    """A block in which ``source_line`` reads from ``lines``, by (file, line), whatever the file contains by now.

    Other lines of a file with a line in ``lines`` are None.
    """
    files: dict[str, dict[int, str]] = {}
    for (file, line), text in lines.items():
        files.setdefault(file, {})[line] = text
    token = _recorded.set(files)
    try:
        yield
    finally:
        _recorded.reset(token)


@contextmanager
def lines_read_as(texts: Mapping[str, tuple[str, ...]]) -> Iterator[None]:
    """A block in which the files of ``texts`` read as these lines."""
    token = _read_as.set(texts)
    try:
        yield
    finally:
        _read_as.reset(token)


def source_line(file: str, line: int) -> str | None:
    """Line ``line`` (from 1) of ``file`` without its line end, or None where there is no such line."""
    known = _recorded.get().get(file)
    if known is not None:
        return known.get(line)
    lines = source_lines(file)
    return lines[line - 1] if 1 <= line <= len(lines) else None


def source_lines(file: str) -> tuple[str, ...]:
    """All lines of ``file`` without line ends; empty where the source is missing or cannot be decoded.

    ``file`` is a path or a name such as ``<string>`` or ``<ipython-input-3>`` under which ``linecache`` has the
    source. A file changed on disk is read again; of a deleted file the lines read before are kept.
    """
    known = _read_as.get().get(file)
    if known is not None:
        return known
    lines = _from_linecache(file) or _from_loader(file) or _from_archive(file)
    stripped = _stripped.get(file)
    if stripped is None or stripped[0] is not lines:
        stripped = _stripped[file] = (lines, tuple(line.rstrip("\r\n") for line in lines))
    return stripped[1]


_stripped: dict[str, tuple[list[str], tuple[str, ...]]] = {}
"""By file, the list that linecache had, which stays the same until the file has changed, and its lines."""


def is_cell(file: str) -> bool:
    """Whether ``file`` is a name that a notebook or IPython gives to the code of a cell."""
    return "ipykernel" in file or file.startswith("<ipython-input")


def _from_linecache(file: str) -> list[str]:
    entry = linecache.cache.get(file)
    remembered = list(entry[2]) if entry is not None and len(entry) == 4 else []
    is_path = not (file.startswith("<") and file.endswith(">"))
    try:
        linecache.checkcache(file)
        # linecache looks a relative name up along sys.path, which may find another program's file.
        if is_path and file not in linecache.cache and not Path(file).is_file():
            return remembered
        return linecache.getlines(file) or remembered
    except (OSError, ValueError, SyntaxError):
        return remembered


def _from_loader(file: str) -> list[str]:
    module = _module_of(file)
    loader = getattr(getattr(module, "__spec__", None), "loader", None) or getattr(module, "__loader__", None)
    if module is None or loader is None or not hasattr(loader, "get_source"):
        return []
    try:
        text = loader.get_source(module.__name__)
    except Exception:  # any loader may be plugged in; a broken one only means that there is no source
        return []
    return _split(text) if isinstance(text, str) else []


def _module_of(file: str) -> ModuleType | None:
    name = _module_name(file, modules_loaded())
    return None if name is None else sys.modules.get(name)


@functools.lru_cache(maxsize=256)
def _module_name(file: str, _loaded: tuple[int, str]) -> str | None:
    """The name of the module that was loaded from ``file``, looked for again when others have been loaded."""
    last = os.path.basename(file)  # noqa: PTH119
    if file.startswith("<") or not last:
        return None  # no file: ``<string>``, a cell
    for name, module in list(sys.modules.items()):
        found = stored_in(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(found, str) and (found == file or (found.endswith(last) and _absolute(found) == file)):
            return name
    return None


def _absolute(file: str) -> str | None:
    try:
        return os.path.abspath(file)  # noqa: PTH100
    except OSError:  # a relative name, where the working directory has been deleted
        return None


def _from_archive(file: str) -> list[str]:
    path = Path(file)
    for parent in path.parents:
        try:
            if not parent.is_file():
                continue
            with zipfile.ZipFile(parent) as archive:
                data = archive.read(path.relative_to(parent).as_posix())
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            return _split(data.decode(encoding))
        except (OSError, ValueError, KeyError, SyntaxError, LookupError, RuntimeError, zipfile.BadZipFile):
            return []
    return []


def _split(text: str) -> list[str]:
    """Split at the line ends Python knows; ``str.splitlines`` would also split at form feeds."""
    return io.StringIO(text, newline=None).readlines()
