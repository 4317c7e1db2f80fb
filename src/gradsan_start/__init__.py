"""Start of gradsan in Python processes whose environment asks for it; ``gradsan_start.pth`` calls :func:`begin`.

``GRADSAN`` is ``1`` or a mode, set by a person to have a program watched (``GRADSAN=deep torchrun train.py``). In
children of such a program, and of ``gradsan run``, it is the folder of that run (:mod:`gradsan.launch.processes`), with
the options, and the place for the report. This package imports neither gradsan nor torch before the process
itself imports torch, so that processes which never do (resource trackers, compilers, tools) only pay for a check of
the environment and one line in a file.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "GRADSAN"
"""The environment variable: a word of :data:`ASKED`, or the folder of the run that a process belongs to."""

OPTIONS = "GRADSAN_OPTIONS"

ASKED = {
    **dict.fromkeys(("1", "true", "yes", "on"), ""),
    **{mode: mode for mode in ("watch", "deep", "heal", "nonfinite")},
}
"""The words that ask for watching, with the mode; ``""`` is the mode of the options."""

_NOT_ASKED = ("", "0", "false", "no", "off")

LOG = "processes"
"""The file of that folder to which every process appends lines of JSON about itself."""

STARTED = "started"
"""Log entry for a Python process that this one starts; the started one logs one of :data:`JOINED`."""

JOINED = ("began", "library", "apart")

_begun: list[int] = []
_OWN_COMMANDS = ("gradsan",)
_OF_STANDARD_LIBRARY = ("from multiprocessing.resource_tracker ",)


def begin() -> None:
    """Watch this process from its first import of torch, if its environment asks for that. Never raises."""
    try:
        value = os.environ.get(VARIABLE, "")
        # An interpreter may read a .pth file twice.
        if os.getpid() in _begun:
            return
        _begun[:] = [os.getpid()]
        if os.path.isabs(value):  # noqa: PTH117 (pathlib is not imported yet)
            if os.path.isdir(value):  # noqa: PTH112
                _join(value)
        elif value.lower() not in _NOT_ASKED:
            _watch(value)
        elif VARIABLE not in os.environ and os.environ.get(OPTIONS):
            atexit.register(_say_what_is_left_out)
    except Exception:
        _show_fault()


def log(folder: str, what: str, **facts: Any) -> bool:
    """Append a line about this process to the log of the run in ``folder``; return False if that is gone."""
    line = json.dumps({"pid": os.getpid(), "what": what, **facts}) + "\n"
    try:
        # One write to a file opened for appending: lines of several processes do not mix. Without O_CREAT: a run's
        # end deletes its folder.
        file = os.open(os.path.join(folder, LOG), os.O_WRONLY | os.O_APPEND)  # noqa: PTH118
    except OSError:
        return False
    try:
        os.write(file, line.encode("utf-8", "backslashreplace"))
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def is_of_library(words: Sequence[str]) -> bool:
    """Whether ``words``, which follow ``python``, start a helper process of torch or Python."""
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else ""
        if word == "-c":
            return following.startswith(_OF_STANDARD_LIBRARY)
        if word == "-m":
            return following.startswith("torch.") and not following.startswith("torch.distributed")
        if not word.startswith("-"):
            place = word.replace("\\", "/")
            return "/site-packages/torch/" in place and "/torch/distributed/" not in place
    return False


def shown(words: Sequence[str]) -> str:
    """Return a command line as one line of at most 100 characters."""
    text = " ".join(" ".join(words).split())
    return text if len(text) <= 100 else f"{text[:99]}…"


def _join(folder: str) -> None:
    words = sys.orig_argv[1:]
    name = shown(["python", *words])
    if _is_own_command(words):
        # It watches the program that it runs, or is no program at all.
        log(folder, "apart", name=name)
    elif is_of_library(words):
        log(folder, "library", name=name)
    elif log(folder, "began", name=name):
        sys.meta_path.insert(0, _AtTorch("gradsan.launch.child", "begin_child", folder))


def _watch(asked: str) -> None:
    words = sys.orig_argv[1:]
    if not _is_own_command(words) and not is_of_library(words):
        sys.meta_path.insert(0, _AtTorch("gradsan._enabled", "enable_as_asked", asked))


def _say_what_is_left_out() -> None:
    """Warn that options alone watch nothing, if torch was imported and gradsan was not requested."""
    try:
        if "torch" in sys.modules and "gradsan" not in sys.modules and not is_of_library(sys.orig_argv[1:]):
            from gradsan.launch.sentences import say_options_alone

            say_options_alone()
    except Exception:
        _show_fault()


def _is_own_command(words: Sequence[str]) -> bool:
    at = words.index("-m") + 1 if "-m" in words else len(words)
    module = words[at] if at < len(words) else ""
    script = next((word for word in words if not word.startswith("-")), "")
    name = os.path.basename(script).removesuffix(".exe")  # noqa: PTH119
    return module.partition(".")[0] in _OWN_COMMANDS or name in _OWN_COMMANDS


class _AtTorch:
    """Finder that finds nothing; the first search for torch loads gradsan, whose own finder waits for that import."""

    def __init__(self, module: str, function: str, argument: str) -> None:
        self._calls = module, function, argument

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        try:
            module, function, argument = self._calls
            getattr(import_module(module), function)(argument)
        except Exception:
            _show_fault()
        # The import in progress iterates over the old list.
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                return spec
        return None


def leave() -> None:
    """Undo :func:`begin` in this process: something else watches it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AtTorch)]


def _show_fault() -> None:
    if os.environ.get("GRADSAN_DEBUG"):
        import traceback

        traceback.print_exc()
