"""The buffers of DistributedDataParallel, which rank 0 gives to the others before a forward, past the version counter.

Mostly they get what they have already. So the bytes are compared, and only what has changed is logged as a write.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gradsan.capture import _torch
from gradsan.capture.patches import Patches
from gradsan.capture.uncounted import Uncounted
from gradsan.model import Message

OP = "DistributedDataParallel.forward"
"""What stands in the log as the writer."""
_MOST_BYTES = 64 * 2**20


class BufferSync:
    """Watches every buffer sync of this process."""

    def __init__(self, core: Any, uncounted: Uncounted, note: Callable[[Message], None]) -> None:
        """Writes go to the log by ``uncounted``; ``note`` is told of buffers that are too large to be compared."""
        self._core, self._uncounted, self._note = core, uncounted, note

    def install(self, patches: Patches, guard: Callable[[Callable[[], object]], None]) -> None:
        """Watch until ``patches`` is undone."""
        owner, name = _torch.buffer_sync()
        if owner is None:
            return
        core, original = self._core, getattr(owner, name)

        @functools.wraps(original)
        def synced(parallel: Any, *args: Any, **kwargs: Any) -> Any:
            before: list[tuple[Any, Any]] = []
            if core.active and not _torch.is_compiling():
                guard(lambda: before.extend(self._copies(parallel)))
            result = original(parallel, *args, **kwargs)
            if before:
                stack = core.stack(1)
                guard(lambda: self._log(before, stack))
            return result

        patches.set(owner, name, synced)

    def _copies(self, parallel: Any) -> list[tuple[Any, Any]]:
        buffers = [one for one in parallel.module.buffers() if one.layout is torch.strided]
        size = sum(one.numel() * one.element_size() for one in buffers)
        if size > _MOST_BYTES:
            self._note(Message("blind.buffers_too_large", {"bytes": size}))
            return []
        return [(one, one.detach().clone()) for one in buffers]

    def _log(self, before: list[tuple[Any, Any]], stack: Any) -> None:
        changed = [one for one, copy in before if not torch.allclose(one, copy, rtol=0, atol=0, equal_nan=True)]
        self._uncounted.log(changed, "collective", OP, "collective", stack)
