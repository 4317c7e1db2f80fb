"""Module calls, and those that repeat another of the same round: the same module with the very same tensors.

A value computed before a loop and anyway in every round was meant to stay: old values, targets. A value
for which the rounds call no module was meant to be computed in each of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook


class RepeatedCalls:
    """Counter of repeated calls from :meth:`start` on; a round ends with the step of an optimizer."""

    def __init__(self) -> None:
        """Start without any call."""
        self.count = self.rounds = 0
        self._met: set[tuple[Any, ...]] = set()
        self._held: list[Any] = []

    def start(self) -> None:
        """Hook every module, for as long as this process lives."""
        register_module_forward_pre_hook(self._hear)

    def step(self) -> None:
        """End a round, counted if it had calls: parameters have changed, so the same call computes something else."""
        self.rounds += bool(self._met)
        self._met.clear()
        self._held.clear()

    def _hear(self, module: Any, args: tuple[Any, ...]) -> None:
        given = [one for one in args if torch.is_tensor(one)]
        if torch.compiler.is_compiling() or not given or not torch.is_grad_enabled():
            return
        if all(one.layout is torch.strided for one in given) and any(p.requires_grad for p in module.parameters()):
            key = (id(module), *((id(one), one._version) for one in given))
            self.count += key in self._met
            self._met.add(key)
            # As long as they live, no other tensor has their ids.
            self._held.append((module, given))
