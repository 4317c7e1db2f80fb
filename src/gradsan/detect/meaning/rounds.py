"""Rounds of a line that calls backward, call by call: from its 1st, 2nd and 4th backward to the next.

A line whose rounds fall into those of another waits for a free one, if its detector wants that.

The time before the very first backward is a round, too, for detectors that want it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import torch

from gradsan import _torch
from gradsan.record.detector import Finder, Run
from gradsan.record.log import RawStack
from gradsan.record.patches import Patches, standing
from gradsan.record.steps import RawBackward

_CALLS_FOLLOWED, _BACKWARDS_FOLLOWED, _LINES_WAITING = 20_000, 16, 4


class RoundDetector(Finder):
    """Base class of detectors that get the results of calls, and the backward calls, of a few rounds."""

    rounds: ClassVar[tuple[int, ...]] = (1, 2, 4)
    from_start: ClassVar[bool] = False
    """Whether the time before the first backward counts as a round, too."""
    takes_gradients: ClassVar[bool] = False
    """Whether a line that calls ``autograd.grad`` has rounds, too, as long as no backward is called."""

    waits: ClassVar[bool] = False
    """Whether a line whose rounds fall into those of another has later ones instead."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._entry: RawBackward | None = None
        self._waiting: list[RawStack] = []
        self._calls = self._backwards = 0
        self._has_backward, self._patches = False, Patches()

    def begins(self, entry: RawBackward) -> bool:
        """Whether to follow the round that begins with this backward; notes of earlier rounds are dropped.

        A round without a first backward has an entry with a clock and a thread only.
        """
        return True

    def result(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Called with each finished call in the thread of the round; as ``listeners.OnResult``."""

    def goes_on(self, entry: RawBackward) -> bool:
        """Whether to follow the next round as well, because of what the last one showed."""
        return False

    def looks(self, entry: RawBackward, is_last: bool) -> None:
        """Called at each backward in the thread of the round; the last one begins the line's next round."""

    def forget(self) -> None:
        self._waiting.clear()
        self._end()
        super().forget()
        self._has_backward = False
        if self.from_start:
            self.begin_here()

    def _watch(self, names: Iterable[str], called: Callable[..., object]) -> None:
        """Have methods of tensors call ``called`` with their name, until the round ends, when they return."""
        for name in names:
            listener = self._core.listener(standing(torch.Tensor, name), None, partial(called, name))
            self._patches.set(torch.Tensor, name, listener)

    def _is_of_thread(self) -> bool:
        return self._entry is not None and threading.get_ident() == self._entry.thread

    def begin_here(self) -> None:
        """Open a round that the next backward of this thread ends, whichever line calls; does nothing if open."""
        start = RawBackward(self._core.clock, None, threading.get_ident(), (), None, True)
        if self._entry is None and self.begins(start):
            self._open(start)

    @property
    def is_before_first_backward(self) -> bool:
        return self._entry is not None and self._entry.stack is None

    def settle(self) -> None:
        self._end()

    @_torch.hushed()
    def before_round(self, entry: RawBackward, rounds: int) -> None:
        """Open a round, or close it; as ``on_round`` of the core."""
        if self.takes_gradients and entry.accumulates and not self._has_backward:
            self._has_backward = True
            self._end()
        goes_on = False
        if self._entry is not None and self._is_last(entry):
            self.looks(entry, True)
            self._end()
            goes_on = self.goes_on(entry)
        elif self._entry is not None and self.is_before_first_backward and entry.thread == self._entry.thread:
            # ``autograd.grad`` before the first backward, or without any, is no end.
            self.looks(entry, False)
        is_round = entry.accumulates or (self.takes_gradients and not self._has_backward)
        is_wanted = rounds in self.rounds or goes_on
        if not (is_wanted and is_round):
            return
        if self._entry is None:
            if self.begins(entry):
                # The outputs would keep the graph alive until the round ends.
                self._open(entry._replace(outputs=()))
        elif self.waits and entry.stack is not None and len(self._waiting) < _LINES_WAITING:
            self._waiting.append(entry.stack)

    @_torch.hushed()
    def before_backward(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pass a backward on to :meth:`looks`; the arguments are those of ``listeners.BeforeBackward``."""
        opened = self._entry
        if opened is None:
            self._begin_waiting(entry)
            return
        if entry.clock == opened.clock or not entry.accumulates:
            return
        # Gradients of another thread are not read: it may be writing them. The thread of the round may have ended.
        is_last = self._is_last(entry)
        if entry.thread == opened.thread:
            self.looks(entry, is_last)
        self._count_backward(is_last)
        if is_last and self.goes_on(entry) and self.begins(entry):
            self._open(entry._replace(outputs=()))

    def _begin_waiting(self, entry: RawBackward) -> None:
        if entry.accumulates and any(one is entry.stack for one in self._waiting):
            self._waiting = [one for one in self._waiting if one is not entry.stack]
            if self.begins(entry):
                self._open(entry._replace(outputs=()))
        if not self._waiting and self._entry is None:
            self._listen(False)

    def _is_last(self, entry: RawBackward) -> bool:
        """Whether this backward ends the open round; any line ends the round before the very first backward."""
        opened = self._entry
        if opened is None or entry.thread != opened.thread:
            return False
        is_first = opened.stack is None and (entry.accumulates or self.takes_gradients)
        return is_first or entry.stack is opened.stack

    def _open(self, entry: RawBackward) -> None:
        self._entry, self._calls, self._backwards = entry, 0, 0
        self._listen(True)

    def _count_backward(self, is_last: bool) -> None:
        self._backwards += 1
        if is_last or self._backwards > _BACKWARDS_FOLLOWED:
            self._end()

    def _end(self) -> None:
        self._patches.undo()
        if self._entry is not None:
            self._entry = None
            self._listen(False)

    def _listen(self, wanted: bool) -> None:
        self._listeners.call_before_backward(self.before_backward, wanted or bool(self._waiting))
        self._listeners.call_on_result(self._on_result, wanted)

    def _on_result(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        opened = self._entry
        if opened is None or threading.get_ident() != opened.thread or _torch.is_compiling():
            return
        self._calls += 1
        if self._calls > _CALLS_FOLLOWED:
            self._end()
        else:
            self.result(op, args, kwargs, result)
