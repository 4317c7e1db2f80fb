"""Values computed once from parameters, and read in every round with their old values: ``weight = base + delta``.

Operations that save nothing of the parameters leave no saved tensor to become stale, and no graph that a first
backward could free: such a value is differentiated again and again, while the parameters have moved on. So are casts
that ``autocast`` caches until its end. Checked at the 4th, 8th and 16th backward of a line: an
operation of this round computes with the result of one made three rounds before or more, and a parameter behind that
has been updated in each of these rounds. A view of a parameter shows its current values. A term that is only added
to the loss has the same gradient now; and a value may be refilled under ``no_grad``.

Row: ``value_built_once``. Roles: ``built`` (its site; ``name``; ``values``: ``shape``, ``dtype``, ``device``,
``is_cast``, whether only ``autocast`` holds it), ``updated`` (the last update; ``name`` of the optimizer or function),
``read``.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.detect.meaning.terms.constant_terms import linear_below
from gradsan.graph import naming, walk
from gradsan.model import Clue
from gradsan.record.backwards import PastBackward
from gradsan.record.detector import Finder, Run
from gradsan.record.ledger import call_that_made, site_that_made
from gradsan.record.log import RawCall, logged_writes
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward, read_backward

ROW = "value_built_once"
_ROUNDS, _PASSED = (4, 8, 16), 3
_CAST, _MOST_LOOKED_AT = "ToCopyBackward0", 500


class StaleValues(Finder):
    """Checks the graphs of a few rounds; findings go to ``found``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._steps, self._backwards = run.steps, run.backwards

    @_torch.hushed()
    def before_round(self, entry: RawBackward, rounds: int) -> None:
        backward = read_backward(entry)
        if rounds not in _ROUNDS or backward.via != "backward":
            return
        own = [one for one in self._backwards.before_in_thread(entry.clock) if one.stack is entry.stack]
        past = own[-_PASSED:]
        if len(past) < _PASSED or entry.stack in self._described:
            return
        order = walk.engine_order(backward.roots)
        if not any(number < past[0].begun_at for node in order if (number := _torch.node_sequence(node)) is not None):
            return
        terms = set(linear_below(backward.roots))
        # Of the many values of a model the largest is the most telling.
        for reader, value in sorted(_crossings(order, past), key=lambda one: -_size(one[1])):
            if reader not in terms and self._judge(entry, reader, value, past, order):
                self._described.add(entry.stack)
                return

    def _judge(self, entry: RawBackward, reader: Any, value: Any, past: list[PastBackward], order: list[Node]) -> bool:
        """Report a value, if parameters that it was computed from have been updated in each round since."""
        borders = [*(one.clock for one in past), entry.clock]
        leaves = [] if _looks_at_leaf(value) else walk.leaves_of(walk.engine_order([value]))
        moved = next(((leaf, last) for leaf in leaves if (last := self._last_update(leaf, borders)) is not None), None)
        built = call_that_made(self._core, _torch.node_sequence(value), entry.thread)
        read = site_that_made(self._core, reader, entry.thread)
        if moved is None or built is None or read is None:
            return False
        leaf, (stack, updater) = moved
        frame = sys._getframe(2)
        held = next(naming.find(frame, lambda one: not one.is_leaf and one.grad_fn is value), None)
        if held is not None and self._is_written(held.tensor, built.clock):
            return False
        is_cast = held is None and value.name() == _CAST
        if not is_cast and self._is_made_again(built, past[0], entry.thread, order):
            return False
        name = naming.name_of(leaf, frame) if held is None else held.path
        shape, dtype, device = _torch.output_info(value, 0) or ((), "?", "?")
        info = {"shape": shape, "dtype": dtype, "device": device}
        self._report_at(
            ROW,
            entry.stack,
            Clue("built", symbolise(built.stack), name=name, values={**info, "is_cast": is_cast}),
            Clue("updated", symbolise(stack), name=updater),
            Clue("read", read),
        )
        return True

    def _last_update(self, leaf: torch.Tensor, borders: list[int]) -> tuple[Any, str] | None:
        """Return stack and name of the last update of a leaf, if there was one between all of the ``borders``."""
        storage = _torch.storage_or_none(leaf)
        found = [
            (one.clock, one.stack, f"{one.optimizer}.step")
            for one in self._steps.steps
            if one.clock > borders[0] and storage in one.storages and one.before != one.after
        ]
        found += [
            (one.clock, one.stack, one.op)
            for one in logged_writes(self._core, borders[0])
            if one.storage == storage and one.kind not in ("metadata", "step")
        ]
        clocks = [clock for clock, _, _ in found]
        if not all(any(low < clock < high for clock in clocks) for low, high in itertools.pairwise(borders)):
            return None
        return max(found, key=lambda one: one[0])[1:]

    def _is_made_again(self, built: RawCall, first: PastBackward, thread: int, order: list[Node]) -> bool:
        """Whether the same call was made in the rounds since: a state that is carried from round to round."""
        if self._core.ran_since(built.stack, first.sequence, thread):
            return True
        # Python may have specialised a call since: then the same lines have another stack.
        younger = (node for node in order if (_torch.node_sequence(node) or 0) >= first.sequence)
        looked_at = itertools.islice(younger, _MOST_LOOKED_AT)
        calls = (call_that_made(self._core, _torch.node_sequence(node), thread) for node in looked_at)
        site = symbolise(built.stack)
        return any(call is not None and symbolise(call.stack) == site for call in calls)

    def _is_written(self, tensor: torch.Tensor, since: int) -> bool:
        storage = _torch.storage_or_none(tensor)
        raws = logged_writes(self._core, since)
        return any(raw.storage == storage and raw.kind != "metadata" for raw in raws)


def _crossings(order: list[Node], past: list[PastBackward]) -> Iterator[tuple[Any, Any]]:
    """Yield (Node of this round, child older than the first of the ``past`` rounds)."""
    for node in order:
        if (_torch.node_sequence(node) or 0) >= past[-1].sequence:
            for child, _ in node.next_functions:
                number = _torch.node_sequence(child)
                if number is not None and number < past[0].begun_at:
                    yield node, child


def _size(node: Node) -> int:
    info = _torch.output_info(node, 0)
    return 0 if info is None else math.prod(info[0])


def _looks_at_leaf(node: Node | None) -> bool:
    """Whether a Node, below those of views, is that of a leaf."""
    while node is not None and _torch.makes_view(node):
        children = [child for child, _ in node.next_functions if child is not None]
        node = children[0] if len(children) == 1 else None
    return hasattr(node, "variable")
