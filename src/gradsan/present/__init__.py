"""Presenters: a Report made readable, for people in a terminal and for programs as JSON. They only format."""

from gradsan.present._glyphs import needs_ascii
from gradsan.present.json import render_json
from gradsan.present.note import short_note
from gradsan.present.terminal import render_terminal

__all__ = ["needs_ascii", "render_json", "render_terminal", "short_note"]
