"""Compatibility with releases of torch and Python: environments, their checks, and the table of docs/compatibility.md.

    python tools/matrix.py --into ~/matrix 2.6.0:python3.10 2.13.0:python3.11
    python tools/matrix.py --into ~/matrix --write

Each pair gets an environment of its own below the folder, outside of the tree, and its results stay there. One that is
there already (``torch-2.6.0-python3.10``) is used as it is, and what was run in it at this commit is not run again
without ``--again``. Not part of the checks of a change: it takes gigabytes and hours. ``--write`` puts the results that
are there between the page's markers; the Chinese page includes them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
TESTS_NEED = ("pytest", "pytest-timeout", "hypothesis", "jsonschema", "syrupy", "pyyaml", "tqdm", "numpy")
BUILD_NEEDS = ("setuptools", "hatchling", "editables")
RESULTS = "results.json"
SECONDS = 3600
SECONDS_A_TEST = 600


class Part(NamedTuple):
    """A column of the table: tests that hold on every torch, as they depend on no wording of its messages."""

    name: str
    tests: tuple[str, ...]


# The pages say what each is, in both languages.
PARTS = (
    Part("self-check", ("tests/graph/test_self_check.py", "tests/graph/test_saved.py")),
    Part(
        "programs",
        (
            "tests/corpus/test_corpus.py",
            "tests/test_examples_watched.py",
            "-k=test_case or gets_its_diagnosis and gan",
        ),
    ),
    Part("types", ("tests/record/test_type_slots.py",)),
    Part(
        "modes",
        ("tests/originals/test_deep.py", "tests/originals/test_heal.py", "tests/detect/test_hooked_programs.py"),
    ),
    Part("bits", ("tests/test_transparency.py",)),
    Part("quiet", ("tests/detect/silent", "tests/transparency", "-k=quiet or right_programs")),
)


def main() -> None:
    """Run what is named, and write the page's table where that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", metavar="TORCH:PYTHON", help="e.g. 2.6.0:python3.10")
    parser.add_argument("--into", type=Path, required=True, help="folder of the environments and results")
    parser.add_argument("--parts", help="only these columns, with commas between them")
    parser.add_argument("--again", action="store_true", help="run what was run at this commit, too")
    parser.add_argument("--write", action="store_true", help="put all results into docs/compatibility.md")
    asked = parser.parse_args()
    wanted = asked.parts.split(",") if asked.parts else [part.name for part in PARTS]
    into = asked.into.expanduser()
    for pair in asked.pairs:
        torch, _, python = pair.partition(":")
        folder = into / f"torch-{torch}-{Path(python).name}"
        done = {} if asked.again else known(folder)["parts"]
        missing = [part for part in PARTS if part.name in wanted and done.get(part.name, {}).get("code") != code()]
        if missing:
            prepare(folder, torch, python)
        for part in missing:
            keep(folder, part, run(folder, part))
    if asked.write:
        text = PAGE.read_text(encoding="utf-8")
        for name, said in tables(into).items():
            start, end = f"<!-- {name}:start -->\n", f"\n<!-- {name}:end -->"
            before, after = text.partition(start), text.partition(end)
            text = f"{before[0]}{start}{said}{end}{after[2]}"
        PAGE.write_text(text, encoding="utf-8")


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


def run(folder: Path, part: Part) -> dict[str, Any]:
    """Run the tests of a column: how many passed and were skipped, and the names of those that failed."""
    python = str(folder / "bin" / "python")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as work:
        written = Path(work, "results.xml")
        options = ["-q", "-p", "no:cacheprovider", "--tb=short", "--timeout", str(SECONDS_A_TEST)]
        options += ["-o", "faulthandler_timeout=0"]  # it would end all tests before that limit
        command = [python, "-m", "pytest", *options, f"--junitxml={written}", *part.tests]
        with (folder / f"{part.name}.log").open("w", encoding="utf-8") as log:
            done = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=SECONDS)
        cases = list(ElementTree.parse(written).iter("testcase")) if written.exists() else []
    result: dict[str, Any] = {"passed": 0, "skipped": 0, "names": [], "code": code()}
    for case in cases:
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            result["names"].append(f"{case.get('classname')}::{case.get('name')}")
        else:
            result["skipped" if "skipped" in kinds else "passed"] += 1
    if not cases or (done.returncode not in (0, 1) and not result["names"]):
        result["names"].append(f"pytest ended with {done.returncode}")
    print(folder.name, part.name, result, flush=True)
    return result


def code() -> str:
    """The commit whose sources were run, with a mark where they were changed since."""
    described = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def keep(folder: Path, part: Part, result: dict[str, Any]) -> None:
    """Write a result down beside the environment, with the versions it holds for."""
    told = "import sys, torch; print(torch.__version__.split('+')[0], sys.version.split()[0])"
    python = str(folder / "bin" / "python")
    versions = subprocess.run([python, "-c", told], capture_output=True, text=True, check=True).stdout.split()
    results = known(folder)
    results["torch"], results["python"] = versions
    results["parts"][part.name] = result
    (folder / RESULTS).write_text(json.dumps(results, indent=1), encoding="utf-8")


def known(folder: Path) -> dict[str, Any]:
    """The results that lie beside an environment."""
    path = folder / RESULTS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"parts": {}}


def tables(into: Path) -> dict[str, str]:
    """What stands between the page's markers, by their names, from the results below a folder."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in into.glob(f"torch-*/{RESULTS}")]
    results.sort(key=lambda one: [[int(part) for part in one[name].split(".")] for name in ("torch", "python")])
    rows = [["torch", "Python", *(part.name for part in PARTS), "commit"], ["---"] * (3 + len(PARTS))]
    for one in results:
        parts = [one["parts"].get(part.name) for part in PARTS]
        commits = dict.fromkeys(part["code"] for part in parts if part is not None)
        rows.append([one["torch"], one["python"], *map(cell, parts), " ".join(commits)])
    failed = [
        f"- torch {one['torch']}, Python {one['python']}, {part.name}: `{name}`"
        for one in results
        for part in PARTS
        for name in one["parts"].get(part.name, {}).get("names", ())
    ]
    return {
        "versions": "\n".join(f"| {' | '.join(row)} |" for row in rows),
        "failed": "\n".join(failed or ["–"]),
    }


def cell(result: dict[str, Any] | None) -> str:
    """How many tests of a column passed."""
    if result is None:
        return "not run"
    passed, failed = result["passed"], len(result["names"])
    counted = f"{passed} of {passed + failed}" if failed or not passed else f"all {passed}"
    return f"{counted}, {result['skipped']} skipped" if result["skipped"] else counted


if __name__ == "__main__":
    sys.exit(main())
