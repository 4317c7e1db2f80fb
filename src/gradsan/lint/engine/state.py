"""State of the abstract interpreter at a statement, the join of two states, and the graphs that a backward has kept."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gradsan.lint.engine.values import Branches, Content, Memory, Node, Site, Value, Write

Merge = Callable[[Value, Value, Branches, tuple[Branches, Branches]], Value]


class State:
    """The state in which a statement is reached.

    ``names`` are variables by (frame, name), ``heap`` attributes and elements by (owner, name), ``writes`` those that
    have surely happened to each memory, ``content`` a memory's content since a write under autograd, ``freed``
    the Nodes that a backward has freed. ``grad`` says whether autograd records, ``hooked`` whether hooks of the
    program's pack the saved tensors, ``quiet`` whether nothing is reported, ``branches`` the undecided choices around.
    """

    __slots__ = ("branches", "content", "freed", "grad", "heap", "hooked", "names", "quiet", "writes")

    def __init__(self) -> None:
        """An empty state, with autograd on."""
        self.names: dict[tuple[int, str], Value] = {}
        self.heap: dict[tuple[object, str], object] = {}
        self.writes: dict[Memory, tuple[Write, ...]] = {}
        self.content: dict[Memory, Content] = {}
        self.freed: dict[Node, Site] = {}
        self.grad = True
        self.quiet = False
        self.hooked = False
        self.branches: Branches = ()

    def copy(self) -> State:
        """An independent copy of the state."""
        new = State.__new__(State)
        new.names = self.names.copy()
        new.heap = self.heap.copy()
        new.writes = self.writes.copy()
        new.content = self.content.copy()
        new.freed = self.freed.copy()
        new.grad, new.quiet, new.hooked, new.branches = self.grad, self.quiet, self.hooked, self.branches
        return new

    def become(self, other: State) -> None:
        """Take over the content of ``other``, which is not used any more."""
        self.names, self.heap, self.writes = other.names, other.heap, other.writes
        self.content, self.freed = other.content, other.freed
        self.grad, self.quiet, self.hooked, self.branches = other.grad, other.quiet, other.hooked, other.branches


def joined(
    one: State | None, other: State | None, branches: Branches, merge: Merge, examine: Callable[..., Content]
) -> State | None:
    """The state after two paths that end in ``one`` and ``other``; None for a path that does not end here.

    Only writes and freed Nodes of both paths are kept: those have surely happened.
    """
    if one is None or other is None:
        left = one if other is None else other
        if left is not None:
            left.branches = branches
        return left
    sides = (one.branches, other.branches)
    # Values are compared by identity; sets of pairs avoid a loop over the common entries.
    for key, value in sorted(other.names.items() - one.names.items(), key=lambda pair: pair[0]):
        mine = one.names.get(key)
        one.names[key] = value if mine is None else merge(mine, value, branches, sides)
    _join_heaps(one, other, branches, merge, sides)
    if one.writes != other.writes:
        for memory in one.writes.keys() | other.writes.keys():
            mine_writes, others = one.writes.get(memory, ()), other.writes.get(memory, ())
            if mine_writes is not others:
                one.writes[memory] = tuple(write for write in mine_writes if write in others)
    for memory, content in other.content.items():
        held = one.content.get(memory)
        if held is not content:
            one.content[memory] = content if held is None else examine(held, content)
    if one.freed is not other.freed:
        one.freed = {node: site for node, site in one.freed.items() if node in other.freed}
    one.grad = one.grad and other.grad
    one.branches = branches
    return one


def _join_heaps(one: State, other: State, branches: Branches, merge: Merge, sides: tuple[Branches, Branches]) -> None:
    for place, value in other.heap.items():
        mine = one.heap.get(place)
        if mine is value:
            continue
        if mine is None:
            one.heap[place] = value
        elif isinstance(mine, tuple) and isinstance(value, tuple):
            one.heap[place] = _join_items(mine, value, branches, merge, sides)
        elif isinstance(mine, frozenset) and isinstance(value, frozenset):
            one.heap[place] = mine | value
        elif isinstance(mine, int) and isinstance(value, int):
            one.heap[place] = mine if mine == value else 1
        elif isinstance(mine, dict) and isinstance(value, dict):
            both = dict(mine)
            for key, item in value.items():
                held = both.get(key)
                both[key] = item if held is None or held is item else merge(held, item, branches, sides)
            one.heap[place] = both
        elif not isinstance(mine, tuple | int | dict) and not isinstance(value, tuple | int | dict):
            one.heap[place] = merge(mine, value, branches, sides)  # type: ignore[arg-type]


def _join_items(
    mine: tuple[Value, ...],
    others: tuple[Value, ...],
    branches: Branches,
    merge: Merge,
    sides: tuple[Branches, Branches],
) -> tuple[Value, ...]:
    if len(mine) != len(others):
        return mine if len(mine) > len(others) else others
    return tuple(a if a is b else merge(a, b, branches, sides) for a, b in zip(mine, others, strict=True))


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
