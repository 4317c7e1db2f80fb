"""The reference pages of the documentation, made from what they describe.

That is the parser of the command line, the pages of the codes, the schema of the JSON report, and docstrings. ``write``
puts them below a folder, before mkdocs builds (``tools/reference_hook.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from gradsan.text import LANGUAGES, Language
from reference import api_page, cli_page, code_pages, message_page, schema_page

__all__ = ["pages", "write"]

_PARTS: tuple[Callable[[Language], dict[str, str]], ...] = (
    cli_page.pages,
    code_pages.pages,
    message_page.pages,
    schema_page.pages,
    api_page.pages,
)
_DEFAULT: Language = "en"


def pages(language: Language) -> dict[str, str]:
    """Every generated page as Markdown, by its path below the reference (``codes/GS111.md``)."""
    return {path: text for part in _PARTS for path, text in part(language).items()}


def write(folder: Path) -> None:
    """Write all pages below ``folder``, in every language; ``folder`` then holds nothing else.

    A page that is as it should be is not touched, so that a server that watches the folder does not build for ever.
    """
    wanted = dict(_files())
    for path, text in wanted.items():
        file = folder / path
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        if file.relative_to(folder).as_posix() not in wanted:
            file.unlink()


def _files() -> Iterator[tuple[str, str]]:
    """As the documentation names them: a page of another language than English says so before its ending."""
    for language in LANGUAGES:
        for path, text in pages(language).items():
            yield path if language == _DEFAULT else path.replace(".md", f".{language}.md"), text
    yield schema_page.FILE, schema_page.source()
