"""Report of ``gradsan fix``: the findings with the fixes that were tried, and the faults mended one after another."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from gradsan import __version__
from gradsan.launch.program import Target
from gradsan.launch.reporting import wants_color, width_of
from gradsan.launch.sentences import complain, write_to_stderr
from gradsan.model import Message, Program, Report
from gradsan.options import Options
from gradsan.present import needs_ascii, render_terminal, working_directory
from gradsan.text import Language

if TYPE_CHECKING:
    from gradsan.repair import Found

_OUTPUT_SHOWN = 4000
"""Characters of the program's output, where nothing else tells why it ended."""


def report_of(found: Found, target: Target) -> Report:
    """The report of the program as it stands, with the fixes of all its faults, and what the trials cannot tell."""
    argv = (target.name if target.kind == "script" else f"-{target.kind[0]}", *target.arguments)
    outcome = "finished" if found.exception is None else "failed"
    return Report(
        program=Program(argv, "failed" if outcome == "failed" else "finished", found.exception),
        seen=replace(found.seen, blind_spots=(*found.seen.blind_spots, *found.problems)),
        diagnoses=found.diagnoses,
        gradsan=__version__,
        torch=_torch_version(),
        python=platform.python_version(),
    )


def show(report: Report, options: Options, language: Language) -> None:
    """The report on stderr."""
    stream = sys.stderr
    text = render_terminal(
        report,
        language=language,
        color=wants_color(options.color, stream, os.environ),
        width=width_of(stream),
        stacks=options.stacks,
        cwd=working_directory(None),
        ascii=needs_ascii(getattr(stream, "encoding", None)),
    )
    write_to_stderr(text)


def series(found: Found) -> list[Message]:
    """Where there were several faults: what mended each of them, in order, and whether one is left."""
    if len(found.diagnoses) < 2:
        return []
    total = len(found.diagnoses)
    said: list[Message] = []
    for number, (fault, fix) in enumerate(zip(found.diagnoses, found.chosen, strict=False), 1):
        values = {"number": number, "total": total, "code": fault.code, "title": fault.title, "fix": fix.summary}
        said.append(Message("fix.series_step", values))
    if len(found.chosen) < total:
        fault = found.diagnoses[-1]
        values = {"number": total, "total": total, "code": fault.code, "title": fault.title}
        said.append(Message("fix.series_end", values))
    return said


def say_nothing_found(found: Found, language: Language) -> int:
    """Why there is nothing to show; the exit status."""
    if found.is_incomplete:
        write_to_stderr(found.output[-_OUTPUT_SHOWN:])
        for problem in found.problems:
            complain(problem, language)
        return 1
    if found.exception is None:
        complain(Message("fix.nothing_to_do"), language)
        return 0
    write_to_stderr(found.output[-_OUTPUT_SHOWN:])
    complain(Message("fix.not_explained", {"kind": found.exception[0]}), language)
    return 1


def _torch_version() -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None
