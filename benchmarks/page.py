"""What both benchmarks print: the machine, tables, and tables put into a page between markers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import torch


def machine() -> dict[str, str]:
    """Processor, number of cores, operating system and versions: what a measured number depends on."""
    return {
        "processor": processor(),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gradsan": importlib.metadata.version("gradsan"),
    }


def processor() -> str:
    """The processor's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found.group(1)
    return platform.processor() or "unknown processor"


def machine_line(facts: dict[str, str]) -> str:
    """:func:`machine` as one sentence."""
    return (
        f"Measured on {facts['processor']}, {facts['cores']} cores, {facts['system']}; "
        f"Python {facts['python']}, torch {facts['torch']}, gradsan {facts['gradsan']}."
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, first column to the left, the others to the right."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def replace_between(page: Path, name: str, text: str) -> None:
    """Put ``text`` between ``<!-- name:start -->`` and ``<!-- name:end -->`` of ``page``.

    Raises ValueError where the page does not have this pair of markers exactly once.
    """
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before = page.read_text(encoding="utf-8")
    if before.count(start) != 1 or before.count(end) != 1 or before.index(start) > before.index(end):
        raise ValueError(f"{page} needs the lines {start} and {end}, once each and in this order")
    head, rest = before.split(start)
    tail = rest.split(end)[1]
    page.write_text(f"{head}{start}\n{text.strip()}\n{end}{tail}", encoding="utf-8")
