"""Variables whose graph reaches back over the rounds before, and so keeps all of them alive.

Two looks only: when one line calls backward for the 16th and the 32nd time. A variable whose graph reaches back over
nearly all of these rounds keeps them alive. Where these rounds leave that graph unchanged, it may be kept for a later
backward (forces of every sample, for one loss): it is reported at the end, if no backward has run it.

Row: ``graph_grows``. Roles: ``grown`` (the variable; ``values``: ``rounds``, ``nodes``, ``bytes``,
``bytes_per_round``), ``holder`` (the methods of its object's class that name it; ``name`` as they spell it).
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

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
        from gradsan.detect.graphs.growing_sums import bytes_kept, is_bare_chain, reaches_back

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
    from gradsan.detect.graphs.growing_sums import reaches_back

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
