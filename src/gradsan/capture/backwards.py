"""The backward calls of the recent past: which one may have freed a Node that a later one asks for.

A call is known by where it was made and by numbers; of its loss there is only a weak reference, so that nothing lives
longer than it would. Where the loss is still alive, its graph tells exactly which Nodes the call reached.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from gradsan.capture import _torch

BACKWARDS_KEPT = 256


@dataclass(slots=True)
class PastBackward:
    """One call into the engine that has begun.

    ``sequence`` is the number that the next Node of ``thread`` would have got when it ended (when it began, while it
    runs or where it raised); ``begun_at`` the same when it began. ``step`` counts the optimizer steps
    before it. ``life`` is one object for each thread's life: numbers of Nodes start anew, and ``thread`` may be used
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
    life: object
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
    """A bounded log of the backward calls of this process, filled by the recorder's listeners."""

    def __init__(self, core: Any) -> None:
        """Start empty; ``core`` tells how many steps there were."""
        self._core = core
        self._local = threading.local()
        self._log: deque[PastBackward] = deque(maxlen=BACKWARDS_KEPT)

    def begun(self, entry: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Log a call that begins; the arguments are those of ``Recorder.before_backward``."""
        clock, stack, thread, outputs, retain, accumulate = entry
        # The Nodes of the outputs are not looked at: the object that Python gets for a Node costs more than all this.
        weak = (_weakly(outputs[0]),) if len(outputs) == 1 else tuple(map(_weakly, outputs))
        number = _torch.sequence_number()
        via = "backward" if accumulate else "grad"
        life = getattr(self._local, "life", None) or self._life()
        # By position: at every backward, names cost as much as the rest.
        self._log.append(
            PastBackward(clock, stack, thread, bool(retain), via, number, number, self._core.steps, life, weak)
        )

    def ended(self, entry: Any) -> None:
        """Note how far the numbers of Nodes had come when a call ended."""
        clock = entry[0]
        for one in reversed(self._log):
            if one.clock == clock:
                one.sequence = _torch.sequence_number()
                return

    def before_in_thread(self, clock: int) -> list[PastBackward]:
        """The calls before the one that began at ``clock``, of the same thread, oldest first."""
        this = next((one for one in self._log if one.clock == clock), None)
        return [] if this is None else [one for one in self.before(clock) if one.life is this.life]

    def before(self, clock: int) -> list[PastBackward]:
        """The calls in the log that began before ``clock``, oldest first."""
        return [one for one in self._log if one.clock < clock]

    def _life(self) -> object:
        local = self._local
        if not hasattr(local, "life"):
            local.life = object()
        life: object = local.life
        return life


def _weakly(output: Any) -> Any:
    try:
        return weakref.ref(output)
    except TypeError:  # a GradientEdge
        return _gone


def _gone() -> None:
    return None
