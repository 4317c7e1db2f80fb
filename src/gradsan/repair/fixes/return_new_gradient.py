"""Hooks, and the backward of Functions, that return a new gradient instead of changing the one they are given."""

from __future__ import annotations

import ast
from dataclasses import replace

from gradsan.model import Diagnosis, Fix, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Change
from gradsan.source.identifiers import local_nodes
from gradsan.source.locate import statement_at
from gradsan.source.rewrite.out_of_place import out_of_place
from gradsan.source.rewrite.scatter import part_out_of_place
from gradsan.source.rewrite.suggest import clone_before
from gradsan.source.targets import target_at


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """The write out of place, and the same write to a copy; a hook that returned nothing returns the result."""
    advice = blocks.advice(diagnosis, "return_new_gradient")
    if diagnosis.cause != "gradient_overwritten" or advice is None:
        return ()
    found: list[Fix] = []
    for label in blocks.labels(diagnosis, "written"):
        frame, op = label.frame, label.op or ""
        new = out_of_place(frame, op) or part_out_of_place(frame, op)
        for change in (new, clone_before(frame, op)):
            lines = () if change is None else _returned(label, change)
            if lines:
                found.append(replace(advice, lines=lines, applicability="review"))
    return tuple(found)


def _returned(label: Label, change: Change) -> tuple[tuple[str, int, str], ...]:
    """``change``, and at the end of a function without a result a ``return`` of what it has changed."""
    statement = statement_at(label.frame)
    target = target_at(label.frame, label.op or "")
    if statement is None or target is None:
        return ()
    source, function = statement.source, statement.function
    changes = blocks.texts_of(source, change)
    if isinstance(function, ast.FunctionDef) and not _has_result(function):
        name = target[1].node
        if not isinstance(name, ast.Name) or not blocks.is_whole_lines(source, function.body[-1]):
            return ()
        last = source.span(function.body[-1])
        indent = source.lines[source.span(function.body[0]).line - 1][: source.span(function.body[0]).column - 1]
        standing = changes.get(last.end_line, source.lines[last.end_line - 1])
        changes[last.end_line] = "\n".join(filter(None, (standing, f"{indent}return {name.id}")))
    return blocks.lines_changed(source, changes)


def _has_result(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Return) and node.value is not None for node in local_nodes(function))
