"""Outcome of a run: suppressions, files, terminal, ranks, children, and the time of watching."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from gradsan._imports import stored_in
from gradsan._terms import chosen
from gradsan.launch.processes import Job
from gradsan.launch.program import Target
from gradsan.launch.ranks import Board, heading, own_files, rank_of, undisturbed
from gradsan.launch.reporting import Presentation, ReportFile, nothing_found, own_surroundings, present
from gradsan.launch.sentences import complain, own_failure
from gradsan.launch.watcher import Session, Watcher
from gradsan.model import Diagnosis, Message, Program, Report
from gradsan.options import REPORT_FILES, Options, OptionsError
from gradsan.suppress import Rule, RuleError, parse_rule, read_baseline, read_rules, suppress, write_baseline
from gradsan.text import choose_language


class Stopwatch:
    """Clock that starts when it is made."""

    def __init__(self) -> None:
        self._began_at = time.time()
        self._began = time.perf_counter()

    def on(self, program: Program) -> Program:
        """Return ``program`` with the start in local time, and the seconds since."""
        started = datetime.fromtimestamp(self._began_at).astimezone().isoformat(timespec="seconds")
        return replace(program, started=started, seconds=max(round(time.perf_counter() - self._began, 3), 0.0))


class Publisher:
    """Publishes the report of this process. Files and options are checked before the program runs."""

    def __init__(
        self,
        options: Options,
        directory: Path | None,
        *,
        own_path: Sequence[str] | None = None,
        target: Target | None = None,
    ) -> None:
        """Check options and files.

        ``directory`` is where the program starts (None if deleted), ``own_path`` the ``sys.path`` for gradsan's imports
        (None: the program's, with its directory last), ``target`` the program, if `gradsan run` started it.

        Raises:
            OptionsError: if a file cannot be read or written.
        """
        self.language = choose_language(options.lang, os.environ)
        self.options = own_files(options, rank_of(os.environ), directory)
        self._asked = options
        self._stopwatch = Stopwatch()
        self._directory = directory
        self._own_path = own_path
        self._target = target
        self._code = target.name if target is not None and target.kind == "code" else None
        self._rank = rank_of(os.environ)
        named = {form: getattr(self.options, form) for form in REPORT_FILES}
        self._files = {form: ReportFile(path, directory) for form, path in named.items() if path is not None}
        self.suppressions = Suppressions(self.options, directory)
        self._board = Board(self._rank, os.environ) if self._rank is not None else None

    def publish(
        self, watcher: Watcher, program: Program, job: Job | None, *, is_child: bool = False, flushes: bool = True
    ) -> Report | None:
        """End watching and publish the report; return the part of it that is not suppressed.

        None where it could not be made, which is said: the program has come to its end, and its status is its own. With
        ``GRADSAN_DEBUG`` in the environment the failure is raised. ``is_child``: a forked child reports for itself;
        files, ranks and the reports of children are its parent's. ``flushes`` is False where the process is about to
        end without flushing the program's output.
        """
        try:
            return self._published(watcher, program, None if is_child else job, is_child, flushes)
        except Exception as failure:
            if os.environ.get("GRADSAN_DEBUG"):
                raise
            complain(own_failure("report", failure), self.language)
            return None

    def _published(self, watcher: Watcher, program: Program, job: Job | None, is_child: bool, flushes: bool) -> Report:
        board = None if is_child else self._board
        presentation = Presentation(
            options=self.options,
            language=self.language,
            directory=self._directory,
            files={} if is_child else self._files,
            flushes=flushes,
        )
        with undisturbed(self._rank), own_surroundings(self._own_path, self._code):
            watcher.stop()
            found = watcher.report(program)
            if job is not None:
                found = job.gather(found)
            found = replace(found, program=self._stopwatch.on(found.program))
            report, said = self.suppressions.applied(found)
            report = _with_lines(report)
            fixing, count = ("", 0) if is_child else self._fixing(report)
            codes = dict.fromkeys(one.code for one in report.diagnoses)
            report = replace(report, next=(*(f"gradsan explain {code}" for code in codes), *filter(None, (fixing,))))
            presentation = replace(
                presentation,
                unexplained=watcher.saw_autograd_error and not found.diagnoses,
                problems=tuple(watcher.problems),
            )
            if self._rank is not None and board is not None:
                publish = partial(board.left_to_show, unexplained=presentation.unexplained)
                over = heading(self._rank, self._asked, self.options)
                presentation = replace(presentation, left_to_show=publish, heading=over)
            problems = [*watcher.problems, *present(report, presentation)]
            if count and self._rank is None:
                said = [*said, Message("cli.fixes_to_try", {"count": count, "command": fixing})]
            clean = None if is_child or (self._rank and self._rank.number) else nothing_found(report, self.options)
            said = said if clean is None else [*said, clean]
            is_silent = self.options.quiet or (self._rank is not None and self._rank.number > 0)
            for sentence in problems if is_silent else [*problems, *said]:
                complain(sentence, self.language)
        return report

    def _fixing(self, report: Report) -> tuple[str, int]:
        """Return the command that tries fixes, and their number; none if the program cannot be started again."""
        target = self._target
        is_file = target is not None and target.kind != "code" and target.name != "-"
        if target is None or not is_file or not report.diagnoses or report.mode == "autopsy":
            return "", 0
        # A report must not be lost for want of one more sentence.
        with contextlib.suppress(Exception):
            from gradsan.repair.fixes import fixes_to_try

            program = (target.name,) if target.kind == "script" else ("-m", target.name)
            count = fixes_to_try(report.diagnoses)
            return (shlex.join(("gradsan", "fix", *program, *target.arguments)), count) if count else ("", 0)
        return "", 0

    def write(self, report: Report) -> None:
        """Write the files without showing anything; failures are printed."""
        presentation = Presentation(
            options=replace(self.options, quiet=True, github=False),
            language=self.language,
            directory=self._directory,
            files=self._files,
        )
        with own_surroundings(self._own_path, self._code):
            problems = present(self.suppressions.applied(report)[0], presentation) if self._files else []
        for sentence in problems:
            complain(sentence, self.language)

    def write_unfinished(self, report: Report) -> Message | None:
        """Write the findings so far to the JSON file, if there is one that can be written again later."""
        file = self._files.get("json")
        if file is None or file.is_special:
            return None
        from gradsan.present.json import render_json

        kept = tuple(one for one in report.diagnoses if self.suppressions.wants(one))
        text = render_json(replace(report, diagnoses=kept), language=self.language, cwd=self._directory)
        return file.write(text)

    def status(self, report: Report, status: int) -> int:
        """Return the exit status of the process, given that of the program."""
        if status:
            return status
        is_conflict = any(diagnosis.severity in ("error", "warning") for diagnosis in report.diagnoses)
        if self._board is not None:
            return self._board.status(is_conflict, self.options.exit_code)
        return self.options.exit_code if is_conflict else 0


def _with_lines(report: Report) -> Report:
    """Return the report with the changed line of every fix for which the source allows one."""
    if not report.diagnoses:
        return report
    # A report must not be lost for want of one more line.
    with contextlib.suppress(Exception):
        from gradsan.repair.fixes import with_lines

        return replace(report, diagnoses=tuple(with_lines(one) for one in report.diagnoses))
    return report


class Suppressions:
    """The rules and the baseline of a run, read before the program starts."""

    def __init__(self, options: Options, directory: Path | None) -> None:
        """Read the files named in ``options``; relative paths are relative to ``directory``.

        Raises:
            OptionsError: if a file cannot be read or is invalid.
        """
        self._written = None if options.write_baseline is None else _path(options.write_baseline, directory)
        self._rules: tuple[Rule, ...] = tuple(parse_rule(rule, "ignore") for rule in options.ignore)
        self._baseline: dict[str, str] = {}
        try:
            if options.suppressions is not None:
                self._rules += read_rules(_path(options.suppressions, directory))
            if options.baseline is not None:
                self._baseline = read_baseline(_path(options.baseline, directory))
        except RuleError as failure:
            raise OptionsError(Message("suppress.no_rule", {"where": failure.where, "text": failure.text})) from None
        except OSError as failure:
            said = {"path": failure.filename, "reason": failure.strerror or str(failure)}
            raise OptionsError(Message("suppress.unreadable", said)) from None
        except (ValueError, KeyError, TypeError):
            path = options.baseline if options.baseline is not None else options.suppressions
            raise OptionsError(Message("suppress.not_understood", {"path": path})) from None

    def wants(self, diagnosis: Diagnosis) -> bool:
        """Whether no comment, rule or baseline suppresses a finding."""
        return bool(suppress((diagnosis,), self._rules, self._baseline).kept)

    def applied(self, report: Report) -> tuple[Report, list[Message]]:
        """Return the report without suppressed findings, and sentences about these, and about unused rules."""
        said: list[Message] = []
        if self._written is not None:
            try:
                write_baseline(self._written, report.diagnoses)
            except OSError as failure:
                values = {"path": self._written, "reason": failure.strerror or str(failure)}
                said.append(Message("suppress.unwritable", values))
            else:
                values = {"path": self._written, "count": len(report.diagnoses)}
                said.append(Message("suppress.baseline_written", values))
        done = suppress(report.diagnoses, self._rules, self._baseline, _program_files())
        for rule, count in done.hits.items():
            said.append(Message("suppress.hit", {"rule": str(rule), "origin": rule.origin, "count": count}))
        said.extend(Message("suppress.unused", {"rule": str(rule), "origin": rule.origin}) for rule in done.unused)
        if done.known:
            said.append(Message("suppress.known", {"count": done.known}))
        if done.gone:
            said.append(Message("suppress.gone", {"count": done.gone}))
        return replace(report, diagnoses=done.kept), said


def watch_session(options: Options, suppressions: Suppressions) -> Session:
    """Return a session, not started yet, with the mode and the terms that ``options`` request."""
    from gradsan._session import Session as WatchSession

    mode, terms = chosen(options, suppressions.wants)
    session: Session = WatchSession(mode, terms=terms)
    return session


def _path(name: str, directory: Path | None) -> Path:
    return Path(name) if directory is None else directory / name


def _program_files() -> list[str]:
    """Return the files of the user's own modules; none of a library, in whatever environment."""
    roots = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    files = [stored_in(module).get("__file__") for module in list(sys.modules.values())]
    own = str(Path(__file__).parent.parent)
    folders = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
    return [
        file
        for file in files
        if isinstance(file, str)
        and file.endswith(".py")
        and not file.startswith((*roots, own))
        and not any(folder in file for folder in folders)
    ]
