"""The files that a run opens for writing: two runs that write the same file must not run side by side."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from gradsan._imports import call_after_torch_import

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC


class WrittenFiles:
    """Notes files from :meth:`start` on, for as long as this process lives."""

    def __init__(self) -> None:
        """Nothing was written yet."""
        self._paths: set[str] = set()
        self._directory = os.path.realpath(os.curdir)

    def start(self) -> None:
        """Begin to listen to what the interpreter opens, and to ``torch.save``, which opens files by itself."""
        sys.addaudithook(self._hear)
        call_after_torch_import(self._watch_saving)

    def paths(self) -> tuple[str, ...]:
        """What was opened for writing, files for a while (of ``tempfile``) apart."""
        scratch = os.path.realpath(tempfile.gettempdir()) + os.sep
        own = self._directory + os.sep
        return tuple(sorted(one for one in self._paths if one.startswith(own) or not one.startswith(scratch)))

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITING:
                self._note(path)

    def _note(self, path: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            real = os.path.realpath(os.fsdecode(path))
            if not real.startswith(("/dev/", "/proc/", "/sys/")):
                self._paths.add(real)

    def _watch_saving(self) -> None:
        torch: Any = sys.modules["torch"]
        torch.save = self._noting(torch.save)

    def _noting(self, save: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(save)
        def noting(*args: Any, **kwargs: Any) -> None:
            self._note(args[1] if len(args) > 1 else kwargs.get("f"))
            save(*args, **kwargs)

        return noting
