"""Lists that keep a graph of every round, where no backward asks for any: an evaluation that appends its losses.

The core tells when a thread has made more Nodes since the last backward than ever before. What a container has gained
from one such moment to the next, in graphs made at one place, is suspected. The next backward settles it: one that
reaches what the container holds was what it was kept for; another one, or the end of watching, tells that it was not.

Row: ``graph_grows``. Role: ``grown`` as in :mod:`gradsan.capture.life`, with ``unused`` true in its ``values``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from gradsan.capture import _torch, graphs, naming
from gradsan.capture._core_pure import QUIET_NODES
from gradsan.capture.life import bytes_kept
from gradsan.capture.stacks import symbolise
from gradsan.capture.variables import Found
from gradsan.model import Clue, Failure, Site

_LEAST_MEMBERS = 8
_GROWTH = 1.5
_SAMPLED = 4


class Suspicion(NamedTuple):
    """A container that has grown: what to tell of it, and the numbers of the Nodes its tensors were made by."""

    failure: Failure
    numbers: frozenset[int]
    thread: int


class UnusedGraphs:
    """Looks for such containers when the core says so; ``found`` is told of those that no backward has used."""

    def __init__(self, core: Any, found: Callable[[Failure], None], ask: Callable[[], None]) -> None:
        """Start without suspicion; ``ask`` is called when the next backward has to be looked at."""
        self._core, self._found, self._ask = core, found, ask
        self._looked: tuple[int, int] = (-1, -1)
        self._members: dict[str, int] = {}
        self._suspicions: dict[str, Suspicion] = {}
        self._told: set[str] = set()

    def forget(self) -> None:
        """Begin anew, as a stretch of watching does."""
        self._looked, self._members = (-1, -1), {}
        self._suspicions.clear()
        self._told.clear()
        self._core.quiet_nodes, self._core.quiet_from = QUIET_NODES, _torch.sequence_number()

    @_torch.hushed()
    def look(self, end: int) -> None:
        """Look at the containers, ``end`` being the number of the next Node of this thread."""
        core, thread = self._core, threading.get_ident()
        if end < core.quiet_from:  # another thread, which counts for itself
            core.quiet_from = end
            return
        core.quiet_nodes = 2 * max(end - core.quiet_from, core.quiet_nodes)
        if core.running or _torch.is_compiling():
            return
        moment = (core.backwards, thread)
        before = self._members if moment == self._looked else {}
        self._looked, self._members = moment, {}
        for path, members in _containers(sys._getframe(1)).items():
            self._members[path] = len(members)
            known = before.get(path, 0)
            if known and len(members) >= max(_LEAST_MEMBERS, _GROWTH * known) and path not in self._told:
                self._suspect(path, sorted(members, key=_number), thread)

    def before_backward(self, entry: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Settle what is suspected of this thread: is it what this backward goes through?"""
        thread = threading.get_ident()
        waiting = {path: one for path, one in self._suspicions.items() if one.thread == thread}
        if not waiting:
            return
        roots = [node for one in entry[3] if (node := getattr(one, "grad_fn", None) or getattr(one, "node", None))]
        numbers = {_torch.node_sequence(node) for node in graphs.engine_order(roots)}
        for path, one in waiting.items():
            del self._suspicions[path]
            if numbers.isdisjoint(one.numbers):
                self._tell(path, one)

    def settle(self) -> None:
        """Nothing is watched any more: what is still suspected has not been used."""
        for path, one in list(self._suspicions.items()):
            del self._suspicions[path]
            self._tell(path, one)

    def _tell(self, path: str, suspicion: Suspicion) -> None:
        if path not in self._told:
            self._told.add(path)
            self._found(suspicion.failure)

    def _suspect(self, path: str, members: list[Found], thread: int) -> None:
        sampled = members[-_SAMPLED:]
        makers = [self._maker(_number(one), thread) for one in sampled]
        if makers[0] is None or any(one is not makers[0] for one in makers):
            return
        several = graphs.engine_order([one.tensor.grad_fn for one in sampled])
        single = graphs.engine_order([sampled[0].tensor.grad_fn])
        # What all of them share, parameters above all, is counted once in both.
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
        self._suspicions[path] = Suspicion(failure, frozenset(map(_number, members)), thread)
        self._ask()

    def _maker(self, number: int, thread: int) -> Any:
        near = self._core.nodes_near(number, thread)
        return next((entry[3] for entry in near if entry[0] <= number < entry[1]), None)


def _containers(frame: Any) -> dict[str, list[Found]]:
    """The tensors with a graph that lie in containers, each once, by the expression for the container."""
    found: dict[str, dict[int, Found]] = {}
    for one in naming.find(frame, lambda tensor: tensor.requires_grad and tensor.grad_fn is not None):
        if one.within is not None and one.container != "object":
            found.setdefault(one.within, {})[id(one.tensor)] = one
    return {path: list(members.values()) for path, members in found.items()}


def _number(found: Found) -> int:
    return _torch.node_sequence(found.tensor.grad_fn) or 0


def _within(site: Site, found: Found) -> Site:
    """``site`` up to the function that the container belongs to; as it is where that function is not on it."""
    for at in range(len(site.frames), 0, -1):
        frame = site.frames[at - 1]
        if (
            frame.file == found.scope.file
            and frame.function.rpartition(".")[2] == found.scope.function.rpartition(".")[2]
        ):
            return Site(site.frames[:at])
    return site
