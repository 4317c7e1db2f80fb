"""Diagnosis as a section of the page, and the pages of its codes, collapsed."""

from __future__ import annotations

import math
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict

from gradsan.model import Diagnosis, Fix
from gradsan.present._canvas import Canvas, describe_gradient, describe_losses, describe_tensor, points
from gradsan.present._fixes import diff_of, standing_of
from gradsan.present._places import location, shown_path, shown_stack
from gradsan.present._snippet import Mark, marks_of
from gradsan.present.html._history import timeline, versions, way
from gradsan.present.html._markup import Html, html_word, join, opened, tag
from gradsan.present.html._snippet import badge, coloured, paint, snippets
from gradsan.source.tree import source_line
from gradsan.text import codes, page

_LANGUAGES = ("python", "py")
_DEEPER = {"h1": "h3", "h2": "h4", "h3": "h5"}


def about(code: str, language: str) -> str | None:
    """Return the id of the page of ``code`` in the report; None if it has no page."""
    return f"about-{code}" if any(entry.code == code for entry in codes(language)) else None


def code_pages(used: Iterable[str], language: str) -> Html | None:
    """Return the pages of the codes ``used``, each once and collapsed; None if none has a page."""
    shown = [code for code in dict.fromkeys(used) if about(code, language) is not None]
    if not shown:
        return None
    heading = tag("h2", html_word(language, "about"), id="about")
    return tag("section", heading, *(_code_page(code, language) for code in shown), aria_labelledby="about")


def _code_page(code: str, language: str) -> Html:
    title = next(entry.title for entry in codes(language) if entry.code == code)
    summary = tag("summary", tag("code", code), " ", title)
    body = _markdown(page(code, language).partition("\n")[2])
    # The id is inside: a link to it opens the page.
    return tag("details", summary, tag("div", body, id=about(code, language)), class_="about")


def _markdown(text: str) -> Html:
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    reader.add_render_rule("fence", _fence)
    tokens = reader.parse(text)
    for token in tokens:
        token.tag = _DEEPER.get(token.tag, token.tag)
    return Html(reader.renderer.render(tokens, reader.options, {}))


def _fence(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    token = tokens[index]
    lines = token.content.rstrip("\n").split("\n")
    colours = coloured("\n".join(lines)) if token.info.split(" ")[0] in _LANGUAGES else [()] * len(lines)
    painted = (paint(f"{line}\n", stretches) for line, stretches in zip(lines, colours, strict=False))
    return tag("pre", tag("code", join(*painted)), tabindex=0)


_CURVE = (160, 32)
"""Width and height of a curve, in pixels."""
_DIFF_CLASS = {"+": "added", "-": "removed", "@": "hunk"}


def finding(diagnosis: Diagnosis, key: str, canvas: Canvas) -> Html:
    """Return the section of a diagnosis; ``key`` is its id on the page."""
    marks = marks_of(diagnosis, canvas)
    parts = (
        ("what_to_change", _fixes(diagnosis, canvas)),
        ("where", snippets(marks, key, canvas) if marks else None),
        ("why", _why(diagnosis, canvas)),
        ("graph", way(diagnosis, canvas)),
        ("versions", versions(diagnosis, canvas)),
        ("timeline", timeline(diagnosis, key, canvas)),
        ("notes", _notes(diagnosis, canvas)),
        ("stacks", _stacks(marks, canvas)),
    )
    sections = [
        tag("section", tag("h3", html_word(canvas.language, name)), body, class_=f"part-{name.replace('_', '-')}")
        for name, body in parts
        if body is not None
    ]
    return tag(
        "article",
        _head(diagnosis, key, canvas),
        _chain(marks, key, canvas),
        *sections,
        id=key,
        class_=f"finding {diagnosis.severity}",
        aria_labelledby=f"{key}-title",
    )


def _head(diagnosis: Diagnosis, key: str, canvas: Canvas) -> Html:
    severity = tag("span", canvas.word(f"severity.{diagnosis.severity}"), class_=f"severity {diagnosis.severity}")
    silent = tag("span", html_word(canvas.language, "silent"), class_="flag") if diagnosis.silent else None
    count = None
    if diagnosis.count > 1:
        count = tag("span", html_word(canvas.language, "times", count=diagnosis.count), class_="flag")
    page = about(diagnosis.code, canvas.language)
    code = tag("code", diagnosis.code, class_="code-name", title=f"gradsan explain {diagnosis.code}")
    if page is not None:
        code = tag("a", code, href=f"#{page}")
    title = tag("h2", tag("bdi", canvas.say(diagnosis.title)), id=f"{key}-title")
    line = tag("p", severity, code, silent, count, class_="head")
    tensor = diagnosis.tensor
    shown = tag("p", tag("bdi", describe_tensor(tensor, canvas)), class_="tensor") if tensor else None
    return tag("header", line, title, shown)


def _chain(marks: list[Mark], key: str, canvas: Canvas) -> Html | None:
    """Return the events in order, each a link to its line."""
    if not marks:
        return None
    items = [
        tag("li", badge(mark, index, key), tag("span", mark.body, class_="words"), _place(mark, canvas))
        for index, mark in enumerate(marks)
    ]
    return tag("ol", *items, class_="chain")


def _place(mark: Mark, canvas: Canvas) -> Html:
    frame = mark.label.frame
    place = f"{shown_path(frame.file, canvas.cwd)}:{frame.line}"
    return opened(tag("bdi", place), frame.file, frame.line, frame.column, canvas, class_="place quiet")


def _why(diagnosis: Diagnosis, canvas: Canvas) -> Html:
    said = [canvas.say(diagnosis.explanation)]
    if diagnosis.why is not None:
        said.append(canvas.say(diagnosis.why.text))
    formula = diagnosis.why.formula if diagnosis.why else None
    gradient = describe_gradient(diagnosis.gradient, diagnosis.silent, canvas)
    return join(
        *(tag("p", words) for words in dict.fromkeys(said)),
        tag("p", tag("code", formula)) if formula and not any(formula in words for words in said) else None,
        tag("p", tag("b", canvas.head(canvas.word("gradient"))), gradient) if gradient else None,
        _losses(diagnosis, canvas),
    )


def _losses(diagnosis: Diagnosis, canvas: Canvas) -> Html | None:
    """Return the losses of the preceding rounds, as a curve with a caption."""
    said = describe_losses(diagnosis, canvas)
    if said is None or diagnosis.nonfinite is None:
        return None
    finite = [one for one in diagnosis.nonfinite.losses if math.isfinite(one)]
    line = tag("polyline", points=points(finite, *_CURVE), fill="none", stroke="currentColor", stroke_width=2)
    width, height = _CURVE
    box = f"-2 -2 {width + 4} {height + 4}"
    curve = tag("svg", line, viewBox=box, width=width, height=height, role="img", aria_label=said[1])
    return tag("p", tag("b", canvas.head(canvas.word("losses"))), curve, " ", said[1])


def _fixes(diagnosis: Diagnosis, canvas: Canvas) -> Html | None:
    """Return the first fix visibly, and the others collapsed."""
    if not diagnosis.fixes:
        return None
    first, *others = diagnosis.fixes
    shown = tag("ol", _fix(first, canvas), class_="fixes")
    if not others:
        return shown
    summary = tag("summary", html_word(canvas.language, "other_fixes", count=len(others)))
    listed = tag("ol", *(_fix(fix, canvas) for fix in others), class_="fixes", start=2)
    return join(shown, tag("details", summary, listed, class_="others"))


def _fix(fix: Fix, canvas: Canvas) -> Html:
    standing = standing_of(fix, canvas)
    tried = fix.verification.status
    status = tag("span", html_word(canvas.language, f"tried_{tried}"), class_=f"flag {tried}")
    diff = diff_of(fix, canvas.cwd).rstrip("\n")
    rows = [tag("span", row + "\n", class_=_class_of(row)) for row in diff.split("\n")] if diff else []
    copy = tag("button", html_word(canvas.language, "copy_patch"), type="button", class_="copy", hidden=True)
    return tag(
        "li",
        tag("p", tag("b", canvas.say(fix.summary)), " ", status if rows else None, copy if rows else None),
        tag("pre", tag("code", *rows), class_="diff", tabindex=0) if rows else None,
        tag("p", standing, class_="quiet") if standing else None,
    )


def _class_of(row: str) -> str | None:
    return "hunk" if row.startswith(("--- ", "+++ ")) else _DIFF_CLASS.get(row[:1])


def _notes(diagnosis: Diagnosis, canvas: Canvas) -> Html | None:
    said = [tag("li", canvas.say(note)) for note in diagnosis.notes]
    if len(diagnosis.sources) > 1:
        files = [tag("li", tag("bdi", source)) for source in diagnosis.sources]
        summary = tag("summary", html_word(canvas.language, "sources", count=len(files)))
        said.append(tag("li", tag("details", summary, tag("ul", *files))))
    return tag("ul", *said) if said else None


def _stacks(marks: list[Mark], canvas: Canvas) -> Html | None:
    folded = [stack for stack in (_stack(mark, canvas) for mark in marks) if stack is not None]
    return join(*folded) if folded else None


def _stack(mark: Mark, canvas: Canvas) -> Html | None:
    frames = shown_stack(mark.label.site)
    if not frames:
        return None
    items = []
    for frame in frames:
        source = (source_line(frame.file, frame.line) or "").strip()
        place = canvas.word("frame", place=location(frame, canvas.cwd), function=frame.function)
        code = tag("code", source) if source else None
        shown = opened(tag("bdi", place), frame.file, frame.line, frame.column, canvas)
        items.append(tag("li", shown, code, class_="user" if frame.is_user else "library quiet"))
    summary = tag("summary", canvas.word("stack_of", label=mark.name))
    return tag("details", summary, tag("ol", *items), class_="stack")
