"""Gate before any parsing: files, and lines, at which no fault can begin."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["may_be_faulty", "proofs", "triggers"]

_PROOF = re.compile(rb"requires?_gra|\bnn\b|backward|Parameter|autograd|requ\w{1,6}_g")

# Texts by which a line is known: found one by one, ten times faster than by one expression with all of them. Before or
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
    """Whether a file is worth parsing: it mentions torch, and something whose gradient could be asked for."""
    return b"torch" in data and _PROOF.search(data) is not None


def proofs(text: str) -> tuple[int, ...]:
    """The lines (from 1) at which a function with unknown arguments may come to a fault that is sure."""
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
