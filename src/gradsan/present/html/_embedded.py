"""A report inside another page, as a notebook is: in a frame of its own, so that neither page styles the other."""

from __future__ import annotations

from pathlib import Path

from gradsan.model import Report
from gradsan.present.html._markup import tag
from gradsan.present.html._page import render_html

_ROOM = 8
_ROOM_FOR_FINDING = 30
_MOST_ROOM = 60


def render_fragment(report: Report, *, language: str, cwd: Path | None = None) -> str:
    """Return a report as HTML to be put into a page; arguments as of :func:`gradsan.present.render_html`.

    One ``iframe`` that loads nothing; its height (in rem) grows with the number of findings, up to a bound.
    """
    height = min(_ROOM + _ROOM_FOR_FINDING * len(report.diagnoses), _MOST_ROOM)
    page = render_html(report, language=language, cwd=cwd)
    style = f"width: 100%; height: {height}rem; border: 0; resize: vertical; overflow: auto"
    return str(tag("iframe", title="gradsan", srcdoc=page, style=style))
