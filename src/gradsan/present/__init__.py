"""Presenters: a Report made readable, for people and for programs. They only format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from gradsan.model import Report
from gradsan.present._glyphs import needs_ascii
from gradsan.present._places import working_directory
from gradsan.present.github import render_github
from gradsan.present.html import render_html
from gradsan.present.json import render_json
from gradsan.present.note import short_note, unseen_note
from gradsan.present.sarif import render_sarif
from gradsan.present.terminal import render_terminal


class Renderer(Protocol):
    """A report as the text of a file; files are shown relative to ``cwd`` (default: the process's own)."""

    def __call__(self, report: Report, *, language: str, cwd: Path | None = None) -> str:
        """Return the text."""


RENDERERS: Mapping[str, Renderer] = {
    "github": render_github,
    "html": render_html,
    "json": render_json,
    "sarif": render_sarif,
}
"""The forms of a report that need no terminal, by name."""

__all__ = [
    "RENDERERS",
    "Renderer",
    "needs_ascii",
    "render_github",
    "render_html",
    "render_json",
    "render_sarif",
    "render_terminal",
    "short_note",
    "unseen_note",
    "working_directory",
]
