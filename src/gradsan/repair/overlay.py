"""New texts laid over files of the program, in this process only: no file on disk changes."""

from __future__ import annotations

import io
import linecache
import os
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

from gradsan.repair.patch import decoded


def lay_over(files: Mapping[str, bytes]) -> None:
    """Have every import, and whoever reads source lines, find ``files`` (by path) instead of what is on disk."""
    if not files:
        return
    known = {os.path.realpath(path): text for path, text in files.items()}
    read, compiled = SourceFileLoader.get_data, SourceFileLoader.get_code

    def get_data(self: Any, path: str) -> bytes:
        text = known.get(os.path.realpath(path))
        return read(self, path) if text is None else text

    def get_code(self: Any, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        text = known.get(os.path.realpath(path))
        # The usual way would ask the bytecode of the file on disk first.
        return compiled(self, fullname) if text is None else self.source_to_code(text, path)

    SourceFileLoader.get_data = get_data  # type: ignore[method-assign]
    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    for path, content in files.items():
        text, _ = decoded(path, content)
        lines = io.StringIO(text, newline=None).readlines()
        # Without a time of change an entry is never held against the file on disk.
        linecache.cache[path] = (len(content), None, lines, path)


def text_of(files: Mapping[str, bytes], path: str) -> bytes | None:
    """What is laid over the file at ``path``, None where nothing is."""
    real = os.path.realpath(path)
    return next((text for name, text in files.items() if os.path.realpath(name) == real), None)
