"""Source lines of a file, wherever Python found that file: on disk, in a notebook cell, in an archive.

A line is what Python compiled, decoded by the file's own encoding declaration, without its line end. Everything here
answers None (or an empty tuple) where the source cannot be had.
"""

from __future__ import annotations

import io
import linecache
import os
import sys
import tokenize
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType, ModuleType

__all__ = ["is_cell", "recorded_lines", "source_line", "source_lines"]

_NOTHING: Mapping[str, Mapping[int, str]] = MappingProxyType({})
_recorded: ContextVar[Mapping[str, Mapping[int, str]]] = ContextVar("recorded", default=_NOTHING)


@contextmanager
def recorded_lines(lines: Mapping[tuple[str, int], str]) -> Iterator[None]:
    """Meanwhile ``source_line`` answers from ``lines``, by (file, line), whatever the file holds by now.

    Of a file with a line in ``lines`` no other line is told.
    """
    files: dict[str, dict[int, str]] = {}
    for (file, line), text in lines.items():
        files.setdefault(file, {})[line] = text
    token = _recorded.set(files)
    try:
        yield
    finally:
        _recorded.reset(token)


def source_line(file: str, line: int) -> str | None:
    """Line ``line`` (from 1) of ``file`` without its line end, or None where there is no such line."""
    known = _recorded.get().get(file)
    if known is not None:
        return known.get(line)
    lines = source_lines(file)
    return lines[line - 1] if 1 <= line <= len(lines) else None


def source_lines(file: str) -> tuple[str, ...]:
    """All lines of ``file`` without line ends; empty where the source is missing or cannot be decoded.

    ``file`` is a path or a name such as ``<string>`` or ``<ipython-input-3>`` under which the source stands in
    ``linecache``. A file changed on disk is read again; of a deleted file the lines read before are kept.
    """
    lines = _from_linecache(file) or _from_loader(file) or _from_archive(file)
    return tuple(line.rstrip("\r\n") for line in lines)


def is_cell(file: str) -> bool:
    """Whether ``file`` is what a notebook or IPython calls the code of a cell."""
    return "ipykernel" in file or file.startswith("<ipython-input")


def _from_linecache(file: str) -> list[str]:
    entry = linecache.cache.get(file)
    remembered = list(entry[2]) if entry is not None and len(entry) == 4 else []
    is_path = not (file.startswith("<") and file.endswith(">"))
    try:
        linecache.checkcache(file)
        # linecache looks a relative name up along sys.path, which may find another program's file.
        if is_path and file not in linecache.cache and not Path(file).is_file():
            return remembered
        return linecache.getlines(file) or remembered
    except (OSError, ValueError, SyntaxError):
        return remembered


def _from_loader(file: str) -> list[str]:
    module = _module_of(file)
    loader = getattr(getattr(module, "__spec__", None), "loader", None) or getattr(module, "__loader__", None)
    if module is None or loader is None or not hasattr(loader, "get_source"):
        return []
    try:
        text = loader.get_source(module.__name__)
    except Exception:  # any loader may be plugged in; a broken one only means that there is no source
        return []
    return _split(text) if isinstance(text, str) else []


def _module_of(file: str) -> ModuleType | None:
    if file.startswith("<"):
        return None  # no file: ``<string>``, a cell
    for module in list(sys.modules.values()):
        found = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if isinstance(found, str) and (found == file or _absolute(found) == file):
            return module
    return None


def _absolute(file: str) -> str | None:
    try:
        return os.path.abspath(file)  # noqa: PTH100
    except OSError:  # a relative name, where the working directory has been deleted
        return None


def _from_archive(file: str) -> list[str]:
    path = Path(file)
    for parent in path.parents:
        try:
            if not parent.is_file():
                continue
            with zipfile.ZipFile(parent) as archive:
                data = archive.read(path.relative_to(parent).as_posix())
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            return _split(data.decode(encoding))
        except (OSError, ValueError, KeyError, SyntaxError, LookupError, RuntimeError, zipfile.BadZipFile):
            return []
    return []


def _split(text: str) -> list[str]:
    """Split at the line ends Python knows; ``str.splitlines`` would also split at form feeds."""
    return io.StringIO(text, newline=None).readlines()
