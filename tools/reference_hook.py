"""Hook of mkdocs for this site: it writes the reference, and includes parts of one page in others.

``<!-- include performance.md overhead -->`` in a page becomes what stands between ``<!-- overhead:start -->`` and
``<!-- overhead:end -->`` in ``docs/performance.md``, and ``<!-- program blind-spots.md Very old writes -->`` the first
Python block below that heading: what a script writes or a test runs is kept once, for both languages.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))
import reference
import site_search

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

_INCLUDE = re.compile(r"^<!-- include (\S+) (\w+) -->$", re.MULTILINE)
_FOREIGN = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//", re.IGNORECASE)
_PROGRAM = re.compile(r"^<!-- program (\S+) (.+) -->$", re.MULTILINE)
_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_BETWEEN_CHINESE = re.compile(r"(?<=[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef“”])\n(?=[\u4e00-\u9fff（“])")


def on_config(config: MkDocsConfig) -> None:
    """Write the reference before mkdocs looks for pages."""
    reference.write(Path(config.docs_dir) / "reference")


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: Any) -> str:
    """Fill in what a page includes, and join Chinese lines. Raises ValueError where there is nothing of a name."""
    folder = Path(config.docs_dir)
    markdown = _INCLUDE.sub(lambda found: included(folder / found[1], found[2]), markdown)
    markdown = _PROGRAM.sub(lambda found: program(folder / found[1], found[2]), markdown)
    pieces = _CODE.split(markdown)
    # A browser would show the end of a line as a space, which Chinese does not have.
    return "".join(piece if index % 2 else _BETWEEN_CHINESE.sub("", piece) for index, piece in enumerate(pieces))


def on_post_page(output: str, page: Page | None = None, **_: Any) -> str:
    """A Chinese page searches the Chinese pages.

    Raises:
        ValueError: for a page that loads something from elsewhere: readers may be without a network.
    """
    foreign = _FOREIGN.search(output)
    if foreign is not None:
        raise ValueError(f"the page loads something from elsewhere: {output[foreign.start() : foreign.end() + 60]}")
    return output if page is None else site_search.with_own_index(output, page.url)


def on_post_build(config: MkDocsConfig) -> None:
    """Part the index of the search by language."""
    site_search.part(Path(config.site_dir))


# After the plugin that builds the languages (mkdocs.plugins.event_priority; tests load this file without mkdocs).
on_post_build.mkdocs_priority = -200  # type: ignore[attr-defined]


def included(file: Path, name: str) -> str:
    """What stands between the marks ``name`` in ``file``. Raises ValueError where the marks are not there once."""
    parts = re.split(rf"<!-- {name}:(?:start|end) -->", file.read_text(encoding="utf-8"))
    if len(parts) != 3:
        raise ValueError(f"{file.name} has no part {name}")
    return parts[1].strip()


def program(file: Path, heading: str) -> str:
    """The first Python block below ``heading`` in ``file``. Raises ValueError where there is none."""
    section = re.search(
        rf"^#+ {re.escape(heading)}\n(?:(?!^#+ |^```)[^\n]*\n)*(```python\n.*?^```$)",
        file.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    if section is None:
        raise ValueError(f"{file.name} has no program below {heading!r}")
    return section[1]
