"""What mkdocs does for this site besides: it writes the reference, and puts what stands in one page into others.

``<!-- include performance.md overhead -->`` in a page becomes what stands between ``<!-- overhead:start -->`` and
``<!-- overhead:end -->`` in ``docs/performance.md``: tables that a script writes are written once, for both languages.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))
import reference

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

_INCLUDE = re.compile(r"^<!-- include (\S+) (\w+) -->$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> None:
    """Write the reference before mkdocs looks for pages."""
    reference.write(Path(config.docs_dir) / "reference")


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: Any) -> str:
    """Fill in what a page includes. Raises ValueError where there is nothing of that name."""
    return _INCLUDE.sub(lambda found: included(Path(config.docs_dir) / found[1], found[2]), markdown)


def included(file: Path, name: str) -> str:
    """What stands between the marks ``name`` in ``file``. Raises ValueError where the marks are not there once."""
    parts = re.split(rf"<!-- {name}:(?:start|end) -->", file.read_text(encoding="utf-8"))
    if len(parts) != 3:
        raise ValueError(f"{file.name} has no part {name}")
    return parts[1].strip()
