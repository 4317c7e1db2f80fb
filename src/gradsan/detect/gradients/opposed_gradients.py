"""Gradients of two losses that oppose each other, and add up because nothing clears them between.

One backward reaches two networks, and the optimizer of one of them steps. The other network keeps its gradients; the
next loss goes through both again and adds its own to them, and only then the other network's optimizer steps, with the
sum. That is how a generator gets the gradients of its discriminator's loss. Where losses share parameters on purpose
they do the same, but those agree more or less: so a few numbers of both gradients are compared.

Row: ``gradients_opposed``. Roles: ``gradient`` (a leaf that gets both; ``values``: ``shape``, ``dtype``, ``device``,
``leaves``, their number, ``cosine`` between the two), ``first`` (the backward whose gradients stayed), ``between``
(the step that they were for; ``name``, the optimizer's), ``updated`` (the step that takes the sum; ``op``).
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from gradsan import _torch
from gradsan.detect.gradients.clip_calls import CLEARS, Clearing, Gradient
from gradsan.graph import naming
from gradsan.model import Clue
from gradsan.record.listeners import Listeners
from gradsan.record.log import Core, RawWrite, logged_writes
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward, StepRecord, Steps

_OPPOSED, _TIMES = -0.7, 2
_LEAVES, _VALUES = 32, 1_024


@dataclass(slots=True)
class Opposed:
    """A backward that adds to gradients of another loss.

    ``before`` holds some numbers of the gradients before it, ``cosine`` compares what it adds with them; None where
    that says nothing. ``step`` is the step that took the sum.
    """

    first: RawBackward
    entry: RawBackward
    between: StepRecord
    standing: Sequence[Gradient]
    before: torch.Tensor
    cosine: float | None = None
    step: StepRecord | None = None

    def clues(self, frame: FrameType) -> tuple[Clue, ...]:
        """The clues of a report; ``frame`` is where the program runs."""
        leaf = next((leaf for one in self.standing if (leaf := one.leaf()) is not None), None)
        if leaf is None:
            return ()
        name, cosine = naming.name_of(leaf, frame), round(self.cosine or 0.0, 2)
        facts = {**_torch.facts_of(leaf), "leaves": len(self.standing), "cosine": cosine}
        found = [
            Clue("gradient", name=name, values=facts),
            Clue("first", symbolise(self.first.stack)),
            Clue("between", symbolise(self.between.stack), name=self.between.optimizer),
        ]
        if self.step is not None:
            found.append(Clue("updated", symbolise(self.step.stack), name=name, op=f"{self.step.optimizer}.step"))
        return tuple(found)


class OpposedGradients:
    """Follows the gradients of a round's first backward; a pair of lines is reported once, in its second round."""

    def __init__(self, core: Core, steps: Steps, listeners: Listeners) -> None:
        self._core, self._steps, self._listeners = core, steps, listeners
        self._met: Opposed | None = None
        self._times = collections.Counter[Hashable]()
        self._agreeing = set[Hashable]()
        self.is_adding = False
        """Whether gradients of the round still stand, or add up: the next one is to be followed as well."""

    def meet(self, first: RawBackward, entry: RawBackward, reached: Collection[Any], gradients: list[Gradient]) -> None:
        """Note a backward that is about to begin, if it reaches all that still has gradients, and nothing new."""
        is_met = self._met is not None and self._met.first.clock == first.clock
        left = None if is_met or entry.stack is first.stack else self._left(first, gradients)
        if left is None:
            return
        standing, between = left
        both, known = {id(one) for one in reached}, {id(one.leaf()) for one in gradients}
        standing = [one for one in standing if id(one.leaf()) in both]
        before = self._numbers(standing) if both <= known and 0 < len(standing) <= len(both) else None
        if before is not None:
            # The outputs would keep the graph alive.
            self._met = Opposed(first._replace(outputs=()), entry._replace(outputs=()), between, standing, before)

    def compare(self, entry: RawBackward) -> None:
        """Compare what a backward has added with what was there; it has just ended."""
        met = self._met
        after = None if met is None or met.entry.clock != entry.clock else self._numbers(met.standing)
        if met is not None and after is not None and after.shape == met.before.shape:
            cosine = float(torch.nn.functional.cosine_similarity(met.before, after - met.before, dim=0))
            met.cosine = cosine if math.isfinite(cosine) and bool(met.before.any()) else None

    def end(self, first: RawBackward, gradients: list[Gradient], clearings: Sequence[Clearing]) -> Opposed | None:
        """End a round; return the pair whose gradients have opposed each other each time, and a step took the sum."""
        met, self._met = self._met, None
        # A round may have been left before its end.
        if met is None or met.first.clock != first.clock:
            # A line may run several times before the other one.
            self.is_adding = self._left(first, gradients) is not None
            return None
        key = met.first.stack, met.entry.stack
        met.step = self._step_with_sum(met, clearings)
        if met.step is None or met.cosine is None or met.cosine >= _OPPOSED:
            self._agreeing.add(key)
        self._times[key] += 1
        self.is_adding = key not in self._agreeing and self._times[key] < _TIMES
        return met if key not in self._agreeing and self._times[key] == _TIMES else None

    def _left(self, first: RawBackward, gradients: list[Gradient]) -> tuple[list[Gradient], StepRecord] | None:
        """The gradients that no step has taken and nothing has changed, and the first step of others; None without."""
        steps = [one for one in self._steps.steps if one.end is not None and one.end > first.clock]
        own, stepped = {one.own for one in gradients}, {storage for one in steps for storage in one.storages}
        between = next((one for one in steps if not own.isdisjoint(one.storages)), None)
        if between is None:
            return None
        written = {raw.storage for raw in self._writes(first.clock)}
        standing = [one for one in gradients if one.own not in stepped and one.storage not in written]
        standing = [one for one in standing if _is_there(one)]
        return (standing, between) if standing else None

    def _step_with_sum(self, met: Opposed, clearings: Sequence[Clearing]) -> StepRecord | None:
        """The step that took the sum: the first of these leaves, if nothing cleared a gradient before it."""
        own, clock = {one.own for one in met.standing}, met.entry.clock
        step = next((one for one in self._steps.steps if one.clock > clock and not own.isdisjoint(one.storages)), None)
        if step is None or step.before == step.after:
            return None
        leaves = {id(leaf) for one in met.standing if (leaf := one.leaf()) is not None}
        storages = {one.storage for one in met.standing}
        cleared = [one.clock for one in clearings if not leaves.isdisjoint(one.leaves)]
        cleared += [raw.clock for raw in self._writes(clock) if raw.op in CLEARS and raw.storage in storages]
        return None if any(clock < one < step.clock for one in cleared) else step

    def _numbers(self, standing: Sequence[Gradient]) -> torch.Tensor | None:
        with self._listeners.without_results():
            return _numbers(standing)

    def _writes(self, clock: int) -> list[RawWrite]:
        return [raw for raw in logged_writes(self._core, clock) if raw.kind != "metadata"]


def _is_there(one: Gradient) -> bool:
    leaf = one.leaf()
    grad = None if leaf is None else leaf.grad
    return grad is not None and _torch.storage_or_none(grad) == one.storage


def _numbers(standing: Sequence[Gradient]) -> torch.Tensor | None:
    """Some numbers of the gradients, on the CPU."""
    parts = []
    for one in itertools.islice(standing, 0, None, -(-len(standing) // _LEAVES)):
        leaf = one.leaf()
        if leaf is None or leaf.grad is None or leaf.grad.layout is not torch.strided:
            return None
        flat = leaf.grad.detach().reshape(-1)
        parts.append(flat[:: -(-flat.numel() // _VALUES)].to("cpu", torch.float64, copy=True))
    return torch.cat(parts) if parts else None
