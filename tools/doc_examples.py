"""Run what the documentation shows, and hold what it shows of the output against what comes.

    python tools/doc_examples.py [PAGE …]          run the pages (default: all below docs/) and say where they differ
    python tools/doc_examples.py --write [PAGE …]  put the real output into the pages that differ

A page is read from top to bottom, in an empty folder of its own:

- a block with ``title="train.py"`` becomes that file;
- a ``console`` block is run: each line after ``$ `` by a shell, and what stands below it has to be what it writes,
  output and errors together. A line ``…`` stands for any lines, ``…`` within a line for anything. Where nothing stands
  below a command, it only has to end without a complaint about its words (exit status 2);
- a ``python`` block without a title runs by itself. Where a comment says ``# RuntimeError``, it has to end with that
  error on that line.

``files_of: tutorial/first-fix.md`` in the head of a page takes over the files of another page. Chinese pages run in a
Chinese locale.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ANYTHING = "…"
_WRONG_USAGE = 2
_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page: its language, the file that it is, what it holds, and where that stands in the page."""

    language: str
    title: str | None
    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A command whose output is not what the page ``file`` shows; ``start`` and ``end`` bound that in the page."""

    file: Path
    command: str
    shown: str
    came: str
    start: int
    end: int

    def __str__(self) -> str:
        """As a diff."""
        lines = difflib.unified_diff(self.shown.splitlines(), self.came.splitlines(), "shown", "came", lineterm="")
        return "\n".join([f"{self.file}: $ {self.command}", *lines])


def pages() -> list[Path]:
    """The pages of the documentation, without those that are generated."""
    return [path for path in sorted(DOCS.rglob("*.md")) if "reference" not in path.relative_to(DOCS).parts]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of ``page`` in order."""
    found = []
    for fence in _FENCE.finditer(page.read_text(encoding="utf-8")):
        title = re.search(r'title="([^"]+)"', fence[2])
        found.append(Block(fence[1], title and title[1], fence[3], fence.start(3)))
    return found


def programs(page: Path) -> list[str]:
    """The ``python`` blocks of ``page`` that run by themselves."""
    return [block.text for block in blocks(page) if block.language == "python" and block.title is None]


def shown_commands(page: Path) -> list[str]:
    """Every command line that ``page`` shows, whether it is run or not, without comments."""
    found = []
    for block in blocks(page):
        if block.language in ("console", "sh"):
            prompt = "$ " if block.language == "console" else ""
            found += [line.removeprefix(prompt) for line in block.text.splitlines() if line.startswith(prompt)]
    return [re.sub(r"\s+#.*", "", line) for line in found]


def differences(page: Path, folder: Path, programs: Path | None = None) -> Iterator[Difference]:
    """Run the commands of ``page`` in the empty ``folder`` and give those that wrote something else than it shows.

    ``programs`` is a folder in which commands are looked for first.
    """
    _take_over(page, folder)
    status = 0
    for block in blocks(page):
        if block.title is not None:
            _write(folder / block.title, block.text)
        elif block.language == "console":
            for command, start, end in _commands(block):
                status, came = run(command, folder, _language(page), status, programs)
                shown = block.text[start:end]
                if not (fits(shown, came) if shown.strip() else status != _WRONG_USAGE):
                    yield Difference(
                        page, command, shown, lasting(came, folder), block.start + start, block.start + end
                    )


def run(command: str, folder: Path, language: str, status: int, programs: Path | None = None) -> tuple[int, str]:
    """The exit status and all output of ``command``, started in ``folder`` after one that ended with ``status``.

    ``programs`` is a folder in which commands are looked for before those of this Python's environment.

    Raises:
        subprocess.TimeoutExpired: after five minutes.
    """
    searched = [] if programs is None else [programs]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("GRADSAN_", "PYTEST_", "LC_"))
    }
    environment |= {
        "COLUMNS": "100",
        "LANG": "zh_CN.UTF-8" if language == "zh" else "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join(map(str, [*searched, Path(sys.executable).parent, os.environ["PATH"]])),
        "PYTHONDONTWRITEBYTECODE": "1",
        # Output and errors stand in the order in which they were written.
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",
        "TERM": "dumb",
    }
    done = subprocess.run(
        ["bash", "-c", f"(exit {status})\n{command}"],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        timeout=_TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout


def fits(shown: str, came: str) -> bool:
    """Whether ``came`` is what ``shown`` shows; white space at the end of a line does not count."""
    pattern = "".join(
        r"(?:.*\n)*?"
        if line.strip() == _ANYTHING
        else f"{'.*'.join(map(re.escape, line.rstrip().split(_ANYTHING)))} *\n"
        for line in shown.strip("\n").splitlines()
    )
    return re.fullmatch(pattern, came.strip("\n") + "\n") is not None


def lasting(output: str, folder: Path) -> str:
    """``output`` as a page shows it: without what is different on another machine or in another run."""
    output = output.replace(f"{folder}{os.sep}", _ANYTHING)
    # Of a traceback, only what was raised.
    output = re.sub(r"^Traceback .*\n(?:  .*\n)+", f"{_ANYTHING}\n", output, flags=re.MULTILINE)
    output = re.sub(r"^(RuntimeError: [^:\n]*:) .*", rf"\1 {_ANYTHING}", output, flags=re.MULTILINE)
    return re.sub(r"\b([x×]) \d+\.\d\d\b", rf"\1 {_ANYTHING}", output).strip("\n") + "\n"


def _commands(block: Block) -> Iterator[tuple[str, int, int]]:
    """Each command of a console block, and the bounds of what the block shows below it."""
    found = list(re.finditer(r"^\$ (.*)\n", block.text, re.MULTILINE))
    ends = [*(one.start() for one in found[1:]), len(block.text)]
    for one, end in zip(found, ends, strict=True):
        yield one[1], one.end(), end


def _take_over(page: Path, folder: Path) -> None:
    head = re.match(r"---\n(.*?)^---$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    other = re.search(r"^files_of: (\S+)$", head[1], re.MULTILINE) if head else None
    if other is None:
        return
    for block in blocks(DOCS / other[1]):
        if block.title is not None and not (folder / block.title).exists():
            _write(folder / block.title, block.text)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _language(page: Path) -> str:
    return "zh" if page.name.endswith(".zh.md") else "en"


def main() -> int:
    """Run pages; 1 where one shows something else than what comes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE")
    parser.add_argument("--write", action="store_true", help="put the real output into the pages")
    asked = parser.parse_args()
    failed = 0
    for page in [path.resolve() for path in asked.pages] or pages():
        with tempfile.TemporaryDirectory() as folder:
            found = list(differences(page, Path(folder)))
        failed += len(found)
        for difference in found:
            print(difference)
        if asked.write:
            text = page.read_text(encoding="utf-8")
            for difference in reversed(found):
                text = text[: difference.start] + difference.came + text[difference.end :]
            page.write_text(text, encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
