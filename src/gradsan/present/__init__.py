"""Presenters: a Report made readable, for people and for programs. They only format.

Each is imported when it is first asked for: the JSON of a run that is still going must not import what draws terminals.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gradsan.model import Report

if TYPE_CHECKING:
    from gradsan.present._cells import needs_ascii
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


if TYPE_CHECKING:
    RENDERERS: Mapping[str, Renderer]
    """The forms of a report that need no terminal, by name."""

_HOMES = {
    "needs_ascii": "_cells",
    "render_github": "github",
    "render_html": "html",
    "render_json": "json",
    "render_sarif": "sarif",
    "render_terminal": "terminal",
    "short_note": "note",
    "unseen_note": "note",
    "working_directory": "_places",
}


def __getattr__(name: str) -> Any:
    if name == "RENDERERS":
        found: Any = {form: __getattr__(f"render_{form}") for form in ("github", "html", "json", "sarif")}
    elif name in _HOMES:
        found = getattr(import_module(f"gradsan.present.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


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
