"""Contexts entered around a whole loop, and entered in each of its rounds instead."""

from __future__ import annotations

import ast

from gradsan.model import Frame, Lines
from gradsan.source.change import Change, Edit, checked, edited_lines
from gradsan.source.identifiers import leaf_name
from gradsan.source.locate import statement_at
from gradsan.source.tree import SourceFile, Span


def enter_each_round(used_at: Frame, context: str) -> Lines:
    """``with <context>():`` around loops, entered in every iteration of the innermost loop instead.

    Empty where the block has more than the loop, or there is no such block around ``used_at``.
    """
    used = statement_at(used_at)
    if used is None:
        return ()
    for loop in used.loops:
        block = used.source.parents[loop][0]
        if not isinstance(block, ast.With) or block.body != [loop] or len(block.items) != 1:
            continue
        call = block.items[0].context_expr
        if isinstance(call, ast.Call) and leaf_name(call.func) == context:
            return _entered_in(used.source, block, used.loops[-1])
    return ()


def _entered_in(source: SourceFile, block: ast.With, loop: ast.stmt) -> Lines:
    """``block`` entered in the body of ``loop`` alone: what stands around that body is dedented."""
    assert isinstance(loop, ast.For | ast.AsyncFor | ast.While)
    around, first = source.span(block), source.span(block.body[0])
    head, begin, end = source.span(loop), source.span(loop.body[0]), source.span(loop.body[-1])
    if first.line != around.line + 1 or begin.line == head.line:
        return ()
    moved = {*range(first.line, begin.line), *range(end.end_line + 1, around.end_line + 1)}
    texts = [one for node in ast.walk(block) if (one := _text_on_lines(node)) is not None]
    if any(moved & set(range(one.line, one.end_line + 1)) for one in map(source.span, texts)):
        return ()
    outer, inner = (source.lines[one.line - 1] for one in (around, first))
    deeper = len(inner) - len(inner.lstrip()) - around.column + 1
    indent = source.lines[head.line - 1][: head.column - 1]
    edits = [Edit(Span(around.line, 1, around.line + 1, 1), "")]
    for line in sorted(moved):
        text = source.lines[line - 1]
        if text[:deeper].strip():
            return ()
        edits.append(Edit(Span(line, 1, line, min(deeper, len(text)) + 1), ""))
    edits[:2] = [Edit(Span(around.line, 1, first.line, deeper + 1), "")]
    edits.append(Edit.insert(begin.line, 1, f"{indent}{outer.strip()}\n"))
    return edited_lines(source, edits)


def _text_on_lines(node: ast.AST) -> ast.expr | None:
    """The node where it is text on several lines, whose indentation is part of it."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)):
        return None if node.end_lineno == node.lineno else node
    return None


def enter_once_more(updated_at: Frame, context: str) -> Change | None:
    """``with <context>():`` entered again after the statement at ``updated_at``, which is in such a block itself.

    The rest of the block is then in the second one. None where nothing follows.
    """
    updated = statement_at(updated_at)
    block = None if updated is None else updated.source.parents[updated.node][0]
    if updated is None or not isinstance(block, ast.With) or len(block.items) != 1 or updated.node is block.body[-1]:
        return None
    source, call, outer = updated.source, block.items[0].context_expr, updated.source.span(block)
    head = source.lines[outer.line - 1]
    if not isinstance(call, ast.Call) or leaf_name(call.func) != context or block.body[0].lineno == block.lineno:
        return None
    change = Change(source.span(updated.node).end_line + 1, "", head, "enter_once_more")
    return checked(source, change)
