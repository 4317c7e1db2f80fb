"""Trial of whether an overwritten saved value changes a gradient: its Node is called with both values.

Padding that is zeroed through ``.data`` and left out of the loss is stale in the Nodes that have saved it, but
affects no gradient: the gradients that arrive at those Nodes are zero there. The Node's results for the gradients that
have arrived are compared right before it runs. The value lies in the program's memory: the old one is put there and
removed again while the thread of the backward waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.record.guarding import Guard
from gradsan.record.log import Core


class Trial:
    """One Node of a backward, a ``tensor`` that it has saved, and the tensor's value ``before`` the write."""

    def __init__(
        self, core: Core, node: Node, tensor: torch.Tensor, before: Any, guard: Guard, on_harm: Callable[[], None]
    ) -> None:
        """Register the trial on ``node``; ``core`` logs nothing of it. ``on_harm`` is called if results differ."""
        self._core, self._guard, self._on_harm = core, guard, on_harm
        self._node: Any = node
        self._tensor: Any = tensor
        self._before = before
        self._has_run = self._is_same = False
        self._handle = node.register_prehook(self._look)

    def outcome(self, has_ended: bool) -> Literal["harmless", "harmful", "unknown"]:
        """The result of the trial; call it once, after the backward, which may have failed before the Node ran."""
        self._handle.remove()
        self._tensor = self._before = None
        self._node = None
        if self._has_run:
            return "harmless" if self._is_same else "harmful"
        return "harmless" if has_ended else "unknown"

    def _look(self, gradients: Any) -> None:
        self._has_run = True
        was_active, self._core.active = self._core.active, False
        try:
            self._guard.run_hushed(partial(self._try, gradients))
        finally:
            self._core.active = was_active
        if not self._is_same:
            self._guard.run(self._on_harm)

    @torch.no_grad()
    def _try(self, gradients: Any) -> None:
        tensor = self._tensor
        place = tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        # With a counter of its own: that of the program's tensor must not move.
        memory = torch.empty(0, dtype=tensor.dtype).set_(*place)
        now, kept = _results(self._node, gradients), memory.clone()
        try:
            memory.copy_(self._before)
            then = _results(self._node, gradients)
        finally:
            memory.copy_(kept)
        pairs = zip(now, then, strict=True)
        self._is_same = all(one is other or (one is not None and torch.equal(one, other)) for one, other in pairs)


def can_be_tried(node: Node, tensor: torch.Tensor) -> bool:
    """Whether a Node can be called twice: not for code of the program's, or elements that share memory."""
    if _torch.function_class(node) is not None or not _torch.has_elements(tensor) or not tensor.is_cpu:
        return False
    is_flagged = tensor.is_conj() or tensor.is_neg()
    return not is_flagged and all(step or size < 2 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _results(node: Any, gradients: Any) -> tuple[Any, ...]:
    found = node(*gradients)
    return tuple(found) if isinstance(found, tuple | list) else (found,)
