"""Faults that were read in a file, before they are put into words."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Hit", "Place"]


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
