"""Compilers that fail under torch.compile: what had been traced is kept on the error while it is still there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from gradsan._imports import call_after_import
from gradsan.capture import _torch
from gradsan.capture.patches import Patches

Guard = Callable[[Callable[[], object]], None]


def install(patches: Patches, guard: Guard) -> None:
    """Watch until ``patches`` is undone: now, or as soon as the program has imported torch.compile's machinery."""

    def watch() -> None:
        kind = _torch.compiler_error_class()
        if kind is not None:
            guard(lambda: _watch(kind, patches, guard))

    patches.on_undo(call_after_import(_torch.COMPILER_ERRORS, watch))


def _watch(kind: Any, patches: Patches, guard: Guard) -> None:
    original = kind.__init__

    @functools.wraps(original)
    def init(error: Any, *args: Any, **kwargs: Any) -> None:
        original(error, *args, **kwargs)
        frame = sys._getframe(1)
        guard(lambda: _torch.keep_traced_graph(error, frame))

    patches.set(kind, "__init__", init)
