"""Reading the rows, and finding the one that a message belongs to."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Literal

Phase = Literal["statement", "backward"]

_TOML = "tomllib" if sys.version_info >= (3, 11) else "tomli"


@dataclass(frozen=True, slots=True)
class Row:
    """One message of PyTorch, in all its wordings; ``slug`` is what ``Failure.row`` calls it."""

    slug: str
    raised_as: str
    phase: Phase
    patterns: tuple[re.Pattern[str], ...]


@cache
def rows() -> tuple[Row, ...]:
    """Every row, files and rows in alphabetical order.

    Raises:
        ValueError: where two files have a row of the same slug.
    """
    found: dict[str, Row] = {}
    for source in sorted(files(__package__).iterdir(), key=lambda one: one.name):
        if not source.name.endswith(".toml"):
            continue
        tables = import_module(_TOML).loads(source.read_text(encoding="utf-8"))
        for slug, table in sorted(tables.items()):
            if slug in found:
                raise ValueError(f"{source.name} has the row {slug} again")
            patterns = tuple(re.compile(pattern, re.DOTALL) for pattern in table["patterns"])
            found[slug] = Row(slug, table["raised_as"], table["phase"], patterns)
    return tuple(found.values())


def recognise(kinds: Iterable[str], message: str) -> tuple[Row, Mapping[str, str]] | None:
    """The row that a message belongs to and the named groups found in it, or None.

    ``kinds`` are the names of the exception's class and of its bases. Groups that took no part are left out.
    """
    known = frozenset(kinds)
    for row in rows():
        if row.raised_as not in known:
            continue
        for pattern in row.patterns:
            match = pattern.search(message)
            if match is not None:
                return row, {name: value for name, value in match.groupdict().items() if value is not None}
    return None
