"""Giving out the report of a run at its end: what the user does not want left out, files, terminal, ranks, children."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from gradsan._processes import Job
from gradsan._ranks import Board, heading, own_files, rank_of, undisturbed
from gradsan.cli._program import Target
from gradsan.cli._report_file import ReportFile
from gradsan.cli._reporting import Presentation, own_surroundings, present
from gradsan.cli._sentences import complain
from gradsan.cli._suppressing import Suppressions
from gradsan.cli._watcher import Watcher
from gradsan.model import Message, Program, Report
from gradsan.options import REPORT_FILES, Options
from gradsan.repair.fixes import fixes_to_try
from gradsan.text import choose_language


class Telling:
    """How the report of this process is given out. What it is told with is looked at before the program runs."""

    def __init__(
        self, options: Options, directory: Path | None, *, own_path: Sequence[str], target: Target | None = None
    ) -> None:
        """``directory`` is where the program starts, None where that was deleted; ``own_path`` the ``sys.path`` that
        gradsan's imports go by, ``target`` the program, where `gradsan run` started it.

        Raises:
            OptionsError: for a file that cannot be read or written.
        """
        self.language = choose_language(options.lang, os.environ)
        self.options = own_files(options, rank_of(os.environ), directory)
        self._asked = options
        self._directory = directory
        self._own_path = own_path
        self._target = target
        self._code = target.name if target is not None and target.kind == "code" else None
        self._rank = rank_of(os.environ)
        named = {form: getattr(self.options, form) for form in REPORT_FILES}
        self._files = {form: ReportFile(path, directory) for form, path in named.items() if path is not None}
        self.suppressions = Suppressions(self.options, directory)
        self._board = Board(self._rank, os.environ) if self._rank is not None else None

    def tell(
        self, watcher: Watcher, program: Program, job: Job | None, *, is_child: bool = False, flushes: bool = True
    ) -> Report:
        """End watching and give the report out; what is left of it after the user's rules.

        ``is_child``: a forked child tells for itself; files, ranks and the reports of children are its parent's.
        ``flushes`` is False where the process is about to end without writing out what the program printed.
        """
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
            if job is not None and not is_child:
                found = job.gather(found)
            report, said = self.suppressions.applied(found)
            presentation = replace(
                presentation,
                unexplained=watcher.met_autograd_error and not found.diagnoses,
                told=tuple(watcher.problems),
            )
            if self._rank is not None and board is not None:
                tell = partial(board.left_to_tell, unexplained=presentation.unexplained)
                over = heading(self._rank, self._asked, self.options)
                presentation = replace(presentation, left_to_tell=tell, heading=over)
            problems = [*watcher.problems, *present(report, presentation)]
            if self._rank is None and not is_child:
                said = [*said, *self._next_command(report)]
            is_silent = self.options.quiet or (self._rank is not None and self._rank.number > 0)
            for sentence in problems if is_silent else [*problems, *said]:
                complain(sentence, self.language)
        return report

    def _next_command(self, report: Report) -> list[Message]:
        """The command that tries fixes, where there are some and the program can be started once more."""
        target = self._target
        if target is None or target.kind == "code" or target.name == "-" or report.mode == "autopsy":
            return []
        count = fixes_to_try(report.diagnoses)
        if not count:
            return []
        program = (target.name,) if target.kind == "script" else ("-m", target.name)
        command = shlex.join(("gradsan", "fix", *program, *target.arguments))
        return [Message("cli.fixes_to_try", {"count": count, "command": command})]

    def write(self, report: Report) -> None:
        """Write the files and show nothing; what goes wrong in doing so is said."""
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
        """Write what was found so far into the JSON file, where there is one that can be written again later."""
        file = self._files.get("json")
        if file is None or file.is_special:
            return None
        from gradsan.present.json import render_json

        kept = tuple(one for one in report.diagnoses if self.suppressions.wants(one))
        text = render_json(replace(report, diagnoses=kept), language=self.language, cwd=self._directory)
        return file.write(text)

    def status(self, report: Report, status: int) -> int:
        """What the process ends with where the program ended with ``status``."""
        if status:
            return status
        is_conflict = any(diagnosis.severity in ("error", "warning") for diagnosis in report.diagnoses)
        if self._board is not None:
            return self._board.status(is_conflict, self.options.exit_code)
        return self.options.exit_code if is_conflict else 0
