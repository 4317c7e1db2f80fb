"""History of the memory: the versions, the timeline."""

from __future__ import annotations

from typing import Any

from gradsan.model import Diagnosis, Event
from gradsan.present._canvas import Canvas
from gradsan.present._places import shown_path
from gradsan.present.html._markup import Html, html_word, tag

KINDS = ("saved", "written", "step", "used", "backward")
"""The lanes of the timeline, from top to bottom."""

_VERSIONS_SHOWN = 12
_LAST_VERSIONS = 4
_ROWS_WITHOUT_SCRIPT = 100


def versions(diagnosis: Diagnosis, canvas: Canvas) -> Html | None:
    """The version counter from the save to the use; None where fewer than two moments are known."""
    known = [event for event in diagnosis.events if event.version is not None]
    if len(known) < 2:
        return None
    expected = next((event.version for event in known if event.kind == "saved"), None)
    items = [_version(event, expected, canvas) for event in known]
    if len(items) > _VERSIONS_SHOWN:
        left_out = len(items) - _VERSIONS_SHOWN + diagnosis.events_left_out
        more = tag("li", _word(canvas, "more_versions", count=left_out), class_="version more quiet")
        items = [*items[: _VERSIONS_SHOWN - _LAST_VERSIONS], more, *items[-_LAST_VERSIONS:]]
    return tag("ol", *items, class_="versions")


def _version(event: Event, expected: int | None, canvas: Canvas) -> Html:
    said = _word(canvas, f"lane_{event.kind}")
    if event.kind == "used" and event.version != expected and expected is not None:
        said = _word(canvas, "version_expected", expected=expected)
    number = tag("span", _word(canvas, "version", version=event.version), class_="v")
    op = tag("code", event.op) if event.op else None
    stale = " stale" if event.kind == "used" and event.version != expected else ""
    return tag("li", number, tag("span", said, class_="quiet"), op, class_=f"version {event.kind}{stale}")


def timeline(diagnosis: Diagnosis, key: str, canvas: Canvas) -> Html | None:
    """The place where the script draws the events, with a table of them; None where there are none."""
    events = diagnosis.events
    if not events:
        return None
    buttons = [
        tag(
            "button",
            sign,
            type="button",
            data_do=do,
            aria_label=_word(canvas, f"do_{do}"),
            title=_word(canvas, f"do_{do}"),
        )
        for do, sign in (("in", "+"), ("out", "−"), ("left", "←"), ("right", "→"), ("all", "⤢"))
    ]
    hint = tag("p", _word(canvas, "timeline_keys"), id=f"{key}-keys", class_="quiet keys")
    axis = tag("p", _word(canvas, "axis"), class_="quiet axis")
    canvas_element = tag(
        "canvas",
        tabindex=0,
        role="application",
        aria_roledescription=_word(canvas, "timeline"),
        aria_label=_word(canvas, "timeline_of", count=len(events)),
        aria_describedby=f"{key}-keys",
    )
    told = tag("p", aria_live="polite", class_="told", role="status")
    left_out = diagnosis.events_left_out
    missing = tag("p", _word(canvas, "events_left_out", count=left_out), class_="quiet") if left_out else None
    return tag(
        "div",
        tag("div", *buttons, class_="buttons", role="group", aria_label=_word(canvas, "timeline")),
        canvas_element,
        axis,
        told,
        missing,
        hint,
        _table(events, canvas),
        class_="timeline",
        data_timeline=key,
    )


def _table(events: tuple[Event, ...], canvas: Canvas) -> Html:
    """Every event as a row; the script pages through what a page without script leaves out."""
    heads = [
        tag("th", _word(canvas, f"column_{name}"), scope="col")
        for name in ("clock", "kind", "op", "version", "place", "step")
    ]
    rows = [_row(event, canvas) for event in events[:_ROWS_WITHOUT_SCRIPT]]
    left_out = len(events) - len(rows)
    more = tag("p", _word(canvas, "more_events", count=left_out), class_="quiet left-out") if left_out else None
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows))
    summary = tag("summary", _word(canvas, "as_table", count=len(events)))
    return tag("details", summary, tag("div", table, class_="scroll", tabindex=0), more, class_="events")


def _row(event: Event, canvas: Canvas) -> Html:
    kind = _word(canvas, f"lane_{event.kind}")
    if not event.touches:
        kind = _word(canvas, "beside", what=kind)
    version = "" if event.version is None else event.version
    cells = (event.clock, kind, event.op or "", version, _place(event, canvas), event.step)
    return tag("tr", *(tag("td", cell) for cell in cells))


def events_data(diagnosis: Diagnosis, canvas: Canvas) -> list[list[Any]]:
    """The events for the script: [lane, clock, step, version or null, op, place, 1 where the saved part was meant]."""
    return [
        [
            KINDS.index(event.kind),
            event.clock,
            event.step,
            event.version,
            event.op or "",
            _place(event, canvas),
            int(event.touches),
        ]
        for event in diagnosis.events
    ]


def _place(event: Event, canvas: Canvas) -> str:
    return "" if event.frame is None else f"{shown_path(event.frame.file, canvas.cwd)}:{event.frame.line}"


def _word(canvas: Canvas, name: str, **values: Any) -> str:
    return html_word(canvas.language, name, **values)
