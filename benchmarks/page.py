"""Output of the benchmarks: the machine, tables, and tables put into a page between markers."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
from collections.abc import Callable, Sequence
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


def around(page: Path, name: str) -> tuple[str, str]:
    """The text of ``page`` up to ``<!-- name:start -->`` and from ``<!-- name:end -->`` on, markers included.

    Raises ValueError where the page is not there or does not have this pair of markers exactly once.
    """
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"{page} needs the markers {start} and {end}, once each and in this order")
    return text[: text.index(start) + len(start)], text[text.index(end) :]


def replace_between(page: Path, name: str, text: str) -> None:
    """Put ``text`` between the markers of ``page``. Raises ValueError as :func:`around`."""
    head, tail = around(page, name)
    page.write_text(f"{head}\n{text.strip()}\n{tail}", encoding="utf-8")


def page_with(name: str) -> Callable[[str], Path]:
    """An argparse type: the path of a page that has the markers, so that a wrong page ends the program at once."""

    def page(argument: str) -> Path:
        try:
            around(Path(argument), name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return Path(argument)

    return page
