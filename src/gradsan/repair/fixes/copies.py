"""Copies: before the loop that writes, for a layer that works in place, on ``ctx``."""

from __future__ import annotations

import ast
from dataclasses import replace

from gradsan.diagnose.build import COLLECTED
from gradsan.model import Diagnosis, Fix, Label, Message
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.calls import clone_given
from gradsan.source.change import changed_lines
from gradsan.source.collected import is_kept_each_round
from gradsan.source.rewrite.out_of_place import out_of_place
from gradsan.source.rewrite.suggest import clone_at_save
from gradsan.source.targets import target_at
from gradsan.source.tree import SourceFile


def clone_before_loop(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """The copy before the outermost loop that does not bind the written name anew."""
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
    text = f"{head}{name} = {name}.clone()\n{source.lines[line - 1]}"
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
    """``fixes``, where a loop collects what it writes (one tensor, many times) those out of place, said so.

    A copy for the operation that saved it leaves what is collected one tensor.
    """
    written = blocks.labels(diagnosis, "written")
    is_seen = any(note.key == COLLECTED for note in diagnosis.notes)
    if not written or not (is_seen or all(_is_collected(label) for label in written)):
        return fixes
    name = diagnosis.tensor.name if diagnosis.tensor is not None else None
    anew = blocks.fix("collect_each_value", (), name=name or "?")
    said = [replace(anew, lines=one.lines) if one.kind == "out_of_place" and one.lines else one for one in fixes]
    is_told = any(one.kind == anew.kind for one in said)
    return tuple(one for one in said if not (is_told and one.kind == "clone_before_mutation"))


def _is_collected(label: Label) -> bool:
    """Whether a loop around the write keeps the written variable itself in a list or dict, round by round."""
    target = target_at(label.frame, label.op or "")
    return target is not None and is_kept_each_round(label.frame, target[0].source.text(target[1].node))


def clone_for_layer(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Where the user's code calls the layer or the function with one tensor, ``.clone()`` behind that tensor."""
    if diagnosis.cause != "inplace_module":
        return ()
    lines: list[tuple[str, int, str]] = []
    for label in blocks.labels(diagnosis, "written"):
        change = clone_given(label.frame, lambda call: next(iter(call.args), None))
        if change is None:
            return ()
        lines += changed_lines(label.frame.file, change)
    name = diagnosis.tensor.name if diagnosis.tensor is not None else None
    return (blocks.fix("clone_before_mutation", tuple(dict.fromkeys(lines)), "clone_for_layer", name=name or "?"),)


def copy_on_context(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``.clone()`` where the attribute of ``ctx`` is given its value, or the write out of place."""
    name = diagnosis.tensor.name if diagnosis.tensor is not None else None
    kept = [label for label in blocks.labels(diagnosis, "note") if label.message.key == "label.kept_here"]
    if diagnosis.cause != "context_attribute" or not kept or not name:
        return ()
    change = clone_at_save(kept[0].frame, name)
    lines = () if change is None else changed_lines(kept[0].frame.file, change)
    copied = blocks.fix("clone_before_mutation", lines, "copy_on_context", name=name)
    written = blocks.labels(diagnosis, "written")
    new = out_of_place(written[0].frame, written[0].op or "") if len(written) == 1 else None
    anew = () if new is None else changed_lines(written[0].frame.file, new)
    summary = Message("help.out_of_place", {"name": name})
    found = (copied, replace(copied, kind="out_of_place", summary=summary, lines=anew))
    return tuple(replace(fix, meaning="preserved", how_changed=None) for fix in found if fix.lines)
