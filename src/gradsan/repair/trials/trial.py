"""Trial: a run of the program in a process of its own, with patched texts of its files."""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, Literal

from gradsan.model import Diagnosis, Seen
from gradsan.repair.patch import decoded
from gradsan.repair.trials.compiling import Compiled, Compiling

TrialMode = Literal["watch", "heal", "measure"]


@dataclass(frozen=True, slots=True)
class Request:
    """The request to a child. ``target`` is (kind, name, arguments) of ``gradsan.launch.program.Target``.

    ``files`` are the patched texts of the program's files, ``steps`` the optimizer steps after which it may end, 0 for
    no limit; before, it ends where it has run for ``enough_seconds`` (0: no such limit) and every optimizer has made
    three steps, two of them since backward number ``past``, which is where the program failed; or where each has made
    as many steps as ``until`` says by its key. ``timeout`` are the seconds after which it is stopped. ``own_folders``
    are counted as the user's own code, ``allowances`` name operations that PyTorch rejects and this run carries out
    (see ``repair.allowances``); ``result`` is the file for the answer, beside which files that the program writes are
    kept; with ``lets_through`` it may write elsewhere, and start processes. ``searches``: the origin of NaN and Inf is
    searched for. ``compiling``: the run is one of those that compare compiled code with eager code. ``hears_calls``:
    module calls that repeat another are counted. ``shifted``: objects lie at other addresses than in the run before,
    and a set of tensors has another order.
    """

    target: tuple[str, str, tuple[str, ...]]
    mode: TrialMode
    files: Mapping[str, bytes]
    steps: int
    timeout: float
    past: int = 0
    enough_seconds: float = 0.0
    until: tuple[tuple[str, int], ...] = ()
    own_folders: tuple[str, ...] = ()
    allowances: frozenset[str] = frozenset()
    result: str = ""
    lets_through: bool = False
    searches: bool = False
    compiling: Compiling | None = None
    hears_calls: bool = False
    shifted: bool = False


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients at one point of a run: ``key`` says whose (an optimizer's parameter shapes, or ``backward``).

    Each is (shape, bytes of float64 numbers, norm), None where a parameter had no gradient. ``labels``, where given,
    identify the leaf of each, whatever the order in which a graph is traversed.
    """

    key: str
    values: tuple[tuple[tuple[int, ...], bytes, float] | None, ...]
    labels: tuple[str, ...] = ()


Standing = Literal["graph", "leaf", "plain"]


@dataclass(frozen=True, slots=True)
class Value:
    """A compact record of a tensor, an array or a number at one point of a run.

    ``checksum`` is that of all its bytes. ``sums`` are float64 numbers, a pair for each of at most 256 parts of it: the
    sum of its elements and that of their absolute values. ``standing`` is ``graph`` for a tensor with a history,
    ``leaf`` for one that gradients are accumulated into. ``memory`` is the same for values in the same memory, 0 for
    numbers.
    """

    shape: tuple[int, ...]
    dtype: str
    checksum: int
    sums: bytes
    standing: Standing = "plain"
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """The state right before a backward, or at the program's end.

    ``begun`` counts the backwards before, ``steps`` the steps that each optimizer had made, by its key; ``ordinal`` the
    moments with the same counts before this one. ``values`` are those that the program's variables reach, by function
    and expression; ``passing`` those of them that name something else in the next round. ``random`` are checksums of
    the random generators' states by their names, ``drawn`` the draws so far, by kind: batches of a DataLoader, tensors
    of random numbers.
    """

    steps: tuple[tuple[str, int], ...]
    ordinal: int
    values: Mapping[str, Value]
    passing: frozenset[str] = frozenset()
    random: Mapping[str, int] = field(default_factory=dict)
    drawn: Mapping[str, int] = field(default_factory=dict)
    is_end: bool = False
    begun: int = 0


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of the optimizer ``key`` after one of its steps."""

    key: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """The results of a run: gradients at each optimizer step and after each backward, and the losses.

    ``losses`` are those of backwards that ended, ``begun`` those of backwards that began. ``finished`` says that it ran
    to its end or to the limit of steps. ``left`` are the gradients of the last backward where no step came after it,
    ``undecided`` those that optimizers end with where the run does not show whether they are cleared (see
    ``state.py``). ``was_ended`` says that it was stopped before its end. ``dtype`` is the coarsest of its gradients.
    ``overwritten`` are the variables that hold a gradient by reference which a later backward then wrote into.
    ``repeated`` counts the module calls that repeat one of the same round, ``called`` the rounds with calls, where a
    request asks for it. ``saved`` are the sums of the tensors that ``torch.save`` was given. ``unused`` counts
    the backwards whose gradients were all cleared before a step used any.
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
    was_ended: bool = False
    dtype: str = "float32"
    parameters: tuple[Parameters, ...] = ()
    moments: tuple[Moment, ...] = ()
    overwritten: frozenset[str] = frozenset()
    repeated: int = 0
    called: int = 0
    saved: str = ""
    unused: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """Counted bytes of a run: those that operators wrote, and the most that autograd kept for backward at once."""

    written: int
    kept: int


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a run. ``status`` is None where it timed out; ``diagnoses`` with every fix that has lines, which a
    healed run does not have: it tells of ``findings`` alone.

    ``is_answered`` says that its process wrote an answer: a kernel may kill it, the program may leave by ``os._exit``.
    ``output`` is all its output, ``printed`` its standard output; ``failed_at`` is the file and line of the user's code
    in which the exception that ended it was raised; where it left by ``sys.exit``, that and ``failed_by`` are of the
    exception that it was handling. ``runs_alone`` says that it uses something that exists once: a device's memory, a
    port of the network, a file outside of the scratch layer. ``changed_files`` are those that it wrote or removed, in
    the scratch layer only, ``read_files`` those that it read. ``texts`` are the contents of text files that it wrote.
    ``uncovered`` is the effect for which it was stopped because no layer covers it:
    ``writes`` or ``starts``, the file or the command, and the line of the user's code. ``written`` are, for each
    diagnosis, the functions and lines that wrote, or that made the value connected to a freed graph: they identify a
    fault where lines have moved. ``compiled`` is set by a run that was asked for it.
    """

    status: int | None
    recording: Recording = field(default_factory=Recording)
    diagnoses: tuple[Diagnosis, ...] = ()
    findings: tuple[Diagnosis, ...] = ()
    written: tuple[frozenset[str], ...] = ()
    seen: Seen = field(default_factory=Seen)
    seconds: float = 0.0
    cost: Cost | None = None
    output: str = ""
    printed: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)
    failed_at: tuple[str, int] | None = None
    failed_by: tuple[str, str] | None = None
    is_answered: bool = True
    runs_alone: bool = False
    changed_files: tuple[str, ...] = ()
    read_files: tuple[str, ...] = ()
    uncovered: tuple[str, str, tuple[str, int] | None] | None = None
    compiled: Compiled | None = None

    @property
    def all_texts(self) -> dict[str, str]:
        """What it wrote, saved and printed, by the file's name or by what it is.

        A folder may be named by the time of the run: files that share a name are known by their paths within the
        folder that contains them all.
        """
        texts: dict[str, str] = {}
        for name in dict.fromkeys(Path(file).name for file in self.texts):
            same = [file for file in self.texts if Path(file).name == name]
            above = os.path.commonpath([str(Path(file).parent) for file in same])
            texts |= {os.path.relpath(file, above): self.texts[file] for file in same}
        return {**texts, "torch.save": self.recording.saved, "printed numbers": self.printed}

    @property
    def timed_out(self) -> bool:
        """Whether it was stopped at its timeout."""
        return self.status is None


def run_trial(request: Request) -> Trial:
    """Run the program once, in a fresh process with the working directory and environment of this one."""
    with tempfile.TemporaryDirectory(prefix="gradsan-fix-") as folder:
        result, asked = Path(folder, "result"), Path(folder, "request")
        asked.write_bytes(pickle.dumps(replace(request, result=str(result))))
        return answered(*_run(asked, request.timeout), result)


def answered(status: int | None, printed: str, complaints: str, result: Path) -> Trial:
    """The Trial of a process that ended with ``status``, with its standard output and error.

    It may have left its answer in ``result``.
    """
    answer: dict[str, Any] = {"is_answered": False}
    with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
        answer = pickle.loads(result.read_bytes())
    return Trial(status=status, output=printed + complaints, printed=printed, **answer)


def environment_of_trials() -> dict[str, str]:
    """The environment of every process of a search."""
    # Bytecode compiled from a patched text must never be kept for the file on disk; a set of strings is iterated in the
    # order of their hashes, which are drawn anew in every process. Threads of OpenMP that spin while they wait take the
    # cores from the trials beside them (measured: five trials of a GAN on two cores, 30 s, and 10 s without).
    own = {"PYTHONHASHSEED": "0", "OMP_WAIT_POLICY": "PASSIVE"}
    return {**own, **os.environ, "PYTHONDONTWRITEBYTECODE": "1"}


def _run(asked: Path, timeout: float) -> tuple[int | None, str, str]:
    command = [sys.executable, "-m", "gradsan.repair.trials._child", str(asked)]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environment_of_trials(),
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
        said = []
        for stream in (output, errors):
            stream.seek(0)
            said.append(stream.read().decode("utf-8", "replace"))
        return status, said[0], said[1]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the program and the processes that it started."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def lay_over(files: Mapping[str, bytes]) -> None:
    """Make every import, and every reader of source lines, find ``files`` (by path) instead of the files on disk."""
    if not files:
        return
    known = {os.path.realpath(path): text for path, text in files.items()}
    read, compiled, opened = SourceFileLoader.get_data, SourceFileLoader.get_code, io.open_code

    def get_data(self: Any, path: str) -> bytes:
        text = known.get(os.path.realpath(path))
        return read(self, path) if text is None else text

    def get_code(self: Any, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        text = known.get(os.path.realpath(path))
        # The default loader would read the bytecode of the file on disk first.
        return compiled(self, fullname) if text is None else self.source_to_code(text, path)

    def open_code(path: str) -> Any:
        text = known.get(os.path.realpath(path))
        return opened(path) if text is None else io.BytesIO(text)

    SourceFileLoader.get_data = get_data  # type: ignore[method-assign]
    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    io.open_code = open_code  # runpy.run_path reads scripts with it
    for path, content in files.items():
        text, _ = decoded(path, content)
        lines = io.StringIO(text, newline=None).readlines()
        # An entry without a modification time is never compared with the file on disk.
        linecache.cache[path] = (len(content), None, lines, path)


def text_of(files: Mapping[str, bytes], path: str) -> bytes | None:
    """The patched text of the file at ``path``, None where there is none."""
    real = os.path.realpath(path)
    return next((text for name, text in files.items() if os.path.realpath(name) == real), None)
