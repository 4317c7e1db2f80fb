"""Backward calls of the recent past, and the events of a run as plain data.

A call is known by where it was made and by numbers; of its loss there is only a weak reference, so that nothing lives
longer than it would. Where the loss is still alive, its graph tells exactly which Nodes the call reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradsan import _torch
from gradsan.model import Moment
from gradsan.record.stacks import symbolise

if TYPE_CHECKING:
    from gradsan.record.steps import Steps


@dataclass(frozen=True, slots=True)
class PastBackward:
    """One call into the engine that has begun.

    ``sequence`` is the number that the next Node of ``thread`` would have got when it ended (when it began, while it
    runs or where it raised); ``begun_at`` the same when it began. ``step`` counts the optimizer steps
    before it. ``life`` is a number for each thread's life: numbers of Nodes start anew, and ``thread`` may be used
    again, when a thread has ended.
    """

    clock: int
    stack: Any
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
        """The number of its youngest root; where a loss is gone, the number of the last Node made before it began."""
        roots = self.live_roots()
        if roots is None:
            return self.begun_at - 1
        return max((number for number in map(_torch.node_sequence, roots) if number is not None), default=None)

    def live_roots(self) -> list[Any] | None:
        """The Nodes it started from; None where one of its losses is gone."""
        alive = [output() for output in self.outputs]
        if not alive or any(one is None for one in alive):
            return None
        return [one.grad_fn for one in alive if one.grad_fn is not None]


class Backwards:
    """The bounded log of the backward calls of this process, as the core fills it."""

    def __init__(self, core: Any) -> None:
        """Read the log of ``core``."""
        self._core = core

    def before_in_thread(self, clock: int) -> list[PastBackward]:
        """The calls before the one that began at ``clock``, of the same thread, oldest first."""
        log = self._read()
        this = next((one for one in log if one.clock == clock), None)
        return [] if this is None else [one for one in log if one.clock < clock and one.life == this.life]

    def before(self, clock: int) -> list[PastBackward]:
        """The calls in the log that began before ``clock``, oldest first."""
        return [one for one in self._read() if one.clock < clock]

    def _read(self) -> list[PastBackward]:
        return [_read(entry) for entry in self._core.backward_log]


def _read(entry: tuple[Any, ...]) -> PastBackward:
    """An entry of the core's log, whose fields ``Core.engine`` names."""
    clock, stack, thread, retain, accumulate, begun_at, sequence, step, life, outputs = entry
    via = "backward" if accumulate else "grad"
    weak = tuple(_gone if one is None else one for one in outputs)
    return PastBackward(clock, stack, thread, bool(retain), via, sequence, begun_at, step, life, weak)


def _gone() -> None:
    return None


def moments(steps: Steps, backwards: Backwards, since: int, until: int) -> tuple[Moment, ...]:
    """Every step and backward call in the logs that began after ``since`` and before ``until``, by the clock.

    A step stands where it ended, as the writes of a step do; a backward call where it began.
    """
    found = [
        Moment(
            kind="step",
            clock=record.clock if record.end is None else record.end,
            step=record.number,
            op=f"{record.optimizer}.step",
            site=symbolise(record.stack),
        )
        for record in steps.steps
        if record.clock > since
    ]
    found += [
        Moment(kind="backward", clock=call.clock, step=call.step, op=call.via, site=symbolise(call.stack))
        for call in backwards.before(until)
        if call.clock > since
    ]
    return tuple(sorted(found, key=lambda moment: moment.clock))
