"""Drawing of the way from the loss to the saved value: a rail with a stop for each Node, in SVG beside their words."""

from __future__ import annotations

from collections.abc import Iterator

from gradsan.model import Diagnosis, PathNode
from gradsan.present._canvas import Canvas
from gradsan.present._places import shown_path
from gradsan.present.html._colours import coloured, paint
from gradsan.present.html._editor import opened
from gradsan.present.html._markup import Html, html_word, tag
from gradsan.source.tree import source_line

_X, _Y = 14, 15
"""Where a stop lies on the rail of its row, in pixels."""


def way(diagnosis: Diagnosis, canvas: Canvas) -> Html | None:
    """The way from the loss to the Node that kept the value; None where it is not known."""
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
        # A stop that is gone around several times.
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
        *_place(node, canvas),
    )


def _place(node: PathNode, canvas: Canvas) -> Iterator[Html]:
    frame = node.frame
    if frame is None:
        return
    place = tag("bdi", f"{shown_path(frame.file, canvas.cwd)}:{frame.line}")
    yield opened(place, frame.file, frame.line, frame.column, canvas, class_="place quiet")
    line = (source_line(frame.file, frame.line) or "").strip()
    if line:
        yield tag("code", paint(line, coloured(line)[0]), class_="source")
