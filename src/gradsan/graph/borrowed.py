"""Tensors that a loss borrows from a network which only another optimizer trains: where its graph may be cut.

Two losses share a forward, and between their backwards an optimizer has stepped. What it alone trains is *moved*; what
another optimizer trains is not. Where every path from a loss to moved parameters leads through tensors behind which
lie moved parameters only, these tensors are the border between the networks: ``fake`` of ``D(fake)``. A path that ends
at a moved parameter itself runs the network, and cannot be cut without loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradsan import _torch
from gradsan.graph import naming, walk
from gradsan.graph.naming import optimizers_alive
from gradsan.model import Bridge, Site
from gradsan.record.backwards import PastBackward
from gradsan.record.stacks import symbolise
from gradsan.record.steps import BackwardRecord

_MOVED, _OTHERS = 1, 2
_MOST = 8


def by_later_loss(
    core: Any, steps: Any, backwards: Any, backward: BackwardRecord, since: int, frame: Any
) -> tuple[Bridge, ...]:
    """The tensors that the loss of ``backward`` borrows from networks whose optimizers have stepped after ``since``.

    Empty where an earlier loss went the same way (or may have, its graph being gone): a cut would be its cut, too.
    """
    edges = _border(backward.roots, _Leaves(steps, since, backward.clock), _OTHERS, _MOVED)
    past = [one for one in backwards.before_in_thread(backward.clock) if one.clock >= since] if edges else []
    if any(_went_through(edge.younger, one) for one in past for edge in edges):
        return ()
    return _as_bridges(core, backward.thread, frame, edges)


def by_earlier_loss(
    core: Any, steps: Any, roots: Iterable[Any], since: int, backward: BackwardRecord, frame: Any
) -> tuple[Bridge, ...]:
    """The same of an earlier loss (``roots``), whose own optimizer stepped after ``since``: what others train."""
    edges = _border(tuple(roots), _Leaves(steps, since, backward.clock), _MOVED, _OTHERS)
    later = set(walk.engine_order(backward.roots)) if edges else set()
    if any(edge.younger in later for edge in edges):
        return ()
    return _as_bridges(core, backward.thread, frame, edges)


def _went_through(node: Any, past: PastBackward) -> bool:
    """Whether the graph of an earlier backward has ``node``; so too where it may have, its loss being gone."""
    roots = past.live_roots()
    if roots is None:
        return (_torch.node_sequence(node) or 0) < past.begun_at
    return node in set(walk.engine_order(roots))


def retained_for(backwards: Any, backward: BackwardRecord, since: int) -> Site | None:
    """The one backward between ``since`` and ``backward`` that kept its graph; None where none did, or several."""
    if backwards is None:
        return None
    kept = [one for one in backwards.before_in_thread(backward.clock) if one.retain_graph and one.clock > since]
    return symbolise(kept[0].stack) if len(kept) == 1 else None


class _Leaves:
    """Which leaves of a graph have moved: those of the optimizers that stepped between two moments of the clock."""

    def __init__(self, steps: Any, since: int, until: int) -> None:
        moved = {one for record in steps.steps if since < record.clock < until for one in record.storages}
        self._kinds: dict[int, int] = {}
        for optimizer in optimizers_alive() if moved else ():
            held = [_torch.storage_identity(p) for group in optimizer.param_groups for p in group["params"]]
            kind = _MOVED if held and all(one in moved for one in held) else _OTHERS
            for one in held:
                self._kinds[one] = self._kinds.get(one, 0) | kind

    def kind_of(self, leaf: Any) -> int:
        """``_MOVED`` where only stepped optimizers hold it, else ``_OTHERS``: what is updated by hand has not moved."""
        return _MOVED if self._kinds.get(_torch.storage_identity(leaf)) == _MOVED else _OTHERS


def _border(roots: tuple[Any, ...], leaves: _Leaves, own: int, borrowed: int) -> list[walk.Crossing]:
    """The edges by which Nodes that lead to ``own`` leaves take what leads to ``borrowed`` ones only; all or none."""
    reached: dict[Any, int] = {}
    order: list[Any] = []
    for root in roots:
        # A Node is decided when all its children are, so it stays on the stack below them.
        stack = [root]
        while stack:
            node = stack[-1]
            if node in reached:
                stack.pop()
                continue
            if len(reached) + len(stack) > walk.NODES_WALKED:
                return []
            leaf = getattr(node, "variable", None)
            children = [child for child, _ in node.next_functions if child is not None]
            waiting = [child for child in children if child not in reached]
            if waiting and leaf is None:
                stack.extend(waiting)
                continue
            kinds = leaves.kind_of(leaf) if _torch.is_tensor(leaf) else 0
            for child in children:
                kinds |= reached[child]
            reached[node] = kinds
            order.append(node)
            stack.pop()
    return [
        walk.Crossing(node, child, output)
        for node in order
        if reached[node] & own
        for child, output in node.next_functions
        if child is not None and reached[child] == borrowed
    ]


def _as_bridges(core: Any, thread: int, frame: Any, edges: list[walk.Crossing]) -> tuple[Bridge, ...]:
    """The border as data; empty where a parameter itself lies on it, or it has too many parts to be two networks'."""
    found: list[Bridge] = []
    waiting = list(edges)
    looked_at: set[tuple[Any, int]] = set()
    while waiting:
        edge = waiting.pop(0)
        if _torch.is_tensor(getattr(edge.older, "variable", None)) or len(looked_at) > _MOST:
            return ()
        taken, made = (sites_near(core, node, thread) for node in (edge.younger, edge.older))
        if taken and made and _line(taken[0]) == _line(made[0]):
            # ``D(torch.cat([real, fake]))``: what this line itself has computed has no name; what it took has.
            inner = (walk.Crossing(edge.older, child, output) for child, output in edge.older.next_functions if child)
            fresh = [one for one in inner if (one.older, one.output) not in looked_at]
            looked_at.update((one.older, one.output) for one in fresh)
            waiting += fresh
            continue
        name = naming.name_of_output(edge.older, frame)
        found.append(Bridge(edge.older.name(), edge.younger.name(), name, taken, made))
    return tuple(found) if len(found) <= _MOST else ()


def _line(site: Site) -> tuple[tuple[str, int], ...]:
    return tuple((frame.file, frame.line) for frame in site.frames if frame.is_user)


def sites_near(core: Any, node: Any, thread: int) -> tuple[Site, ...]:
    """Where a Node was made; where the call that made it was not watched, the calls before and after it."""
    number = _torch.node_sequence(node)
    return () if number is None else tuple(symbolise(entry[3]) for entry in core.nodes_near(number, thread))
