"""Python processes that this one starts, noted by name: one that does not join the run later was not watched."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from gradsan_start import STARTED, is_of_library, log, shown

_PYTHON = re.compile(r"(python|pypy)[\d.]*w?t?(\.exe)?")


class Starts:
    """Stand-ins for the functions by which ``subprocess`` and multiprocessing start programs."""

    def __init__(self, folder: str) -> None:
        """Note into the log of the run in ``folder``; nothing is replaced yet."""
        self._folder = folder
        self._undo: list[Callable[[], None]] = []

    def follow(self) -> None:
        """Start noting; called again, it also covers modules imported since."""
        popen: Any = subprocess.Popen
        method = vars(popen).get("_execute_child") if isinstance(popen, type) else None
        if isinstance(method, FunctionType):
            self._replace(popen, "_execute_child", _Looked(method, self._popen))
        util = sys.modules.get("multiprocessing.util")
        spawn = getattr(util, "spawnv_passfds", None)
        if isinstance(spawn, FunctionType) and not hasattr(spawn, "__wrapped__"):
            self._replace(util, "spawnv_passfds", self._noting(spawn))

    def stop(self) -> None:
        """Restore the originals that are still replaced."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, ours: Any) -> None:
        original = vars(owner)[name]
        setattr(owner, name, ours)

        def undo() -> None:
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)

        self._undo.append(undo)

    def _popen(self, popen: Any) -> None:
        words = popen.args
        if isinstance(words, (list, tuple)) and words:
            self._note([os.fsdecode(word) for word in words])

    def _noting(self, spawn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(spawn)
        def spawnv_passfds(path: Any, args: Any, passfds: Any) -> Any:
            _quietly(lambda: self._note([os.fsdecode(word) for word in args]))
            return spawn(path, args, passfds)

        return spawnv_passfds

    def _note(self, words: Sequence[str]) -> None:
        is_python = _PYTHON.fullmatch(os.path.basename(words[0])) is not None  # noqa: PTH119
        if is_python and not is_of_library(words[1:]) and shutil.which(words[0]):
            log(self._folder, STARTED, name=shown(["python", *words[1:]]))


class _Looked:
    """A method of ``subprocess.Popen`` that calls back when it is about to be called.

    The method itself is called, so the traceback for a missing program has no frame of gradsan's.
    """

    def __init__(self, method: Any, look: Callable[[Any], None]) -> None:
        self._method = method
        self._look = look

    def __get__(self, popen: Any, kind: Any = None) -> Any:
        if popen is not None:
            _quietly(lambda: self._look(popen))
        return self._method.__get__(popen, kind)


def _quietly(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        # Invalid command words (such as a path-like object of the program's own) are ignored.
        return
