"""Run a folder of PyTorch's own test files with gradsan and without, test by test, and compare the outcomes.

Usage::

    python tools/upstream.py /elsewhere/test_autograd.py /elsewhere/nn --out /elsewhere/results --modes plain,watch,deep

Files are unittest modules, got by whoever runs this; none is part of the project. ``--stand-in autograd`` gives an
empty module for one that a file imports test classes from and that is not there.

Modes: ``plain``; ``watch``, ``deep`` and ``heal``, begun before the file is imported; ``pure``, which is watch with the
core written in Python; ``after``, watched while the file is imported and switched off before its tests run.

A file is imported once for each mode, in a process of its own, and every test runs in a fork of it, with a limit in
seconds. Results are lines of ``FILE.MODE.jsonl`` in the folder given by ``--out``, appended as they come: what is there
is not run again. ``--sample`` takes so many tests of each file, chosen by a seed. A test that differs from plain is run
once more in both modes; if any two of these runs agree, it is unstable and no difference. ``table.md`` in that folder
says what differs. The exit status is 1 where anything does.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import fnmatch
import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import types
import unittest
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODES = ("plain", "watch", "deep", "heal", "pure", "after")
_KEPT_OUTPUT = 6_000
_SEED = 20


@dataclass(frozen=True)
class Outcome:
    """How a test ended; ``detail`` is the type and first line of what it raised, or why it was skipped."""

    status: str
    detail: str = ""
    found: tuple[str, ...] = ()
    """Codes of gradsan's findings."""
    blind: tuple[str, ...] = ()
    """Keys of the blind spots that it named."""

    def same(self, other: Outcome) -> bool:
        """Whether both ended alike: in the same way and, where something was raised, with the same words."""
        return self.status == other.status and (
            self.status == "skipped" or _settled(self.detail) == _settled(other.detail)
        )


def _settled(words: str) -> str:
    """Without what is another in every run: addresses, numbers of processes, names of temporary files."""
    return re.sub(r"0x[0-9a-f]+|/tmp/\S+|\d{4,}", "…", words)


# --- one file in one mode -----------------------------------------------------------------------------------------


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that are not there, whose every attribute is a TestCase without tests."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        class StandIn(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (unittest.TestCase,), {})

        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _tests(suite: unittest.TestSuite | unittest.TestCase) -> Iterator[unittest.TestCase]:
    if isinstance(suite, unittest.TestCase):
        yield suite
        return
    for one in suite:
        yield from _tests(one)


class _Result(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.outcome = Outcome("passed")
        self.traceback = ""

    def _failed(self, status: str, err: Any) -> None:
        import traceback

        words = str(err[1]).strip().splitlines()
        self.outcome = Outcome(status, f"{err[0].__name__}: {words[0] if words else ''}"[:400])
        self.traceback = "".join(traceback.format_exception(*err))[-_KEPT_OUTPUT:]

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802 - unittest's name
        self._failed("failed", err)

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802
        self._failed("failed", err)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:  # noqa: N802
        if err is not None:
            self._failed("failed", err)

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        self.outcome = Outcome("skipped", reason[:200])

    def addExpectedFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        self.outcome = Outcome("expected failure")

    def addUnexpectedSuccess(self, test: Any) -> None:  # noqa: N802
        self.outcome = Outcome("unexpected success")


def _run_here(test: unittest.TestCase, session: Any) -> dict[str, Any]:
    """Run one test in this process; what it did and what gradsan told of it."""
    result = _Result()
    unittest.TestSuite([test]).run(result)
    outcome = result.outcome
    row: dict[str, Any] = {"status": outcome.status, "detail": outcome.detail, "traceback": result.traceback}
    if session is not None:
        report = session.report()
        row["found"] = [one.code for one in report.diagnoses]
        spots = [one for one in report.seen.blind_spots if one.key != "processes.forked"]  # this one is forked
        row["blind"] = [f"{one.key} {dict(one.values)}"[:300] for one in spots]
    return row


def _run_forked(test: unittest.TestCase, session: Any, limit: float) -> dict[str, Any]:
    """Run one test in a fork of this process that ends after ``limit`` seconds."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as output:
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            try:
                os.setpgid(0, 0)
                os.close(reader)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                faulthandler.enable(file=2)
                faulthandler.dump_traceback_later(max(limit - 2, limit / 2), file=2)
                row = _run_here(test, session)
                with os.fdopen(writer, "w") as pipe:
                    json.dump(row, pipe)
            finally:
                os._exit(0)
        os.close(writer)
        text = b""
        timed_out = False
        while True:
            left = began + limit - time.monotonic()
            if left <= 0 or not select.select([reader], [], [], left)[0]:
                timed_out = True
                break
            chunk = os.read(reader, 65536)
            if not chunk:
                break
            text += chunk
        os.close(reader)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        _, ended = os.waitpid(child, 0)
        took = round(time.monotonic() - began, 2)
        with contextlib.suppress(ValueError):
            return {**json.loads(text), "seconds": took}
        output.seek(0)
        said = output.read().decode(errors="replace")[-_KEPT_OUTPUT:]
        crash = f"signal {os.WTERMSIG(ended)}" if os.WIFSIGNALED(ended) else f"exit status {os.WEXITSTATUS(ended)}"
        status = "timed out" if timed_out else "crashed"
        return {"status": status, "detail": "" if timed_out else crash, "traceback": said, "seconds": took}


def serve(file: Path, mode: str, options: argparse.Namespace, again: Sequence[str] = ()) -> None:
    """Import the file and run its tests; those of ``again`` alone where there are any."""
    for folder in {str(file.parent), *(str(path) for path in options.path)}:
        sys.path.insert(0, folder)
    sys.meta_path.append(_StandIns(options.stand_in))
    sys.argv = [str(file)]
    import torch

    torch.set_num_threads(1)
    session = None
    if mode != "plain":
        from gradsan._session import Session

        gradsan_mode: Any = mode if mode in ("watch", "deep", "heal") else "watch"
        session = Session(gradsan_mode, native=False if mode == "pure" else None)
        session.start()
    module = importlib.import_module(file.stem)
    if mode == "after":
        assert session is not None
        session.stop()
        session = None
    if session is not None:
        session.report()  # what it imports is not imported once more in every fork
    tests = sorted(_tests(unittest.defaultTestLoader.loadTestsFromModule(module)), key=lambda one: one.id())
    if options.sample is not None and options.sample < len(tests):
        tests = random.Random(_SEED).sample(tests, options.sample)
    results = options.out / f"{file.stem}.{mode}.jsonl"
    known = set() if again else set(read(results))
    left = [
        test
        for test in tests
        if (name := test.id().partition(".")[2]) not in known
        and fnmatch.fnmatch(name, options.only)
        and (not again or name in again)
    ]
    print(f"{file.stem} {mode}: {len(left)} of {len(tests)} tests to run", flush=True)
    gc.collect()
    gc.freeze()
    counts: Counter[str] = Counter()
    shown = time.monotonic()
    with results.open("a") as lines:
        for done, test in enumerate(left, 1):
            row = {"test": test.id().partition(".")[2], **_run_forked(test, session, options.limit)}
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            counts[row["status"]] += 1
            if time.monotonic() - shown > 10 or done == len(left):
                shown = time.monotonic()
                summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
                print(f"{file.stem} {mode}: {done}/{len(left)}: {summary}", flush=True)


# --- all files ----------------------------------------------------------------------------------------------------


def read(results: Path) -> dict[str, list[Outcome]]:
    """The outcomes of every test in one file of results, in the order of its runs."""
    found: dict[str, list[Outcome]] = {}
    if not results.exists():
        return found
    for line in results.read_text().splitlines():
        with contextlib.suppress(ValueError):  # a line that was being written when the run was ended
            row = json.loads(line)
            found.setdefault(row["test"], []).append(
                Outcome(row["status"], row["detail"], tuple(row.get("found", ())), tuple(row.get("blind", ())))
            )
    return found


def differing(plain: dict[str, list[Outcome]], other: dict[str, list[Outcome]]) -> list[str]:
    """Tests of which no run in the one mode ended as one in the other did."""
    return [
        test
        for test, outcomes in other.items()
        if test in plain and not any(one.same(two) for one in outcomes for two in plain[test])
    ]


def table(out: Path, files: Sequence[Path], modes: Sequence[str]) -> tuple[str, int]:
    """What was found, as Markdown, and how many tests differ."""
    lines = ["| file | mode | tests | same | differ | passed | failed | skipped | other | findings in passing tests |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    details: list[str] = []
    total = 0
    for file in files:
        plain = read(out / f"{file.stem}.plain.jsonl")
        for mode in modes:
            outcomes = read(out / f"{file.stem}.{mode}.jsonl")
            differ = differing(plain, outcomes) if mode != "plain" else []
            total += len(differ)
            last = {test: runs[-1] for test, runs in outcomes.items()}
            counts = Counter(one.status for one in last.values())
            codes = Counter(code for one in last.values() if one.status == "passed" for code in one.found)
            other = sum(counts.values()) - counts["passed"] - counts["failed"] - counts["skipped"]
            told = ", ".join(f"{code}×{count}" for code, count in sorted(codes.items()))
            # Two runs that were ended at the limit say nothing of what either would have done.
            ended = {test for test, runs in plain.items() if any(one.status != "timed out" for one in runs)}
            same = len((outcomes.keys() & ended) - set(differ))
            lines.append(
                f"| {file.stem} | {mode} | {len(last)} | {same} | {len(differ)} | {counts['passed']} |"
                f" {counts['failed']} | {counts['skipped']} | {other} | {told} |"
            )
            for test in differ:
                before, now = plain[test][-1], last[test]
                details.append(
                    f"- `{file.stem}` {mode} `{test}`: {before.status} {before.detail} → {now.status} {now.detail}"
                )
            blind = Counter(spot for one in last.values() for spot in one.blind)
            details += [
                f"- `{file.stem}` {mode}: blind spot {spot}: {count} tests" for spot, count in blind.most_common()
            ]
    return "\n".join([*lines, "", *details, ""]), total


def _files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        found += sorted(path.rglob("test_*.py")) if path.is_dir() else [path.resolve()]
    return found


def _run(file: Path, mode: str, options: argparse.Namespace, again: Sequence[str] = ()) -> None:
    words = [
        sys.executable,
        __file__,
        str(file),
        "--serve",
        mode,
        "--out",
        str(options.out),
        "--limit",
        str(options.limit),
    ]
    words += [] if options.sample is None else ["--sample", str(options.sample)]
    words += ["--only", options.only, *(word for name in options.stand_in for word in ("--stand-in", name))]
    words += [word for path in options.path for word in ("--path", str(path))]
    words += [word for test in again for word in ("--again", test)]
    ended = subprocess.run(words, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode
    if ended:
        print(f"{file.stem} {mode}: cannot be run: exit status {ended}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, help="test files, or folders of them")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--modes", default="plain,watch", help=", ".join(MODES))
    parser.add_argument("--limit", type=float, default=120, help="seconds for one test")
    parser.add_argument("--only", default="*", help="pattern of test ids, as Class.test_name")
    parser.add_argument("--sample", type=int, help="so many tests of each file, chosen by a seed")
    parser.add_argument("--path", type=Path, action="append", default=[], help="a folder to import from")
    parser.add_argument("--stand-in", action="append", default=[], help="a module that is not there")
    parser.add_argument("--jobs", type=int, default=1, help="files and modes that run at a time")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--again", action="append", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    modes = options.modes.split(",")
    if unknown := set(modes) - set(MODES):
        parser.error(f"unknown mode {', '.join(sorted(unknown))}; modes are {', '.join(MODES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.serve:
        serve(options.paths[0], options.serve, options, options.again)
        return 0
    files = _files(options.paths)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda both: _run(both[0], both[1], options), [(file, mode) for file in files for mode in modes]))
    for file in files:
        for mode in modes:
            results = [options.out / f"{file.stem}.{one}.jsonl" for one in ("plain", mode)]
            again = differing(read(results[0]), read(results[1])) if mode != "plain" else []
            unsettled = [test for test in again if len(read(results[1])[test]) == 1]
            if unsettled:
                _run(file, "plain", options, unsettled)
                _run(file, mode, options, unsettled)
    text, differ = table(options.out, files, modes)
    (options.out / "table.md").write_text(text)
    print(text)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
