"""Which results in the program's graphs have gradient hooks (``Tensor.register_hook``); leaves are left out."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any

import torch

from gradsan.capture import _torch
from gradsan.capture.patches import Patches, standing

_KEY = "gradsan.hooks"


class TensorHooks:
    """The hooks that were registered while gradsan was on.

    Each Node carries them itself (numbers of Nodes begin anew in every thread), as weak references: what a Node holds
    beside its graph, Python's garbage collection does not see.
    """

    def __init__(self, core: Any) -> None:
        """None so far."""
        self._core = core
        self._any = False

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
        known = node.metadata.get(_KEY) if self._any else None
        found = [(output, reference()) for output, reference in known.items()] if known else []
        return [(output, list(hooks.values())) for output, hooks in found if hooks]

    def _remember(self, tensor: Any) -> None:
        if tensor.grad_fn is not None:
            self._any = True
            tensor.grad_fn.metadata.setdefault(_KEY, {})[tensor.output_nr] = weakref.ref(tensor._backward_hooks)
