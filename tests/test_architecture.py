"""Import order of the packages, their size, and circles: what docs/architecture.md says of the structure."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from cases import each

SOURCES = Path(__file__).resolve().parent.parent / "src" / "gradsan"

ORDER = (
    "_lazy", "_collector", "model", "text", "catalogue", "overlap", "_errors", "_imports", "heuristics", "source",
    "suppress", "_editors", "options", "_torch", "record", "graph", "originals", "detect", "errors", "postmortem",
    "_watching", "diagnose", "lint", "present", "_notes", "_terms", "_autopsy", "_session", "_ipython", "launch",
    "_enabled", "_install", "_api", "repair", "cli", "integrations",
)  # fmt: skip
"""Each imports only those before it, and itself."""

TOUCH_TORCH = {"_torch", "record", "graph", "originals", "detect", "errors", "postmortem", "_watching"}

EXCEPTIONS = {
    # The detectors are made where all of them are known.
    ("record.recorder", "_watching"),
    # The C library searches memory, lends it, and walks the heap.
    *((f"_torch.{name}", "record") for name in ("finite", "memory")),
    ("_collector", "record"),
    # Sentences that a person asked for: str(diagnosis), diagnosis.title.
    *(("model._findings", package) for package in ("present", "text")),
    ("model._sites", "text"),
    # Whether a function hands on what it was given is read off its source while the program runs.
    ("detect.changed_values", "source"),
    # So is what reads a parameter as ``.data``.
    ("detect.bypassed", "source"),
    # So is whether forward has saved what it writes afterwards.
    ("detect.functions", "source"),
    # Whether a test compares something with the sum.
    ("detect.graphs.unused_graphs", "source"),
    # Whether a value is read again as if it had not changed, or taken for a copy, only the source says.
    ("detect.meaning.callers_values", "source"),
    *(
        (f"detect.meaning.{name}", "source")
        for name in (
            "changed_again",
            "changed_arrays",
            "idle_schedules",
            "reused_inputs",
        )
    ),
    *((f"detect.gradients.{name}", "source") for name in ("dropped_results", "wrong_steps")),
    *(
        (f"detect.one_tensor.{name}", "source")
        for name in (
            "kept_states",
            "kept_weights",
            "lists_of_one",
            "own_operands",
            "own_pairs",
            "second_names",
        )
    ),
    # So does whether gradients are read by hand, a term was cut off, or parameters were chosen by name.
    # And whether a hook computes a gradient that it does not return, or a step stands apart from its backward.
    *((f"detect.meaning.{name}", "source") for name in ("evidence", "terms.drawn_samples", "terms.lost_terms")),
    ("detect.meaning.lost_hooks", "source"),
    # Whether anything reads the only number that an optimizer has.
    ("detect.gradients.missing_gradients", "source"),
    # Whether what a hook, or NumPy, has changed is read again by another name.
    ("detect.gradients.gradient_writes", "source"),
    ("detect.one_tensor.arrays_in_lists", "source"),
    ("detect.one_tensor.kept_references", "source"),
    ("detect.one_tensor.overwritten_names", "source"),
    ("detect.gradients.kept_gradients", "source"),
    # Failures keep what the source of a frame says: the variable of an index, the operand of a statement.
    *((f"errors.{name}", "source") for name in ("graph_nodes", "refused_writes")),
    # A session is where a process and its report meet.
    *((name, "launch") for name in ("_session", "_ipython")),
    # The number of fixes that can be tried, at the end of a report.
    ("launch.outcome", "repair"),
}
"""(module, package that it may import all the same), each with its reason."""

FILES_IN_A_FOLDER = 20
LINES_IN_A_FILE = 420
MODULES_LOADED = 120


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCES.rglob("*.py"):
        parts = path.relative_to(SOURCES).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, *, lazily: bool) -> Iterator[str]:
    """The modules of gradsan that a module imports; ``lazily`` within functions, and for type checkers, too."""
    tree = ast.parse(modules()[name].read_text(encoding="utf-8"))
    for node in ast.walk(tree) if lazily else at_once(tree.body):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "gradsan":
            base = (node.module or "").partition(".")[2]
            for alias in node.names:
                inner = f"{base}.{alias.name}" if base else alias.name
                yield inner if inner in modules() else base
        elif isinstance(node, ast.Import):
            yield from (one.name.partition(".")[2] for one in node.names if one.name.startswith("gradsan."))


def at_once(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If):
            yield from () if "TYPE_CHECKING" in ast.unparse(node.test) else at_once([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from at_once(node.body)
        else:
            yield node


def package(module: str) -> str:
    return module.partition(".")[0]


def test_packages_import_only_what_comes_before_them() -> None:
    named = {package(name) for name in modules()} - {"", "__main__"}
    assert named == set(ORDER)
    wrong = set()
    for name in modules():
        if package(name) in ("", "__main__"):
            continue
        for other in imported(name, lazily=True):
            if other and ORDER.index(package(other)) > ORDER.index(package(name)):
                wrong.add((name, package(other)))
    upwards = {one for one in EXCEPTIONS if ORDER.index(one[1]) > ORDER.index(package(one[0]))}
    assert wrong == upwards


def test_recording_packages_import_no_explanations() -> None:
    explaining = {"source", "diagnose", "present", "repair", "text", "cli"}
    wrong = {
        (name, package(other))
        for name in modules()
        if package(name) in TOUCH_TORCH - {"postmortem"}
        for other in imported(name, lazily=True)
        if package(other) in explaining
    }
    assert wrong == {one for one in EXCEPTIONS if package(one[0]) in TOUCH_TORCH and one[1] in explaining}


def test_pure_packages_know_nothing_of_torch() -> None:
    pure = {
        *("model", "text", "catalogue", "overlap", "heuristics", "source", "suppress"),
        *("options", "diagnose", "lint", "present"),
    }
    found = {
        (name, other)
        for name in modules()
        if package(name) in pure
        for other in imported(name, lazily=True)
        if package(other) in TOUCH_TORCH
    }
    assert found == set()
    for name, path in modules().items():
        if package(name) in pure:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            roots = {
                alias.name.partition(".")[0]
                for node in ast.walk(tree)
                if isinstance(node, ast.Import)
                for alias in node.names
            }
            assert "torch" not in roots, name


WITHOUT_TORCH = "import sys; import gradsan, gradsan.cli.{}; sys.exit('torch' in sys.modules)"


@each("modules", ["run", "fix, gradsan.repair.search", "compare, gradsan.repair.compiled", "lint", "report", "explain"])
def test_a_command_imports_no_torch_before_its_program_does(modules: str) -> None:
    assert subprocess.run([sys.executable, "-c", WITHOUT_TORCH.format(modules)]).returncode == 0


@pytest.mark.parametrize("name", ["gradsan", "gradsan.source", "gradsan.present"])
def test_names_that_are_imported_on_demand_are_there(name: str) -> None:
    found = import_module(name)
    assert [one for names in found._HOMES.values() for one in names if not hasattr(found, one)] == []


def test_there_is_no_circle() -> None:
    """Not through imports within functions either, but for the listed exceptions."""
    graph = {
        name: {
            one for one in imported(name, lazily=True) if one and one != name and (name, package(one)) not in EXCEPTIONS
        }
        for name in modules()
    }
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_folders_and_files_are_of_a_size_that_one_can_read() -> None:
    counts = Counter(str(path.parent.relative_to(SOURCES)) for path in modules().values())
    assert {folder: count for folder, count in counts.items() if count > FILES_IN_A_FOLDER} == {}
    texts = {str(path.relative_to(SOURCES)): path.read_text(encoding="utf-8") for path in modules().values()}
    lengths = {name: text.count("\n") for name, text in texts.items()}
    assert {name: n for name, n in lengths.items() if n > LINES_IN_A_FILE} == {}


def test_a_watched_run_loads_what_it_needs_only():
    program = """
import sys, gradsan, torch
weight = torch.ones(2, requires_grad=True)
with gradsan.watch():
    weight.sum().backward()
print(sum(name.partition(".")[0] == "gradsan" for name in sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert int(run.stdout) <= MODULES_LOADED
