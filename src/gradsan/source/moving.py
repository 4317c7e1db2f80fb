"""Statements that wait until a backward is over: an update of weights, averages or statistics moved behind it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import UnionType

from gradsan.model import Frame
from gradsan.source.chains import leaf_name
from gradsan.source.locate import statement_at
from gradsan.source.tree import SourceFile

__all__ = ["Moved", "blocks_around", "is_whole_lines", "move_behind", "names_bound", "names_read"]

_LEAVING = (ast.Return, ast.Continue, ast.Break, ast.Raise, ast.Yield, ast.YieldFrom, ast.Await)
_LIGHT = frozenset(
    {
        *("append", "debug", "float", "info", "item", "len", "log", "ones_like", "print", "randn_like"),
        *("set_description", "zero_grad", "zeros_like"),
    }
)


@dataclass(frozen=True, slots=True)
class Moved:
    """The changed lines, and whether nothing between computes: what is moved is then seen by nobody in between."""

    lines: tuple[tuple[str, int, str], ...]
    is_plain: bool


def move_behind(written: Sequence[Sequence[Frame]], used: Sequence[Frame]) -> Moved | None:
    """The statements that lead to the writes, moved behind the one that leads to the backward.

    ``written`` and ``used`` are stacks of the user's frames, outermost first. None where they do not stand in one block
    with the backward last, where a statement between reads what is moved or binds what it reads, or where what is moved
    reads gradients (which that backward is about to change) or runs a backward itself.
    """
    found = _in_one_block(written, used)
    if found is None:
        return None
    source, block, first, last, backward = found
    moved, between, use = block[first : last + 1], block[last + 1 : backward], block[backward]
    if not all(is_whole_lines(source, node) for node in (*moved, use)):
        return None
    if any(_must_stay(node) for node in moved) or any(_reads_gradients(source, use, stack) for stack in written):
        return None
    if names_bound(moved) & names_read([*between, use]) or names_bound([*between, use]) & names_read(moved):
        return None
    end = source.span(use).end_line
    texts = [source.lines[source.span(node).line - 1 : source.span(node).end_line] for node in moved]
    behind = "\n".join([source.lines[end - 1], *(line for text in texts for line in text)])
    gone = {line for node in moved for line in range(source.span(node).line, source.span(node).end_line + 1)}
    lines = (*((source.file, line, "") for line in sorted(gone)), (source.file, end, behind))
    return Moved(lines, all(_is_light(node) for node in between))


def blocks_around(stack: Sequence[Frame]) -> Iterator[tuple[SourceFile, list[ast.stmt], ast.stmt]]:
    """Every block of statements that a stack passes through, with its statement there, the innermost first."""
    for frame in reversed(stack):
        found = statement_at(frame)
        node: ast.AST | None = None if found is None else found.node
        while found is not None and node is not None:
            parent, field = found.source.parents.get(node, (None, ""))
            block = None if parent is None else getattr(parent, field, None)
            if isinstance(node, ast.stmt) and isinstance(block, list):
                yield found.source, block, node
            if parent is None or isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                break
            node = parent


def is_whole_lines(source: SourceFile, node: ast.stmt) -> bool:
    """Whether nothing but the statement stands on its lines."""
    span = source.span(node)
    before = source.lines[span.line - 1][: span.column - 1]
    after = source.lines[span.end_line - 1][span.end_column - 1 :].strip()
    return not before.strip() and (not after or after.startswith("#"))


def _in_one_block(
    written: Sequence[Sequence[Frame]], used: Sequence[Frame]
) -> tuple[SourceFile, list[ast.stmt], int, int, int] | None:
    places = [list(blocks_around(stack)) for stack in written]
    for source, block, use in blocks_around(used):
        at = [[node for _, other, node in stack if other is block] for stack in places]
        if not at or not all(at):
            continue
        indices = [block.index(nodes[0]) for nodes in at]
        backward = block.index(use)
        if any(index == backward for index in indices):
            continue
        return (source, block, min(indices), max(indices), backward) if max(indices) < backward else None
    return None


def _reads_gradients(source: SourceFile, use: ast.stmt, stack: Sequence[Frame]) -> bool:
    """Whether a function that the block calls on the way to the write reads ``.grad``."""
    around = source.function(use)
    statements = [statement_at(frame) for frame in stack]
    level = max((at for at, one in enumerate(statements) if one is not None and one.function is around), default=-1)
    return any(
        one is None or one.function is None or _mentions_gradients(one.function) for one in statements[level + 1 :]
    )


def _mentions_gradients(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in ast.walk(node))


def _must_stay(node: ast.stmt) -> bool:
    inner = list(ast.walk(node))
    return (
        any(isinstance(one, _LEAVING) for one in inner)
        or _mentions_gradients(node)
        or any(_calls(one, "backward") or _calls(one, "step") for one in inner)
        or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)
    )


def _calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and leaf_name(node.func) == name


def names_bound(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that ``nodes`` bind."""
    return {name for node in nodes for name in _names(node, ast.Store | ast.Del)}


def names_read(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that ``nodes`` read from outside."""
    return {name for node in nodes for name in _names(node, ast.Load)}


def _names(node: ast.AST, context: type[ast.expr_context] | UnionType) -> set[str]:
    """The names that stand in ``context`` within ``node``, but for the variables of its comprehensions."""
    inner = list(ast.walk(node))
    own = {
        one.id
        for comprehension in inner
        if isinstance(comprehension, ast.comprehension)
        for one in ast.walk(comprehension.target)
        if isinstance(one, ast.Name)
    }
    return {one.id for one in inner if isinstance(one, ast.Name) and isinstance(one.ctx, context)} - own


def _is_light(node: ast.stmt) -> bool:
    return all(leaf_name(one.func) in _LIGHT for one in ast.walk(node) if isinstance(one, ast.Call))
