"""Sums and lists that keep the graph of every round: ``total += loss``, evaluations that no backward uses.

Such a sum is a chain of Nodes that one line made, each depending on the one before by the same edges; and its
new terms do not depend on the one before. That distinguishes ``total = total + loss`` from ``h = h + f(h)``, and from
the state of a recurrent layer, which the next round computes with.

The core reports when a thread has made more Nodes since the last backward than ever before. Tensors that a container
has gained from one such moment to the next, in graphs made at one place, are suspected, and so is a sum that
goes on from before the last such moment. The next backward decides: if it reaches the kept graphs, they were kept for
it; if another one runs, or watching ends, they were not.

Row: ``graph_grows``. Role: ``grown`` as in :mod:`gradsan.detect.life`, with ``unused`` true in its ``values``, and
``summed`` where it is a sum.
"""

from __future__ import annotations

import heapq
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.graph import naming, walk
from gradsan.graph.variables import Found
from gradsan.model import Clue, Failure, Site
from gradsan.record._core_pure import QUIET_NODES
from gradsan.record.detector import Detector, Run
from gradsan.record.ledger import call_that_made
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward

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
    way = None if maker is None else _way_back(node, maker, maker_of)
    if way is None:
        return None
    links = [node]
    while len(links) <= _MOST_LINKS:
        previous = _follow(links[-1], way)
        if previous is None or previous.name() != node.name():
            break
        links.append(previous)
    sampled = links[: _SAMPLED + 1]
    if len(sampled) <= _SAMPLED or any(maker_of(one) is not maker for one in (*sampled[1:], links[-2])):
        return None
    younger, rounds = _between(node, links[1]), _between(node, links[2])
    if younger is None or rounds is None or [child for one in younger for child in _children(one)].count(links[1]) != 1:
        return None
    taken_in = next((one for one in younger if one is not node and not _is_on_way(node, one, way)), None)
    if taken_in is None:
        return None
    oldest = _torch.node_sequence(links[-1]) or 0
    return GrowingSum(len(links), len(links) <= _MOST_LINKS, oldest, rounds, younger, taken_in)


def _adds(node: Node | None) -> bool:
    return node is not None and str(node.name()).startswith(_ADDING)


def _children(node: Node) -> list[Any]:
    return [child for child, _ in node.next_functions]


def _way_back(node: Node, maker: Any, maker_of: Callable[[Any], Any]) -> tuple[int, ...] | None:
    """Return the edges, one after the other, from ``node`` to the Node that the same line made before."""
    ways: list[tuple[tuple[int, ...], Any]] = [((), node)]
    for _ in range(_DEEPEST):
        further = []
        for way, one in ways:
            for at, child in enumerate(_children(one)):
                if not _adds(child):
                    continue
                if child.name() == node.name() and maker_of(child) is maker:
                    return (*way, at)
                further.append(((*way, at), child))
        ways = further
    return None


def _follow(node: Node | None, way: tuple[int, ...]) -> Any:
    for at in way:
        children = [] if node is None else _children(node)
        node = children[at] if at < len(children) else None
    return node


def _is_on_way(node: Node, other: Any, way: tuple[int, ...]) -> bool:
    return any(_follow(node, way[:length]) is other for length in range(1, len(way)))


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


_LEAST_MEMBERS = 8
_GROWTH = 1.5
_SAMPLED_ROUNDS = 4


class Suspicion(NamedTuple):
    """A grown container or sum: its report, the numbers of its tensors' Nodes, and the stack that made the last."""

    failure: Failure
    numbers: frozenset[int]
    maker: Any
    thread: int


class UnusedGraphs(Detector):
    """Searches for such containers when the core reports; ``found`` is called with those that no backward has used."""

    def __init__(self, run: Run) -> None:
        self._core, self._found, self._listeners = run.core, run.report, run.listeners
        self._looked: tuple[int, int] = (-1, -1)
        self._end = 0
        self._members: dict[str, int] = {}
        self._suspicions: dict[str, Suspicion] = {}
        self._reported: set[str] = set()

    def forget(self) -> None:
        self._looked, self._members = (-1, -1), {}
        self._suspicions.clear()
        self._reported.clear()
        self._core.quiet_nodes, self._core.quiet_from = QUIET_NODES, _torch.sequence_number()

    @_torch.hushed()
    def look(self, end: int) -> None:
        """Check the containers; ``end`` is the number of the next Node of this thread."""
        core, thread = self._core, threading.get_ident()
        if end < core.quiet_from:  # another thread, which has its own numbers
            core.quiet_from = end
            return
        core.quiet_nodes = 2 * max(end - core.quiet_from, core.quiet_nodes)
        if core.running or _torch.is_compiling():
            return
        moment = (core.backwards, thread)
        before = self._members if moment == self._looked else {}
        border, self._end = self._end if moment == self._looked else 0, end
        self._looked, self._members = moment, {}
        found = _with_graph(sys._getframe(1))
        for path, members in _containers(found).items():
            self._members[path] = len(members)
            known = before.get(path, 0)
            if known and len(members) >= max(_LEAST_MEMBERS, _GROWTH * known) and path not in self._reported:
                self._suspect(path, sorted(members, key=_number), thread)
        for path, one in _singles(found) if border else ():
            grown = (
                None
                if path in self._reported
                else sum_of(one.tensor.grad_fn, lambda node: self._maker(_torch.node_sequence(node), thread))
            )
            if grown is not None and grown.links >= _LEAST_MEMBERS and grown.oldest < border:
                self._suspect_sum(path, one, grown, thread)

    def before_backward(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decide the suspicions of this thread by whether this backward runs the kept graphs."""
        thread = threading.get_ident()
        waiting = {path: one for path, one in self._suspicions.items() if one.thread == thread}
        if not waiting:
            return
        roots = [node for one in entry.outputs if (node := getattr(one, "grad_fn", None) or getattr(one, "node", None))]
        numbers = {_torch.node_sequence(node) for node in walk.engine_order(roots)}
        for path, one in waiting.items():
            del self._suspicions[path]
            if numbers.isdisjoint(one.numbers) and not self._goes_through(numbers, one):
                self._report(path, one)

    def _goes_through(self, numbers: set[int | None], suspicion: Suspicion) -> bool:
        """Whether the backward runs Nodes that are younger than the suspected ones and made at the same place."""
        younger = sorted((one for one in numbers if one is not None and one > max(suspicion.numbers)), reverse=True)
        return any(self._maker(number, suspicion.thread) is suspicion.maker for number in younger)

    def settle(self) -> None:
        """Report, as watching ends, the suspected graphs, since none has been used."""
        for path, one in list(self._suspicions.items()):
            del self._suspicions[path]
            self._report(path, one)

    def _report(self, path: str, suspicion: Suspicion) -> None:
        if path not in self._reported:
            self._reported.add(path)
            self._found(suspicion.failure)

    def _suspect(self, path: str, members: list[Found], thread: int) -> None:
        sampled = members[-_SAMPLED_ROUNDS:]
        makers = [self._maker(_number(one), thread) for one in sampled]
        if makers[0] is None or any(one is not makers[0] for one in makers):
            return
        several = walk.engine_order(walk.roots_of(one.tensor for one in sampled))
        single = walk.engine_order(walk.roots_of([sampled[0].tensor]))
        # Parts shared by all of them, parameters above all, are counted once in both.
        rounds = len(sampled) - 1
        size = (bytes_kept(several) - bytes_kept(single)) // rounds
        nodes = (len(several) - len(single)) // rounds
        if nodes < 1:
            return
        values = {
            "rounds": len(members),
            "nodes": nodes * len(members),
            "bytes": size * len(members),
            "bytes_per_round": size,
            "unused": True,
        }
        site = _within(symbolise(makers[0]), members[-1])
        clue = Clue("grown", site, name=path, values=values)
        failure = Failure("graph_grows", "", "", site, (clue,), raised=False)
        self._suspicions[path] = Suspicion(failure, frozenset(map(_number, members)), makers[-1], thread)
        self._listeners.call_before_backward(self.before_backward)

    def _suspect_sum(self, path: str, found: Found, grown: GrowingSum, thread: int) -> None:
        newest = _number(found)
        nodes = len(grown.rounds) - len(grown.younger)
        # Uncounted rounds are assumed to have made as many Nodes each as the counted ones.
        uncounted = (
            0 if grown.is_whole else (grown.oldest - self._core.quiet_from) * grown.links // (newest - grown.oldest)
        )
        rounds = grown.links + max(uncounted, 0)
        size = bytes_kept(grown.rounds) - bytes_kept(grown.younger)
        values = {
            "rounds": rounds,
            "nodes": nodes * rounds,
            "bytes": size * rounds,
            "bytes_per_round": size,
            "unused": True,
            "summed": True,
        }
        maker = self._maker(newest, thread)
        made = self._maker(_torch.node_sequence(grown.taken_in), thread) or maker
        clue = Clue("grown", _within(symbolise(maker), found), name=path, values=values)
        failure = Failure("graph_grows", "", "", _within(symbolise(made), found), (clue,), raised=False)
        self._suspicions[path] = Suspicion(failure, frozenset([newest]), maker, thread)
        self._listeners.call_before_backward(self.before_backward)

    def _maker(self, number: int | None, thread: int) -> Any:
        made = call_that_made(self._core, number, thread)
        return None if made is None else made.stack


def _with_graph(frame: FrameType) -> list[Found]:
    """Return the live tensors with a graph."""
    return list(naming.find(frame, naming.has_graph))


def _containers(found: list[Found]) -> dict[str, list[Found]]:
    """Return the tensors in containers, each once, by the expression for the container."""
    members: dict[str, dict[int, Found]] = {}
    for one in found:
        if one.within is not None and one.container != "object":
            members.setdefault(one.within, {})[id(one.tensor)] = one
    return {path: list(tensors.values()) for path, tensors in members.items()}


def _singles(found: list[Found]) -> Iterator[tuple[str, Found]]:
    """Yield each tensor once, by the first expression for it; none of containers with many."""
    counts = Counter(one.within for one in found if one.container not in (None, "object"))
    seen: set[int] = set()
    for one in found:
        if counts[one.within] < _LEAST_MEMBERS and id(one.tensor) not in seen:
            seen.add(id(one.tensor))
            yield one.path, one


def _number(found: Found) -> int:
    return _torch.node_sequence(found.tensor.grad_fn) or 0


def _within(site: Site, found: Found) -> Site:
    """Return ``site`` up to the function that the container belongs to; unchanged if it is not on the stack."""
    for at in range(len(site.frames), 0, -1):
        frame = site.frames[at - 1]
        if (
            frame.file == found.scope.file
            and frame.function.rpartition(".")[2] == found.scope.function.rpartition(".")[2]
        ):
            return Site(site.frames[:at])
    return site


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
