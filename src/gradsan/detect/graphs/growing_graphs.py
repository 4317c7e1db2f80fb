"""Variables whose graph reaches back over the rounds before, and sums that keep the graph of every round.

Two looks only: when one line calls backward for the 16th and the 32nd time. A variable whose graph reaches back over
nearly all of these rounds keeps them alive. Where these rounds leave that graph unchanged, it may be kept for a later
backward (forces of every sample, for one loss): it is reported at the end, if no backward has run it.

Row: ``graph_grows``. Roles: ``grown`` (the variable; ``values``: ``rounds``, ``nodes``, ``bytes``,
``bytes_per_round``), ``holder`` (the methods of its object's class that name it; ``name`` as they spell it).

Each Node of such a chain depends on the one before by the same edges, and its new terms do not depend on the one
before. That distinguishes ``total = total + loss`` from ``h = h + f(h)``, and from the state of a recurrent layer,
which the next round computes with.
"""

from __future__ import annotations

import heapq
import itertools
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.detect.gradients.lost_updates import Graph
from gradsan.graph import naming, walk
from gradsan.graph.variables import Found, search_in
from gradsan.model import Clue, Failure
from gradsan.record.detector import Detector, Run
from gradsan.record.ledger import site_that_made
from gradsan.record.stacks import symbolise
from gradsan.record.steps import BackwardRecord, RawBackward, read_backward, running_here

FIRST_LOOK, SECOND_LOOK = 16, 32
_OWN_PART = 0.1


class GrowingGraphs(Detector):
    """Checks the live graphs after some rounds of a line that calls backward."""

    def __init__(self, run: Run) -> None:
        self._core, self._backwards, self._found = run.core, run.backwards, run.report
        self._sizes: dict[tuple[int, str], tuple[int, int]] = {}
        self._awaited: list[list[Awaited]] = []

    def forget(self) -> None:
        for one in itertools.chain.from_iterable(self._awaited):
            one.graph.let_go()
        self._awaited.clear()

    def settle(self) -> None:
        """Report, as watching ends, the first of the graphs that grew together that no backward has run."""
        for grown in self._awaited:
            used = [one.kept for one in grown if one.graph.was_used]
            unused = next((one for one in grown if not one.graph.was_used and not any(map(one.is_kept_by, used))), None)
            if unused is not None:
                self._found(unused.failure)
        self.forget()

    def before_round(self, entry: RawBackward, rounds: int) -> None:
        """Check the graphs after some rounds of a line that calls backward; as ``on_round`` of the core."""
        if rounds in (FIRST_LOOK, SECOND_LOOK):
            self._look_at_graphs(entry, rounds)

    @_torch.hushed()
    def _look_at_graphs(self, entry: RawBackward, rounds: int) -> None:
        clock, stack = entry.clock, entry.stack
        past = [one for one in self._backwards.before_in_thread(clock) if one.stack is stack]
        borders = [one.sequence for one in past]
        if len(borders) < rounds - 1:
            return
        from gradsan.graph.bytecode import is_run_by_library, spaces_of_objects

        grown = self._grown(entry, rounds, borders, _groups(naming.find(sys._getframe(1), naming.has_graph)))
        if not grown and is_run_by_library(stack):
            held = _groups(search_in(spaces_of_objects(), naming.has_graph))
            grown = self._grown(entry, rounds, borders, held)
        if grown:
            self._report_grown(entry, rounds, sorted(grown, key=lambda one: one[:2]), borders[len(borders) // 2])

    def _grown(
        self, entry: RawBackward, rounds: int, borders: list[int], groups: dict[str, list[Found]]
    ) -> list[tuple[Any, ...]]:
        """Return those of the groups whose graph reaches back over the rounds and has grown since the first look."""
        grown = []
        for path, members in groups.items():
            roots = walk.roots_of(one.tensor for one in members)
            if not any(reaches_back(root, borders[len(borders) // 2]) for root in roots):
                continue
            order = walk.engine_order(roots)
            numbers = [number for number in map(_torch.node_sequence, order) if number is not None]
            covered = sum(
                any(low <= number < high for number in numbers)
                for low, high in zip([0, *borders], borders, strict=False)
            )
            if covered < 0.75 * len(borders) or is_bare_chain(order, borders[len(borders) // 2]):
                continue
            size = bytes_kept(order)
            known = self._sizes.get((id(entry.stack), path))
            self._sizes[id(entry.stack), path] = (len(order), size)
            if known is not None and len(order) > 1.3 * known[0]:
                per_round = (size - known[1]) / (SECOND_LOOK - FIRST_LOOK)
                kept = {number for number in numbers if number < borders[len(borders) // 2]}
                first = min(_torch.node_sequence(one.tensor.grad_fn) or 0 for one in members)
                grown.append((first, path, members, len(order), size, per_round, kept))
        return grown

    def _report_grown(self, entry: RawBackward, rounds: int, grown: list[Any], border: int) -> None:
        from gradsan.graph.bytecode import holder_clue

        backward, awaited = read_backward(entry), []
        ran = set(walk.engine_order(backward.roots))

        def is_another_line() -> bool:
            here = running_here(self._core)
            return here is None or here.stack is not entry.stack

        for _, path, members, nodes, size, per_round, kept in grown:
            values = {"rounds": rounds, "nodes": nodes, "bytes": size, "bytes_per_round": int(per_round)}
            made = site_that_made(self._core, members[0].tensor.grad_fn, threading.get_ident())
            clue = Clue("grown", made, name=path, values=values)
            clues = (clue, *holder_clue(path, members[0]))
            failure = Failure("graph_grows", "", "", symbolise(entry.stack), clues, raised=False)
            # ``autograd.grad`` runs only what leads to its inputs: inner steps of meta-learning wait for a backward of
            # another line.
            if backward.via == "backward" and _is_spent(backward, ran, members, border):
                self._found(failure)
                return
            awaited.append(Awaited(Graph([one.tensor for one in members], is_another_line), failure, kept))
        self._awaited.append(awaited)


class Awaited(NamedTuple):
    """A grown graph that a later backward may run; ``kept`` are the numbers of its Nodes of earlier rounds."""

    graph: Graph
    failure: Failure
    kept: set[int]

    def is_kept_by(self, used: set[int]) -> bool:
        """Whether a graph that was used holds those Nodes anyway, but for a few."""
        return len(self.kept - used) <= _OWN_PART * len(self.kept)


def _is_spent(backward: BackwardRecord, ran: set[Any], members: list[Found], border: int) -> bool:
    """Whether the graph of ``members`` is of no use after a round, or is what this backward runs over and over."""
    if any(reaches_back(root, border) for root in backward.roots):
        return True
    return not backward.retain_graph and any(one.tensor.grad_fn in ran for one in members)


def _groups(found: Iterable[Found]) -> dict[str, list[Found]]:
    """Live tensors with a graph, grouped by the container that they are elements of."""
    groups: dict[str, list[Found]] = {}
    for one in found:
        is_element = one.within is not None and one.container in naming.COLLECTING
        groups.setdefault(one.within if is_element and one.within else one.path, []).append(one)
    return groups


# Operations that add, concatenate, or weigh, as moving averages do.
_ADDING = ("Add", "Sub", "Rsub", "Cat", "Lerp", "Mul", "Div", "To", "Copy")
_DEEPEST = 3
_NODE_BYTES, _STEPS_DOWN = 400, 2_000
_MOST_LINKS = 2_000
_MOST_OF_A_ROUND = 10_000
_SAMPLED = 3


class GrowingSum(NamedTuple):
    """A chain of additions by one line; the Nodes of its last rounds, newest first.

    ``links`` counts its Nodes (``is_whole``: there are no more), ``oldest`` is the number of the last counted.
    ``rounds`` are the Nodes below the last two links, ``younger`` those of the last alone. ``taken_in`` is one Node
    of the term that the last round added.
    """

    links: int
    is_whole: bool
    oldest: int
    rounds: list[Any]
    younger: list[Any]
    taken_in: Any


def sum_of(node: Node | None, maker_of: Callable[[Any], Any]) -> GrowingSum | None:
    """Return the growing sum whose newest Node is ``node``; None where it is none.

    ``maker_of`` returns the line that made a Node, as an object that is the same for one line, None if unknown.
    """
    if node is None or not _adds(node):
        return None
    maker = maker_of(node)
    edges = None if maker is None else _edges_back(node, maker, maker_of)
    if edges is None:
        return None
    links = [node]
    while len(links) <= _MOST_LINKS:
        previous = _follow(links[-1], edges)
        if previous is None or previous.name() != node.name():
            break
        links.append(previous)
    sampled = links[: _SAMPLED + 1]
    if len(sampled) <= _SAMPLED or any(maker_of(one) is not maker for one in (*sampled[1:], links[-2])):
        return None
    younger, rounds = _between(node, links[1]), _between(node, links[2])
    if younger is None or rounds is None or [child for one in younger for child in _children(one)].count(links[1]) != 1:
        return None
    path = [_follow(node, edges[:length]) for length in range(len(edges))]
    taken_in = next((one for one in younger if not any(one is passed for passed in path)), None)
    if taken_in is None:
        return None
    oldest = _torch.node_sequence(links[-1]) or 0
    return GrowingSum(len(links), len(links) <= _MOST_LINKS, oldest, rounds, younger, taken_in)


def _adds(node: Node | None) -> bool:
    return node is not None and str(node.name()).startswith(_ADDING)


def _children(node: Node) -> list[Any]:
    return [child for child, _ in node.next_functions]


def _edges_back(node: Node, maker: Any, maker_of: Callable[[Any], Any]) -> tuple[int, ...] | None:
    """Return the edges, one after the other, from ``node`` to the Node that the same line made before."""
    waiting: list[tuple[tuple[int, ...], Any]] = [((), node)]
    for _ in range(_DEEPEST):
        further = []
        for edges, one in waiting:
            for at, child in enumerate(_children(one)):
                if not _adds(child):
                    continue
                if child.name() == node.name() and maker_of(child) is maker:
                    return (*edges, at)
                further.append(((*edges, at), child))
        waiting = further
    return None


def _follow(node: Node | None, edges: tuple[int, ...]) -> Any:
    for at in edges:
        children = [] if node is None else _children(node)
        node = children[at] if at < len(children) else None
    return node


def _between(node: Node, older: Any) -> list[Any] | None:
    """Return the Nodes below ``node`` that are younger than ``older``, itself first; None where there are many."""
    border = _torch.node_sequence(older)
    if border is None:
        return None
    found, waiting = {node: None}, [node]
    while waiting:
        for child in _children(waiting.pop()):
            number = None if child is None or child in found else _torch.node_sequence(child)
            if number is not None and number > border:
                if len(found) >= _MOST_OF_A_ROUND:
                    return None
                found[child] = None
                waiting.append(child)
    return list(found)


def bytes_kept(order: list[Node]) -> int:
    """Return about how many bytes a graph keeps: tensors its Nodes saved and still hold, and the Nodes themselves."""
    storages: dict[int, int] = {}
    for node in order:
        for _, saved in _torch.saved_slots(node):
            tensor = _torch.packed_object(saved)
            if _torch.is_tensor(tensor):
                storages[_torch.storage_or_none(tensor)] = tensor.numel() * tensor.element_size()
    return sum(storages.values()) + _NODE_BYTES * len(order)


def is_bare_chain(order: list[Node], border: int) -> bool:
    """Whether each Node since ``border`` leads to one other and saves nothing, as those of ``total + x.detach()``."""
    late = [node for node in order if (_torch.node_sequence(node) or 0) >= border]
    branches = (sum(child is not None for child, _ in node.next_functions) > 1 for node in late)
    return bytes_kept(late) == _NODE_BYTES * len(late) and not any(branches)


def reaches_back(node: Node | None, border: int) -> bool:
    """Whether a Node made before ``border`` lies below ``node``; walks down to the oldest Nodes first.

    This avoids walking the graph of the current round: Nodes that Python has touched are costly to free.
    """
    waiting: list[tuple[int, int, Any]] = [(0, 0, node)]
    seen = {node}
    for _ in range(_STEPS_DOWN):
        if not waiting:
            return False
        for child, _ in heapq.heappop(waiting)[2].next_functions:
            number = None if child is None or child in seen else _torch.node_sequence(child)
            if number is None:
                continue
            if number < border:
                return True
            seen.add(child)
            heapq.heappush(waiting, (number, len(seen), child))
    return False
