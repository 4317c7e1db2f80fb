"""Files to lint: what the paths of a command line name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["python_files"]

_PASSED_OVER = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})


def python_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Every Python file of ``paths``, each once, in the order of their names.

    Of folders all ``*.py`` files below them, but those in hidden folders and in virtual environments; a file is taken
    whatever it is called.

    Raises:
        FileNotFoundError: for a path that is not there.
    """
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(str(path))
        for file in _below(path) if path.is_dir() else [path]:
            if file not in seen:
                seen.add(file)
                yield file


def _below(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _PASSED_OVER
            and not os.path.exists(os.path.join(here, name, "pyvenv.cfg"))  # noqa: PTH110, PTH118
        )
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(here) / name
