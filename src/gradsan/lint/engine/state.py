"""State of the abstract interpreter at a statement, and the join of two states."""

from __future__ import annotations

from collections.abc import Callable

from gradsan.lint.engine.values import Content, Memory, Node, Site, Value, Way, Write

Merge = Callable[[Value, Value, Way, tuple[Way, Way]], Value]


class State:
    """The state in which a statement is reached.

    ``names`` are variables by (frame, name), ``heap`` attributes and elements by (owner, name), ``writes`` those that
    have surely happened to each memory, ``content`` a memory's content since a write under autograd, ``freed``
    the Nodes that a backward has freed. ``grad`` says whether autograd records, ``hooked`` whether hooks of the
    program's pack the saved tensors, ``quiet`` whether nothing is reported, ``way`` the undecided choices around.
    """

    __slots__ = ("content", "freed", "grad", "heap", "hooked", "names", "quiet", "way", "writes")

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
        self.way: Way = ()

    def copy(self) -> State:
        """An independent copy of the state."""
        new = State.__new__(State)
        new.names = self.names.copy()
        new.heap = self.heap.copy()
        new.writes = self.writes.copy()
        new.content = self.content.copy()
        new.freed = self.freed.copy()
        new.grad, new.quiet, new.hooked, new.way = self.grad, self.quiet, self.hooked, self.way
        return new

    def become(self, other: State) -> None:
        """Take over the content of ``other``, which is not used any more."""
        self.names, self.heap, self.writes = other.names, other.heap, other.writes
        self.content, self.freed = other.content, other.freed
        self.grad, self.quiet, self.hooked, self.way = other.grad, other.quiet, other.hooked, other.way


def joined(
    one: State | None, other: State | None, way: Way, merge: Merge, examine: Callable[..., Content]
) -> State | None:
    """The state after two paths that end in ``one`` and ``other``; None for a path that does not end here.

    Only writes and freed Nodes of both paths are kept: those have surely happened.
    """
    if one is None or other is None:
        left = one if other is None else other
        if left is not None:
            left.way = way
        return left
    ways = (one.way, other.way)
    # Values are compared by identity; sets of pairs avoid a loop over the common entries.
    for key, value in sorted(other.names.items() - one.names.items(), key=lambda pair: pair[0]):
        mine = one.names.get(key)
        one.names[key] = value if mine is None else merge(mine, value, way, ways)
    _join_heaps(one, other, way, merge, ways)
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
    one.way = way
    return one


def _join_heaps(one: State, other: State, way: Way, merge: Merge, ways: tuple[Way, Way]) -> None:
    for place, value in other.heap.items():
        mine = one.heap.get(place)
        if mine is value:
            continue
        if mine is None:
            one.heap[place] = value
        elif isinstance(mine, tuple) and isinstance(value, tuple):
            one.heap[place] = _join_items(mine, value, way, merge, ways)
        elif isinstance(mine, frozenset) and isinstance(value, frozenset):
            one.heap[place] = mine | value
        elif isinstance(mine, int) and isinstance(value, int):
            one.heap[place] = mine if mine == value else 1
        elif isinstance(mine, dict) and isinstance(value, dict):
            both = dict(mine)
            for key, item in value.items():
                held = both.get(key)
                both[key] = item if held is None or held is item else merge(held, item, way, ways)
            one.heap[place] = both
        elif not isinstance(mine, tuple | int | dict) and not isinstance(value, tuple | int | dict):
            one.heap[place] = merge(mine, value, way, ways)  # type: ignore[arg-type]


def _join_items(
    mine: tuple[Value, ...], others: tuple[Value, ...], way: Way, merge: Merge, ways: tuple[Way, Way]
) -> tuple[Value, ...]:
    if len(mine) != len(others):
        return mine if len(mine) > len(others) else others
    return tuple(a if a is b else merge(a, b, way, ways) for a, b in zip(mine, others, strict=True))
