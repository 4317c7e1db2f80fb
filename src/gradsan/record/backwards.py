"""Backward calls of the recent past, and the events of a run as plain data.

A call is identified by its stack and by numbers; its loss is referred to weakly, so that nothing
lives longer than it would. Where the loss is still alive, its graph gives the exact Nodes that the call reached.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gradsan import _torch
from gradsan.record.log import Log, RawBackwardCall, Stack, backward_calls

_CALLS_KEPT = 256


@dataclass(frozen=True, slots=True)
class PastBackward:
    """One call into the engine that has begun.

    ``sequence`` is the number that the next Node of ``thread`` would have got when it ended (when it began, while it
    runs or where it raised); ``begun_at`` the same when it began. ``step`` counts the optimizer steps
    before it. ``life`` is a number for each life of a thread: Node numbers restart, and ``thread`` may be reused,
    after a thread has ended.
    """

    clock: int
    stack: Stack
    thread: int
    retain_graph: bool
    via: str
    sequence: int
    begun_at: int
    step: int
    life: int
    outputs: tuple[Any, ...]

    @property
    def root_sequence(self) -> int | None:
        """The number of the youngest root; where a loss is gone, that of the last Node made before the call began."""
        roots = self.live_roots()
        if roots is None:
            return self.begun_at - 1
        return max((number for number in map(_torch.node_sequence, roots) if number is not None), default=None)

    def live_roots(self) -> list[Any] | None:
        """Return the Nodes it started from; None where a loss is gone, or has been added to in place since."""
        alive = [output() for output in self.outputs]
        if not alive or any(one is None for one in alive):
            return None
        roots = [one.grad_fn for one in alive if one.grad_fn is not None]
        is_newer = any((_torch.node_sequence(one) or 0) >= self.begun_at for one in roots)
        return None if is_newer else roots


class BackwardLog(Protocol):
    """The backward calls of a run: of a recorder, or read off the program."""

    def before_in_thread(self, clock: int) -> list[PastBackward]:
        """The calls before the one that began at ``clock``, of the same thread, oldest first."""

    def before(self, clock: int) -> list[PastBackward]:
        """The calls that began before ``clock``, oldest first."""


class Backwards:
    """Bounded log of the backward calls of this process, without those that torch.compile traces."""

    def __init__(self, core: Log) -> None:
        """Read from the log of ``core``."""
        self._core = core

    def before_in_thread(self, clock: int) -> list[PastBackward]:
        """Return the calls before the one that began at ``clock``, of the same thread, oldest first."""
        log = self._read()
        this = next((one for one in log if one.clock == clock), None)
        return [] if this is None else [one for one in log if one.clock < clock and one.life == this.life]

    def before(self, clock: int) -> list[PastBackward]:
        """Return the logged calls that began before ``clock``, oldest first."""
        return [one for one in self._read() if one.clock < clock]

    def _read(self) -> list[PastBackward]:
        found = map(_read, backward_calls(self._core))
        return [one for one in found if not _torch.is_within_graph_capture(one.stack.codes)]


def run_in_threads(core: Log) -> bool:
    """Whether the logged backward calls are of several threads, whose events interleave."""
    return len({one.life for one in backward_calls(core)}) > 1


def _read(call: RawBackwardCall) -> PastBackward:
    via = "backward" if call.accumulates else "grad"
    weak = tuple(_gone if one is None else one for one in call.outputs)
    retain = bool(call.retain_graph)
    ended, begun = call.ended_at, call.begun_at
    return PastBackward(call.clock, call.stack, call.thread, retain, via, ended, begun, call.step, call.life, weak)


def _gone() -> None:
    return None


class MadeByEngine:
    """Nodes that backward calls with ``create_graph`` have made in the engine's device threads, by device.

    Such a thread numbers its Nodes itself, outside any wrapper. Known are only the number of the Node
    behind each gradient, and that of the call before.
    """

    def __init__(self) -> None:
        self._ends: dict[Any, int] = {}
        self._calls: dict[Any, deque[tuple[int, int, int, Any, int]]] = {}

    def note(self, entry: Any, result: Any) -> None:
        """Record a call that has ended; the arguments are those of ``on_differentiable`` of the core."""
        clock, stack, thread, outputs = entry[:4]
        ends: dict[Any, int] = {}
        for one in outputs:
            if torch.is_tensor(one) and one.device.type != "cpu":
                ends[one.device] = -1
        for one in result if isinstance(result, (tuple, list)) else ():
            if torch.is_tensor(one) and one.device.type != "cpu":
                number = _torch.node_sequence(one.grad_fn)
                ends[one.device] = max(ends.get(one.device, -1), -1 if number is None else number + 1)
        for device, end in ends.items():
            first = self._ends.get(device, 0)
            # The number of Nodes is unknown where the gradients went to ``.grad``.
            last = end if end >= 0 else sys.maxsize
            self._calls.setdefault(device, deque(maxlen=_CALLS_KEPT)).append((first, last, clock, stack, thread))
            self._ends[device] = max(first, end)

    def near(self, number: int, device: Any) -> list[tuple[int, Any, int]]:
        """Return (clock, stack, calling thread) of the calls that may have made the Node ``number`` on ``device``."""
        calls = self._calls.get(device, ())
        return [(clock, stack, thread) for first, end, clock, stack, thread in calls if first <= number < end]
