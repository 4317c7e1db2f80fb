"""Watched training, from its first step to its last or to its failure, and its report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from gradsan._notes import annotate
from gradsan._terms import Mode
from gradsan.launch.outcome import Stopwatch, Suppressions, watch_session
from gradsan.launch.ranks import Board, Rank, heading, own_files, undisturbed
from gradsan.launch.reporting import Presentation, ReportFile, present
from gradsan.launch.sentences import complain, own_failure
from gradsan.launch.watcher import Watcher
from gradsan.model import Program, Report
from gradsan.options import REPORT_FILES, Options, OptionsError, read_options, working_directory
from gradsan.text import choose_language, say

Language = Literal["en", "zh", "auto"]


def _options_of(mode: Mode | None, said: Mapping[str, Any]) -> Options:
    """Return the options for a training: ``said`` (None: not given) over ``GRADSAN_OPTIONS`` over ``[tool.gradsan]``.

    Raises:
        ValueError: for an invalid option, with the sentence of ``gradsan run``.
    """
    layer = {name: value for name, value in said.items() if value is not None}
    if mode is not None:
        layer.update(deep=mode == "deep", heal=mode == "heal", nonfinite=mode == "nonfinite")
    try:
        return read_options(layer, os.environ, working_directory())
    except OptionsError as problem:
        raise _as_value_error(problem, str(said.get("lang") or "auto")) from None


class Training:
    """Watches from :meth:`begin` to :meth:`end`; failures of gradsan are printed, never raised."""

    def __init__(self, options: Options, rank: Rank | None) -> None:
        """Check the files in ``options``, for this ``rank`` of a job (None: a single process).

        Raises:
            ValueError: if a file cannot be read or written.
        """
        self._asked = options
        self._rank = rank
        self._directory = working_directory()
        self._options = own_files(options, rank, self._directory)
        self._language = choose_language(options.lang, os.environ)
        named = {form: getattr(self._options, form) for form in REPORT_FILES}
        try:
            self._files = {form: ReportFile(path, self._directory) for form, path in named.items() if path is not None}
            self._suppressions = Suppressions(self._options, self._directory)
        except OptionsError as problem:
            raise _as_value_error(problem, options.lang) from None
        self._watcher = Watcher(lambda: watch_session(self._options, self._suppressions))
        self._is_inner = False
        self._program = Program(tuple(sys.argv))
        self._stopwatch = Stopwatch()

    def begin(self) -> None:
        """Begin watching."""
        self._stopwatch = Stopwatch()
        from gradsan.record.recorder import recorder

        self._is_inner = recorder().is_on
        self._watcher.start()

    def fail(self, error: BaseException) -> None:
        """Examine the exception that ends the training while its graph exists; add the short diagnosis as a note."""
        self._program = Program.ended_by(error, tuple(sys.argv))
        self._watcher.examine(error)
        self._attempt(lambda: annotate(error, self._watcher.report(self._program), self._options.lang))

    def end(self) -> Report | None:
        """Stop watching, write the files and print the report; return it, or None if it could not be made.

        If something else was watching already, that reports the findings; then only files are written.
        """
        reports: list[Report] = []
        with undisturbed(self._rank):
            self._attempt(self._watcher.stop)
            self._attempt(lambda: reports.append(self._published()))
        return reports[0] if reports else None

    def _published(self) -> Report:
        found = self._watcher.report(self._stopwatch.on(self._program))
        report, said = self._suppressions.applied(found)
        options = replace(self._options, quiet=True, github=False) if self._is_inner else self._options
        unexplained = self._watcher.saw_autograd_error and not found.diagnoses
        presentation = Presentation(
            options=options,
            language=self._language,
            directory=self._directory,
            files=self._files,
            unexplained=unexplained,
            problems=tuple(self._watcher.problems),
        )
        if self._rank is not None:
            publish = partial(Board(self._rank, os.environ).left_to_show, unexplained=unexplained)
            presentation = replace(
                presentation, left_to_show=publish, heading=heading(self._rank, self._asked, self._options)
            )
        is_silent = options.quiet or (self._rank is not None and self._rank.number > 0)
        for sentence in (*self._watcher.problems, *present(report, presentation), *(() if is_silent else said)):
            complain(sentence, self._language)
        return report

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as failure:
            if os.environ.get("GRADSAN_DEBUG"):
                raise
            complain(own_failure("report", failure), self._language)


class WatchedTraining:
    """Common parts of the callbacks: their options, the training that is watched now, the last report."""

    def __init__(
        self,
        mode: Mode | None = None,
        *,
        language: Language | None = None,
        json: str | None = None,
        html: str | None = None,
        sarif: str | None = None,
        quiet: bool | None = None,
        stacks: bool | None = None,
    ) -> None:
        """Choose how to watch.

        Raises:
            ValueError: for an invalid option.
        """
        said = {"lang": language, "json": json, "html": html, "sarif": sarif, "quiet": quiet, "stacks": stacks}
        self._options = _options_of(mode, said)
        self._training: Training | None = None
        self._report: Report | None = None

    @property
    def report(self) -> Report | None:
        """The report of the last training that has ended; None before."""
        return self._report

    def _begin(self, rank: int, world_size: int) -> None:
        self._end()
        training = Training(self._options, Rank(rank, world_size) if world_size > 1 else None)
        training.begin()
        self._training = training

    def _fail(self, error: BaseException) -> None:
        if self._training is not None:
            self._training.fail(error)
            self._end()

    def _end(self) -> None:
        training, self._training = self._training, None
        if training is not None:
            self._report = training.end()


def _as_value_error(problem: OptionsError, lang: str) -> ValueError:
    chosen: Language = "en" if lang == "en" else "zh" if lang == "zh" else "auto"
    return ValueError(say(problem.message, choose_language(chosen, os.environ)))
