"""Gate before any parsing: files, and lines, at which no fault can begin."""

from __future__ import annotations

import re

__all__ = ["may_be_faulty", "proofs", "triggers"]

_PROOF = re.compile(rb"requires?_gra|\bnn\b|backward|Parameter|autograd|requ\w{1,6}_g")
_TRIGGER = re.compile(
    r"[a-z0-9]_\(|[-+*/@&|^%]=|inplace|\]\s*=[^=]|backward\(|autograd\.grad|\brequ\w*_gr\w*|\bgrad\(|out=|\.step\("
)


def may_be_faulty(data: bytes) -> bool:
    """Whether a file is worth parsing: it mentions torch, and something whose gradient could be asked for."""
    return b"torch" in data and _PROOF.search(data) is not None


_SURE = re.compile(r"backward\(|\brequ\w*_gr|Parameter\(|autograd\.grad|\bgrad\(|\binplace|\.grad\b|\.step\(")


def proofs(text: str) -> tuple[int, ...]:
    """The lines (from 1) at which a function with unknown arguments may come to a fault that is sure."""
    return _lines(_SURE, text)


def triggers(text: str) -> tuple[int, ...]:
    """The lines (from 1) at which a fault may begin."""
    return _lines(_TRIGGER, text)


def _lines(pattern: re.Pattern[str], text: str) -> tuple[int, ...]:
    found: list[int] = []
    line, at = 1, 0
    for match in pattern.finditer(text):
        line += text.count("\n", at, match.start())
        at = match.start()
        if not found or found[-1] != line:
            found.append(line)
    return tuple(found)
