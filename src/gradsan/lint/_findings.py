"""Findings of ``gradsan lint``: as they were read in a file, and as they are kept and shown, without syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Place:
    """A place that takes part: its role (``saved``, ``written``, ``used`` …), its syntax, and its function's name."""

    role: str
    node: ast.AST
    function: str


@dataclass(frozen=True, slots=True)
class Hit:
    """A fault at ``at``: its code and cause, whether it is sure, the values of its sentence, and the places around.

    ``fix`` names the change that mends it, ``""`` where none is certain; ``variant`` the sentence, where a cause has
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
        """What makes two findings one: the code and the place."""
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

    ``is_certain``: the fault is gone with them, and nothing else has changed; ``--fix`` writes such lines.
    """

    kind: str
    line: int
    old: str
    new: str
    is_certain: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault that was read in a file. ``values`` fill its sentence, ``lint.<slug>``."""

    code: str
    slug: str
    is_sure: bool
    at: Spot
    values: Mapping[str, str | int]
    spots: tuple[Spot, ...] = ()
    suggestion: Suggestion | None = field(default=None)


def as_record(finding: Finding) -> dict[str, Any]:
    """A finding as JSON can hold it."""
    return asdict(finding)


def of_record(record: Mapping[str, Any]) -> Finding:
    """The finding that :func:`as_record` wrote. Raises KeyError and TypeError for anything else."""
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
