"""HTML page: its frame, its content policy (nothing is loaded), and the page as a fragment."""

from __future__ import annotations

import base64
import hashlib
import shlex
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template

from gradsan.model import Program, Report
from gradsan.present._canvas import Canvas, describe_watched
from gradsan.present._cells import UNICODE
from gradsan.present._places import working_directory
from gradsan.present.html._finding import code_pages, finding
from gradsan.present.html._history import KINDS, events_data
from gradsan.present.html._markup import Html, data_block, escaped, html_word, join, script_words, tag

_WIDTH = 100
_DIGITS = 2


def render_html(report: Report, *, language: str, cwd: Path | None = None, editor: str | None = None) -> str:
    """Return a report as one HTML file without any outside resource; equal reports give equal text.

    Source files are read by :mod:`linecache`, and shown relative to ``cwd`` (default: the process's own).
    ``editor`` is the URL of a line in an editor (``vscode://file{file}:{line}:{column}``), to which places link.
    """
    return _page(report, language, cwd, editor)


def _page(
    report: Report, language: str, cwd: Path | None, editor: str | None = None, *, is_framed: bool = False
) -> str:
    # The parts shared with the terminal report require a width, which does not wrap them here.
    canvas = Canvas(language, _WIDTH, _DIGITS, UNICODE, working_directory(cwd), editor)
    style, script = _asset("page.css"), _asset("page.js")
    keys = [f"finding-{number}" for number in range(1, len(report.diagnoses) + 1)]
    return Template(_asset("page.html")).substitute(
        language=escaped({"zh": "zh-Hans"}.get(language, language)),
        style_hash=_hash(style),
        script_hash=_hash(script),
        style=style,
        script=script,
        title=escaped(_title(report, canvas)),
        framed=' class="framed"' if is_framed else "",
        skip=escaped(html_word(language, "skip")),
        theme=escaped(html_word(language, "theme")),
        header=_header(report, canvas),
        contents=_contents(report, keys, canvas),
        main=_main(report, keys, canvas),
        footer=escaped(html_word(language, "made_by", gradsan=report.gradsan)),
        data=_data(report, keys, canvas),
    )


def _title(report: Report, canvas: Canvas) -> str:
    if not report.program.argv:
        return "gradsan"
    program = Path(report.program.argv[0]).name
    return html_word(canvas.language, "title", program=program)


def _header(report: Report, canvas: Canvas) -> Html:
    program, language = report.program, canvas.language
    counts = dict.fromkeys(("error", "warning", "note"), 0)
    for diagnosis in report.diagnoses:
        counts[diagnosis.severity] += 1
    found = [
        tag("span", canvas.word(f"{severity}s", count=count), class_=f"severity {severity}")
        for severity, count in counts.items()
        if count
    ]
    command = tag("code", tag("bdi", shlex.join(program.argv)), class_="command") if program.argv else None
    ended = None
    if program.exception is not None:
        kind, words = program.exception
        summary = tag("summary", html_word(language, "ended_by", kind=kind))
        ended = tag("details", summary, tag("pre", words, tabindex=0), class_="exception")
    versions = html_word(language, "versions_of", torch=report.torch or "–", python=report.python)
    facts = [describe_watched(report.seen, canvas), versions, _when(program, language)]
    return join(
        tag("h1", _title(report, canvas)),
        tag("p", *(found or [tag("span", html_word(language, "nothing_found"))]), " ", command, class_="counts"),
        tag("p", " · ".join(fact for fact in facts if fact), class_="quiet"),
        _to_try(report, language),
        ended,
    )


def _to_try(report: Report, language: str) -> Html | None:
    """Return the command that tries the suggested fixes, unless that has been done."""
    tried = any(fix.verification.status != "not_run" for one in report.diagnoses for fix in one.fixes)
    command = next((one for one in report.next if one.startswith("gradsan fix ")), None)
    if tried or command is None:
        return None
    return tag("p", html_word(language, "to_try"), " ", tag("code", tag("bdi", command), class_="command"))


def _when(program: Program, language: str) -> str | None:
    """Return the start of the program, in its local time, and its duration."""
    if program.started is None or program.seconds is None:
        return None
    lasted = _duration(program.seconds, language)
    return html_word(language, "ran", started=program.started[:19].replace("T", " "), took=lasted)


def _duration(seconds: float, language: str) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return html_word(language, "took_seconds", much=round(seconds, 1))
    if minutes < 60:
        return html_word(language, "took_minutes", much=minutes, rest=rest)
    return html_word(language, "took_hours", much=minutes // 60, rest=minutes % 60)


def _contents(report: Report, keys: list[str], canvas: Canvas) -> Html | None:
    if len(keys) < 2:
        return Html("")
    links = [
        tag("li", tag("a", tag("code", diagnosis.code), " ", canvas.say(diagnosis.title), href=f"#{key}"))
        for key, diagnosis in zip(keys, report.diagnoses, strict=True)
    ]
    name = html_word(canvas.language, "contents")
    return tag("nav", tag("h2", name), tag("ol", *links), aria_label=name)


def _main(report: Report, keys: list[str], canvas: Canvas) -> Html:
    findings = [finding(diagnosis, key, canvas) for key, diagnosis in zip(keys, report.diagnoses, strict=True)]
    spots = [tag("li", canvas.say(spot)) for spot in report.seen.blind_spots]
    blind = None
    if spots:
        heading = tag("h2", html_word(canvas.language, "not_seen"), id="not-seen")
        blind = tag("section", heading, tag("ul", *spots), class_="blind", aria_labelledby="not-seen")
    pages = code_pages((diagnosis.code for diagnosis in report.diagnoses), canvas.language)
    return join(*findings, blind, pages)


def _data(report: Report, keys: list[str], canvas: Canvas) -> Html:
    events = {
        key: events_data(diagnosis, canvas)
        for key, diagnosis in zip(keys, report.diagnoses, strict=True)
        if diagnosis.events
    }
    data = {"kinds": KINDS, "words": script_words(canvas.language), "events": events}
    return data_block("gradsan-data", data)


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


_COLUMNS = 8
_COLUMNS_OF_FINDING = 38
_MOST_COLUMNS = 60


def render_fragment(report: Report, *, language: str, cwd: Path | None = None) -> str:
    """Return a report as HTML for embedding in a page; arguments as of :func:`gradsan.present.render_html`.

    One ``iframe`` that loads nothing; its height (in rem) grows with the number of findings, up to a bound.
    """
    height = min(_COLUMNS + _COLUMNS_OF_FINDING * len(report.diagnoses), _MOST_COLUMNS)
    page = _page(report, language, cwd, is_framed=True)
    style = f"width: 100%; height: {height}rem; border: 0; resize: vertical; overflow: auto"
    return str(tag("iframe", title="gradsan", srcdoc=page, style=style))
