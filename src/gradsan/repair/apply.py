"""Writing a patch to the program's files: all or nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gradsan.repair.patch import Patch


def dirty_files(patch: Patch) -> tuple[str, ...]:
    """The files of ``patch`` that git knows and that have changes which are not committed. No git: none."""
    return tuple(file for file in patch.files if _is_dirty(file))


@contextlib.contextmanager
def apply_patch(patch: Patch) -> Iterator[None]:
    """Write every file of ``patch``, each by one atomic replacement; put all back if the block raises.

    Raises:
        OSError: where a file cannot be written; then none has changed.
    """
    before = {file: Path(file).read_bytes() for file in patch.files}
    written: list[str] = []
    try:
        for file, content in patch.files.items():
            _replace(file, content)
            written.append(file)
        yield
    except BaseException:
        for file in written:
            _replace(file, before[file])
        raise


def _replace(file: str, content: bytes) -> None:
    # A link stays a link: what it leads to is replaced.
    path = Path(os.path.realpath(file))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        shutil.copymode(path, name)
        os.replace(name, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)  # noqa: PTH108
        raise


def _is_dirty(file: str) -> bool:
    path = Path(file)
    try:
        done = subprocess.run(
            ["git", "status", "--porcelain", "--", path.name],
            cwd=path.parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return False
    # Untracked files have nothing to go back to, which is no reason to ask.
    return done.returncode == 0 and any(not row.startswith("??") for row in done.stdout.splitlines())
