"""The programs in examples/: how they end, and how to run them, plain and under gradsan.

A program runs as ``__main__`` by its path, in a process that has torch imported (forked.py). Runs without side effects
are kept on disk for the workers of a test run, so that each program is run once in each of its modes.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import pickle
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from forked import run_forked

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def load(path: Path) -> ModuleType:
    """The module in a file that lies in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


refresh_reports = load(ROOT / "tools" / "refresh_reports.py")
NAMES = refresh_reports.EXAMPLES

VERSION_ERROR = (
    r"RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: "
    r"\[torch\.{type} {size}\].* is at version \d+; expected version \d+ instead\. Hint: .*"
)
LEAF_ERROR = r"RuntimeError: a leaf Variable that requires grad is being used in an in-place operation\."
NO_GRAD_LEFT = r"TypeError: unsupported operand type\(s\) for \*: 'float' and 'NoneType'"


def version_error(size: str, kind: str = "FloatTensor") -> str:
    return VERSION_ERROR.format(type=kind, size=re.escape(size))


# (example, arguments, the exact line of the program that PyTorch stops at, last line on stderr)
BROKEN = [
    ("gan", (), "g_loss.backward()", version_error("[1, 64, 4, 4]")),
    ("hierarchical_bert", (), "loss.backward()", version_error("[16, 32]", "LongTensor")),
    ("image_classifier", (), "loss.backward()", version_error("[64, 3072]")),
    ("image_classifier", ("--model", "cnn"), "loss.backward()", version_error("[64, 3, 32, 32]")),
    ("leaf_update", (), "loss.backward(retain_graph=True)", version_error("[16, 2]")),
    ("leaf_update", ("--update", "in-place"), "p -= lr * p.grad", LEAF_ERROR),
    ("leaf_update", ("--update", "rebind"), "params = [p - lr * p.grad for p in params]", NO_GRAD_LEFT),
    ("rnn_sequence", (), "loss.backward(retain_graph=True)", version_error("[32, 32]")),
    ("rnn_sequence", ("--cell", "lstm"), "loss.backward(retain_graph=True)", version_error("[128, 1]")),
]

# (example, arguments, the printed quantities that fall)
RIGHT = [
    # Shorter than by default.
    ("gan", ("--epochs", "4", "--pictures", "256"), ("d_loss", "distance")),
    ("hierarchical_bert", ("--texts", "96", "--lr", "4e-3"), ("loss",)),
    ("image_classifier", (), ("loss",)),
    ("image_classifier", ("--way", "clone", "--model", "cnn"), ("loss",)),
    ("image_classifier", ("--way", "no_grad"), ("loss",)),
    ("leaf_update", (), ("loss",)),
    ("leaf_update", ("--update", "in-place"), ("loss",)),
    ("leaf_update", ("--update", "rebind"), ("loss",)),
    ("rnn_sequence", (), ("loss",)),
    ("rnn_sequence", ("--cell", "lstm"), ("loss",)),
]


def case_id(value: object) -> str | None:
    return " ".join(value) if isinstance(value, tuple) else None


def run_program(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run ``python *command`` and return it finished, with its output as text."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return run_forked(command, cwd, environment, limit=300)


def kept(key: tuple[str, ...], make: Callable[[], Any]) -> Any:
    """What ``make`` gives, made once in a test run, whichever worker asks first."""
    file = Path(os.environ["PYTEST_SHARED_FOLDER"]) / hashlib.sha256(repr(key).encode()).hexdigest()
    with file.open("ab+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        if found := stream.read():
            return pickle.loads(found)
        made = make()
        stream.write(pickle.dumps(made))
    return made


def run_example(example: str, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = (str(EXAMPLES / example / script), *arguments)
    return kept(("plain", *words), lambda: run_program(*words))


class Watched(NamedTuple):
    """An example run under gradsan: how it ended and what it printed, and the report written by ``--json``."""

    done: subprocess.CompletedProcess[str]
    report: dict[str, Any]


def watch_example(example: str, script: str, *arguments: str, language: str = "en") -> Watched:
    def watch() -> Watched:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "report.json")
            options = ("--lang", language, "--json", str(file))
            words, environment = refresh_reports.gradsan_command(
                f"examples/{example}/{script}", *arguments, options=options
            )
            done = run_forked(words, ROOT, environment, limit=300)
            assert file.is_file(), done.stderr
            return Watched(done, json.loads(file.read_text(encoding="utf-8")))

    return kept(("watched", language, example, script, *arguments), watch)


def last_line(text: str) -> str:
    return text.rstrip().splitlines()[-1]


def own_frames(text: str) -> list[tuple[str, str]]:
    """Return (``folder/file.py", line 12, in f``, source line) of every frame in examples/ that a traceback shows."""
    return re.findall(r'File "(?:[^"]*/)?examples/([^"]*", line \d+, in \S+)\n\s+(.*)', text)


def series(output: str, quantity: str) -> list[float]:
    """Return the values printed as ``quantity 1.2345``, in order."""
    return [float(value) for value in re.findall(rf"(?<!\w){quantity} (\d+\.\d+)", output)]
