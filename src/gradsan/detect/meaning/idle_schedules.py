"""Schedulers of an optimizer that no longer steps: another one updates its parameters, at an unscheduled rate.

Checked in the 4th, 8th, 16th … round of a line, and at the end: between two checks a scheduler has been stepped, its
optimizer has not, and another optimizer with groups of its own has updated the same parameters with an unchanged
rate. An optimizer with a scheduler of its own is no such case: optimizers may take turns.

And rates that are written into what ``optimizer.state_dict()`` returns, which nothing keeps: its groups are copies.

Row ``setting_of_a_copy``: roles ``written`` (``name`` is the optimizer's class); the call is the site.
Row: ``schedule_without_effect``. Roles: ``scheduler`` (where it was made; ``name`` is its class), ``optimizer`` (where
its optimizer was made; ``name``), ``other`` (where the stepping one was made; ``name``), ``stepped`` (its step).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.optim.optimizer import Optimizer

from gradsan import _torch, source
from gradsan.detect.meaning.made import Made, Making
from gradsan.detect.one_tensor.second_names import at_line
from gradsan.model import Clue
from gradsan.record.detector import Finder, Guard, Run
from gradsan.record.log import RawStack
from gradsan.record.patches import Patches, standing
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward, StepRecord

ROW, COPY = "schedule_without_effect", "setting_of_a_copy"
_ADVANCED, _STEPS, _STACKS = 2, 2, 64


class _Look(NamedTuple):
    """State of a scheduler at a check: its epoch, the last step of any optimizer, and all learning rates."""

    weak: Any
    epoch: int
    clock: int
    rates: dict[int, list[Any]]


class IdleSchedules(Finder):
    """Checks the live schedulers in some rounds; findings go to ``found``."""

    part = "states of optimizers"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._steps, self._making = run.steps, run.get(Making)
        self._seen = self._notes(dict[int, _Look]())

    def install(self, patches: Patches, guard: Guard) -> None:
        core = self._core

        def given(_: Any, args: tuple[Any, ...], __: dict[str, Any], ___: Any) -> None:
            if core.backwards and not _torch.is_compiling():
                stack = core.stack(1)
                guard(lambda: self._look_at_state(args[0], stack))

        patches.set(Optimizer, "state_dict", core.listener(standing(Optimizer, "state_dict"), None, given))

    def _look_at_state(self, optimizer: Optimizer, stack: RawStack) -> None:
        if stack in self._described or len(self._described) > _STACKS:
            return
        self._described.add(stack)
        site = symbolise(stack)
        frame = site.user_frame
        line = None if frame is None else source.writes_into_result(frame, "param_groups")
        if frame is not None and line is not None:
            name = type(optimizer).__name__
            self._report_at(COPY, stack, Clue("written", at_line(site, frame, line), name=name))

    def before_round(self, entry: RawBackward, rounds: int) -> None:
        if rounds >= 4:
            self.settle()

    @_torch.hushed()
    def settle(self) -> None:
        """Check each scheduler."""
        for scheduler, made in self._making.schedulers():
            if id(scheduler) not in self._described:
                self._look(scheduler, made)

    def _look(self, scheduler: Any, made: Made) -> None:
        optimizer, epoch = getattr(scheduler, "optimizer", None), getattr(scheduler, "last_epoch", None)
        if optimizer is None or not isinstance(epoch, int):
            return
        last = self._seen.get(id(scheduler))
        since = made.clock if last is None or last.weak is not made.weak else last.clock
        steps = [record for record in self._steps.steps if record.clock > since]
        if last is None or last.weak is not made.weak or any(record.identity == id(optimizer) for record in steps):
            latest = max((record.clock for record in steps), default=since)
            self._seen[id(scheduler)] = _Look(made.weak, epoch, latest, self._rates())
            return
        own = set(map(_torch.storage_or_none, _torch.parameters_of(optimizer))) - {0}
        others = [record for record in steps if not own.isdisjoint(record.storages)]
        if epoch - last.epoch >= _ADVANCED and len(others) >= _STEPS:
            self._seen[id(scheduler)] = _Look(made.weak, epoch, steps[-1].clock, self._rates())
            self._judge(scheduler, optimizer, made, others[-1], last.rates)

    def _rates(self) -> dict[int, list[Any]]:
        """Return the learning rates of the live optimizers, by the clock at which these were made."""
        return {made.clock: _rates_of(one) for one, made in self._making.optimizers()}

    def _judge(
        self, scheduler: Any, optimizer: Optimizer, made: Made, step: StepRecord, rates: dict[int, list[Any]]
    ) -> None:
        known = {id(one): (one, where) for one, where in self._making.optimizers()}
        other = known.get(step.identity)
        # An optimizer that wraps another shares its groups.
        if other is None or any(group is own for group in other[0].param_groups for own in optimizer.param_groups):
            return
        if any(getattr(one, "optimizer", None) is other[0] for one, _ in self._making.schedulers()):
            return
        if other[1].clock not in rates:
            return
        self._described.add(id(scheduler))
        if rates[other[1].clock] != _rates_of(other[0]):
            return
        clues = [Clue("scheduler", symbolise(made.stack), name=type(scheduler).__name__)]
        if id(optimizer) in known:
            clues.append(Clue("optimizer", symbolise(known[id(optimizer)][1].stack), name=type(optimizer).__name__))
        clues += [
            Clue("other", symbolise(other[1].stack), name=type(other[0]).__name__),
            Clue("stepped", symbolise(step.stack), name=step.optimizer),
        ]
        self._report_at(ROW, step.stack, *clues)


def _rates_of(optimizer: Optimizer) -> list[Any]:
    rates = [group.get("lr") for group in optimizer.param_groups]
    return [float(one) if isinstance(one, int | float) else id(one) for one in rates]
