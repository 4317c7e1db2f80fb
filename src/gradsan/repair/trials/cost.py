"""Cost of a run, counted in the child instead of timed: the same program has the same numbers.

Time and peak memory of a process vary between runs by more than most fixes do. The counts are the bytes that operators
write, which dominate the time, and the most bytes that autograd keeps for backward at any one moment.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from gradsan.repair.trials.recording import EnoughSteps
from gradsan.repair.trials.trial import Cost


class Meter:
    """Counter of costs from :meth:`start` on, in the calling thread and in the backwards that it starts."""

    def __init__(self, steps: int) -> None:
        """Set the program to end after ``steps`` optimizer steps; 0: never."""
        self._limit = steps
        self._made = 0
        self._written = _Written()
        self._kept = _Kept()
        self._open = contextlib.ExitStack()

    def start(self) -> None:
        """Start counting."""
        register_optimizer_step_post_hook(self._after_step)
        self._open.enter_context(self._written)
        self._open.enter_context(saved_tensors_hooks(self._kept.pack, self._kept.unpack))

    def stop(self) -> None:
        """Stop counting."""
        self._open.close()

    def cost(self) -> Cost:
        """The costs counted so far."""
        return Cost(self._written.bytes, self._kept.most)

    def _after_step(self, *_: Any) -> None:
        self._made += 1
        if self._limit and self._made >= self._limit:
            raise EnoughSteps(0)


class _Written(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        if schema.is_mutable:
            named = kwargs or {}
            values = [*args, *(named.get(place.name) for place in schema.arguments[len(args) :])]
            pairs = zip(schema.arguments, values, strict=False)
            self.bytes += sum(_size(value) for place, value in pairs if place.alias_info and place.alias_info.is_write)
        elif not any(one.alias_info is not None for one in schema.returns):
            self.bytes += _size(result)
        return result


# Torch wraps the method so that its compiler keeps out, which imports that compiler at the first call: as long as torch
# itself takes. Nothing is compiled under a mode.
_Written.__torch_dispatch__ = getattr(  # type: ignore[method-assign]
    _Written.__torch_dispatch__, "__wrapped__", _Written.__torch_dispatch__
)


class _Kept:
    """Bytes of the storages that pending graphs keep, without trained leaves: those exist in any case."""

    def __init__(self) -> None:
        self.most = 0
        self._bytes = 0
        self._holders: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> _Holder:
        return _Holder(self, tensor)

    def unpack(self, holder: _Holder) -> Any:
        return holder.tensor

    def take(self, storage: int, size: int) -> None:
        self._holders[storage] = self._holders.get(storage, 0) + 1
        if self._holders[storage] == 1:
            self._bytes += size
            self.most = max(self.most, self._bytes)

    def give(self, storage: int, size: int) -> None:
        self._holders[storage] -= 1
        if not self._holders[storage]:
            del self._holders[storage]
            self._bytes -= size


class _Holder:
    """Holder of a saved tensor for as long as autograd keeps it."""

    def __init__(self, kept: _Kept, tensor: torch.Tensor) -> None:
        # A result with a reference to itself would keep its own graph alive.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self._kept = kept
        self._place: tuple[int, int] | None = None
        if tensor.layout is torch.strided and not (tensor.is_leaf and tensor.requires_grad):
            storage = tensor.untyped_storage()
            self._place = storage.data_ptr(), storage.nbytes()
            kept.take(*self._place)

    def __del__(self) -> None:
        if self._place is not None:
            self._kept.give(*self._place)


def _size(value: Any) -> int:
    if torch.is_tensor(value):
        return value.numel() * value.element_size()
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0
