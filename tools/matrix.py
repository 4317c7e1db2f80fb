"""Which torch and Python gradsan works with: environments, what is run in each, and docs/compatibility.md.

    python tools/matrix.py --into ~/matrix 2.6.0:python3.10 2.13.0:python3.11
    python tools/matrix.py --into ~/matrix --write

Each pair gets an environment of its own below the folder, outside of the tree, and its results stay there. One that is
there already (``torch-2.6.0-python3.10``) is used as it is. Not part of the checks of a change: it takes gigabytes and
hours. ``--write`` makes the page from all results that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
TESTS_NEED = ("pytest", "pytest-timeout", "hypothesis", "jsonschema", "syrupy", "pyyaml", "tqdm", "numpy")
BUILD_NEEDS = ("setuptools", "hatchling", "editables")
SECONDS = 1800


class Part(NamedTuple):
    """A column of the table: tests that hold on every torch, as they depend on no wording of its messages."""

    name: str
    about: str
    tests: tuple[str, ...]


PARTS = (
    Part(
        "self-check",
        "what gradsan checks itself when it is switched on, and how saved tensors are read",
        ("tests/capture/test_self_check.py", "tests/capture/test_saved.py"),
    ),
    Part("programs", "the programs of tests/corpus under `gradsan run`: right lines and names", ("tests/corpus",)),
    Part("types", "C slots of types before, while and after watching", ("tests/capture/test_type_slots.py",)),
    Part(
        "slots",
        "every operation with one of its saved tensors overwritten: Node, slot and lines",
        ("tests/capture/test_autopsy.py",),
    ),
    Part(
        "modes",
        "deep and heal mode",
        ("tests/capture/test_deep.py", "tests/capture/test_heal.py", "tests/capture/test_hooked_programs.py"),
    ),
    Part("bits", "models with and without gradsan: same bits, same lifetimes", ("tests/test_transparency.py",)),
)
_COUNT = re.compile(r"(\d+) (passed|failed|errors?)\b")


def main() -> None:
    """Run what is named, and write the page where that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", metavar="TORCH:PYTHON", help="e.g. 2.6.0:python3.10")
    parser.add_argument("--into", type=Path, required=True, help="folder of the environments and results")
    parser.add_argument("--parts", help="only these columns, with commas between them")
    parser.add_argument("--write", action="store_true", help="write docs/compatibility.md from all results")
    asked = parser.parse_args()
    wanted = asked.parts.split(",") if asked.parts else [part.name for part in PARTS]
    for pair in asked.pairs:
        torch, _, python = pair.partition(":")
        folder = asked.into.expanduser() / f"torch-{torch}-{Path(python).name}"
        prepare(folder, torch, python)
        for part in PARTS:
            if part.name in wanted:
                keep(folder, part, run(folder, part))
    if asked.write:
        PAGE.write_text(page(asked.into.expanduser()), encoding="utf-8")


def prepare(folder: Path, torch: str, python: str) -> None:
    """Have an environment with that torch, what the tests need, and the core compiled for its Python."""
    command = folder / "bin" / "python"
    pip = [str(command), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not command.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        subprocess.run([*pip, f"torch=={torch}", "rich", "tomli", *TESTS_NEED, *BUILD_NEEDS], check=True)
    # The sources are read in place, and the compiled core of each Python has a name of its own.
    environment = {**os.environ, "GRADSAN_BUILD_NATIVE": "1"}
    editable = ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    subprocess.run([*pip, *editable], env=environment, check=True)


def run(folder: Path, part: Part) -> dict[str, object]:
    """Run the tests of a column; what passed, what failed, and by what versions."""
    python = str(folder / "bin" / "python")
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "120",
        "-rfE",
        "--tb=no",
        *part.tests,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
        said = done.stdout
    except subprocess.TimeoutExpired:
        said = "1 failed: it took too long"
    counts = {word.removesuffix("s"): int(number) for number, word in _COUNT.findall(said)}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    names = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    print(folder.name, part.name, counts, *names[:5], flush=True)
    return {"passed": counts.get("passed", 0), "failed": failed, "names": names}


def keep(folder: Path, part: Part, result: dict[str, object]) -> None:
    """Write a result down beside the environment, with the versions it holds for."""
    told = "import sys, torch; print(torch.__version__.split('+')[0], sys.version.split()[0])"
    python = str(folder / "bin" / "python")
    versions = subprocess.run([python, "-c", told], capture_output=True, text=True, check=True).stdout.split()
    path = folder / "results.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"parts": {}}
    known["torch"], known["python"] = versions
    known["parts"][part.name] = result
    path.write_text(json.dumps(known, indent=1), encoding="utf-8")


def page(into: Path) -> str:
    """docs/compatibility.md, from the results below a folder."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in into.glob("torch-*/results.json")]
    results.sort(key=lambda one: [[int(part) for part in one[name].split(".")] for name in ("torch", "python")])
    columns = " | ".join(part.name for part in PARTS)
    rows = [
        f"| {one['torch']} | {one['python']} | "
        + " | ".join(cell(one["parts"].get(part.name)) for part in PARTS)
        + " |"
        for one in results
    ]
    failures = [
        f"- torch {one['torch']}, Python {one['python']}: `{name}`"
        for one in results
        for part in PARTS
        for name in one["parts"].get(part.name, {}).get("names", ())
    ]
    return "\n".join(
        (
            *("# Which torch and Python", "", *INTRODUCTION, ""),
            f"| torch | Python | {columns} |",
            "|---" * (2 + len(PARTS)) + "|",
            *rows,
            "",
            *(f"- **{part.name}**: {part.about}" for part in PARTS),
            *("", "## What failed", "", *(failures or ["Nothing."]), "", *REMARKS, ""),
        )
    )


def cell(result: dict[str, int] | None) -> str:
    """How many tests of a column passed."""
    if result is None:
        return "not run"
    total = result["passed"] + result["failed"]
    return f"all {total}" if not result["failed"] and total else f"{result['passed']} of {total}"


INTRODUCTION = (
    "gradsan needs torch 2.6 or newer and Python 3.10 or newer. Where torch is older, it says so in one sentence and",
    "the program runs without it. On every torch it checks itself when it is switched on, in a graph of three",
    "operations: `gradsan --version --verbose` shows the outcome, and what fails stands in every report.",
    "",
    "Written by `tools/matrix.py` from runs on CPU, by hand now and then; the tests of every change run with the torch",
    "of `constraints.txt`. A cell tells how many tests passed.",
)
REMARKS = (
    "## What differs",
    "",
    "- Before 2.10 torch shows neither what a saved tensor holds nor whether hooks stand behind it. gradsan reads the",
    "  slot as backward does, and ends every Python function that would run for it before its first line. The tensor",
    "  of a slot that raises is shown to hooks only: after a failed backward such a slot keeps a hook of gradsan's,",
    "  which raises PyTorch's error with PyTorch's words. In 2.10 the same holds for lists of saved tensors.",
    "- Before 2.10, in deep mode, `ctx.saved_tensors` are other objects than those that were saved, in the same",
    "  memory, and slots of a graph take no hooks of the program's.",
)

if __name__ == "__main__":
    sys.exit(main())
