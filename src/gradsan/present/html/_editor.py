"""Places on the page that open in the reader's editor."""

from __future__ import annotations

from pathlib import Path

from gradsan._editors import link_to
from gradsan.present._canvas import Canvas
from gradsan.present._places import shown_path
from gradsan.present.html._markup import Html, html_word, join, tag


def opened(shown: object, file: str, line: int, column: int | None, canvas: Canvas, **attributes: object) -> Html:
    """``shown`` as a link to a line; as it is where no editor is known, or where there is no such file."""
    path = None if canvas.editor is None else _path(file, canvas.cwd)
    if canvas.editor is None or path is None:
        return tag("span", shown, **attributes) if attributes else join(shown)
    place = html_word(canvas.language, "open", place=f"{shown_path(file, canvas.cwd)}:{line}")
    href = link_to(canvas.editor, path, line, column)
    return tag("a", shown, href=href, title=place, aria_label=place, **attributes)


def _path(file: str, cwd: Path | None) -> Path | None:
    if file.startswith("<") or (cwd is None and not Path(file).is_absolute()):
        return None
    path = (cwd or Path()) / file
    try:
        return path if path.is_file() else None
    except (OSError, ValueError):
        return None
