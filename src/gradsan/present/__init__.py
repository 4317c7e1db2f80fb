"""Presenters: a Report made readable, for people and for programs. They only format.

Each is imported on first use: the JSON of a running program must not import the terminal renderer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gradsan._lazy import names_on_demand
from gradsan.model import Report

if TYPE_CHECKING:
    from gradsan.present._cells import needs_ascii
    from gradsan.present._places import working_directory
    from gradsan.present.github import render_github
    from gradsan.present.html import render_html
    from gradsan.present.json import render_json
    from gradsan.present.note import render_summary, short_note, unseen_note
    from gradsan.present.sarif import render_sarif
    from gradsan.present.terminal import render_terminal


class Renderer(Protocol):
    """Renders a report as the text of a file; files are shown relative to ``cwd`` (default: the process's own)."""

    def __call__(self, report: Report, *, language: str, cwd: Path | None = None) -> str:
        """Return the text."""


if TYPE_CHECKING:
    RENDERERS: Mapping[str, Renderer]
    """The report formats that need no terminal, by name."""

_HOMES = {
    "_cells": ("needs_ascii",),
    "_places": ("working_directory",),
    "github": ("render_github",),
    "html": ("render_html",),
    "json": ("render_json",),
    "note": ("render_summary", "short_note", "unseen_note"),
    "sarif": ("render_sarif",),
    "terminal": ("render_terminal",),
}
_on_demand = names_on_demand(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    if name != "RENDERERS":
        return _on_demand(name)
    found = {form: _on_demand(f"render_{form}") for form in ("github", "html", "json", "sarif")}
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
    "render_summary",
    "render_terminal",
    "short_note",
    "unseen_note",
    "working_directory",
]
