"""Commands that a program may start in a trial without confirmation: they only read, or libraries need them."""

from __future__ import annotations

import re
import shlex
import sys
from types import FrameType

_PRINTING = frozenset(
    {
        *("nvidia-smi", "rocm-smi", "xpu-smi", "nproc", "lscpu", "lspci", "free", "df", "ps", "uptime", "sysctl"),
        *("uname", "hostname", "whoami", "id", "date", "which", "where", "getconf", "sw_vers", "system_profiler"),
        *("ldconfig", "ldd", "cat", "ls", "head", "tail", "wc", "grep", "echo", "pwd", "du", "true", "false", "stat"),
    }
)
_GIT = frozenset({"rev-parse", "status", "log", "describe", "diff", "show", "ls-files", "rev-list", "--version"})
_SHELL = re.compile(r"[;&|<>`$(){}\n]")
_OF_LIBRARIES = frozenset({"torch", "triton", "numpy", "gradsan", "setuptools", "cpuinfo", "psutil"})
"""Packages that start compilers and their own workers; these write to caches."""
_OF_PYTHON = frozenset({"platform", "ctypes", "uuid", "sysconfig", "_osx_support", "distutils", "locale", "shutil"})
_PASSED_ON = frozenset({"subprocess", "os", "asyncio", "concurrent", "multiprocessing", "functools", "contextlib"})


def command_of(program: object, words: object) -> str:
    """The command as typed in a shell."""
    if isinstance(words, str):
        return words
    if isinstance(words, bytes):
        return words.decode("utf-8", "replace")
    try:
        return shlex.join(str(word) for word in words)  # type: ignore[attr-defined]
    except TypeError:
        return str(program)


def is_harmless(command: str, caller: FrameType | None) -> bool:
    """Whether the command, started by code at frame ``caller``, has no lasting effect that matters."""
    return _only_prints(command) or _is_of_library(caller)


def _only_prints(command: str) -> bool:
    # shell=True turns a line into `sh -c "..."`.
    try:
        words = shlex.split(command)
    except ValueError:
        return False
    if len(words) == 3 and words[0].rpartition("/")[2] in ("sh", "bash") and words[1] == "-c":
        return _only_prints(words[2])
    if not words or any(_SHELL.search(word) for word in words):
        return False
    name = words[0].rpartition("/")[2]
    if name == "git":
        given = [word for word in words[1:] if not word.startswith("-") or word == "--version"]
        inner = given[1:] if "-C" in words[1:2] else given
        return bool(inner) and inner[0] in _GIT and "--output" not in command
    return name in _PRINTING


def _is_of_library(frame: FrameType | None) -> bool:
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _OF_LIBRARIES or package in _OF_PYTHON:
            return package != "gradsan" or "repair" not in frame.f_globals["__name__"]
        if package not in _PASSED_ON and package not in sys.stdlib_module_names:
            return False
        frame = frame.f_back
    return False
