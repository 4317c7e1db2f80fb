"""Writes: recorded by autograd, or a list of parts that is stacked."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import replace

from gradsan import source
from gradsan.model import Diagnosis, Fix, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Change, Edit, changed_lines, text_with
from gradsan.source.locate import Expression
from gradsan.source.rewrite.out_of_place import out_of_place, recorded
from gradsan.source.rewrite.scatter import part_out_of_place
from gradsan.source.rewrite.suggest import clone_before
from gradsan.source.targets import Target, target_at
from gradsan.source.tree import SourceFile


def record_change(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Out of its ``no_grad`` block and out of place; without ``.data``, to a copy; another alias as a new tensor."""
    written = blocks.labels(diagnosis, "written")
    if diagnosis.cause != "no_grad_write" or len(written) != 1:
        return ()
    target = target_at(written[0].frame, written[0].op or "")
    if target is None:
        return ()
    found: list[Fix] = []
    record, copy = (blocks.advice(diagnosis, kind) for kind in ("record_the_change", "change_a_copy"))
    lines = _recorded(written[0], *target)
    if record is not None and lines:
        found.append(replace(record, lines=lines, applicability="review"))
    # What is written by its own name is meant to be changed: a copy of it would have no graph.
    if copy is not None and not lines:
        for change in _new_or_copy(written[0]):
            changed = changed_lines(written[0].frame.file, change)
            found.append(replace(copy, lines=changed, applicability="review"))
    return tuple(found)


def _new_or_copy(label: Label) -> list[Change]:
    frame, op = label.frame, label.op or ""
    changes = (out_of_place(frame, op) or part_out_of_place(frame, op), clone_before(frame, op))
    return [change for change in changes if change is not None]


def _recorded(label: Label, place: Expression, target: Target) -> tuple[tuple[str, int, str], ...]:
    source = place.source
    if not blocks.is_whole_lines(source, place.statement) or hasattr(place.statement, "body"):
        return ()
    block = source.parents[place.statement][0]
    if isinstance(block, ast.With) and blocks.switches_grad_off(block):
        new = next(iter(_new_or_copy(label)), None)
        return () if new is None else _where_grad_is_on(source, block, place.statement, new)
    change = recorded(label.frame, label.op or "")
    if change is not None and not change.notes:
        return changed_lines(label.frame.file, change)
    name = source.text(target.node)
    text = _without_data(source, place.statement, name)
    if text is None or not isinstance(target.node, ast.Name | ast.Attribute):
        return ()
    span = source.span(place.statement)
    head = source.lines[span.line - 1][: span.column - 1]
    gone = dict.fromkeys(range(span.line + 1, span.end_line + 1), "")
    return blocks.lines_changed(source, {**gone, span.line: f"{head}{name} = {name}.clone()\n{head}{text}"})


def _without_data(source: SourceFile, statement: ast.stmt, name: str) -> str | None:
    """The statement with ``name`` in the place of ``name.data``; None where it does not read that."""
    reads = [
        node
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute) and node.attr == "data" and source.text(node.value) == name
    ]
    if not reads:
        return None
    return text_with(source, source.span(statement), [Edit(source.span(node), name) for node in reads])


def _where_grad_is_on(
    source: SourceFile, block: ast.With, statement: ast.stmt, new: Change
) -> tuple[tuple[str, int, str], ...]:
    """The changed statement in the place of a block that has nothing else, else with grad switched on around it."""
    changes = blocks.texts_of(source, new)
    span, outer = source.span(statement), source.span(block)
    lines = [changes.get(line, source.lines[line - 1]) for line in range(span.line, span.end_line + 1)]
    text = "\n".join(line for line in lines if line)
    if len(block.body) == 1 and len(block.items) == 1:
        head = source.lines[outer.line - 1][: outer.column - 1]
        gone = dict.fromkeys(range(outer.line + 1, span.end_line + 1), "")
        return blocks.lines_changed(source, {**gone, outer.line: textwrap.indent(textwrap.dedent(text), head)})
    head = source.lines[span.line - 1][: span.column - 1]
    torch = blocks.module_of(block)
    if torch is None:
        return ()
    inner = textwrap.indent(text, blocks.indentation_of(source))
    gone = dict.fromkeys(range(span.line + 1, span.end_line + 1), "")
    return blocks.lines_changed(source, {**gone, span.line: f"{head}with {torch}.enable_grad():\n{inner}"})


def list_and_stack(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Where a loop stores into a part of a variable, keep that variable as a list."""
    # There no saved value is stale: it is another name of the tensor that shall keep its values.
    if diagnosis.cause == "forward_alias":
        return ()
    for label in blocks.labels(diagnosis, "written"):
        change = source.list_and_stack(label.frame)
        lines = () if change is None else source.changed_lines(label.frame.file, change)
        if lines:
            return (blocks.fix("list_and_stack", lines),)
    return ()
