"""Processes of one watched run: a folder in which each leaves its report, and their merged report.

The contract with a child is one environment variable, ``GRADSAN``, which names the folder. It contains

- ``options.json``: how the program is watched (:class:`gradsan.options.Options`), for children that start afresh;
- ``processes``: a line of JSON for everything that a process reports about itself, or its parent about it;
- ``<pid>-<token>.json``: the report of a process that found something (``gradsan.report/1``, with absolute paths),
 rewritten at each finding, so that nothing is lost where the process is killed.

The process that made the folder merges the reports when the program ends, and deletes it. A killed run leaves it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gradsan import __version__
from gradsan.model import Diagnosis, Fix, Frame, Message, Report
from gradsan.options import REPORT_FILES, Options
from gradsan_start import JOINED, LOG, STARTED, VARIABLE

OPTIONS = "options.json"
_KEPT_SECONDS = 7 * 24 * 3600
_OF_PARENT = (*REPORT_FILES, "write_baseline")
"""Options for files that only the process started by the user writes."""


@dataclass(slots=True)
class _Process:
    """The log entries of one process."""

    name: str = ""
    said: set[str] = field(default_factory=set)
    files: list[str] = field(default_factory=list)
    seen: tuple[int, int, int, int] = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Job:
    """The folder of a running watched run; ``before`` is the previous value of ``GRADSAN``."""

    folder: Path
    before: str | None

    def gather(self, own: Report) -> Report:
        """Return ``own``, the report of the folder's maker, with the findings of its children and open questions.

        Findings are equal as in :func:`gradsan.present.merge.merged`; a note marks those of a child.
        """
        processes, unwatched = _read_log(self.folder)
        processes.pop(os.getpid(), None)
        reports: list[tuple[str, Report]] = []
        spots = [Message("processes.unwatched", {"name": name}) for name in unwatched]
        watched = 0
        for number, process in processes.items():
            name = f"{process.name or 'python'} (pid {number})"
            own_code = number if "began" in process.said else None
            read = [_read(self.folder / file, name, own_code, spots) for file in process.files]
            read_reports = [report for report in read if report is not None]
            reports += [(name, report) for report in read_reports]
            watched += bool(process.said & {"watched", "ended"} or read_reports)
            spots += _unknown(process, name, number)
        return _merged(own, reports, spots, watched, [one for one in processes.values() if not one.files])

    def close(self) -> None:
        """Delete the folder; children that are still running report for themselves from now on."""
        if os.environ.get(VARIABLE) == str(self.folder):
            if self.before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = self.before
        # The log first, which children check for.
        with contextlib.suppress(OSError):
            (self.folder / LOG).unlink()
        shutil.rmtree(self.folder, ignore_errors=True)


def open_job(options: Options, directory: Path | None, unseen: list[Message]) -> Job | None:
    """Make the folder of a run watched with ``options``, and announce it to children that start from now on.

    Relative paths in ``options`` are relative to ``directory``. None, with the reason added to ``unseen``, if the
    folder cannot be made.
    """
    try:
        return _opened(options, directory)
    except OSError as failure:
        unseen.append(Message("processes.no_folder", {"reason": failure.strerror or str(failure)}))
        return None


def _opened(options: Options, directory: Path | None) -> Job:
    place = reports_folder()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid") and place.stat().st_uid != os.getuid():
        raise PermissionError(f"{place} belongs to another user")
    _sweep(place)
    folder = place / f"{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    shared = asdict(options) | dict.fromkeys(_OF_PARENT)
    for name in ("suppressions", "baseline"):
        if shared[name] is not None:
            shared[name] = str((directory or Path()).absolute() / shared[name])
    (folder / OPTIONS).write_text(json.dumps({"gradsan": __version__, "options": shared}), encoding="utf-8")
    (folder / LOG).touch()
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(folder)
    return Job(folder, before)


def read_options(folder: Path) -> Options | None:
    """Return the options of the run that ``folder`` belongs to; None if another version of gradsan made it.

    Raises:
        OSError, ValueError, TypeError: if they cannot be read.
    """
    said = json.loads((folder / OPTIONS).read_text(encoding="utf-8"))
    if said["gradsan"] != __version__:
        return None
    known = {one.name for one in fields(Options)}
    values: dict[str, Any] = {}
    for name, value in said["options"].items():
        if name in known:
            values[name] = tuple(value) if isinstance(value, list) else value
    return Options(**values)


def reports_folder() -> Path:
    """Return the folder that contains the folders of this user's runs."""
    user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir(), f"gradsan-{user}")


def left_reports() -> list[Path]:
    """Return the reports left by this user's last run that did not end properly, one per process."""
    runs: list[list[Path]] = [
        [file for file in folder.glob("*.json") if file.name != OPTIONS]
        for folder in _folders(reports_folder())
        if not is_alive(_maker(folder))
    ]
    return max((sorted(files) for files in runs if files), key=lambda files: files[0].stat().st_mtime, default=[])


def is_alive(number: int) -> bool:
    """Whether there is a process of this number that is no zombie; True where that cannot be found out."""
    if os.name != "posix":
        return True
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def _unknown(process: _Process, name: str, number: int) -> Iterator[Message]:
    """Yield sentences on the open questions about a process."""
    said = process.said
    if "ended" in said:
        return
    if "watched" in said or process.files:
        yield Message("processes.running" if is_alive(number) else "processes.killed", {"name": name})
    elif "failed" in said:
        yield Message("processes.unwatched", {"name": name})


def _merged(
    own: Report, reports: Sequence[tuple[str, Report]], spots: list[Message], watched: int, quiet: list[_Process]
) -> Report:
    from gradsan.present.merge import identity

    kept: dict[object, Diagnosis] = {identity(one): one for one in own.diagnoses}
    had: dict[object, list[str]] = {}
    for name, report in reports:
        for diagnosis in report.diagnoses:
            key = identity(diagnosis)
            known = kept.get(key)
            kept[key] = diagnosis if known is None else replace(known, count=known.count + diagnosis.count)
            had.setdefault(key, []).append(name)
    for key, names in had.items():
        note = Message("processes.found_in", {"name": names[0], "count": len(names)})
        kept[key] = replace(kept[key], notes=(*kept[key].notes, note), sources=(*kept[key].sources, *names))
    # Their sentences are read from a file: equal ones have the same text, not the same key.
    for _, report in reports:
        spots += [spot for spot in report.seen.blind_spots if spot not in spots]
    each = [own.seen, *(report.seen for _, report in reports)]
    seen = replace(
        own.seen,
        saves=sum(one.saves for one in each) + sum(one.seen[0] for one in quiet),
        writes=sum(one.writes for one in each) + sum(one.seen[1] for one in quiet),
        backwards=sum(one.backwards for one in each) + sum(one.seen[2] for one in quiet),
        steps=sum(one.steps for one in each) + sum(one.seen[3] for one in quiet),
        processes=own.seen.processes + watched,
        blind_spots=(*own.seen.blind_spots, *spots),
    )
    return replace(own, diagnoses=tuple(kept.values()), seen=seen)


def _read(file: Path, name: str, own_code: int | None, spots: list[Message]) -> Report | None:
    """Return the report of a process; ``own_code`` is its number if its ``<string>`` is another text than here."""
    from gradsan.present.json import ReadError, read_report

    if not file.exists():
        return None
    try:
        report = read_report(file).report
    except ReadError as failure:
        spots.append(Message("processes.unreadable", {"name": name, "reason": failure.message}))
        return None
    if own_code is not None:
        report = replace(report, diagnoses=tuple(_renamed(one, own_code) for one in report.diagnoses))
    # The log shows that a process was killed; its report need not repeat it.
    unfinished = len(report.seen.blind_spots) if report.program.ended else len(report.seen.blind_spots) - 1
    seen = replace(report.seen, blind_spots=report.seen.blind_spots[:unfinished])
    return replace(report, seen=seen, diagnoses=tuple(_with_own_diffs(one) for one in report.diagnoses))


def _renamed(diagnosis: Diagnosis, number: int) -> Diagnosis:
    """Return the diagnosis with distinct names for ``<string>`` and ``<stdin>``."""

    def frame(old: Frame) -> Frame:
        return replace(old, file=f"{old.file[:-1]}, pid {number}>") if old.file in ("<string>", "<stdin>") else old

    return diagnosis.with_frames(frame)


def _with_own_diffs(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis with diffs remade from the lines, relative to this process's start directory."""
    fixes: tuple[Fix, ...] = tuple(replace(fix, diff="" if fix.lines else fix.diff) for fix in diagnosis.fixes)
    return replace(diagnosis, fixes=fixes)


def _read_log(folder: Path) -> tuple[dict[int, _Process], list[str]]:
    """Return the processes by number, and the names of those that were started and have logged nothing."""
    try:
        text = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}, []
    processes: dict[int, _Process] = {}
    silent: Counter[str] = Counter()
    for line in text.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            said: Mapping[str, Any] = json.loads(line)
            what, name = str(said["what"]), str(said.get("name", ""))
            if what == STARTED:
                silent[name] += 1
                continue
            if what in JOINED:
                silent[name] -= 1
            process = processes.setdefault(int(said["pid"]), _Process())
            process.said.add(what)
            process.name = name or process.name
            if "file" in said and said["file"] not in process.files:
                process.files.append(Path(str(said["file"])).name)
            if "seen" in said:
                process.seen = tuple(map(int, said["seen"]))  # type: ignore[assignment]
    return processes, sorted(silent.elements())


def _folders(place: Path) -> list[Path]:
    try:
        return [folder for folder in place.iterdir() if folder.is_dir()]
    except OSError:
        return []


def _maker(folder: Path) -> int:
    number = folder.name.partition("-")[0]
    return int(number) if number.isdigit() else 0


def _sweep(place: Path) -> None:
    """Delete folders of runs that were killed long ago, or that found nothing."""
    for folder in _folders(place):
        with contextlib.suppress(OSError):
            if _maker(folder) == 0 or is_alive(_maker(folder)):
                continue
            is_empty = not any(file.name != OPTIONS for file in folder.glob("*.json"))
            if is_empty or time.time() - folder.stat().st_mtime > _KEPT_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
