"""``gradsan mcp``: run, explain, fix and report as tools of the Model Context Protocol, for coding agents."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module, util
from pathlib import Path
from typing import Any

from gradsan import __version__
from gradsan.cli._parser import Subparsers, Words
from gradsan.diagnose.messages import codes_of
from gradsan.model import Message
from gradsan.options import OptionsError
from gradsan.text import codes, page, resolve

MOST_CHARACTERS = 12_000
"""The most characters of a tool's answer; the middle of a longer one is left out."""

_SECONDS = 600
_FIXES_KEPT = 2


def add_parser(subparsers: Subparsers, words: Words) -> argparse.ArgumentParser:
    """Add ``mcp`` to the commands of ``gradsan``; its ``handler`` is :func:`run`."""
    summary = words("cli.mcp_summary")
    parser: argparse.ArgumentParser = subparsers.add_parser("mcp", help=summary, description=summary)
    parser.set_defaults(handler=run)
    return parser


def run(namespace: argparse.Namespace) -> int:
    """Serve on standard input and output until the client disconnects; return the exit status.

    Raises:
        OptionsError: if the package ``mcp`` is not installed.
    """
    if util.find_spec("mcp") is None:
        raise OptionsError(Message("cli.no_mcp"))
    server().run()
    return 0


def server() -> Any:
    """Return the server with its tools. Raises ImportError if the package ``mcp`` is not installed."""
    made = import_module("mcp.server.mcpserver").MCPServer("gradsan", version=__version__)
    for tool in (run_program, fix_program, explain, show_report):
        made.tool()(tool)
    return made


def run_program(command: list[str], directory: str = ".", mode: str = "watch") -> str:
    """Run a Python program under gradsan; return what it found as JSON, and the end of what the program wrote.

    ``command`` are the words after ``python``: ``["train.py", "--epochs", "1"]`` or ``["-m", "package.train"]``.
    ``mode`` is ``watch``, ``deep`` (compares bytes, measures gradients), ``heal`` or ``nonfinite`` (where NaN begins).
    """
    options = [] if mode == "watch" else [f"--{mode}"]
    return _with_json(["run", *options, "--quiet"], command, directory)


def fix_program(command: list[str], directory: str = ".", steps: int = 20) -> str:
    """Try candidate fixes on a program without changing a file; return the report as JSON with the diffs that work.

    ``command`` as for ``run_program``. Each run ends after ``steps`` optimizer steps. A fix with
    ``verification.status == "passed"`` and ``meaning == "preserved"`` was run, and keeps the gradients.
    """
    return _with_json(["fix", "--steps", str(steps)], command, directory)


def explain(code_or_message: str, language: str = "en") -> str:
    """Explain a gradsan code (GS110) or an error message of PyTorch's, whole, in part or in a traceback."""
    code = resolve(code_or_message)
    found = (code,) if code is not None else codes_of(code_or_message)
    if len(found) == 1:
        return bounded(page(found[0], language))
    titles = {entry.code: entry.title for entry in codes(language)}
    return "\n".join(f"{code} {titles[code]}" for code in found) or "no code explains this"


def show_report(file: str, language: str = "en") -> str:
    """Show a JSON report of ``gradsan run --json`` as text: source lines, what happened there, what to change."""
    return bounded(_gradsan(["report", "--color", "never", "--lang", language, file], ".")[1])


def bounded(text: str) -> str:
    """Return ``text``, or its beginning and end if it is longer than :data:`MOST_CHARACTERS`."""
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2 - 40
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def _with_json(words: Sequence[str], command: Sequence[str], directory: str) -> str:
    with tempfile.TemporaryDirectory(prefix="gradsan-mcp-") as folder:
        file = Path(folder, "report.json")
        status, said = _gradsan([words[0], "--json", str(file), *words[1:], *command], directory)
        report = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    answer = {"exit_status": status, "report": None if report is None else _shortened(report), "output": said[-2000:]}
    return fitting(answer)


def fitting(answer: dict[str, Any]) -> str:
    """Return ``answer`` as JSON of at most :data:`MOST_CHARACTERS`, leaving out the last findings and fixes if needed.

    ``answer`` is changed; ``left_out`` in it counts them.
    """
    findings = (answer.get("report") or {}).get("diagnoses", [])
    left_out = {"diagnoses": 0, "fixes": 0}
    while len(text := json.dumps(answer, ensure_ascii=False)) > MOST_CHARACTERS:
        most: dict[str, Any] = max(findings, key=lambda one: len(one.get("fixes", [])), default={})
        if len(most.get("fixes", [])) > _FIXES_KEPT:
            most["fixes"].pop()
            left_out["fixes"] += 1
        elif len(findings) > 1:
            findings.pop()
            left_out["diagnoses"] += 1
        else:
            break
        answer["left_out"] = left_out
    return bounded(text)


def _shortened(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report without parts for human readers: whole stacks, surrounding lines, every event."""
    for diagnosis in report["diagnoses"]:
        diagnosis.pop("events", None)
        for label in diagnosis["labels"]:
            # Empty, not removed: a saved answer is still a report that show_report reads.
            label["stack"], label["lines"] = [], []
    return report


def _gradsan(words: Sequence[str], directory: str) -> tuple[int, str]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gradsan", *words],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="backslashreplace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"did not end within {_SECONDS} seconds"
    return done.returncode, done.stdout
