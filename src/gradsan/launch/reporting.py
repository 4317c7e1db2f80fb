"""Writing of a report when the program has ended, and the file that receives it."""

from __future__ import annotations

import errno
import linecache
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gradsan._editors import address_in
from gradsan._imports import imports_by
from gradsan.launch.program import CODE_NAME
from gradsan.launch.sentences import complain, flush_output, own_failure, write_to_stderr, write_to_stdout
from gradsan.model import Message, Report
from gradsan.options import STANDARD_OUTPUT, Options, OptionsError
from gradsan.source.tree import no_warnings
from gradsan.text import Language, language_on

_Part = Callable[[Report, "Presentation"], Message | None]
_WIDTH = 100
"""Columns, if stderr is no terminal and ``COLUMNS`` is not set."""


@dataclass(frozen=True, slots=True)
class Presentation:
    """Destination and form of a report.

    ``directory`` is where the program started, None if it no longer existed; ``files`` are the report files,
    by the name of their format. ``unexplained`` says that the program had an error of autograd for which gradsan has no
    diagnosis; then the terminal shows the blind spots. ``problems`` are sentences that are always printed.
    ``left_to_show`` returns the part of the report to show besides the files, None for nothing, and does not raise;
    ``heading`` is printed before it. ``flushes`` says that the program's output is to be flushed before.
    """

    options: Options
    language: Language
    directory: Path | None
    files: Mapping[str, ReportFile]
    unexplained: bool = False
    problems: Sequence[Message] = ()
    left_to_show: Callable[[Report], Report | None] = lambda report: report
    heading: Message | None = None
    flushes: bool = True


def present(report: Report, presentation: Presentation) -> list[Message]:
    """Write the files, and the report on stderr if there is something to report; return sentences on failures."""
    problems = _written([partial(_write_file, form) for form in presentation.files], report, presentation)
    options = presentation.options
    if not options.quiet or options.github or options.json_summary:
        shown = presentation.left_to_show(report)
        parts = (_write_annotations, _write_summary, _write_terminal)
        problems += _written(parts, shown, presentation) if shown is not None else []
    return problems


def _written(parts: Sequence[_Part], report: Report, presentation: Presentation) -> list[Message]:
    problems: list[Message] = []
    for part in parts:
        try:
            problem = part(report, presentation)
        except Exception as failure:
            problem = own_failure("report", failure)
        if problem is not None:
            problems.append(problem)
    return problems


@contextmanager
def own_surroundings(path: Sequence[str] | None, code: str | None) -> Iterator[None]:
    """Let gradsan work undisturbed in a process that the program has left in some state of its own.

    Meanwhile imports use ``path`` (the program may have a ``rich.py``), no warning is shown or raised, and the lines
    of ``code``, the text of ``-c``, can be found.
    """
    with imports_by(path), no_warnings(), _source_at_hand(code):
        yield


def wants_color(option: str, stream: object, environ: Mapping[str, str]) -> bool:
    """Whether to colour output to ``stream``: as ``option`` says; ``auto`` on terminals that can show it.

    ``NO_COLOR`` and ``FORCE_COLOR`` count if not empty, as defined by https://no-color.org and
    https://force-color.org.
    """
    if option != "auto":
        return option == "always"
    if environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or (_is_terminal(stream) and environ.get("TERM") != "dumb")


def _write_file(form: str, report: Report, presentation: Presentation) -> Message | None:
    from gradsan.present import RENDERERS, render_html

    language, cwd = presentation.language, presentation.directory
    if form == "html":
        editor = address_in(presentation.options.editor, os.environ)
        text = render_html(report, language=language, cwd=cwd, editor=editor)
    else:
        text = RENDERERS[form](report, language=language, cwd=cwd)
    return presentation.files[form].write(text)


def _write_annotations(report: Report, presentation: Presentation) -> Message | None:
    if not presentation.options.github or not report.diagnoses:
        return None
    from gradsan.present import render_github

    write_to_stdout(render_github(report, language=presentation.language, cwd=presentation.directory))
    return None


def _write_summary(report: Report, presentation: Presentation) -> Message | None:
    if presentation.options.json_summary:
        from gradsan.present import render_summary

        flush_output()
        write_to_stdout(render_summary(report, language=presentation.language, cwd=presentation.directory))
    return None


def _write_terminal(report: Report, presentation: Presentation) -> Message | None:
    options = presentation.options
    if options.quiet or not (report.diagnoses or _has_something_unseen(report, presentation)):
        return None
    from gradsan.present import needs_ascii, render_terminal

    stream = sys.stderr
    text = render_terminal(
        report,
        language=language_on(stream, presentation.language),
        color=wants_color(options.color, stream, os.environ),
        width=width_of(stream),
        stacks=options.stacks,
        cwd=presentation.directory,
        ascii=needs_ascii(getattr(stream, "encoding", None)),
    )
    if presentation.flushes:
        flush_output()
    if report.program.exception is not None and _is_terminal(stream):
        # A traceback may be long; its end must be easy to see.
        write_to_stderr(f"\n{'-' * (width_of(stream) - 1)}\n")
    if presentation.heading is not None:
        complain(presentation.heading, presentation.language)
    write_to_stderr(text)
    return None


def nothing_found(report: Report, options: Options) -> Message | None:
    """Return the sentence about a program that finished without a finding, if somebody is watching.

    Only on a terminal: scripts that compare the output of a correct program get that of the program alone.
    """
    if options.quiet or report.diagnoses or report.program.outcome != "finished" or not _is_terminal(sys.stderr):
        return None
    seen = report.seen
    counts = {"saves": seen.saves, "writes": seen.writes, "backwards": seen.backwards}
    watched = {name: Message(f"ui.{name}", {"count": count}) for name, count in counts.items()}
    return Message("cli.nothing_found", watched)


def _has_something_unseen(report: Report, presentation: Presentation) -> bool:
    return presentation.unexplained and any(spot not in presentation.problems for spot in report.seen.blind_spots)


def _is_terminal(stream: object) -> bool:
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError, OSError):
        return False


def width_of(stream: object) -> int:
    """Return the width of a report on ``stream``: the terminal's columns, else ``COLUMNS``, else 100."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns  # type: ignore[attr-defined]
    except (AttributeError, ValueError, OSError):
        columns = 0
    return columns or shutil.get_terminal_size((_WIDTH, 24)).columns


@contextmanager
def _source_at_hand(code: str | None) -> Iterator[None]:
    """Make the lines of ``-c`` code available.

    Only meanwhile: tracebacks that the program prints itself use the cache, too, and must stay unchanged.
    """
    if code is None or CODE_NAME in linecache.cache:
        yield
        return
    lines = code.splitlines(keepends=True)
    linecache.cache[CODE_NAME] = (len(code), None, lines, CODE_NAME)
    try:
        yield
    finally:
        linecache.cache.pop(CODE_NAME, None)


class ReportFile:
    """A file to be written later, in whatever directory the program may be by then."""

    def __init__(self, path: str, directory: Path | None) -> None:
        """Check that ``path`` (relative to ``directory``, where the program starts) can be written.

        ``-`` is the standard output.

        Raises:
            OptionsError: if it cannot.
        """
        self.shown = path
        self._is_stdout = path == STANDARD_OUTPUT
        if self._is_stdout:
            return
        try:
            self._path = (directory or Path()) / path
            if not self.is_special:
                # A link stays a link: its target is replaced.
                self._path = self._path.resolve()
            self._check()
        except (OSError, RuntimeError, ValueError) as failure:
            raise OptionsError(self._cannot(failure)) from None

    def write(self, content: str | bytes) -> Message | None:
        """Write ``content`` (text as UTF-8); return the sentence on why it could not be written, or None.

        Readers see the former file or the whole new one, never a part. A path that is no regular file (a pipe,
        ``/dev/stdout``) is written directly.
        """
        if self._is_stdout:
            flush_output()
            write_to_stdout(content.decode("utf-8") if isinstance(content, bytes) else content)
            return None
        data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
        try:
            if self.is_special:
                self._path.write_bytes(data)
            else:
                self._replace(data)
        except OSError as failure:
            return self._cannot(failure)
        return None

    def _check(self) -> None:
        if self._path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if self._path.exists() and not os.access(self._path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not self.is_special:
            # Only making a file shows for sure that one can be made (read-only file systems, quotas, missing folder).
            self._create().unlink()

    @property
    def is_special(self) -> bool:
        """Whether it is no regular file: a pipe, ``-`` or ``/dev/stdout``."""
        if self._is_stdout:
            return True
        try:
            return not stat.S_ISREG(self._path.stat().st_mode)
        except FileNotFoundError:
            return False

    def _create(self) -> Path:
        path = self._path.with_name(f".{self._path.name[:100]}.{secrets.token_hex(8)}.tmp")
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        return path

    def _replace(self, data: bytes) -> None:
        path = self._create()
        try:
            path.write_bytes(data)
            if self._path.exists():
                path.chmod(stat.S_IMODE(self._path.stat().st_mode))
            path.replace(self._path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _cannot(self, failure: Exception) -> Message:
        reason = (isinstance(failure, OSError) and failure.strerror) or str(failure)
        return Message("cli.unwritable_json", {"path": self.shown, "reason": reason})
