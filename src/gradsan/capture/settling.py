"""Which optimizers' steps somebody still wants to be told of; for most, after their first step, nobody does.

A hook in Python that runs at every step costs more than all that the core notes of the step.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from gradsan.capture import _torch


class Settling:
    """Has ``first`` called once for each optimizer, and ``fused`` after each step of a fused one."""

    def __init__(self, core: Any, first: Callable[[Any, Any], None], fused: Callable[[Any], None]) -> None:
        """Listen to ``core``. ``first`` is given the optimizer and a frame to find the program's variables from."""
        self._core, self._first, self._fused = core, first, fused
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiting: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        core.on_step_begin, core.on_step_end = self.before_step, self.after_step

    @property
    def optimizers(self) -> list[Any]:
        """The live optimizers that have had a step with gradients."""
        return list(self._seen)

    def before_step(self, optimizer: Any) -> None:
        """See whether there was a backward whose gradients this step could use, and whether any is missing."""
        if self._core.backwards and optimizer not in self._seen:
            missing = _without_gradient(optimizer)
            if missing:
                # ``step(closure)`` computes its gradients itself: what is missing is known at its end.
                self._waiting[optimizer] = self._core.backwards, missing
            else:
                self._seen.add(optimizer)

    def after_step(self, optimizer: Any) -> None:
        """Call ``first`` if it is time, and ``fused`` if it is; else ask not to be told of this optimizer again."""
        waited = self._waiting.pop(optimizer, None)
        if waited is not None:
            self._seen.add(optimizer)
            backwards, missing = waited
            # More than before without a backward: the step itself has cleared gradients, and nothing can be told.
            if self._core.backwards > backwards or _without_gradient(optimizer) == missing:
                with _torch.hushed():
                    self._first(optimizer, sys._getframe(1))
        if any(group.get("fused") for group in optimizer.param_groups):
            with _torch.hushed():
                self._fused(optimizer)
        elif optimizer in self._seen:
            number, settled = id(optimizer), self._core.settled
            settled.add(number)
            weakref.finalize(optimizer, settled.discard, number).atexit = False


def _without_gradient(optimizer: Any) -> int:
    with _torch.hushed():
        return sum(one.grad is None for group in optimizer.param_groups for one in group["params"])
