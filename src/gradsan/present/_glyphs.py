"""The characters a report is drawn with."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Glyphs:
    """``arrow`` opens a location, ``bar`` parts line numbers from source; ``span_*`` draw a span of several lines.

    ``span_open`` stands beside the first line of such a span, ``span_top`` begins a row of its own below that line.
    """

    arrow: str
    bar: str
    ellipsis: str
    span_open: str
    span_top: str
    span_side: str
    span_bottom: str
    span_line: str
    called_from: str


UNICODE = Glyphs(
    arrow="┌─",
    bar="│",
    ellipsis="…",
    span_open="╭",
    span_top="╭",
    span_side="│",
    span_bottom="╰",
    span_line="─",
    called_from="←",
)

ASCII = Glyphs(
    arrow="-->",
    bar="|",
    ellipsis="...",
    span_open="/",
    span_top=" ",
    span_side="|",
    span_bottom="|",
    span_line="_",
    called_from="<-",
)


def needs_ascii(encoding: str | None) -> bool:
    """Whether a stream of this encoding cannot carry the box characters, so that ``ascii=True`` is wanted."""
    try:
        "".join(getattr(UNICODE, field.name) for field in fields(Glyphs)).encode(encoding or "ascii")
    except (UnicodeError, LookupError):
        return True
    return False
