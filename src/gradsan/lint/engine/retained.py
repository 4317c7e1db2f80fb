"""Graphs that a backward was told to keep (``retain_graph=True``), and whether anything walks them again."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

from gradsan.lint.engine.values import Node, Site


@dataclass(slots=True, eq=False)
class Kept:
    """The graphs that one call of backward keeps. ``is_sure``: all code that could walk them again has been read."""

    site: Site
    name: str
    is_sure: bool
    nodes: set[Node] = field(default_factory=set)
    is_needed: bool = False


class RetainedGraphs:
    """Follows what becomes of graphs that are kept."""

    def __init__(self) -> None:
        """No graph is kept yet."""
        self._kept: dict[ast.AST, Kept] = {}

    def any(self) -> bool:
        """Whether any graph is kept."""
        return bool(self._kept)

    def keep(self, site: Site, name: str, nodes: Iterable[Node], *, is_sure: bool) -> None:
        """A backward at ``site`` keeps the graph that ``nodes`` are."""
        known = self._kept.setdefault(site.node, Kept(site, name, is_sure))
        known.is_sure &= is_sure
        known.nodes.update(nodes)

    def walked(self, nodes: Iterable[Node]) -> None:
        """A backward walks ``nodes``: what kept one of them was right to."""
        for one in self._kept.values():
            one.is_needed = one.is_needed or not one.nodes.isdisjoint(nodes)

    def handed_on(self, nodes: Iterable[Node] | None = None) -> None:
        """Code that is not read may walk ``nodes`` (None: anything that is kept)."""
        for one in self._kept.values():
            if one.is_sure and (nodes is None or not one.nodes.isdisjoint(nodes)):
                one.is_sure = False

    def needless(self) -> list[Kept]:
        """Those that nothing was seen to walk again."""
        return [one for one in self._kept.values() if not one.is_needed]
