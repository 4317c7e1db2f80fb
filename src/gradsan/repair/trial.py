"""Running the program in a process of its own, with a patch laid over its files."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from gradsan.model import Diagnosis, Seen

TrialMode = Literal["watch", "heal", "measure"]


@dataclass(frozen=True, slots=True)
class Request:
    """What a child is asked to do. ``target`` is (kind, name, arguments) of ``gradsan.cli._program.Target``.

    ``files`` are the texts laid over the program's files, ``steps`` the optimizer steps after which it may end, 0 for
    no limit, ``timeout`` the seconds after which it is stopped. ``own_folders`` are counted as the user's own code,
    ``allowances`` name what PyTorch refuses and this run carries out (see ``repair.allowances``); ``result`` is the
    file for the answer.
    """

    target: tuple[str, str, tuple[str, ...]]
    mode: TrialMode
    files: Mapping[str, bytes]
    steps: int
    timeout: float
    own_folders: tuple[str, ...] = ()
    allowances: frozenset[str] = frozenset()
    result: str = ""


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients at one point of a run: ``key`` says whose (an optimizer's parameter shapes, or ``backward``).

    Each is (shape, bytes of float64 numbers, norm), None where a parameter had no gradient. ``labels``, where given,
    say of each which leaf's it is, whatever the order in which a graph is walked.
    """

    key: str
    values: tuple[tuple[tuple[int, ...], bytes, float] | None, ...]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """What the program computed: gradients at each optimizer step and after each backward, and the losses.

    ``losses`` are those of backwards that ended, ``begun`` those of backwards that began. ``finished`` says that it ran
    to its end or to the limit of steps. ``left`` is what the last backward left where no step came after it,
    ``undecided`` what optimizers end with of which the run does not show whether it is cleared (see ``left_over.py``).
    """

    steps: tuple[Gradients, ...] = ()
    backwards: tuple[Gradients, ...] = ()
    losses: tuple[float, ...] = ()
    begun: tuple[float, ...] = ()
    finished: bool = False
    exception: tuple[str, str] | None = None
    was_cut: bool = False
    left: Gradients | None = None
    undecided: tuple[Gradients, ...] = ()


@dataclass(frozen=True, slots=True)
class Cost:
    """Counted bytes of a run: those that operators wrote, and the most that autograd kept for backward at once."""

    written: int
    kept: int


@dataclass(frozen=True, slots=True)
class Trial:
    """How a run went. ``status`` is None where it ran out of time; ``diagnoses`` with every fix that has lines.

    ``is_answered`` says that its process lived to tell: a kernel may kill it, the program may leave by ``os._exit``.
    ``written`` are the functions and lines that wrote, of each diagnosis: what tells one fault from another where
    lines have moved.
    """

    status: int | None
    recording: Recording = field(default_factory=Recording)
    diagnoses: tuple[Diagnosis, ...] = ()
    written: tuple[frozenset[str], ...] = ()
    seen: Seen = field(default_factory=Seen)
    seconds: float = 0.0
    peak_bytes: int = 0
    cost: Cost | None = None
    output: str = ""
    is_answered: bool = True

    @property
    def timed_out(self) -> bool:
        """Whether it had to be stopped."""
        return self.status is None


def run_trial(request: Request) -> Trial:
    """Run the program once, in the working directory and environment of this process, its output kept aside."""
    with tempfile.TemporaryDirectory(prefix="gradsan-fix-") as folder:
        result, asked = Path(folder, "result"), Path(folder, "request")
        asked.write_bytes(pickle.dumps(replace(request, result=str(result))))
        status, output = _run(asked, request.timeout)
        answer: dict[str, Any] = {"is_answered": False}
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            answer = pickle.loads(result.read_bytes())
    return Trial(status=status, output=output, **answer)


def _run(asked: Path, timeout: float) -> tuple[int | None, str]:
    command = [sys.executable, "-m", "gradsan.repair._child", str(asked)]
    # Bytecode compiled from a patched text must never be kept for the file on disk; a set of strings is walked in the
    # order of their hashes, which are drawn anew in every process.
    environment = {"PYTHONHASHSEED": "0", **os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            _end(process)
            status = None
        except BaseException:
            _end(process)
            raise
        output.seek(0)
        return status, output.read().decode("utf-8", "replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the program and the processes that it started."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
