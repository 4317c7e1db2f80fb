"""Sums and lists that keep the graph of every round: ``total += loss``, evaluations that no backward uses.

The core reports when a thread has made more Nodes since the last backward than ever before. Tensors that a container
has gained from one such moment to the next, in graphs made at one place, are suspected, and so is a sum that
goes on from before the last such moment. The next backward decides: if it reaches the kept graphs, they were kept for
it; if another one runs, or watching ends, they were not. A sum that the program asserts something about is what a test
compares with, and is not reported.

Row: ``graph_grows``. Roles as in :mod:`gradsan.detect.graphs.growing_graphs`; ``grown`` with ``unused`` true in its
``values``, and ``summed`` where it is a sum.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from gradsan import _torch, source
from gradsan.graph import naming, walk
from gradsan.graph.variables import Found
from gradsan.model import Clue, Failure, Site
from gradsan.record.detector import Detector, Run
from gradsan.record.ledger import call_that_made
from gradsan.record.raw_stacks import QUIET_NODES
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward

if TYPE_CHECKING:
    from gradsan.detect.graphs.growing_graphs import GrowingSum

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
        found = list(naming.find(sys._getframe(1), naming.has_graph))
        for path, members in _containers(found).items():
            self._members[path] = len(members)
            known = before.get(path, 0)
            if known and len(members) >= max(_LEAST_MEMBERS, _GROWTH * known) and path not in self._reported:
                self._suspect(path, sorted(members, key=_number), thread)
        if border:
            self._look_at_sums(found, border, thread)

    def _look_at_sums(self, found: list[Found], border: int, thread: int) -> None:
        from gradsan.detect.graphs.growing_graphs import sum_of

        for path, one in _singles(found):
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
            if not source.is_checked(suspicion.failure.site.user_frames, path):
                self._found(suspicion.failure)

    def _suspect(self, path: str, members: list[Found], thread: int) -> None:
        from gradsan.graph.bytecode import holder_clue

        sampled = members[-_SAMPLED_ROUNDS:]
        makers = [self._maker(_number(one), thread) for one in sampled]
        if makers[0] is None or any(one is not makers[0] for one in makers):
            return
        several = walk.engine_order(walk.roots_of(one.tensor for one in sampled))
        single = walk.engine_order(walk.roots_of([sampled[0].tensor]))
        from gradsan.detect.graphs.growing_graphs import bytes_kept

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
        failure = Failure("graph_grows", "", "", site, (clue, *holder_clue(path, members[-1])), raised=False)
        self._suspicions[path] = Suspicion(failure, frozenset(map(_number, members)), makers[-1], thread)
        self._listeners.call_before_backward(self.before_backward)

    def _suspect_sum(self, path: str, found: Found, grown: GrowingSum, thread: int) -> None:
        from gradsan.detect.graphs.growing_graphs import bytes_kept
        from gradsan.graph.bytecode import holder_clue

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
        clues = (clue, *holder_clue(path, found))
        failure = Failure("graph_grows", "", "", _within(symbolise(made), found), clues, raised=False)
        self._suspicions[path] = Suspicion(failure, frozenset([newest]), maker, thread)
        self._listeners.call_before_backward(self.before_backward)

    def _maker(self, number: int | None, thread: int) -> Any:
        made = call_that_made(self._core, number, thread)
        return None if made is None else made.stack


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
