"""Catalogue of PyTorch's autograd error messages, by structure and not by version.

Rows are in the ``*.toml`` files of this folder, one table per row; the file's name is its topic. A row has

* ``raised_as``: the exception's or warning's class (``RuntimeError``, ``UserWarning``); subclasses count too;
* ``patterns``: regular expressions for the wordings of all PyTorch versions from 2.6 on, searched for in the message;
  the groups of the one that matches become ``Failure.values``;
* ``raised_in``: instead of patterns, where the program chooses the words, the functions of torch that raise them
  (``torch/autograd/graph.py:__enter__``); the words become the value ``message``.

It reads no program and imports no torch. ``tests/catalogue`` matches the patterns with messages that the installed
torch raises and with recorded ones of older versions.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path

__all__ = ["VERSION_CHECK", "Row", "comes_from_autograd", "is_of_autograd", "place_raised", "recognise", "rows"]


_GRADSAN = str(Path(__file__).resolve().parent.parent) + os.sep
_TOML = "tomllib" if sys.version_info >= (3, 11) else "tomli"


@dataclass(frozen=True, slots=True)
class Row:
    """One message of PyTorch, in all its wordings; ``slug`` is its name in ``Failure.row``.

    ``raised_in``: where the program chooses the words, the functions that raise them, as :func:`place_raised` returns
    them.
    """

    slug: str
    raised_as: str
    patterns: tuple[re.Pattern[str], ...]
    raised_in: tuple[str, ...] = ()


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
            patterns = tuple(re.compile(pattern, re.DOTALL) for pattern in table.get("patterns", ()))
            found[slug] = Row(slug, table["raised_as"], patterns, tuple(table.get("raised_in", ())))
    return tuple(found.values())


def place_raised(error: BaseException) -> str:
    """The file and function of the innermost frame that an exception passed through: ``torch/_tensor.py:backward``.

    For torch's files the path from torch's folder on. gradsan's own frames do not count; empty
    where there is no other.
    """
    place = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(_GRADSAN):
            _, found, within = code.co_filename.replace("\\", "/").rpartition("/torch/")
            place = f"{found[1:]}{within}:{code.co_name}"
        trace = trace.tb_next
    return place


def recognise(kinds: Iterable[str], message: str, raised_in: str = "") -> tuple[Row, Mapping[str, str]] | None:
    """The row that a message belongs to and the named groups found in it, or None.

    ``kinds`` are the names of the exception's class and of its bases, ``raised_in`` the result of :func:`place_raised`
    for it; the words are matched first. Groups that did not participate are left out.
    """
    known = frozenset(kinds)
    for row in rows():
        if row.raised_as not in known:
            continue
        for pattern in row.patterns:
            match = pattern.search(message)
            if match is not None:
                return row, {name: value for name, value in match.groupdict().items() if value is not None}
    here = (row for row in rows() if row.raised_as in known and raised_in in row.raised_in)
    return next(((row, {"message": message}) for row in here), None)


# The start of the version check's own message, which needs no row: the causes explain it.
VERSION_CHECK = "one of the variables needed for gradient computation has been modified by an inplace operation"


def is_of_autograd(error: BaseException) -> bool:
    """Whether ``error`` is the version check's or one that the catalogue knows."""
    if isinstance(error, RuntimeError) and str(error).startswith(VERSION_CHECK):
        return True
    return recognise([kind.__name__ for kind in type(error).__mro__], str(error), place_raised(error)) is not None


def comes_from_autograd(error: BaseException) -> bool:
    """Whether ``error``, or one that it was raised from (``raise TrainingFailed() from error``), is autograd's."""
    seen: set[int] = set()
    looked_at: BaseException | None = error
    while looked_at is not None and id(looked_at) not in seen:
        if is_of_autograd(looked_at):
            return True
        seen.add(id(looked_at))
        looked_at = looked_at.__cause__
    return False
