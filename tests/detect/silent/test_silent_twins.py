"""Faults of meaning beside their right twins, from ``twins.txt``: one warning for the fault, none for the twin.

``quiet.txt`` has right programs that come near a fault, or do on purpose what resembles one.

A section has a name, a code, and what the report calls the tensor. As in a diff, ``-`` begins a line that only the
wrong program has, ``+`` one of the right program alone.
"""

from __future__ import annotations

import re
import runpy
import threading
import zlib
from pathlib import Path

import pytest

import gradsan
from cases import each
from gradsan.record.recorder import recorder


def sections(name: str) -> dict[str, tuple[list[str], str]]:
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    parts = (part.split("\n", 1) for part in re.split(r"^=== ", text, flags=re.MULTILINE)[1:])
    return {head.split()[0]: (head.split()[1:], body) for head, body in parts}


SECTIONS, QUIET = sections("twins.txt"), sections("quiet.txt")


def told(body: str, own: str, file: Path, mode: str) -> list[tuple[str, str | None]]:
    lines = (line for line in body.splitlines() if not line.startswith(("+", "-")) or line.startswith(own))
    file.write_text("\n".join(re.sub(r"^[+-] ?", _indent, line) for line in lines) + "\n", encoding="utf-8")
    recorder().core.clear()
    watch = gradsan.watch(mode)
    # What calls the program is no code of the user's, as under ``gradsan run``.
    thread = threading.Thread(target=watch(runpy.run_path), args=(str(file),))
    thread.start()
    thread.join()
    return [(one.code, one.tensor.name if one.tensor else None) for one in watch.diagnoses if one.severity != "note"]


def _indent(found: re.Match[str]) -> str:
    return "  " if found.string[2:3] == " " else ""


def modes(name: str, table: dict[str, tuple[list[str], str]], config: pytest.Config) -> list[str]:
    """Watch mode, and deep mode, which has the same detectors, for every fourth program, or all with ``--long``."""
    is_both = config.getoption("--long") or list(table).index(name) % 4 == 0
    return ["watch", "deep"] if is_both else ["watch"]


@pytest.mark.parametrize("part", range(4))
@each("name", SECTIONS)
def test_fault_is_reported_and_its_twin_is_not(
    name: str, part: int, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    if zlib.crc32(name.encode()) % 4 != part:
        return
    expected, body = SECTIONS[name]
    for mode in modes(name, SECTIONS, pytestconfig):
        found = told(body, "-", tmp_path / f"{name}_wrong.py", mode)
        assert len(found) == 1, (mode, found)
        code, tensor = found[0]
        assert [code, *([tensor] if expected[1:] else [])] == expected, mode
        assert told(body, "+", tmp_path / f"{name}_right.py", mode) == [], mode


@pytest.mark.parametrize("part", range(2))
@each("name", QUIET)
def test_right_programs_get_no_warning(name: str, part: int, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    if zlib.crc32(name.encode()) % 2 == part:
        for mode in modes(name, QUIET, pytestconfig):
            assert told(QUIET[name][1], "?", tmp_path / f"{name}.py", mode) == [], mode
