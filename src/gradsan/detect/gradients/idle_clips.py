"""Clips of gradients that are missing, used up, others' than those of the step that follows, or to be added to yet."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from types import FrameType
from typing import NamedTuple

from torch.optim import Optimizer

from gradsan import _torch
from gradsan.detect.gradients.clip_calls import CLEARS, Clip, ClipCalls
from gradsan.graph import naming
from gradsan.model import Clue
from gradsan.record.log import RawWrite
from gradsan.record.stacks import symbolise
from gradsan.record.steps import StepRecord

_UNSCALES, _LARGE = "GradScaler.unscale_", 500


class IdleClip(NamedTuple):
    """A clip without its effect: its ``kind``, as in the clue of ``clip_without_effect``, and the step beside it.

    There is no step where the gradients are a ``part`` of what the next backward of the same line adds to.
    """

    clip: Clip
    kind: str
    step: StepRecord | None
    frozen: tuple[_torch.weak_tensor, ...] = ()
    """What it was given, if that is a frozen part of the model, which may have its turn later."""

    @property
    def is_frozen(self) -> bool:
        """Whether all of that is there, and still without a gradient."""
        held = [one() for one in self.frozen]
        return all(one is not None and not one.requires_grad and one.grad is None for one in held)

    def clues(self, frame: FrameType, optimizers: list[Optimizer]) -> tuple[Clue, Clue]:
        """The clues of a report; ``frame`` is where the program runs. An unclipped parameter stands for all."""
        leaf = None if self.clip.doubled is None or self.kind != "doubled" else self.clip.doubled()
        trained = [] if leaf is not None else [one for one in _torch.parameters_of(*optimizers) if one.requires_grad]
        for storages in (self.clip.storages, () if self.step is None else self.step.storages):
            found = (one for one in trained if _torch.storage_or_none(one) in storages)
            leaf = next(found, None) if leaf is None else leaf
        facts = {} if leaf is None else _torch.facts_of(leaf)
        name = None if leaf is None else naming.name_of(leaf, frame)
        clip = Clue("clip", symbolise(self.clip.stack), name, op=self.clip.op, values={**facts, "kind": self.kind})
        if self.step is None:
            return clip, Clue("stepped")
        return clip, Clue("stepped", symbolise(self.step.stack), name=self.step.optimizer)

    @property
    def may_be_read(self) -> bool:
        """Whether the clipped gradients are there, and the program may read them after the step."""
        return self.clip.is_filled and self.kind in ("spent", "of_last_step")


class Round(NamedTuple):
    """What a round has shown: ``refilled`` are the clocks of its later backwards and the leaves of each by ``id``."""

    calls: ClipCalls
    steps: list[StepRecord]
    writes: list[RawWrite]
    refilled: list[tuple[int, frozenset[int]]]
    optimizers: list[Optimizer]

    def idle_clips(self) -> Iterator[IdleClip]:
        """Yield the clips of the round that have changed no step."""
        clips = [one for one in self.calls.clips if one.storages]
        for clip in clips:
            yield from self._of_others(clip, clips)
            yield from self._too_early_or_late(clip, clips)
            leaf = None if clip.doubled is None else clip.doubled()
            own = _torch.storage_or_none(leaf) if leaf is not None else 0
            later = [one for one in self.steps if (one.end or one.clock) > clip.clock and own in one.storages]
            if later and own:
                yield IdleClip(clip, "doubled", later[0])
            elif clip.has_scaled and self._is_part(clip):
                yield IdleClip(clip, "part", None)
        for clip in self.calls.clips:
            if clip.is_run_out and clip.bounds and self.steps:
                yield IdleClip(clip, "run_out", self.steps[0])

    def _is_part(self, clip: Clip) -> bool:
        """Whether the next backward adds to what was clipped: no step has used it, and nothing has written it."""
        is_used = any(not clip.storages.isdisjoint(one.storages) for one in self.steps)
        own = clip.stack.codes
        later = (raw for raw in self.writes if raw.clock > clip.clock and raw.storage in clip.gradients)
        # Zeros come by any operation (``grad.mul_(0)``, ``grad.copy_(zeros)``), but not by the call itself.
        if is_used or any(raw.stack.codes[-len(own) :] != own for raw in later):
            return False
        held = [one.grad for one in _torch.parameters_of(*self.optimizers) if id(one) in clip.leaves]
        kept = {_torch.storage_or_none(one) for one in held if one is not None}
        # ``zero_grad`` may have dropped some, and memory comes back.
        cleared = [one.clock for one in self.calls.clearings if not clip.leaves.isdisjoint(one.leaves)]
        return bool(clip.gradients) and clip.gradients <= kept and not any(one > clip.clock for one in cleared)

    def _of_others(self, clip: Clip, clips: list[Clip]) -> Iterator[IdleClip]:
        """Yield a clip that got parameters without gradients that no optimizer has, if none got those of the steps."""
        if any(not clip.storages.isdisjoint(one.storages) for one in self.steps):
            return
        clipped = frozenset[int]().union(*(one.storages for one in clips))
        owned = {id(one) for optimizer in self.optimizers for one in _torch.parameters_of(optimizer)}
        is_idle = clip.bounds and not clip.gradients and owned.isdisjoint(clip.leaves)
        if not (is_idle and self.steps and all(clipped.isdisjoint(one.storages) for one in self.steps)):
            return
        from gradsan.detect.meaning.evidence import top_modules

        beside = naming.frozen_beside(owned, top_modules())
        frozen = tuple(_torch.weak_tensor(one) for one in beside if id(one) in clip.leaves)
        yield IdleClip(clip, "others", self.steps[0], frozen)

    def _too_early_or_late(self, clip: Clip, clips: list[Clip]) -> Iterator[IdleClip]:
        """Yield a clip before its gradients exist or are unscaled, or after the step that used them."""
        own = [record for record in self.steps if not clip.storages.isdisjoint(record.storages)]
        if not own or not clip.bounds:
            return
        unscaled = [raw.clock for raw in self.writes if raw.op == _UNSCALES and raw.storage in clip.gradients]
        if any(clip.clock < clock < (own[0].end or clock) for clock in unscaled) and self._is_scaled(clip):
            yield IdleClip(clip, "scaled", own[0])
            return
        clears = [one.clock for one in self.calls.clearings if not clip.leaves.isdisjoint(one.leaves)]
        clears += [raw.clock for raw in self.writes if raw.op in CLEARS and raw.storage in clip.gradients]
        filled = [begun for begun, reached in self.refilled if not clip.leaves.isdisjoint(reached)]

        def acts(one: Clip) -> bool:
            # A gradient may be zero or missing for good reason: a loss at its minimum, a head whose turn it is not.
            return any(
                (record.end or record.clock) > one.clock
                and not any(one.clock < clear < record.clock for clear in clears)
                and (one.is_filled or not any(one.clock < begun < record.clock for begun in filled))
                for record in own
            )

        is_spent = own[0].clock < clip.clock and any(clear > clip.clock for clear in clears)
        if any(acts(one) for one in clips if not one.storages.isdisjoint(clip.storages)):
            # What steps next has no clip of its own: this one was given the parameters of the step before.
            later = (one for one in self.steps if one.clock > clip.clock)
            step = min(later, default=own[0], key=attrgetter("clock"))
            is_next = all(one.storages.isdisjoint(step.storages) for one in clips)
            if clip.is_filled and is_spent and not acts(clip) and is_next:
                yield IdleClip(clip, "of_last_step", step)
        elif not clip.is_filled or is_spent:
            yield IdleClip(clip, "spent" if clip.is_filled else "empty", own[0])

    def _is_scaled(self, clip: Clip) -> bool:
        """Whether a bound is one for plain gradients: the scale that is divided out later is not in it."""
        scaler = next((one() for clock, one in self.calls.unscaled if clock > clip.clock), None)
        return scaler is not None and clip.bound is not None and bool(clip.bound * _LARGE < scaler.get_scale())
