"""Graphs kept by a backward with ``retain_graph=True``, and whether another backward uses them."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

from gradsan.lint.engine.values import Node, Site


@dataclass(slots=True, eq=False)
class Kept:
    """The graphs that one call of backward keeps. ``is_sure``: all code that could use them again has been analysed."""

    site: Site
    name: str
    is_sure: bool
    nodes: set[Node] = field(default_factory=set)
    is_needed: bool = False


class RetainedGraphs:
    """Tracker of kept graphs."""

    def __init__(self) -> None:
        """Start without a kept graph."""
        self._kept: dict[ast.AST, Kept] = {}

    def any(self) -> bool:
        """Whether any graph is kept."""
        return bool(self._kept)

    def keep(self, site: Site, name: str, nodes: Iterable[Node], *, is_sure: bool) -> None:
        """Note that a backward at ``site`` keeps the graph of ``nodes``."""
        known = self._kept.setdefault(site.node, Kept(site, name, is_sure))
        known.is_sure &= is_sure
        known.nodes.update(nodes)

    def walked(self, nodes: Iterable[Node]) -> None:
        """Note that a backward runs ``nodes``: a call that kept one of them needed to."""
        for one in self._kept.values():
            one.is_needed = one.is_needed or not one.nodes.isdisjoint(nodes)

    def handed_on(self, nodes: Iterable[Node] | None = None) -> None:
        """Note that code not analysed may run ``nodes`` (None: any kept graph)."""
        for one in self._kept.values():
            if one.is_sure and (nodes is None or not one.nodes.isdisjoint(nodes)):
                one.is_sure = False

    def needless(self) -> list[Kept]:
        """The kept graphs that no later backward was seen to use."""
        return [one for one in self._kept.values() if not one.is_needed]
