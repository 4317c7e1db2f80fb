"""History of the memory: drawings of its versions, the timeline, and the path from the loss to the saved value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradsan.model import Diagnosis, Event, PathNode
from gradsan.present._canvas import Canvas
from gradsan.present._places import shown_path
from gradsan.present.html._markup import Html, html_word, opened, tag
from gradsan.present.html._snippet import coloured, paint
from gradsan.source.tree import source_line

KINDS = ("saved", "written", "step", "used", "backward")
"""The lanes of the timeline, from top to bottom."""

_VERSIONS_SHOWN = 12
_LAST_VERSIONS = 4
_ROWS_WITHOUT_SCRIPT = 100


def versions(diagnosis: Diagnosis, canvas: Canvas) -> Html | None:
    """Return the version counter from the save to the use; None if fewer than two values are known."""
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
    """Return the element in which the script draws the events, with a table of them; None if there are none."""
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
    status = tag("p", aria_live="polite", class_="status", role="status")
    left_out = diagnosis.events_left_out
    missing = tag("p", _word(canvas, "events_left_out", count=left_out), class_="quiet") if left_out else None
    return tag(
        "div",
        tag("div", *buttons, class_="buttons", role="group", aria_label=_word(canvas, "timeline")),
        canvas_element,
        axis,
        status,
        missing,
        hint,
        _table(events, canvas),
        class_="timeline",
        data_timeline=key,
    )


def _table(events: tuple[Event, ...], canvas: Canvas) -> Html:
    """Return a table of the events; the script pages through those left out without it."""
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
    """Return the events for the script: [lane, clock, step, version or null, op, place, 1 if the saved part is hit]."""
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


_X, _Y = 14, 15
"""The position of a stop on the rail of its row, in pixels."""


def way(diagnosis: Diagnosis, canvas: Canvas) -> Html | None:
    """Return the path from the loss to the Node that saved the value; None if it is unknown."""
    nodes = diagnosis.way
    if not nodes:
        return None
    rows = []
    for index, node in enumerate(nodes):
        rail = _rail(node, nodes[max(index - 1, 0) : index], nodes[index + 1 : index + 2])
        rows.append(tag("li", rail, _words(node, canvas), class_=f"knot {node.kind}"))
    return tag("ol", *rows, class_="way")


def _rail(node: PathNode, before: tuple[PathNode, ...], after: tuple[PathNode, ...]) -> Html:
    lines = [
        tag("line", x1=_X, y1=top, x2=_X, y2=bottom, class_="dashed" if "gap" in (node.kind, other[0].kind) else None)
        for other, top, bottom in ((before, 0, _Y), (after, _Y, "100%"))
        if other
    ]
    return tag("svg", *lines, *_stop(node), width=2 * _X, height="100%", aria_hidden="true")


def _stop(node: PathNode) -> Iterator[Html]:
    if node.kind == "bridge":
        yield tag("path", d=f"M{_X} {_Y - 8}l8 8l-8 8l-8 -8z")
    elif node.kind == "repeat":
        # A stop that is passed several times.
        yield tag("path", d=f"M{_X} {_Y + 6}c12 2 12 -14 0 -12", class_="round")
        yield tag("circle", cx=_X, cy=_Y, r=5)
    elif node.kind != "gap":
        yield tag("circle", cx=_X, cy=_Y, r=7 if node.kind in ("loss", "saved") else 5)


def _words(node: PathNode, canvas: Canvas) -> Html:
    kind = None
    if node.kind == "gap" and node.nodes:
        kind = tag("span", html_word(canvas.language, "knot_left_out", count=node.nodes), class_="kind quiet")
    elif node.kind not in ("node", "repeat"):
        kind = tag("span", html_word(canvas.language, f"knot_{node.kind}"), class_="kind")
    name = tag("code", tag("bdi", node.name)) if node.name else None
    times = tag("span", html_word(canvas.language, "knot_times", count=node.count), class_="flag")
    step = tag("span", html_word(canvas.language, "in_step", step=node.step), class_="quiet")
    return tag(
        "div",
        kind,
        name,
        times if node.kind == "repeat" else None,
        step if node.step is not None else None,
        *_stop_place(node, canvas),
    )


def _stop_place(node: PathNode, canvas: Canvas) -> Iterator[Html]:
    frame = node.frame
    if frame is None:
        return
    place = tag("bdi", f"{shown_path(frame.file, canvas.cwd)}:{frame.line}")
    yield opened(place, frame.file, frame.line, frame.column, canvas, class_="place quiet")
    line = (source_line(frame.file, frame.line) or "").strip()
    if line:
        yield tag("code", paint(line, coloured(line)[0]), class_="source")
