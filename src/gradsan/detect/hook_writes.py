"""Writes by a hook past the version counter while backward runs, to values that pending Nodes have saved.

The scan before the backward comes too early for them. The graph is scanned again when a hook has
written to bypassed memory (``memory.py``): in some of the rounds of a line, and a few times in each. Exported memory
(``exports.py``) is compared right before a Node reads it, in the same rounds.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.detect.exports import Exports
from gradsan.detect.gradients import gradient_writes
from gradsan.detect.gradients.gradient_writes import Given, frames_inside, given_to_hook
from gradsan.detect.memory import Uncounted
from gradsan.detect.prescan import Prescan
from gradsan.graph import walk
from gradsan.record.detector import Detector, Run
from gradsan.record.guarding import before_node
from gradsan.record.log import RawStack
from gradsan.record.steps import RawBackward, read_backward, running_here

_NESTED = 8
_LOOKS = 8
_BEFORE_THE_NODE = (gradient_writes.TENSOR, f"{gradient_writes.NODE}_1")
"""The kinds of hooks that are called right before the running Node."""


class HookWrites(Detector):
    """Checks writes while a backward runs; ``prescan`` finds their effects."""

    def __init__(self, run: Run) -> None:
        self._core, self._uncounted, self._exports = run.core, run.get(Uncounted), run.get(Exports)
        self._prescan, self._guard = run.get(Prescan), run.guard.run_hushed
        self._looks: deque[tuple[int, list[int]]] = deque(maxlen=_NESTED)

    def before_round(self, entry: RawBackward, rounds: int) -> None:
        """Check the writes of this backward; as ``on_round`` of the core."""
        self._looks.append((entry.clock, []))
        if self._exports.any:
            backward = read_backward(entry)
            self._compare_before(entry, walk.engine_order(backward.roots))

    def handed_out(self, storage: int) -> None:
        """Check memory that has just been exported while a backward runs."""
        entry, looks = self._looked_at()
        inside, engine = frames_inside()
        if looks is not None and engine is not None and len(looks) < _LOOKS:
            looks.append(storage)
            waiting = _waiting(entry, _torch.inputs_given(engine), _is_before(given_to_hook(inside)))
            self._compare_before(entry, waiting, storage)

    def on_write(self, tensor: torch.Tensor, op: str, stack: RawStack) -> None:
        """Check one write; as ``on_write`` of the core."""
        storage = _torch.storage_or_none(tensor)
        if storage not in self._uncounted.bypasses:
            return
        entry, looks = self._looked_at()
        if looks is None or len(looks) >= _LOOKS or storage in looks:
            return
        inside, engine = frames_inside()
        given = list(given_to_hook(inside))
        # A gradient is new memory, which no Node of the forward has saved.
        if engine is None or any(_torch.storage_or_none(one.tensor) == storage for one in given):
            return
        looks.append(storage)
        waiting = _waiting(entry, _torch.inputs_given(engine), _is_before(given))
        self._prescan.look_again(entry, waiting, storage)

    def _looked_at(self) -> tuple[Any, list[int] | None]:
        """Return the backward that runs here, and the storages checked in it so far; None if it is not checked."""
        entry = running_here(self._core)
        return entry, None if entry is None else next((done for at, done in self._looks if at == entry.clock), None)

    def _compare_before(self, entry: RawBackward, nodes: Iterable[Node], storage: int = 0) -> None:
        for node in nodes:
            found = frozenset(self._unchanged(node, entry.thread, storage))
            if found:
                before_node(node, functools.partial(self._about_to_run, entry.clock, found))

    def _unchanged(self, node: Node, thread: int, storage: int) -> Iterator[tuple[str, int]]:
        """Yield slots in exported memory whose bytes are those saved; others are reported elsewhere."""
        for slot, saved in _torch.saved_slots(node):
            tensor = _torch.packed_object(saved)
            at = _torch.storage_or_none(tensor) if _torch.is_tensor(tensor) and not _torch.is_hooked(saved) else 0
            is_outside = at and at == (storage or at) and self._exports.of(at) is not None
            if is_outside and not self._prescan.is_changed_outside(node, slot, tensor, thread):
                yield slot, at

    def _about_to_run(self, clock: int, slots: frozenset[tuple[str, int]], _: Any) -> None:
        # The entry is looked up, because Node and backward hold this hook: a reference would keep them alive.
        entry, _ = self._looked_at()
        if entry is not None and entry.clock == clock and self._core.active:
            self._guard(functools.partial(self._compare, entry, slots))

    def _compare(self, entry: RawBackward, slots: frozenset[tuple[str, int]]) -> None:
        node = _torch.current_node()
        held = {} if node is None else {slot: _torch.packed_object(saved) for slot, saved in _torch.saved_slots(node)}
        changed = {
            storage
            for slot, storage in slots
            if slot in held and self._prescan.is_changed_outside(node, slot, held[slot], entry.thread)
        }
        for storage in changed:
            self._prescan.look_again(entry, (node,), storage)


def _is_before(given: Iterable[Given]) -> bool:
    return any(one.kind.startswith(_BEFORE_THE_NODE) for one in given)


def _waiting(entry: RawBackward, inputs: tuple[Any, ...], is_before: bool) -> Iterator[Any]:
    """Yield the Nodes that have not run yet. Nodes that have run have freed their saves, unless the graph is retained.

    ``is_before`` says that the running hook was called before the running Node.
    """
    backward, running = read_backward(entry), _torch.current_node()
    at = _torch.node_sequence(running)
    for node in walk.engine_order(backward.roots, inputs, backward.via == "backward"):
        number = _torch.node_sequence(node)
        if node is running:
            if is_before:
                yield node
        elif number is not None and (not backward.retain_graph or (at is not None and number < at)):
            yield node
