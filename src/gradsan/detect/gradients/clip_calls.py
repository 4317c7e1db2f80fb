"""Calls that clear, clip or scale gradients, noted for the length of a round.

``zero_grad`` of optimizers and modules, ``clip_grad_norm_``, ``clip_grad_value_``, and methods of ``GradScaler`` are
only replaced meanwhile: an ordinary step pays nothing.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from gradsan import _torch
from gradsan.record import _writer_pure as writer_pure
from gradsan.record.guarding import Guard
from gradsan.record.log import Core, RawStack, RawWrite
from gradsan.record.patches import Patches, standing

CLEARS = frozenset({"zero_", "_foreach_zero_", "fill_"})
"""Writes that clear a gradient."""

NO_READ = CLEARS | {"detach", "detach_", "requires_grad_", "_amp_foreach_non_finite_check_and_unscale_"}
"""Operations that may be given a gradient and do not use its values elsewhere."""

CLAMPS = frozenset({"clamp", "clip", "clamp_min", "clamp_max", "nan_to_num"})
OUT_OF_PLACE = CLAMPS | {"lerp", "add", "sub", "mul", "div", "addcmul", "addcdiv"}
COMPUTES = OUT_OF_PLACE | {"__add__", "__sub__", "__mul__", "__truediv__", "__radd__", "__rsub__", "__rmul__"}
"""Operations that compute a new tensor: their results, dropped, change nothing."""

_MEASURES = 1e5
"""The bound from which a call only measures the norm."""


class Gradient(NamedTuple):
    """The gradient of a leaf after a backward: its memory, and the memory of the leaf (``own``), as numbers."""

    leaf: _torch.weak_tensor
    own: int
    storage: int
    memory: Any


class Clearing(NamedTuple):
    """A call of ``zero_grad``: clock, stack, and the leaves by ``id``."""

    clock: int
    stack: RawStack
    op: str
    leaves: frozenset[int]


class Clip(NamedTuple):
    """A call that clips: clock, stack, the leaves by ``id``, their memory and that of their gradients.

    ``is_filled`` says whether any gradient was nonzero, ``bounds`` whether its bound is one, ``is_run_out``
    whether an exhausted generator was given. ``bound`` is the bound where it is a number. ``has_scaled`` says whether
    the norm is known to be beyond it, ``doubled`` is a leaf whose gradient was then given once more, and scaled twice.
    """

    clock: int
    stack: RawStack
    op: str
    leaves: frozenset[int]
    storages: frozenset[int]
    gradients: frozenset[int]
    is_filled: bool
    bounds: bool
    is_run_out: bool
    bound: float | None
    has_scaled: bool = False
    doubled: _torch.weak_tensor | None = None


class ClipCalls:
    """Notes such calls between :meth:`begin` and :meth:`end`."""

    def __init__(self, core: Core, guard: Guard) -> None:
        """Use the clock of ``core``; failures here become blind spots of ``guard``."""
        self._core, self._guard, self._patches = core, guard, Patches()
        self.clearings: list[Clearing] = []
        self.clips: list[Clip] = []
        self.unscaled: list[tuple[int, weakref.ref[Any]]] = []
        """Clock and ``GradScaler`` of each call of ``unscale_``; to read its scale waits for the device."""
        self.through_scaler: set[int] = set()
        """The optimizers, by ``id``, that a ``GradScaler`` was given to unscale, or to step."""
        self._scaled = _torch.WeakTensors()
        self._scaler: weakref.ref[Any] | None = None

    def begin(self) -> None:
        """Forget the last round, and start watching."""
        self.end()
        self.clearings, self.clips, self.unscaled, self.through_scaler = [], [], [], set()
        self._watch(torch.amp.GradScaler, "unscale_", self._unscaled, False)
        self._watch(torch.amp.GradScaler, "step", self._unscaled, False)
        scale = standing(torch.amp.GradScaler, "scale")
        self._patches.set(torch.amp.GradScaler, "scale", self._core.listener(scale, None, self._note_scaled))
        for owner in (Optimizer, nn.Module):
            self._watch(owner, "zero_grad", self._cleared, False)
        for owner, name, is_given_list in _torch.clip_functions():
            self._watch(owner, name, self._clipped, not is_given_list)

    def end(self) -> None:
        """Restore the originals."""
        self._patches.undo()

    def cleared_at(self, one: Gradient, clear: RawWrite | None) -> Clearing | None:
        """The clearing of a gradient, by ``clear`` if there is one; None where it was not cleared, or is unknown."""
        leaf = one.leaf()
        if leaf is None:
            return None
        now = 0 if leaf.grad is None else _torch.storage_or_none(leaf.grad)
        if clear is not None:
            return Clearing(clear.clock, clear.stack, clear.op, frozenset())
        if now == one.storage or not one.memory.expired():
            return None
        return next((call for call in self.clearings if id(leaf) in call.leaves), None)

    def is_scaled(self, outputs: Any) -> bool:
        """Whether a backward starts at what a ``GradScaler`` gave in the round before, by another scale than one."""
        given = next(iter(outputs), None)
        return torch.is_tensor(given) and self._scaled.get(id(given)) is given

    @property
    def has_scale(self) -> bool:
        """Whether the scaler of the last scaled loss is PyTorch's own, and its scale not one; waits for the device."""
        scaler = None if self._scaler is None else self._scaler()
        is_plain = scaler is not None and type(scaler).unscale_ is torch.amp.GradScaler.unscale_
        return is_plain and scaler is not None and bool(scaler.get_scale() != 1)

    def _note_scaled(self, _: Any, args: tuple[Any, ...], __: dict[str, Any], result: Any) -> None:
        if type(result) in _torch.PLAIN_TENSORS and args[0].is_enabled():
            self._scaler = weakref.ref(args[0])
            self._guard.run(lambda: self._scaled.set(id(result), result))

    def _watch(self, owner: Any, name: str, note: Callable[[str, Any, Any, Any], None], lists: bool) -> None:
        """Wrap ``owner.name``; ``lists`` says whether it may take a generator, which must be kept for the call."""
        original, core = standing(owner, name), self._core

        def called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if args and not _torch.is_compiling():
                stack, caller = core.stack(1), writer_pure.caller(1)
                bound = kwargs.get("max_norm", args[1] if len(args) > 1 else kwargs.get("optimizer"))
                is_run_out = name != "zero_grad" and _torch.is_empty_generator(args[0], caller)
                taken = [] if is_run_out else args[0]
                with _torch.hushed(), torch.no_grad():
                    norm = args[2] if len(args) > 2 else kwargs.get("total_norm")
                    self._guard.run(functools.partial(note, name, taken, (bound, is_run_out, norm), stack))

        listener = core.listener(original, called, None)

        @functools.wraps(original)
        def listed(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            is_used = core.active and not _torch.is_compiling() and isinstance(parameters, Iterator)
            if is_used and not _torch.is_empty_generator(parameters, None):
                parameters = list(parameters)
            return listener(parameters, *args, **kwargs)

        self._patches.set(owner, name, listed if lists else listener)

    def _cleared(self, name: str, owner: Any, _: Any, stack: RawStack) -> None:
        held = owner.parameters() if isinstance(owner, nn.Module) else _torch.parameters_of(owner)
        self.clearings.append(Clearing(self._core.tick(), stack, name, frozenset(map(id, held))))

    def _unscaled(self, name: str, scaler: Any, how: tuple[Any, bool, Any], stack: RawStack) -> None:
        self.through_scaler.add(id(how[0]))
        if name == "unscale_":
            self.unscaled.append((self._core.tick(), weakref.ref(scaler)))

    def _clipped(self, name: str, given: Any, how: tuple[Any, bool, Any], stack: RawStack) -> None:
        bound, is_run_out, norm = how
        leaves = [given] if torch.is_tensor(given) else given
        if not all(type(one) in _torch.PLAIN_TENSORS for one in leaves):
            return
        grads = [one.grad for one in leaves if one.grad is not None]
        storages = frozenset(map(_torch.storage_or_none, leaves)) - {0}
        of_grads = frozenset(map(_torch.storage_or_none, grads)) - {0}
        # Reading from a device would synchronise; a profiler would record the operations.
        is_asked = all(one.is_cpu for one in grads) and not _torch.is_profiled()
        is_filled = any(bool(one.any()) for one in grads) if is_asked else bool(grads)
        is_bound = not isinstance(bound, int | float) or (math.isfinite(bound) and bound < _MEASURES)
        short = "clip_grad_value_" if "value" in name else "clip_grad_norm_"
        number = bound if isinstance(bound, int | float) else None
        ids = frozenset(map(id, leaves))
        # ``norm`` may be the argument for its kind where the inner function is not there to be watched.
        is_norm = short == "clip_grad_norm_" and is_bound and number is not None and torch.is_tensor(norm)
        scales = is_norm and is_asked and bool(norm > number)
        twice = _given_twice(leaves) if scales else None
        doubled = None if twice is None else _torch.weak_tensor(twice)
        clock = self._core.tick()
        self.clips.append(
            Clip(clock, stack, short, ids, storages, of_grads, is_filled, is_bound, is_run_out, number, scales, doubled)
        )


def _given_twice(leaves: list[Any]) -> Any:
    """The first leaf with a gradient that is an earlier one's too, or the leaf itself for the second time."""
    seen = set()
    for leaf in leaves:
        grad = leaf.grad
        if grad is None or grad.layout is not torch.strided or not (storage := _torch.storage_or_none(grad)):
            continue
        place = storage, int(grad.storage_offset()), grad.numel()
        if place in seen and bool(grad.any()):
            return leaf
        seen.add(place)
    return None
