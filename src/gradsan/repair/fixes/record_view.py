"""A view that is made where autograd records: the statement that makes it leaves its ``no_grad`` block."""

from __future__ import annotations

import ast
import textwrap

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.tree import SourceFile


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Move the statement behind the block; where the block still needs what it binds, have it recorded in its place."""
    made = next(iter(blocks.labels(diagnosis, "created")), None)
    if diagnosis.cause != "unrecorded_view_written" or made is None:
        return ()
    for place in blocks.placements(made):
        block = place.source.parents[place.statement][0]
        if (
            isinstance(block, ast.With)
            and blocks.switches_grad_off(block)
            and blocks.is_whole_lines(place.source, place.statement)
        ):
            lines = _behind(place, block) or _recorded_in_place(place)
            return (blocks.fix("move_view_out_of_no_grad", lines),)
    return ()


def _behind(place: blocks.Placed, block: ast.With) -> tuple[tuple[str, int, str], ...]:
    source, node = place.source, place.statement
    bound = blocks.names_bound(node)
    following = place.block[place.index + 1 :]
    is_needed = blocks.names_read(following) & bound
    is_changed = {name for other in following for name in blocks.names_bound(other)} & (
        blocks.names_read([node]) | bound
    )
    if is_needed or is_changed or not isinstance(node, ast.Assign) or len(place.block) < 2 or len(block.items) > 1:
        return ()
    moved = textwrap.indent(textwrap.dedent(blocks.text_of(source, node)), _indent(source, block))
    changes = blocks.removed(source, node)
    end = source.span(block).end_line
    changes[end] = moved if end in changes else f"{source.lines[end - 1]}\n{moved}"
    return blocks.lines_changed(source, changes)


def _recorded_in_place(place: blocks.Placed) -> tuple[tuple[str, int, str], ...]:
    source, node = place.source, place.statement
    indent, span = _indent(source, node), source.span(node)
    inner = textwrap.indent(blocks.text_of(source, node), blocks.indentation_of(source))
    text = f"{indent}with torch.enable_grad():\n{inner}"
    gone = dict.fromkeys(range(span.line + 1, span.end_line + 1), "")
    return blocks.lines_changed(source, {**gone, span.line: text})


def _indent(source: SourceFile, node: ast.stmt) -> str:
    span = source.span(node)
    return source.lines[span.line - 1][: span.column - 1]
