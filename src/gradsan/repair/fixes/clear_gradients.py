"""Gradients that are cleared in every round: by their optimizer, or where an update by hand has used them."""

from __future__ import annotations

import ast
from dataclasses import replace

from gradsan.model import Diagnosis, Fix, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Change, changed_lines, insert_after, insert_before
from gradsan.source.inplace import is_inplace_name
from gradsan.source.locate import expressions_at
from gradsan.source.tree import SourceFile


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``zero_grad()`` before a backward that is alone in its block, and behind the step; ``w.grad = None`` by hand."""
    if diagnosis.cause != "gradient_never_cleared":
        return ()
    used = next(iter(blocks.labels(diagnosis, "used")), None)
    written = next(iter(blocks.labels(diagnosis, "written")), None)
    if used is None or written is None:
        return ()
    by_step = blocks.advice(diagnosis, "clear_by_optimizer")
    if by_step is not None:
        return _with_lines(by_step, written, _by_optimizer(used, written))
    by_hand = blocks.advice(diagnosis, "clear_gradient")
    return () if by_hand is None else _with_lines(by_hand, written, _by_hand(written))


def _with_lines(advice: Fix, label: Label, changes: list[Change]) -> tuple[Fix, ...]:
    lines = [changed_lines(label.frame.file, change) for change in changes]
    return tuple(replace(advice, lines=one, applicability="review") for one in lines if one)


def _by_optimizer(used: Label, written: Label) -> list[Change]:
    step = next(iter(blocks.placements(written)), None)
    call = None if step is None else blocks.method_call(step.statement, "step")
    if step is None or call is None or not isinstance(call.func, ast.Attribute):
        return []
    # A scaler steps with the optimizer that it is given; an optimizer may be given a closure. A run tells them apart.
    names = [*call.args[:1], call.func.value]
    index = blocks.at_block(used, step.block)
    found: list[Change | None] = []
    for name in names:
        text = f"{step.source.text(name)}.zero_grad()"
        if index is not None and index < step.index and used.frame.file == written.frame.file:
            backwards = [node for node in step.block if _runs_backward(node)]
            if len(backwards) == 1 and backwards[0] is step.block[index]:
                found.append(insert_before(step.source, backwards[0], text, "clear_gradients"))
        found.append(insert_after(step.source, step.statement, text, "clear_gradients"))
    return [change for change in found if change is not None]


def _runs_backward(node: ast.stmt) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "backward" for one in ast.walk(node))


def _by_hand(written: Label) -> list[Change]:
    """Behind the last update of the block: that of one parameter often stands beside those of the others."""
    update = next(iter(blocks.placements(written)), None)
    if update is None:
        return []
    source = update.source
    names = [name for place in expressions_at(written.frame) for name in _updated(source, place.statement)]
    last = update.statement
    for node in update.block:
        read = _gradients_read(source, node)
        more = [name for name in _updated(source, node) if name in read]
        if more:
            names += more
            last = max(last, node, key=source.span)
    text = " = ".join(f"{name}.grad" for name in dict.fromkeys(names))
    change = insert_after(source, last, f"{text} = None", "clear_gradients") if text else None
    return [] if change is None else [change]


def _gradients_read(source: SourceFile, node: ast.stmt) -> set[str]:
    attributes = [one for one in ast.walk(node) if isinstance(one, ast.Attribute) and one.attr == "grad"]
    return {source.text(one.value) for one in attributes}


def _updated(source: SourceFile, node: ast.stmt) -> list[str]:
    """What a statement updates: ``w`` of ``w -= …``, ``w.data = …``, ``w.data[0] = …`` and ``w.sub_(…)``."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.AugAssign):
        targets = [node.target]
    elif isinstance(node, ast.Assign):
        targets = [one for one in node.targets if isinstance(one, ast.Attribute | ast.Subscript)]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        if isinstance(function, ast.Attribute) and is_inplace_name(function.attr):
            targets = [function.value]
    found: list[str] = []
    for target in targets:
        while isinstance(target, ast.Subscript) or (isinstance(target, ast.Attribute) and target.attr == "data"):
            target = target.value
        if isinstance(target, ast.Name | ast.Attribute):
            found.append(source.text(target))
    return found
