"""Lint run over many files: discovery, cached results, the rest in several processes; the certain fixes (``--fix``)."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from gradsan import __version__
from gradsan.lint._findings import Finding, Suggestion, as_record, of_record
from gradsan.lint.check import Checked, check, may_be_faulty
from gradsan.source.change import Change, apply_change

_PASSED_OVER = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})


def python_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Every Python file of ``paths``, each once, in the order of their names.

    For folders all ``*.py`` files below them, except in hidden folders and in virtual environments; a file is included
    whatever its name.

    Raises:
        FileNotFoundError: for a path that does not exist.
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


_MOST = 200_000


def default_folder(environ: Mapping[str, str]) -> Path:
    """The folder for cached results: ``gradsan`` in the user's cache folder."""
    base = environ.get("XDG_CACHE_HOME") or environ.get("LOCALAPPDATA")
    return (Path(base) if base else Path.home() / ".cache") / "gradsan"


def mark_of(data: bytes) -> str:
    """The hash of a file's content."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


class Cache:
    """Results of earlier runs of this version of the rules; the oldest are dropped where there are too many."""

    def __init__(self, folder: Path | None) -> None:
        """Read the results in ``folder``; None keeps nothing."""
        self._file = None if folder is None else folder / f"lint-{_rules_mark()}.json"
        self._known: dict[str, list[dict[str, object]]] = {}
        self._has_changed = False
        if self._file is not None:
            try:
                self._known = json.loads(self._file.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                self._known = {}

    def get(self, mark: str, lines: int) -> Checked | None:
        """The result for a content, None where it is not known."""
        records = self._known.get(mark)
        if records is None:
            return None
        try:
            return Checked(tuple(of_record(one) for one in records), lines) if records else Checked((), lines)
        except (KeyError, TypeError):
            return None

    def put(self, mark: str, findings: tuple[Finding, ...]) -> None:
        """Store the result for a content."""
        self._known[mark] = [as_record(one) for one in findings]
        self._has_changed = True

    def close(self) -> None:
        """Write new results; a folder that cannot be written is ignored."""
        if self._file is None or not self._has_changed:
            return
        while len(self._known) > _MOST:
            del self._known[next(iter(self._known))]
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False, encoding="utf-8") as stream:
                json.dump(self._known, stream, separators=(",", ":"))
            os.replace(stream.name, self._file)  # noqa: PTH105
        except OSError:
            return


def _rules_mark() -> str:
    """The hash of everything but the file that results depend on: the rules, the tables, and the parsing Python."""
    here = Path(__file__).parent
    files = [*sorted(here.rglob("*.py")), *sorted(here.rglob("*.toml")), here.parent / "diagnose" / "needs.json"]
    state = [f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files if file.is_file()]
    return mark_of("\n".join([__version__, sys.version, *state]).encode())


_ENOUGH_FOR_TWO = 3_000_000
"""Bytes: below, starting processes costs more than it saves."""


def lint_files(
    files: Sequence[Path], cache: Cache, jobs: int | None = None, *, maybe: bool = False
) -> Iterator[tuple[Path, Checked]]:
    """Each file with its findings, in their order. ``jobs`` processes at most (None: as many as seem worthwhile).

    A file that cannot be read has a problem instead.
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


_ROUNDS = 30


def mended(file: Path) -> int:
    """Write the certain changes of ``file``, one after another; return their number.

    Raises:
        OSError: where the file cannot be read or written.
        UnicodeDecodeError: where it is not UTF-8.
    """
    with file.open(encoding="utf-8", newline="") as stream:
        before = stream.read()
    if "\r" in before:
        return 0
    text, count = before, 0
    refused: set[tuple[str, int, str]] = set()
    for _ in range(_ROUNDS):
        findings = _certain(text, file)
        wanted = next((one for one in findings if _key(one) not in refused), None)
        if wanted is None or wanted.suggestion is None:
            break
        changed = _with(text, wanted.suggestion)
        if changed is None or len(_sure(changed, file)) >= len(_sure(text, file)):
            refused.add(_key(wanted))
            continue
        text, count = changed, count + 1
        _write(file, text)
    return count


def _write(file: Path, text: str) -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        stream.write(text)


def _sure(text: str, file: Path) -> list[Finding]:
    return [one for one in check(text.encode(), str(file.absolute())).findings if one.is_sure]


def _certain(text: str, file: Path) -> list[Finding]:
    return [one for one in _sure(text, file) if one.suggestion is not None and one.suggestion.is_certain]


def _with(text: str, suggestion: Suggestion) -> str | None:
    try:
        return apply_change(text, Change(suggestion.line, suggestion.old, suggestion.new, suggestion.kind))
    except ValueError:
        return None


def _key(finding: Finding) -> tuple[str, int, str]:
    return finding.code, finding.at.line, finding.slug
