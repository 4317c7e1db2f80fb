"""Which results in the program's graphs have gradient hooks (``Tensor.register_hook``); leaves are left out."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any

import torch

from gradsan.capture import _torch
from gradsan.capture.patches import Patches, standing


class TensorHooks:
    """The hooks that were registered while gradsan was on, as long as their graphs live."""

    def __init__(self, core: Any) -> None:
        """Start with none."""
        self._core = core
        # What autograd holds of a tensor's hooks, by the Node that made the tensor and the number of its output.
        self._by_place: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()

    def install(self, patches: Patches) -> None:
        """Watch hooks being registered, until ``patches`` is undone."""
        register = standing(torch.Tensor, "register_hook")
        known = self

        @functools.wraps(register)
        def registering(self: Any, hook: Any) -> Any:
            handle = register(self, hook)
            if known._core.active and not _torch.is_compiling():
                with contextlib.suppress(RuntimeError), _torch.hushed():
                    known._remember(self)
            return handle

        patches.set(torch.Tensor, "register_hook", registering)

    def at(self, node: Any) -> list[tuple[int, list[Any]]]:
        """The outputs of a Node that have hooks, each with its hooks in their order."""
        if not self._by_place:
            return []
        number = _torch.node_sequence(node)
        if number is None:
            return []
        places = ((output, self._by_place.get((number, output))) for output in range(_torch.count_of_outputs(node)))
        return [(output, list(hooks.values())) for output, hooks in places if hooks]

    def _remember(self, tensor: Any) -> None:
        number = None if tensor.grad_fn is None else _torch.node_sequence(tensor.grad_fn)
        if number is not None:
            self._by_place[number, tensor.output_nr] = tensor._backward_hooks
