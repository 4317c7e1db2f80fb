"""Rounds whose gradients are cleared without a step, over and over: until the end, the step was forgotten.

Row: ``gradient_thrown_away``, with the roles of :mod:`gradsan.detect.gradients.spent_gradients`; ``stepped`` has no
site, and ``gradient`` also ``is_alone``, whether no other optimizer steps in these rounds, and ``is_chosen``: others
are trained, and the program chooses whether this optimizer steps.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from gradsan import _torch
from gradsan.detect.gradients.clip_calls import Clearing
from gradsan.detect.gradients.kept_gradients import program_reads_gradients
from gradsan.detect.meaning.made import Making
from gradsan.graph import naming
from gradsan.model import Clue
from gradsan.record.log import Core, RawStack, logged_writes
from gradsan.record.stacks import symbolise
from gradsan.record.steps import StepRecord, Steps

_LEAVES_COMPARED, _VALUES_COMPARED = 4, 64


class _Idle(NamedTuple):
    """Leaves whose gradients were cleared in rounds without a step, some of their values then, and the report of it."""

    stack: RawStack
    clock: int
    storages: frozenset[int]
    values: list[tuple[_torch.weak_tensor, torch.Tensor]]
    clues: tuple[Clue, ...]
    made: RawStack | None
    beside: tuple[RawStack, ...]
    """The steps that such a round had of other optimizers."""


class ForgottenSteps:
    """Notes such rounds by the line of their backward, and by optimizer, for a look at the end of the program."""

    def __init__(self, core: Core, steps: Steps, making: Making) -> None:
        self._core, self._steps, self._making = core, steps, making
        self._idle: dict[Hashable, _Idle] = {}
        self._rounds = collections.Counter[Hashable]()

    def forget(self) -> None:
        """Forget all rounds."""
        self._idle.clear()
        self._rounds.clear()

    def note(
        self,
        stack: RawStack,
        first: Clearing,
        leaves: list[Any],
        beside: Sequence[StepRecord] = (),
        key: Hashable = None,
    ) -> None:
        """Note a round without a step; the second one is described, by the ``leaves`` that no step had.

        ``key`` stands for a line's rounds without a step of one optimizer, which others had; ``beside`` are those.
        """
        key = stack if key is None else key
        self._rounds[key] += 1
        frame = sys._getframe(1)
        if self._rounds[key] != 2 or any(leaf is None for leaf in leaves) or program_reads_gradients(frame):
            return
        held = next((pair for pair in self._making.optimizers() if _has(pair[0], leaves[0])), None)
        facts = {**_torch.facts_of(leaves[0]), "leaves": len(leaves), "is_refilled": False, "is_part": ""}
        clues = (
            Clue("gradient", name=naming.name_of(leaves[0], frame), values=facts),
            Clue("cleared", symbolise(first.stack), op=first.op),
            Clue("stepped", name=None if held is None else type(held[0]).__name__),
        )
        values = [(_torch.weak_tensor(one), _first_values(one)) for one in leaves[:_LEAVES_COMPARED]]
        storages = frozenset(map(_torch.storage_or_none, leaves))
        made = None if held is None else held[1].stack
        others = tuple(dict.fromkeys(one.stack for one in beside))
        self._idle[key] = _Idle(stack, self._core.clock, storages, values, clues, made, others)

    def until_now(self) -> Iterator[tuple[RawStack, Hashable, tuple[Clue, ...]]]:
        """Yield the lines, with their keys, whose leaves no step had since, and have their values still."""
        for key, idle in self._idle.items():
            if not self._is_trained(idle):
                gradient, *rest = idle.clues
                chosen = {"is_alone": "" if idle.beside else "yes", "is_chosen": "yes" if _is_chosen(idle) else ""}
                yield idle.stack, key, (replace(gradient, values={**gradient.values, **chosen}), *rest)

    def _is_trained(self, idle: _Idle) -> bool:
        """Whether a step had one of the leaves, or one has other values now, or was written and is gone."""
        if any(not idle.storages.isdisjoint(one.storages) for one in self._steps.steps):
            return True
        alive = [(leaf, before) for weak, before in idle.values if (leaf := weak()) is not None]
        if len(alive) < len(idle.values):
            return any(one.storage in idle.storages for one in logged_writes(self._core, idle.clock))
        return not all(torch.equal(_first_values(leaf), before) for leaf, before in alive)


def _is_chosen(idle: _Idle) -> bool:
    """Whether others are trained, and the program chooses in which rounds, or which optimizer, it steps."""
    if not idle.beside or idle.made is None:
        return False
    from gradsan.detect.meaning.evidence import is_step_chosen

    return is_step_chosen(idle.made, idle.stack, idle.beside)


def _has(optimizer: Optimizer, leaf: torch.Tensor) -> bool:
    return any(one is leaf for one in _torch.parameters_of(optimizer))


def _first_values(leaf: torch.Tensor) -> torch.Tensor:
    """A copy of the first values of a leaf, on the CPU."""
    return leaf.detach().reshape(-1)[:_VALUES_COMPARED].to("cpu", copy=True)
