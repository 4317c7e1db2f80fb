"""Pages of the codes that a report has, folded at its end: what ``gradsan explain`` shows, without a network."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict

from gradsan.present.html._colours import coloured, paint
from gradsan.present.html._markup import Html, html_word, join, tag
from gradsan.text import codes, page

_LANGUAGES = ("python", "py")
_DEEPER = {"h1": "h3", "h2": "h4", "h3": "h5"}


def about(code: str, language: str) -> str | None:
    """The id of the page of ``code`` in the report; None where it has no page."""
    return f"about-{code}" if any(entry.code == code for entry in codes(language)) else None


def code_pages(used: Iterable[str], language: str) -> Html | None:
    """The pages of the codes ``used``, each once and folded; None where none has a page."""
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
