"""Copies: before the loop that writes, for a layer that works in place, on ``ctx``; writes recorded or stacked."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradsan import source
from gradsan.diagnose.build import COLLECTED
from gradsan.model import Diagnosis, Fix, Label, Lines, Message
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Change, Edit, changed_lines, edited, indentation_of, text_with
from gradsan.source.flow.collected import is_kept_each_round
from gradsan.source.flow.targets import Target, target_at, written_expression
from gradsan.source.flow.writing import reads_gradient, writing_at
from gradsan.source.identifiers import leaf_name
from gradsan.source.imports import torch_name
from gradsan.source.locate import Expression, expressions_at, frame_of
from gradsan.source.rewrite.copied import cloned
from gradsan.source.rewrite.leaves import reads_later
from gradsan.source.rewrite.moving import is_whole_lines
from gradsan.source.rewrite.out_of_place import out_of_place, recorded
from gradsan.source.rewrite.rebinding import can_rebind, notes_on_rebinding
from gradsan.source.rewrite.scatter import mask_out_of_place, part_out_of_place
from gradsan.source.rewrite.suggest import clone_before
from gradsan.source.tree import SourceFile


def clone_before_loop(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """The copy before the outermost loop that does not rebind the written name."""
    copy = next((fix for fix in diagnosis.fixes if fix.kind == "clone_before_mutation" and fix.lines), None)
    written = blocks.labels(diagnosis, "written")
    if copy is None or not written:
        return ()
    target = target_at(written[0].frame, written[0].op or "")
    if target is None or not isinstance(target[1].node, ast.Name):
        return ()
    source, name = target[0].source, target[1].node.id
    loop = _outermost_loop(source, target[0].statement, name)
    if loop is None:
        return ()
    line = source.span(loop).line
    head = source.lines[line - 1][: source.span(loop).column - 1]
    text = f"{head}{name} = {cloned(name, written[0].op or '')}\n{source.lines[line - 1]}"
    return (replace(copy, lines=blocks.lines_changed(source, {line: text})),)


def _outermost_loop(source: SourceFile, statement: ast.stmt, name: str) -> ast.stmt | None:
    found: ast.stmt | None = None
    node: ast.AST = statement
    while node in source.parents:
        node = source.parents[node][0]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            break
        if isinstance(node, ast.For | ast.While):
            if _binds(node, name):
                break
            found = node
    return found


def _binds(loop: ast.AST, name: str) -> bool:
    nodes = list(ast.walk(loop))
    in_place = [node.target for node in nodes if isinstance(node, ast.AugAssign)]
    stored = [node for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)]
    return any(node.id == name and node not in in_place for node in stored)


def collect_each_value(diagnosis: Diagnosis, fixes: tuple[Fix, ...]) -> tuple[Fix, ...]:
    """``fixes``; where a loop collects the written tensor (one tensor, many times), those out of place, with a note.

    A copy for the operation that saved it would still collect one tensor.
    """
    written = blocks.labels(diagnosis, "written")
    is_seen = any(note.key == COLLECTED for note in diagnosis.notes)
    if not written or not (is_seen or all(_is_collected(label) for label in written)):
        return fixes
    name = diagnosis.tensor.name if diagnosis.tensor is not None else None
    anew = blocks.fix("collect_each_value", (), name=name or "?")
    said = [replace(anew, lines=one.lines) if one.kind == "out_of_place" and one.lines else one for one in fixes]
    is_made_anew = any(one.kind == anew.kind for one in said)
    return tuple(one for one in said if not (is_made_anew and one.kind == "clone_before_mutation"))


def _is_collected(label: Label) -> bool:
    """Whether a loop around the write appends the written variable itself to a list or dict in each iteration."""
    target = target_at(label.frame, label.op or "")
    return target is not None and is_kept_each_round(label.frame, target[0].source.text(target[1].node))


def clone_for_call(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``functional_call`` with copies of a module's parameters, where each forward pass writes them before it."""
    saved, name = blocks.first(diagnosis, "saved"), diagnosis.tensor and diagnosis.tensor.name
    if saved is None or not name or blocks.advice(diagnosis, "update_between_forwards") is None:
        return ()
    for place in expressions_at(saved.frame):
        call, source = place.node, place.source
        torch = torch_name(source)
        if not isinstance(call, ast.Call) or not call.args or call.keywords:
            continue
        callee, given = source.text(call.func), ", ".join(map(source.text, call.args))
        if f".{leaf_name(call.func)}." not in f".{name.replace('[', '.')}" or any(
            isinstance(one, ast.Starred) for one in call.args
        ):
            continue
        copies = f"{{key: p.clone() for key, p in {callee}.named_parameters()}}"
        edit = Edit(source.span(call), f"{torch}.func.functional_call({callee}, {copies}, ({given},))")
        lines = changed_lines(source.file, edited(source, [edit], "clone_for_call"))
        return (blocks.fix("clone_before_mutation", lines, "clone_for_call", name=callee),) if lines else ()
    return ()


def with_masks(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """The fixes of the diagnosis; before an ``index_put`` of one number, ``masked_fill`` if the index may be a mask.

    The mask may be one of all elements, or of rows; a run decides.
    """
    written, found = blocks.labels(diagnosis, "written"), list[Fix]()
    for fix in diagnosis.fixes:
        is_by_tensor = fix.kind == "out_of_place" and any(".index_put(" in text for _, _, text in fix.lines)
        for is_of_rows in (False, True) if is_by_tensor and len(written) == 1 else ():
            change = mask_out_of_place(written[0].frame, written[0].op or "", is_of_rows=is_of_rows)
            if change is not None:
                found.append(replace(fix, lines=changed_lines(written[0].frame.file, change)))
        found.append(fix)
    return tuple(found)


_COPY = re.compile(r"^ *([\w.]+) = \1\.clone\(\)\n", re.MULTILINE)


def record_change(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """The write outside of its ``no_grad`` block, out of place; without ``.data``, to a copy; an alias made anew."""
    written = blocks.labels(diagnosis, "written")
    if any(fix.kind == "record_the_change" and fix.lines for fix in diagnosis.fixes):
        return ()
    if (diagnosis.cause == "no_grad_write" and len(written) > 1) or diagnosis.cause == "result_overwritten":
        lines = (_all_recorded(written[0]) if written else ()) or _whole_block(written)
        values = {"name": "?" if diagnosis.tensor is None else diagnosis.tensor.name or "?"}
        how = Message("help.record_the_change_how", values)
        summary = Message("help.record_the_change", values)
        fix = Fix("record_the_change", "changed", summary, how_changed=how, applicability="review", lines=lines)
        return (fix,) if lines else ()
    if diagnosis.cause != "no_grad_write" or len(written) != 1:
        return ()
    target = target_at(written[0].frame, written[0].op or "")
    if target is None:
        return ()
    found: list[Fix] = []
    record, copy, new = (
        blocks.advice(diagnosis, kind) for kind in ("record_the_change", "change_a_copy", "out_of_place")
    )
    record = record or new
    lines = _recorded(written[0], *target)
    if record is not None and lines:
        # Where autograd has saved the value, the write alone ends the run.
        alone = tuple((file, line, _COPY.sub("", text)) for file, line, text in lines)
        each = (lines, alone) if alone != lines else (lines,)
        found += [replace(record, lines=one, applicability="review") for one in each]
    # A tensor written by its own name is changed on purpose: a copy of it would have no graph.
    if copy is not None and not lines:
        for change in _new_or_copy(written[0]):
            changed = changed_lines(written[0].frame.file, change)
            found.append(replace(copy, lines=changed, applicability="review"))
    return tuple(found)


def _whole_block(written: Sequence[Label]) -> tuple[tuple[str, int, str], ...]:
    """A ``no_grad`` block that only writes to one name, recorded: a copy of it and the writes."""
    targets = [target_at(label.frame, label.op or "") for label in written]
    block = next((one[0].source.parents[one[0].statement][0] for one in targets if one is not None), None)
    if not isinstance(block, ast.With) or not blocks.switches_grad_off(block) or len(block.items) > 1:
        return ()
    found = [(one[0], one[1].node) for one in targets if one is not None]
    source, name = found[0][0].source, found[0][1]
    is_all = {place.statement for place, _ in found} == set(block.body)
    if not (is_all and isinstance(name, ast.Name) and can_rebind(source, name)) or notes_on_rebinding(source, name):
        return ()
    if any(source.text(node) != name.id for _, node in found) or not is_whole_lines(source, block):
        return ()
    first, last = source.span(block.body[0]), source.span(block)
    head = source.indent(last)
    body = textwrap.indent(textwrap.dedent("\n".join(source.lines[first.line - 1 : last.end_line])), head)
    gone = dict.fromkeys(range(last.line + 1, last.end_line + 1), "")
    return blocks.lines_changed(source, {**gone, last.line: f"{head}{name.id} = {name.id}.clone()\n{body}"})


def _all_recorded(label: Label) -> Lines:
    """A ``no_grad`` block that only writes to names, one after the other: each bound anew, and no block."""
    place = next(iter(blocks.placements(label)), None)
    block = None if place is None else place.source.parents[place.statement][0]
    if place is None or not isinstance(block, ast.With) or not blocks.switches_grad_off(block):
        return ()
    source, texts = place.source, dict[int, str]()
    if len(block.items) > 1 or not all(is_whole_lines(source, one) for one in block.body):
        return ()
    for node in block.body:
        frame = frame_of(source, node, label.frame)
        written = writing_at(frame)
        # An update by gradients is one of leaves: bound anew, they would be none.
        is_plain = written is not None and written.target.isidentifier() and not reads_gradient(frame)
        new = out_of_place(frame, written.op) if written is not None and is_plain else None
        if new is None:
            return ()
        texts |= blocks.texts_of(source, new)
    head, first, last = source.indent(source.span(block)), source.span(block.body[0]), source.span(block)
    rows = [texts.get(line, source.lines[line - 1]) for line in range(first.line, last.end_line + 1)]
    text = textwrap.indent(textwrap.dedent("\n".join(row for row in rows if row)), head)
    gone = dict.fromkeys(range(last.line + 1, last.end_line + 1), "")
    return blocks.lines_changed(source, {**gone, last.line: text})


def _new_or_copy(label: Label) -> list[Change]:
    frame, op = label.frame, label.op or ""
    name = written_expression(frame, op)
    if name is not None and name.isidentifier() and not reads_later(frame, name):
        return []  # The new value would be nobody's.
    whole = out_of_place(frame, op)
    # What kind of index it is, only a run shows.
    changes = (whole, clone_before(frame, op), part_out_of_place(frame, op) if whole is None else None)
    return [change for change in changes if change is not None]


def _recorded(label: Label, place: Expression, target: Target) -> Lines:
    source = place.source
    if not is_whole_lines(source, place.statement) or hasattr(place.statement, "body"):
        return ()
    block = source.parents[place.statement][0]
    if isinstance(block, ast.With) and blocks.switches_grad_off(block):
        if lines := _all_recorded(label):
            return lines
        new = next(iter(_new_or_copy(label)), None)
        return () if new is None else _where_grad_is_on(source, block, place.statement, new)
    change = recorded(label.frame, label.op or "")
    if change is not None and not change.notes:
        past = _reads_past_the_graph(source, place.statement)
        texts = {line: _replaced(text, past) for line, text in blocks.texts_of(source, change).items()}
        return blocks.lines_changed(source, texts)
    name = source.text(target.node)
    text = _without_data(source, place.statement, name)
    if text is None or not isinstance(target.node, ast.Name | ast.Attribute):
        return ()
    span = source.span(place.statement)
    head = source.indent(span)
    gone = dict.fromkeys(range(span.line + 1, span.end_line + 1), "")
    return blocks.lines_changed(source, {**gone, span.line: f"{head}{name} = {name}.clone()\n{head}{text}"})


def _reads_past_the_graph(source: SourceFile, statement: ast.stmt) -> dict[str, str]:
    """``w`` for each ``w.data`` and ``w.detach()`` that an augmented assignment computes with."""
    value = statement.value if isinstance(statement, ast.AugAssign) else None
    found = dict[str, str]()
    for node in ast.walk(value) if value is not None else ():
        read = node.func if isinstance(node, ast.Call) and not node.args and not node.keywords else node
        is_cut = isinstance(read, ast.Attribute) and read.attr == ("data" if read is node else "detach")
        if isinstance(node, ast.expr) and isinstance(read, ast.Attribute) and is_cut:
            found[source.text(node)] = source.text(read.value)
    return found


def _replaced(text: str, known: Mapping[str, str]) -> str:
    for old, new in known.items():
        text = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", new.replace("\\", r"\\"), text)
    return text


def _without_data(source: SourceFile, statement: ast.stmt, name: str) -> str | None:
    """The statement with ``name`` instead of ``name.data``; None where it does not read that."""
    reads = [
        node
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute) and node.attr == "data" and source.text(node.value) == name
    ]
    if not reads:
        return None
    return text_with(source, source.span(statement), [Edit(source.span(node), name) for node in reads])


def _where_grad_is_on(source: SourceFile, block: ast.With, statement: ast.stmt, new: Change) -> Lines:
    """The changed statement instead of a block that contains nothing else, else with grad mode on around it."""
    changes = blocks.texts_of(source, new)
    span, outer = source.span(statement), source.span(block)
    lines = [changes.get(line, source.lines[line - 1]) for line in range(span.line, span.end_line + 1)]
    text = "\n".join(line for line in lines if line)
    if len(block.body) == 1 and len(block.items) == 1:
        head = source.indent(outer)
        gone = dict.fromkeys(range(outer.line + 1, span.end_line + 1), "")
        return blocks.lines_changed(source, {**gone, outer.line: textwrap.indent(textwrap.dedent(text), head)})
    head = source.indent(span)
    torch = blocks.module_of(block)
    if torch is None:
        return ()
    inner = textwrap.indent(text, indentation_of(source))
    gone = dict.fromkeys(range(span.line + 1, span.end_line + 1), "")
    return blocks.lines_changed(source, {**gone, span.line: f"{head}with {torch}.enable_grad():\n{inner}"})


def list_and_stack(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """A list instead of the variable, where a loop writes into a part of it."""
    # No saved value is stale there: another name of the tensor must keep its values.
    if diagnosis.cause == "forward_alias":
        return ()
    for label in blocks.labels(diagnosis, "written"):
        change = source.list_and_stack(label.frame)
        lines = source.changed_lines(label.frame.file, change)
        if lines:
            return (blocks.fix("list_and_stack", lines),)
    return ()
