"""A changed line as text, and how it is made from edits of the source."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from gradsan.source.lines import source_lines
from gradsan.source.tree import SourceFile, Span, parses

__all__ = ["Change", "Edit", "apply_change", "changed_lines", "edited", "insert_after", "insert_before", "text_with"]


@dataclass(frozen=True, slots=True)
class Change:
    """Whole source lines to replace or to add, without their last line end.

    The lines from ``line`` on that read ``old`` become ``new``; where ``old`` is empty, ``new`` is put before ``line``.
    ``kind`` names the change (``out_of_place``, ``clone_before``, ``detach`` …). ``notes`` say when binding a name
    anew does less than writing in place did:

    * ``parameter_not_returned``: a parameter which the function does not return: the caller keeps the old value
    * ``loop_variable``: the name is a loop's variable: what is looped over keeps the old values
    * ``aliased``: another name in the function stands for the same tensor and keeps the old value
    """

    line: int
    old: str
    new: str
    kind: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Edit:
    """Put ``text`` in the place of ``span``; an empty span inserts."""

    span: Span
    text: str

    @classmethod
    def insert(cls, line: int, column: int, text: str) -> Edit:
        """Insert ``text`` before ``column`` (from 1) of ``line``."""
        return cls(Span(line, column, line, column), text)


def apply_change(text: str, change: Change) -> str:
    """The source ``text`` with ``change`` made. Raises ValueError where the old lines do not stand there."""
    lines = text.split("\n")
    index = change.line - 1
    new = change.new.split("\n")
    if not change.old:
        return "\n".join([*lines[:index], *new, *lines[index:]])
    old = change.old.split("\n")
    if lines[index : index + len(old)] != old:
        raise ValueError(f"line {change.line} does not read {old[0]!r}")
    return "\n".join([*lines[:index], *new, *lines[index + len(old) :]])


def changed_lines(file: str, change: Change) -> tuple[tuple[str, int, str], ...]:
    """``change`` as ``model.Fix.lines``: (file, line, what that one line becomes), "" for a line that goes.

    An added line comes together with the line it stands before. Empty where ``file`` does not read as it should.
    """
    lines = source_lines(file)
    if not change.old:
        if change.line <= len(lines):
            return ((file, change.line, f"{change.new}\n{lines[change.line - 1]}"),)
        return ((file, len(lines), f"{lines[-1]}\n{change.new}"),) if lines else ()
    old = tuple(change.old.split("\n"))
    if lines[change.line - 1 : change.line - 1 + len(old)] != old:
        return ()
    gone = ((file, change.line + index, "") for index in range(1, len(old)))
    return ((file, change.line, change.new), *gone)


def edited(source: SourceFile, edits: Sequence[Edit], kind: str, notes: tuple[str, ...] = ()) -> Change | None:
    """The change that makes ``edits`` (which must not overlap); None where the result would not be Python."""
    if not edits:
        return None
    first = min(edit.span.line for edit in edits)
    last = max(edit.span.end_line for edit in edits)
    old = "\n".join(source.lines[first - 1 : last])
    lines = _with_edits(source, first, last, edits)
    return _checked(source, Change(first, old, "\n".join(lines), kind, notes))


def text_with(source: SourceFile, span: Span, edits: Sequence[Edit]) -> str:
    """The characters of ``span`` with ``edits`` made, all of which must lie within it and must not overlap."""
    text = "\n".join(_with_edits(source, span.line, span.end_line, edits))
    after = len(source.lines[span.end_line - 1]) - (span.end_column - 1)
    return text[span.column - 1 : len(text) - after]


def insert_before(
    source: SourceFile, statement: ast.stmt, text: str, kind: str, notes: tuple[str, ...] = ()
) -> Change | None:
    """The change that runs ``text``, a simple statement, right before ``statement``; None where there is no place."""
    span = source.span(statement)
    if isinstance(statement, ast.While) or source.slice(span).startswith("elif"):
        return None
    decorators = getattr(statement, "decorator_list", [])
    line = min([span.line, *(decorator.lineno for decorator in decorators)])
    head = source.lines[line - 1][: span.column - 1]
    if not head.strip():
        return _checked(source, Change(line, "", head + text, kind, notes))
    return edited(source, [Edit.insert(span.line, span.column, f"{text}; ")], kind, notes)


def insert_after(
    source: SourceFile, statement: ast.stmt, text: str, kind: str, notes: tuple[str, ...] = ()
) -> Change | None:
    """The change that runs ``text``, a simple statement, right after ``statement``; None after a compound one."""
    if hasattr(statement, "body") or isinstance(statement, ast.Match):
        return None
    span = source.span(statement)
    head = source.lines[span.line - 1][: span.column - 1]
    tail = source.lines[span.end_line - 1][span.end_column - 1 :].strip()
    if not head.strip() and (not tail or tail.startswith("#")):
        return _checked(source, Change(span.end_line + 1, "", head + text, kind, notes))
    return edited(source, [Edit.insert(span.end_line, span.end_column, f"; {text}")], kind, notes)


def _with_edits(source: SourceFile, first: int, last: int, edits: Sequence[Edit]) -> list[str]:
    """The lines from ``first`` to ``last`` with ``edits`` made."""
    lines = list(source.lines[first - 1 : last])
    for edit in sorted(edits, key=lambda edit: edit.span, reverse=True):
        start, end = edit.span.line - first, edit.span.end_line - first
        head, tail = lines[start][: edit.span.column - 1], lines[end][edit.span.end_column - 1 :]
        lines[start : end + 1] = (head + edit.text + tail).split("\n")
    return lines


def _checked(source: SourceFile, change: Change) -> Change | None:
    return change if parses(apply_change("\n".join(source.lines), change)) else None
