"""A run over many files: what is known already, the rest in several processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from gradsan.lint.cache import Cache, mark_of
from gradsan.lint.check import Checked, check
from gradsan.lint.gate import may_be_faulty

__all__ = ["lint_files"]

_ENOUGH_FOR_TWO = 3_000_000
"""Bytes: below, starting processes costs more than it saves."""


def lint_files(
    files: Sequence[Path], cache: Cache, jobs: int | None = None, *, maybe: bool = False
) -> Iterator[tuple[Path, Checked]]:
    """Each file with what was found in it, in their order. ``jobs`` processes at most (None: as it seems worth it).

    A file that cannot be read is told as one that has a problem.
    """
    results: dict[Path, Checked] = {}
    pending: list[tuple[Path, str]] = []
    size = 0
    for file in files:
        try:
            data = file.read_bytes()
        except OSError as problem:
            results[file] = Checked(problem=problem.strerror or str(problem))
            continue
        lines = data.count(b"\n")
        if not may_be_faulty(data):
            results[file] = Checked((), lines)
            continue
        mark = f"{mark_of(data)}{'?' if maybe else ''}"
        known = cache.get(mark, lines)
        if known is not None:
            results[file] = known
        else:
            pending.append((file, mark))
            size += len(data)
    for (file, mark), checked in zip(pending, _checked([file for file, _ in pending], size, jobs, maybe), strict=True):
        results[file] = checked
        if checked.problem is None:
            cache.put(mark, checked.findings)
    for file in files:
        yield file, results[file]


def _checked(files: list[Path], size: int, jobs: int | None, maybe: bool) -> Iterator[Checked]:
    wanted = jobs if jobs is not None else (_cores() if size > _ENOUGH_FOR_TWO else 1)
    if wanted < 2 or len(files) < 2:
        yield from (_check_file(file, maybe) for file in files)
        return
    with ProcessPoolExecutor(min(wanted, len(files))) as pool:
        yield from pool.map(
            _check_file, files, [maybe] * len(files), chunksize=max(1, min(16, len(files) // (4 * wanted)))
        )


def _check_file(file: Path, maybe: bool) -> Checked:
    try:
        return check(file.read_bytes(), str(file.absolute()), maybe=maybe)
    except OSError as problem:
        return Checked(problem=problem.strerror or str(problem))


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
