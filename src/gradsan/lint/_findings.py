"""Findings of ``gradsan lint``: with syntax trees as analysed, and without them as stored and shown."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Place:
    """A place involved in a fault: its role (``saved``, ``written``, ``used`` …), its syntax, its function's name."""

    role: str
    node: ast.AST
    function: str


@dataclass(frozen=True, slots=True)
class Hit:
    """A fault at ``at``: its code and cause, whether it is certain, the values of its sentence, and other places.

    ``fix`` names the change that repairs it, ``""`` where none is certain; ``variant`` the sentence, where a cause has
    several.
    """

    code: str
    slug: str
    at: Place
    is_sure: bool
    values: Mapping[str, object] = field(default_factory=dict)
    places: tuple[Place, ...] = ()
    fix: str = ""
    variant: str = ""

    @property
    def key(self) -> tuple[str, int, int]:
        """The key of equal findings: the code and the position."""
        node = self.at.node
        return self.code, getattr(node, "lineno", 1), getattr(node, "col_offset", 0)


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in the linted file: its role, and lines and columns in characters from 1, the end exclusive."""

    role: str
    line: int
    column: int
    end_line: int
    end_column: int
    function: str


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Whole lines to change: those from ``line`` on that read ``old`` become ``new``.

    ``is_certain``: they remove the fault and change nothing else; ``--fix`` writes such lines.
    """

    kind: str
    line: int
    old: str
    new: str
    is_certain: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault found in a file. ``values`` fill its sentence, ``lint.<slug>``."""

    code: str
    slug: str
    is_sure: bool
    at: Spot
    values: Mapping[str, str | int]
    spots: tuple[Spot, ...] = ()
    suggestion: Suggestion | None = field(default=None)


def as_record(finding: Finding) -> dict[str, Any]:
    """A finding as JSON data."""
    return asdict(finding)


def of_record(record: Mapping[str, Any]) -> Finding:
    """The finding from a record of :func:`as_record`. Raises KeyError and TypeError for anything else."""
    suggestion = record["suggestion"]
    return Finding(
        record["code"],
        record["slug"],
        record["is_sure"],
        Spot(**record["at"]),
        record["values"],
        tuple(Spot(**one) for one in record["spots"]),
        None if suggestion is None else Suggestion(**suggestion),
    )
