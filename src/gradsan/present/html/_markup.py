"""HTML construction that no content can break, and the page's own words."""

from __future__ import annotations

import html
import json
import unicodedata
from pathlib import Path
from typing import Any

from gradsan import text
from gradsan._editors import link_to
from gradsan.model import Message
from gradsan.present._canvas import Canvas
from gradsan.present._places import shown_path

_DIRECTION = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class Html(str):
    """Markup, only made by :func:`tag`, :func:`join` and :func:`escaped`."""

    __slots__ = ()


def tag(name: str, *children: object, **attributes: object) -> Html:
    """Return an element. Children that are no Html are escaped, None is left out.

    Attributes are escaped; ``class_`` and ``for_`` lose their underscore, others become dashes; True gives a bare
    attribute, and False and None leave it out.
    """
    said = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in ("meta", "br", "hr"):
        return Html(f"<{name}{said}>")
    return Html(f"<{name}{said}>{join(*children)}</{name}>")


def join(*parts: object) -> Html:
    """Return the concatenated parts, escaped unless they are Html; None is left out."""
    return Html("".join(part if isinstance(part, Html) else escaped(part) for part in parts if part is not None))


def escaped(text: object) -> Html:
    """Return text as markup, with control and direction characters made visible, so that no code can be disguised."""
    return Html(html.escape("".join(map(_visible, str(text))), quote=True))


def data_block(name: str, data: Any) -> Html:
    """Return data for the script as JSON in a block that no content can end."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Html(f'<script type="application/json" id="{html.escape(name, quote=True)}">{safe}</script>')


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escaped(value)}"'


def _visible(character: str) -> str:
    code = ord(character)
    if character in "\n\t" or 0x20 <= code < 0x7F:
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    if character in _DIRECTION or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
        return f"⟨U+{code:04X}⟩"
    return character


_OF_THE_SCRIPT = (
    *("beside", "copied", "event", "lane_backward", "lane_saved", "lane_step", "lane_used", "lane_written"),
    *("next_page", "page_of", "previous_page", "version"),
)


def html_word(language: str, name: str, /, **values: Any) -> str:
    """Return one of the page's own words, from the table ``html`` of the text package."""
    return text.say(Message(f"html.{name}", values), language)


def script_words(language: str) -> dict[str, str]:
    """Return the words that the script itself fills in, with their {fields}."""
    fields = ("what", "kind", "clock", "step", "op", "place", "count", "first", "last", "version", "total")
    braces = {name: f"{{{name}}}" for name in fields}
    return {name: html_word(language, name, **{key: braces[key] for key in fields}) for name in _OF_THE_SCRIPT}


def opened(shown: object, file: str, line: int, column: int | None, canvas: Canvas, **attributes: object) -> Html:
    """Return ``shown`` as a link to a line; unlinked if no editor is known, or there is no such file."""
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
