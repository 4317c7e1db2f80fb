"""Module calls, and those that repeat another of the same round: the same module with overlapping memory.

A value computed before a loop and anyway in every round was meant to stay: old values, targets. A value
for which the rounds call no module was meant to be computed in each of them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

Place: TypeAlias = tuple[int, int, int, int]
"""Of a tensor: its storage, its version, and the first and last of its elements there."""


class RepeatedCalls:
    """Counter of repeated calls from :meth:`start` on; a round ends with the step of an optimizer."""

    def __init__(self) -> None:
        self.count = self.rounds = 0
        self._places: dict[tuple[int, int], list[tuple[Place, ...]]] = {}
        self._held: list[Any] = []

    def start(self) -> None:
        """Hook every module, for as long as this process lives."""
        register_module_forward_pre_hook(self._hear)

    def step(self) -> None:
        """End a round, counted if it had calls: parameters have changed, so the same call computes something else."""
        self.rounds += bool(self._places)
        self._places.clear()
        self._held.clear()

    def _hear(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        given = [one for one in args if torch.is_tensor(one)]
        if torch.compiler.is_compiling() or not given or not torch.is_grad_enabled():
            return
        if all(one.layout is torch.strided for one in given) and any(p.requires_grad for p in module.parameters()):
            # An optimizer that evaluates a closure several times changes parameters within its step.
            versions = sum(p._version for p in module.parameters())
            places = tuple(map(_place, given))
            known = self._places.setdefault((id(module), versions), [])
            self.count += any(len(one) == len(places) and all(map(_overlap, one, places)) for one in known)
            known.append(places)
            # As long as they live, no other tensor has their memory.
            self._held.append((module, given))


def _place(tensor: Any) -> Place:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.storage_offset()
    return tensor.untyped_storage()._cdata, tensor._version, first, first + reach


def _overlap(one: Place, other: Place) -> bool:
    return one[:2] == other[:2] and one[2] <= other[3] and other[2] <= one[3]
