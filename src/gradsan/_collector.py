"""Garbage collection paused for the length of a block."""

from __future__ import annotations

import gc


class CollectorPaused:
    """Context manager: in its block the collector of this process, all threads of it, does not run by itself."""

    __slots__ = ("_was_enabled",)

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was_enabled:
            gc.enable()
