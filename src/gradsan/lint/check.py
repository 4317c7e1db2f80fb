"""Check of one file: a text search before any parsing, the analysis, and the findings with their fixing lines."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gradsan._collector import CollectorPaused
from gradsan.lint._findings import Finding, Hit, Place, Spot
from gradsan.lint.engine.program import read
from gradsan.lint.mending import suggestion_for

_PROOF = re.compile(rb"requires?_gra|\bnn\b|backward|arameter|autograd|requ\w{1,6}_g")

# Literals that mark a line: searched one by one, ten times faster than by one expression with all of them. Before or
# after some of them a letter, digit or underscore must stand ("+"), or must not ("-").
_TRIGGERS = (
    *(("", f"{sign}=", "") for sign in "-+*/@&|^%"),
    ("", "inplace", ""),
    ("", "backward(", ""),
    ("", "autograd.grad", ""),
    ("-", "grad(", ""),
    ("", "out=", ""),
    ("", ".step(", ""),
    ("+", "_(", ""),
)
_SURE = (
    ("", "backward(", ""),
    ("", "Parameter(", ""),
    ("", "autograd.grad", ""),
    ("-", "grad(", ""),
    ("-", "inplace", ""),
    ("", ".grad", "-"),
    ("", ".step(", ""),
)
_FILLED = re.compile(r"\]\s*=[^=]")
_REQUIRING = re.compile(r"requ\w*_gr")


def may_be_faulty(data: bytes) -> bool:
    """Whether a file is worth parsing: it mentions torch, and something that may compute gradients."""
    return b"torch" in data and _PROOF.search(data) is not None


def proofs(text: str) -> tuple[int, ...]:
    """The lines (from 1) at which a function with unknown arguments may have a certain fault."""
    return _lines(text, [*_places(text, _SURE), *_starts(_REQUIRING, text)])


def triggers(text: str) -> tuple[int, ...]:
    """The lines (from 1) at which a fault may begin."""
    return _lines(text, [*_places(text, _TRIGGERS), *_starts(_REQUIRING, text), *_starts(_FILLED, text)])


def _starts(pattern: re.Pattern[str], text: str) -> Iterator[int]:
    return (match.start() for match in pattern.finditer(text))


def _places(text: str, wanted: tuple[tuple[str, str, str], ...]) -> Iterator[int]:
    for before, literal, after in wanted:
        at = text.find(literal)
        while at >= 0:
            end = at + len(literal)
            if _fits(before, text[at - 1 : at]) and _fits(after, text[end : end + 1]):
                yield at
            at = text.find(literal, end)


def _fits(rule: str, character: str) -> bool:
    return not rule or (character.isalnum() or character == "_") == (rule == "+")


def _lines(text: str, places: list[int]) -> tuple[int, ...]:
    found: list[int] = []
    line, last = 1, 0
    for at in sorted(places):
        line += text.count("\n", last, at)
        last = at
        if not found or found[-1] != line:
            found.append(line)
    return tuple(found)


_UNPROVEN = frozenset({"GS401", "GS402", "GS404", "GS405", "GS409", "GS705"})
"""Codes that are never certain: of 19 such hits on unseen sources, one was right (docs/how-to/lint.md).

They depend on the use of a graph by other files' functions.
"""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result for a file; ``problem`` says why it could not be read, ``lines`` counts its lines."""

    findings: tuple[Finding, ...] = ()
    lines: int = 0
    problem: str | None = None


def check(data: bytes, file: str, *, maybe: bool = False) -> Checked:
    """The faults in the source ``data`` of ``file``; the file itself is read only where lines are to be suggested.

    With ``maybe`` also the uncertain ones.
    """
    count = data.count(b"\n")
    if not may_be_faulty(data):
        return Checked(lines=count)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = io.StringIO(data.decode(encoding), newline=None).read()
    except (SyntaxError, LookupError, UnicodeDecodeError) as problem:
        return Checked(lines=count, problem=str(problem))
    lines = triggers(text)
    if not lines and ".parameters()" not in text:
        return Checked(lines=count)
    try:
        # A syntax tree is many small objects, none of which is garbage yet.
        with CollectorPaused(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            known = read(ast.parse(text), lines, None if maybe else proofs(text))
            hits = [replace(hit, is_sure=False) if hit.code in _UNPROVEN else hit for hit in known]
    except (SyntaxError, ValueError, RecursionError) as problem:
        return Checked(lines=count, problem=str(problem).replace("(<unknown>, line", "(line"))
    rows = text.split("\n") if hits else []
    found = [_finding(hit, rows, file) for hit in _one_a_place(hits) if hit.is_sure or maybe]
    return Checked(tuple(sorted(found, key=lambda one: (one.at.line, one.at.column, one.code))), count)


def _one_a_place(hits: list[Hit]) -> list[Hit]:
    """Of several faults at one place, the certain one before the possible one, then the lower code."""
    kept: dict[tuple[int, int], Hit] = {}
    for hit in sorted(hits, key=lambda one: (not one.is_sure, one.code)):
        kept.setdefault(hit.key[1:], hit)
    return list(kept.values())


def _finding(hit: Hit, rows: list[str], file: str) -> Finding:
    at = _spot(hit.at, rows)
    spots = tuple(_spot(place, rows) for place in hit.places)
    values = {name: value if isinstance(value, int) else str(value) for name, value in hit.values.items()}
    suggestion = suggestion_for(hit, at, file) if hit.fix and hit.is_sure else None
    return Finding(hit.code, hit.slug, hit.is_sure, at, values, spots, suggestion)


def _spot(place: Place, rows: list[str]) -> Spot:
    node = place.node
    line: int = getattr(node, "lineno", 1)
    # For a statement with a block, its first line.
    has_block = isinstance(getattr(node, "body", None), list)
    end_line: int = line if has_block else getattr(node, "end_lineno", None) or line
    end: int = getattr(node, "end_col_offset", None) or 0
    column = _characters(rows, line, getattr(node, "col_offset", 0))
    end_column = len(rows[line - 1]) + 1 if has_block else _characters(rows, end_line, end)
    return Spot(place.role, line, column, end_line, max(end_column, 1), place.function)


def _characters(rows: list[str], line: int, offset: int) -> int:
    """The column, in characters from 1, at byte ``offset`` of ``line``."""
    row = rows[line - 1] if line <= len(rows) else ""
    return offset + 1 if row.isascii() else len(row.encode()[:offset].decode("utf-8", "replace")) + 1
