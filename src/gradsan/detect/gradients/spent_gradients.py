"""Gradients that are cleared before any step uses them, and clipping of gradients that are missing or used up.

Some rounds of a line are followed as a whole: the gradients of its backward, their reads, where they are cleared,
where gradients are clipped, and the steps. A fault is reported when it has occurred in two of these rounds: for all
gradients, or for those of one optimizer, if nothing refills them before its step. A line whose gradients were used in
one round is left alone, unless the source shows that they were to be accumulated for a step of several rounds; and so
is a program whose own code reads gradients. Where no step of these parameters comes until the end, and they keep their
values, the step was forgotten.

Rows: ``gradient_thrown_away``. Roles: ``gradient`` (a leaf that no other backward reached before the step, if any;
``values``: ``shape``, ``dtype``, ``device``, ``leaves``, ``is_refilled``, whether there is none, ``is_part``, whether
it is one of several to be accumulated, ``is_read``, whether the program has read it, and ``is_cleared_again``, whether
it is cleared once more after the step), ``cleared`` (its site; ``op``), ``stepped`` (the step that came too late,
without a site if none came; ``name``, the optimizer's).
``clip_without_effect``. Roles: ``clip`` (the call; ``values``: ``kind``, ``empty`` where there was nothing to clip,
``run_out`` where it was given an exhausted generator, ``spent`` where it came after the step, ``of_last_step`` where
the step that follows is for others, ``dropped`` where it made a tensor that nothing takes, ``others`` where no
optimizer has what it was given, ``scaled`` where a ``GradScaler`` unscales later, ``doubled``, ``part``), ``stepped``.
``result_dropped``, of a parameter: role ``written`` (the call; ``name``; ``op``; ``values``: ``shape``, ``dtype``,
``device``). ``update_dropped``, of a gradient (``g = g / n`` after ``g = p.grad``): role ``written``; ``op`` is that.
And the rows of :mod:`gradsan.detect.gradients.wrong_steps` and :mod:`gradsan.detect.gradients.opposed_gradients`.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradsan import _torch
from gradsan.detect.gradients import clip_calls
from gradsan.detect.gradients.clip_calls import CLEARS, Clearing, ClipCalls, Gradient
from gradsan.detect.gradients.kept_gradients import program_reads_gradients
from gradsan.detect.meaning.made import Making
from gradsan.detect.meaning.rounds import RoundDetector
from gradsan.graph import naming, walk
from gradsan.model import Clue
from gradsan.record.detector import Run
from gradsan.record.log import RawStack, RawWrite, logged_writes
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward, StepRecord, read_backward, steps_of_round
from gradsan.record.user_hooks import may_look

if TYPE_CHECKING:
    from gradsan.detect.gradients.forgotten_steps import ForgottenSteps
    from gradsan.detect.gradients.idle_clips import IdleClip
    from gradsan.detect.gradients.opposed_gradients import OpposedGradients
    from gradsan.detect.gradients.wrong_steps import WrongStep

THROWN, CLIPPED, DROPPED = "gradient_thrown_away", "clip_without_effect", "result_dropped"
BOUND, OPPOSED = "update_dropped", "gradients_opposed"
_ROUNDS_WITHOUT_STEP, _LINES_BOUND, _LINES_STEPPING = 16, 64, 16


class SpentGradients(RoundDetector):
    """Checks the gradients of some rounds; findings go to ``found``."""

    waits = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._steps, self._making = run.steps, run.get(Making)
        self._calls_of_program = ClipCalls(run.core, run.guard)
        self._leaves: list[Any] = []
        self._gradients: list[Gradient] = []
        self._storages: set[int] = set()
        self._is_read = self._is_clipped = self._is_scaled = self._is_suspect = False
        self._dropped: dict[RawStack, tuple[str, dict[str, Any] | None]] = {}
        self._bound: dict[RawStack, dict[str, Any]] = {}
        self._taken = collections.Counter[tuple[RawStack, tuple[str, int, int]]]()
        self._owned = frozenset[int]()
        self._refilled: list[tuple[int, frozenset[int]]] = []
        self._used, self._stepped_at = self._notes(set[Hashable]()), self._notes(set[Hashable]())
        self._unstepped = self._notes(dict[Hashable, Clearing]())
        self._forgotten: ForgottenSteps | None = None
        self._opposed: OpposedGradients | None = None
        self._begun = self._gone_on = self._since = 0
        self._frozen: list[tuple[RawStack, IdleClip]] = self._notes([])
        self._coasting: list[WrongStep] = self._notes([])
        self._rounds_at = self._notes(collections.Counter[Hashable]())

    def forget(self) -> None:
        super().forget()
        self._forgotten, self._opposed, self._gone_on, self._since = None, None, 0, self._core.clock

    def begins(self, entry: RawBackward) -> bool:
        """Note the leaves, if optimizers have all of them and no hook is in the graph."""
        trained = list(_torch.parameters_of(*self._optimizers()))
        if not trained:
            return False
        owned = set(map(id, trained))
        self._owned = frozenset(map(_torch.storage_or_none, trained)) - {0}
        order = walk.engine_order(read_backward(entry).roots)
        leaves = [one for one in walk.leaves_of(order) if one.requires_grad]
        is_plain = all(type(one) in _torch.PLAIN_TENSORS and id(one) in owned for one in leaves)
        is_hooked = any(map(_torch.has_leaf_hooks, leaves)) or any(map(may_look, order))
        if not is_plain or is_hooked or any(True for _ in naming.find(sys._getframe(1), _keeps_gradient)):
            leaves = []
        self._leaves = [_torch.weak_tensor(one) for one in reversed(leaves)]
        self._gradients, self._refilled, self._dropped = [], [], {}
        self._taken, self._bound, self._storages = collections.Counter(), {}, set()
        self._is_read = self._is_clipped = self._is_suspect = False
        self._begun, self._is_scaled = entry.clock, self._calls_of_program.is_scaled(entry.outputs)
        self._calls_of_program.begin()
        self._listeners.call_after_backward(self.after_backward)
        return True

    def goes_on(self, entry: RawBackward) -> bool:
        """Whether a fault was seen once, or gradients cleared without a step, scaled at one, or wait for a loss."""
        is_wanted = (entry.stack in self._unstepped and entry.stack not in self._described) or self._is_suspect
        is_wanted |= (self._opposed is not None and self._opposed.is_adding) or 1 in self._rounds_at.values()
        self._gone_on += is_wanted
        return is_wanted and self._gone_on <= _ROUNDS_WITHOUT_STEP

    @_torch.hushed()
    def first_step(self, optimizer: Any) -> None:
        """Check an optimizer's first step: flags that were to freeze what it has, and its closure."""
        from gradsan.detect.gradients.wrong_steps import UNREAD, unfed_closure, unread_flags

        self._report_wrong(unfed_closure(self._core, self._steps.steps, optimizer, sys._getframe(1)))
        stack = self._core.stack()
        # A program may make one optimizer per task.
        is_due = stack not in self._stepped_at and len(self._stepped_at) < _LINES_STEPPING
        self._stepped_at.add(stack)
        for clue in unread_flags(optimizer, sys._getframe(1)) if is_due else ():
            if clue.site not in self._described:
                self._described.add(clue.site)
                self._report_at(UNREAD, stack, clue, Clue("stepped", name=type(optimizer).__name__))

    @_torch.hushed()
    def later_step(self, optimizer: Any) -> None:
        """Check a later step of an optimizer: what it has moved although it is frozen."""
        from gradsan.detect.gradients.wrong_steps import frozen_step

        self._coasting += filter(None, [frozen_step(self._steps.steps, optimizer)])

    @_torch.hushed()
    def settle(self) -> None:
        """Report the lines whose gradients no step has used until the end, and clips of what stayed frozen."""
        if len(self._steps.steps) > 1:
            from gradsan.detect.gradients.wrong_steps import is_left_so, steps_at_the_end

            left = [one for one in self._coasting if is_left_so(one, self._steps.steps)]
            for one in (*left, *steps_at_the_end(self._core, self._since, self._steps.steps, self._optimizers())):
                self._report_wrong(one)
        for stack, idle in self._frozen:
            if idle.is_frozen:
                self._report_clip(stack, idle)
        for stack, key, clues in self._forgotten.until_now() if self._forgotten is not None else ():
            if stack not in self._described and key not in self._used:
                self._described.add(stack)
                self._report_at(THROWN, stack, *clues)
        super().settle()

    def _end(self) -> None:
        if self._entry is not None:
            self._calls_of_program.end()
            self._listeners.call_after_backward(self.after_backward, False)
        super()._end()

    @_torch.hushed()
    def after_backward(self, entry: RawBackward) -> None:
        """Note the gradients; as ``listeners.AfterBackward``."""
        if self._opposed is not None:
            self._opposed.compare(entry)
        if entry.clock != self._begun:
            return
        for weak in self._leaves:
            leaf = weak()
            grad = None if leaf is None else leaf.grad
            if grad is not None and not grad.is_sparse and (storage := _torch.storage_or_none(grad)):
                memory = _torch.weak_storage(grad.untyped_storage())
                self._gradients.append(Gradient(weak, _torch.storage_or_none(leaf), storage, memory))
                self._storages.add(storage)

    def result(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Check whether a call reads the gradients."""
        if op in clip_calls.OUT_OF_PLACE and args and torch.is_tensor(args[0]) and result is not args[0]:
            storage, is_kept = _torch.storage_or_none(args[0]), type(args[0]) is nn.Parameter
            if is_kept or storage in self._owned or (storage in self._storages and op in clip_calls.CLAMPS):
                stack = self._core.stack()
                self._dropped[stack] = op, _torch.facts_of(args[0]) if is_kept or storage in self._owned else None
                self._taken[stack, (op, storage, int(args[0].storage_offset()))] += 1
        if self._storages and op in clip_calls.COMPUTES and len(self._bound) < _LINES_BOUND:
            held = [one for one in args if torch.is_tensor(one) and _torch.storage_or_none(one) in self._storages]
            if held:
                stack = self._core.stack()
                self._bound.setdefault(stack, _torch.facts_of(held[0]))
                self._taken[stack, ("=", _torch.storage_or_none(held[0]), int(held[0].storage_offset()))] += 1
        if self._storages and not self._is_read and op not in clip_calls.NO_READ:
            given = _torch.tensors_of_call(args, kwargs)
            if any(_torch.storage_or_none(one) in self._storages for one in given):
                is_clip = _torch.is_within_clip(sys._getframe(1))
                self._is_clipped |= is_clip
                self._is_read = not is_clip

    def looks(self, entry: RawBackward, is_last: bool) -> None:
        """Judge the round when it is over."""
        if not is_last:
            reached = walk.leaves_of(walk.engine_order(read_backward(entry).roots))
            self._refilled.append((entry.clock, frozenset(map(id, reached))))
            if (opposed := self._compared(self._steps.steps)) is not None and self._entry is not None:
                opposed.meet(self._entry, entry, reached, self._gradients)
            return
        begun = self._begun
        steps = steps_of_round(self._steps.steps, begun, [clock for clock, _ in self._refilled])
        if steps is None:
            return
        writes = [raw for raw in logged_writes(self._core, begun) if raw.kind != "metadata"]
        if (opposed := self._compared(steps)) is not None and self._entry is not None:
            self._judge_opposed(opposed, self._entry)
        self._judge_part(entry, steps)
        # A clip reads for the step's sake, unless it has no bound and gives the norm alone.
        self._is_read |= self._is_clipped and not any(one.bounds for one in self._calls_of_program.clips)
        if self._gradients:
            self._judge_cleared(entry, steps, writes)
        self._judge_dropped(entry, steps)
        from gradsan.detect.gradients.idle_clips import Round

        if self._is_scaled and self._gradients and not (self._is_read or self._is_clipped):
            from gradsan.detect.gradients.wrong_steps import scaled_step

            pairs, later = [(one.own, one.storage) for one in self._gradients], [clock for clock, _ in self._refilled]
            wrong = scaled_step(entry.stack, self._calls_of_program, steps, writes, pairs, later, self._optimizers())
            self._is_suspect = wrong is not None and wrong.stack not in self._described
            if wrong is not None and self._is_second(wrong.stack):
                self._report_wrong(wrong)
        for idle in Round(self._calls_of_program, steps, writes, self._refilled, self._optimizers()).idle_clips():
            if not self._is_second(idle.clip.stack):
                continue
            if idle.frozen:
                self._frozen.append((entry.stack, idle))
            elif not (idle.may_be_read and program_reads_gradients(sys._getframe(1))):
                self._report_clip(entry.stack, idle)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [one for one, _ in self._making.optimizers()]

    def _report_wrong(self, wrong: WrongStep | None) -> None:
        if wrong is not None and self._described.isdisjoint([key := (wrong.kind, wrong.stack)]):
            self._described.add(key)
            self._report_at("step_without_its_gradients", wrong.stack, *wrong.clues())

    def _judge_dropped(self, entry: RawBackward, steps: list[StepRecord]) -> None:
        """Report ``p.grad.clamp(-1, 1)`` or ``average.lerp(p, 0.1)`` as a statement: it changes nothing."""
        if not (self._dropped or self._bound):
            return
        from gradsan.detect.gradients.dropped_results import results, updates

        step = self._first_step(steps)
        for written in updates(self._bound, self._taken) if step is not None else ():
            if written.site not in self._described:
                self._described.add(written.site)
                self._report_at(BOUND, entry.stack, written)
        for written in results(self._dropped, self._taken):
            if not self._is_second(written.site):
                continue
            if written.values:
                self._report_at(DROPPED, entry.stack, written)
            elif step is not None:
                clip = Clue("clip", written.site, op=written.op, values={"kind": "dropped"})
                self._report_at(CLIPPED, entry.stack, clip, Clue("stepped", symbolise(step.stack), name=step.optimizer))

    def _first_step(self, steps: list[StepRecord]) -> StepRecord | None:
        own = {one.own for one in self._gradients}
        return next((one for one in steps if not own.isdisjoint(one.storages)), None)

    def _compared(self, steps: Sequence[StepRecord]) -> OpposedGradients | None:
        stepped = {storage for one in steps if one.clock > self._begun for storage in one.storages}
        if self._opposed is None and 0 < sum(one.own in stepped for one in self._gradients) < len(self._gradients):
            from gradsan.detect.gradients.opposed_gradients import OpposedGradients

            self._opposed = OpposedGradients(self._core, self._steps, self._listeners)
        return self._opposed

    def _judge_opposed(self, opposed: OpposedGradients, first: RawBackward) -> None:
        """Report two losses whose gradients add up in a network and have opposed each other in this round, too."""
        found = opposed.end(first, self._gradients, self._calls_of_program.clearings)
        if found is not None and not self._is_read and not program_reads_gradients(frame := sys._getframe(2)):
            self._report_at(OPPOSED, found.entry.stack, *found.clues(frame))

    def _judge_part(self, entry: RawBackward, steps: list[StepRecord]) -> None:
        """Report gradients cleared in an earlier round, if this one ends with a step that was to accumulate them."""
        step, before = self._first_step(steps), self._unstepped.get(entry.stack)
        if step is None or before is None or entry.stack in self._described:
            return
        from gradsan.detect.meaning.evidence import adds_up_parts

        is_meant = adds_up_parts(before.stack, entry.stack, step.stack)
        if is_meant and not program_reads_gradients(sys._getframe(1)):
            self._described.add(entry.stack)
            self._report_cleared(entry, before, step, self._gradients, is_part=True)

    def _judge_cleared(self, entry: RawBackward, steps: list[StepRecord], writes: list[RawWrite]) -> None:
        clears = {raw.storage: raw for raw in reversed(writes) if raw.op in CLEARS}
        clearings = [self._calls_of_program.cleared_at(one, clears.get(one.storage)) for one in self._gradients]
        is_whole = not any(one is None for one in clearings)
        if is_whole and self._judge_cleared_of(entry, entry.stack, self._gradients, clearings, steps, writes):
            return
        for optimizer, _ in self._making.optimizers():
            held = set(map(id, _torch.parameters_of(optimizer)))
            own = [one for one in zip(self._gradients, clearings, strict=True) if id(one[0].leaf()) in held]
            gradients, cleared = [one for one, _ in own], [one for _, one in own]
            if 0 < len(own) < len(self._gradients) and not any(one is None for one in cleared):
                self._judge_cleared_of(entry, (entry.stack, id(optimizer)), gradients, cleared, steps, writes)

    def _judge_cleared_of(
        self,
        entry: RawBackward,
        key: Any,
        gradients: list[Gradient],
        clearings: list[Clearing | None],
        steps: list[StepRecord],
        writes: list[RawWrite],
    ) -> bool:
        """Judge the clearing of all gradients of the round, or of one optimizer's; return whether none was used."""
        first = min((one for one in clearings if one is not None), key=lambda one: one.clock)
        own = {one.own: cleared.clock for one, cleared in zip(gradients, clearings, strict=True) if cleared is not None}
        # Those of one network are often cleared early, and those of another after its step.
        used = any(record.clock < own.get(storage, 0) for record in steps for storage in record.storages)
        moved = any(raw.clock < own.get(raw.storage, 0) for raw in writes)
        later = [one for one in steps if one.clock > first.clock and not own.keys().isdisjoint(one.storages)]
        # A backward before many steps has another purpose, or belongs to an outer loop.
        is_alone = bool(later) and len({one.identity for one in later}) == len(later)
        is_whole = key is entry.stack
        if is_whole and not (used or moved):
            # A loss often goes through a network that another one trains: a step of that one is none of the others.
            stepped = {storage for one in later for storage in one.storages}
            cleared = zip(gradients, clearings, strict=True)
            idle = [(one, by) for one, by in cleared if by is not None and one.own not in stepped]
            if not (later or self._is_read):
                self._unstepped.setdefault(entry.stack, first)
            if idle:
                earliest = min((by for _, by in idle), key=lambda by: by.clock)
                self._note_forgotten(entry.stack, earliest, [one.leaf() for one, _ in idle], later)
        elif not (is_whole or used or moved or later):
            self._note_forgotten(entry.stack, first, [one.leaf() for one in gradients], steps, key)
        if used or moved:
            self._used.add(key)
        # One loss often reaches parameters that another trains: they are cleared, and refilled before their step.
        leaves = [one.leaf() for one in gradients]
        is_idle = is_whole or (bool(later) and not self._are_refilled(leaves, first, later[0]))
        is_idle = is_idle and is_alone and key not in self._used
        is_read = is_idle and (self._is_read or program_reads_gradients(sys._getframe(1)))
        if is_read:
            from gradsan.detect.gradients.wrong_steps import is_starved

            since = [raw for raw in writes if raw.clock > first.clock]
            is_idle = is_starved(gradients, since, later[0], self._optimizers())
            is_idle = is_idle and not self._are_refilled(leaves, first, later[0])
        # A gradient of zeros was still there at the step; where it was None, another may have been set.
        if is_idle and not (is_read and first.op in CLEARS):
            is_idle = not self._has_other_gradient(gradients, first, later[0])
        if is_idle and self._is_second(key):
            self._report_cleared(entry, first, later[0], gradients)
        return not (used or moved)

    def _note_forgotten(self, *round_without_step: Any) -> None:
        if self._is_read:
            return
        if self._forgotten is None:
            from gradsan.detect.gradients.forgotten_steps import ForgottenSteps

            self._forgotten = ForgottenSteps(self._core, self._steps, self._making)
        self._forgotten.note(*round_without_step)

    def _has_other_gradient(self, gradients: list[Gradient], first: Clearing, step: StepRecord) -> bool:
        """Whether the step has moved a leaf whose gradient went to None, by one that the program has set itself."""
        moved = {at for at, old, new in zip(step.storages, step.before, step.after, strict=False) if old != new}
        gone = [one.leaf() for one in gradients if one.own in moved and one.memory.expired()]
        return bool(gone) and not self._are_refilled(gone, first, step)

    def _are_refilled(self, leaves: list[Any], first: Clearing, step: StepRecord) -> bool:
        between = [reached for clock, reached in self._refilled if first.clock < clock < step.clock]
        return any(id(leaf) in reached for leaf in leaves for reached in between)

    def _report_cleared(
        self, entry: RawBackward, first: Clearing, step: StepRecord, gradients: list[Gradient], *, is_part: bool = False
    ) -> None:
        leaves = [leaf for one in gradients if (leaf := one.leaf()) is not None]
        starved = [leaf for leaf in leaves if not self._are_refilled([leaf], first, step)]
        if len(leaves) < len(gradients):
            return
        frame, leaf = sys._getframe(1), (starved or leaves)[0]
        part = "yes" if is_part else ""
        later = [call.leaves for call in self._calls_of_program.clearings if call.clock > step.clock]
        facts = {
            **_torch.facts_of(leaf),
            "leaves": len(gradients),
            "is_refilled": not starved,
            "is_part": part,
            "is_read": self._is_read,
            "is_cleared_again": all(any(id(one) in held for held in later) for one in leaves),
        }
        self._report_at(
            THROWN,
            entry.stack,
            Clue("gradient", name=naming.name_of(leaf, frame), values=facts),
            Clue("cleared", symbolise(first.stack), op=first.op),
            Clue("stepped", symbolise(step.stack), name=step.optimizer),
        )

    def _report_clip(self, stack: RawStack, idle: IdleClip) -> None:
        self._report_at(CLIPPED, stack, *idle.clues(sys._getframe(2), self._optimizers()))

    def _is_second(self, key: Any) -> bool:
        self._rounds_at[key] += 1
        if self._rounds_at[key] < 2 or key in self._described:
            return False
        self._described.add(key)
        return True


def _keeps_gradient(tensor: torch.Tensor) -> bool:
    return not tensor.is_leaf and bool(tensor.retains_grad or _torch.has_leaf_hooks(tensor))
