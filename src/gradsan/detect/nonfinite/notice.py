"""Notice of a training whose parameters have become NaN or Inf, at the cost of one check of each loss.

The operation that made the value is not searched: ``search.py`` does that, in a mode of its own.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradsan import _torch
from gradsan.graph import naming, walk
from gradsan.model import Birth, NonFinite, NonFiniteSeen
from gradsan.record.detector import Detector, Run
from gradsan.record.log import RawStack, backward_calls, logged_writes
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward, StepRecord

if TYPE_CHECKING:
    from gradsan.detect.nonfinite.origins import Searched

_LARGEST_LOSS = 4_096
_NAMED = 8
_REFILLS = frozenset({"copy_", "fill_", "zero_", "set_", "__setitem__", "data"})
"""Writes that replace a leaf's contents; any other write changes them, as an update does."""


class _Pending(NamedTuple):
    """A loss that was not finite, and its leaves, which were finite."""

    clock: int
    stack: RawStack
    steps: int
    facts: Searched
    leaves: list[_torch.weak_tensor]


class Notice(Detector):
    """Checks the outputs of each backward call, and leaves only once one of these is not finite.

    A non-finite loss does no harm by itself (a ``GradScaler`` skips the step): a finding needs a leaf with NaN,
    at a later backward or at the end. There is one per stretch of watching: later ones follow from it. Outputs on
    other devices than the CPU are not checked, because reading them would synchronise.
    """

    def __init__(self, run: Run) -> None:
        self._core, self._listeners, self._steps = run.core, run.listeners, run.steps
        self._settling, self._report = run.settling, run.nonfinite.append
        self._is_done = False
        self._first_steps = self._began = 0
        self._pending: _Pending | None = None

    def forget(self) -> None:
        self._is_done, self._pending = False, None
        self._listeners.call_on_nonfinite(self.look)
        self._first_steps, self._began = self._core.steps, self._core.clock

    def leave(self) -> None:
        """Stop checking in this stretch."""
        self._is_done = True
        self._listeners.call_on_nonfinite(None)
        self._await(None)

    def look(self, entry: RawBackward) -> None:
        """Check the outputs that a backward starts from; as ``listeners.OnNonFinite``."""
        if self._is_done or _torch.is_transformed() or _torch.is_profiled():
            return
        with _torch.hushed():
            bad = next((one for one in entry.outputs if _is_bad(one)), None)
            if bad is not None:
                self._look(entry, bad)

    def _before_next(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the effect of a non-finite loss; as ``listeners.BeforeBackward``."""
        if self._pending is None or self._pending.clock == entry.clock:
            return
        with _torch.hushed():
            self._follow_up()

    def settle(self) -> None:
        """Check the effect of the last losses, as the stretch ends."""
        if self._is_done:
            return
        with _torch.hushed():
            if self._pending is not None:
                self._follow_up()
            elif self._core.steps > self._first_steps:
                spoilt = [
                    one
                    for one in _torch.parameters_of(*self._settling.optimizers)
                    if _is_spoilt(one) and self._steps_of(one)
                ]
                if spoilt:
                    self._found(spoilt, "after", None, self._core.steps, _searched(spoilt[0]))

    def _look(self, entry: RawBackward, loss: torch.Tensor) -> None:
        # Not the data: an input that requires grad is a leaf, too.
        leaves = [
            one for one in _leaves_behind(entry.outputs) if isinstance(one, torch.nn.Parameter) or self._is_trained(one)
        ]
        spoilt = [leaf for leaf in leaves if _is_spoilt(leaf)]
        if self._pending is not None:
            self._follow_up()
        if self._is_done:
            return
        if spoilt:
            self._found(spoilt, "before", entry.stack, self._core.steps, _searched(loss))
        else:
            known = [_torch.weak_tensor(leaf) for leaf in leaves]
            self._await(_Pending(entry.clock, entry.stack, self._core.steps, _searched(loss), known))

    def _follow_up(self) -> None:
        """Check whether a non-finite loss has spoilt its leaves by now."""
        seen = self._pending
        assert seen is not None
        self._await(None)
        spoilt = [leaf for one in seen.leaves if (leaf := one()) is not None and _is_spoilt(leaf)]
        if spoilt:
            self._found(spoilt, "during", seen.stack, seen.steps, seen.facts)

    def _await(self, pending: _Pending | None) -> None:
        self._pending = pending
        self._listeners.call_before_backward(self._before_next, pending is not None)

    def _is_trained(self, leaf: torch.Tensor) -> bool:
        """Whether steps of this stretch have updated a leaf, or statements after a backward have."""
        if self._steps_of(leaf):
            return True
        began = min((one.clock for one in backward_calls(self._core) if one.clock >= self._began), default=None)
        storage = _torch.storage_or_none(leaf)
        if began is None:
            return False
        # Another tensor may have had the address: a leaf's own writes have at most its version.
        return any(
            raw.storage == storage
            and raw.clock > began
            and raw.is_parameter
            and raw.op not in _REFILLS
            and (raw.version or 0) <= leaf._version
            for raw in logged_writes(self._core)
        )

    def _steps_of(self, parameter: torch.Tensor) -> list[StepRecord]:
        """Return the steps of this stretch that updated a parameter, as far as the log goes back."""
        storage = _torch.storage_or_none(parameter)
        return [one for one in self._steps.steps if one.clock >= self._began and _has_written(one, storage)]

    def _found(
        self, spoilt: list[Any], seen: NonFiniteSeen, stack: RawStack | None, steps: int, facts: Searched
    ) -> None:
        self.leave()
        frame = sys._getframe()
        names = [found[0].text for one in spoilt[:_NAMED] if (found := naming.names_of(one, frame))]
        known = self._steps_of(spoilt[0])
        # The first one after the noticed loss, else the very last.
        step = next((one for one in known if one.number >= steps), known[-1] if known else None)
        self._report(
            NonFinite(
                Birth("unknown", "", None, facts.value, facts.index, facts.shape, facts.dtype, facts.device),
                steps - self._first_steps,
                noticed=None if stack is None else symbolise(stack),
                consumed=None if step is None else symbolise(step.stack),
                consumer=None if step is None else f"{step.optimizer}.step",
                parameters=tuple(dict.fromkeys(names)),
                seen=seen,
                spoilt=len(spoilt),
            )
        )


def _is_bad(output: torch.Tensor) -> bool:
    if type(output) not in _torch.PLAIN_TENSORS or not output.is_cpu or not _torch.has_elements(output):
        return False
    return output.numel() <= _LARGEST_LOSS and _torch.is_nonfinite(output)


def _leaves_behind(outputs: Any) -> Iterator[Any]:
    roots = [one.grad_fn for one in outputs if _torch.is_tensor(one) and one.grad_fn is not None]
    known = (getattr(node, "variable", None) for node in itertools.islice(walk.each_behind(roots), walk.NODES_WALKED))
    return (leaf for leaf in known if _torch.is_tensor(leaf))


def _has_written(step: StepRecord, storage: int | None) -> bool:
    versions = zip(step.storages, step.before, step.after, strict=False)
    return any(one == storage and before != after for one, before, after in versions)


def _is_spoilt(leaf: torch.Tensor) -> bool:
    # Programs write -inf into parameters on purpose; a faulty Inf becomes NaN a round later.
    is_bad = _torch.has_elements(leaf) and leaf.is_cpu and _torch.is_nonfinite(leaf)
    return bool(is_bad and torch.isnan(leaf.detach()).any())


def _searched(tensor: torch.Tensor) -> Searched:
    from gradsan.detect.nonfinite.origins import Searched  # not needed by a sound run

    return Searched(tensor)
