"""Process of a trial: ``python -m gradsan.repair.trials._child REQUEST``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from gradsan._imports import call_after_torch_import
from gradsan.launch.program import Target, gradsan_path, perform, prepare, take_stage
from gradsan.launch.uncaught import call_when_uncaught, wait_for_threads
from gradsan.model import Diagnosis
from gradsan.repair.libraries import imported_files, own_files
from gradsan.repair.trials.redirecting import Redirecting, Uncovered
from gradsan.repair.trials.scratch import Scratch, caches
from gradsan.repair.trials.state import seed_generators, shifted_addresses
from gradsan.repair.trials.trial import Recording, Request, lay_over, text_of
from gradsan.source.tree import source_line

if TYPE_CHECKING:
    from gradsan._terms import Mode


class _Watch:
    """Session and recorder of a watched trial, started when the program imports torch."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.session: Any = None
        self.recorder: Any = None
        self.failed_at: tuple[str, int] | None = None
        self.failed_by: tuple[str, str] | None = None
        self._is_reference = request.mode == "heal"
        self.compiled: Any = None

    def start(self) -> None:
        from gradsan._session import Session
        from gradsan.originals.deep import Deep
        from gradsan.record.recorder import recorder
        from gradsan.record.stacks import count_as_user_code
        from gradsan.repair.trials.recording import Recorder

        for folder in self.request.own_folders:
            count_as_user_code(folder)
        searched: Mode = "nonfinite" if self.request.searches else "watch"
        self.session = Session(mode="heal" if self._is_reference else searched)
        self.session.start()
        # The healed run only needs the training.
        Deep.measures = not self._is_reference
        call_when_uncaught(self.session.examine)
        call_when_uncaught(self._note_place)
        self.recorder = Recorder(self.request)
        self.recorder.start()
        if self.request.compiling is not None:
            from gradsan.repair.compiled.running import CompiledRun

            self.compiled = CompiledRun(self.request.compiling)
            self.compiled.start()
        listeners = recorder().listeners
        listeners.call_before_backward(self.recorder.before_backward)
        listeners.call_after_backward(self.recorder.after_backward)
        if self.request.allowances:
            from gradsan.repair.trials.allowances import allow

            allow(self.request.allowances)

    def note_exit(self, leaving: SystemExit) -> None:
        """Note that the program leaves by ``sys.exit``, and the exception that it was handling."""
        if leaving.code not in (None, 0):
            reason = leaving.__context__ if leaving.__context__ is not None else leaving
            self.failed_by = type(reason).__name__, str(reason)
            self._note_place(reason)

    def _note_place(self, failure: BaseException) -> None:
        from gradsan.record.stacks import is_user_file

        trace = failure.__traceback__
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            if is_user_file(file):
                self.failed_at = file, trace.tb_lineno
            trace = trace.tb_next

    @property
    def started(self) -> bool:
        return self.session is not None

    def stop(self) -> None:
        self.session.stop()

    def look_at_end(self, main: ModuleType) -> None:
        """Look at the program's variables at its end."""
        if "own_results" in self.request.allowances:
            from gradsan.repair.trials.own_results import OwnResults

            OwnResults.is_over = True
        self.recorder.look_at_end(main)

    def answer(self, is_well: bool, exception: tuple[str, str] | None) -> dict[str, Any]:
        """The fields of :class:`Trial` that this process knows."""
        from gradsan.repair.fixes import with_candidates

        answer = {
            "recording": self.recorder.recording(is_well, exception),
            "failed_at": self.failed_at,
            "failed_by": self.failed_by,
            "compiled": None if self.compiled is None else self.compiled.results(self.recorder.names),
        }
        report = self.session.report()
        if self._is_reference:
            return {**answer, "findings": report.diagnoses}
        return {
            **answer,
            "diagnoses": tuple(with_candidates(diagnosis) for diagnosis in report.diagnoses),
            "written": tuple(_written(diagnosis) for diagnosis in report.diagnoses),
            "seen": report.seen,
        }


class _Measure:
    """Counter of costs of a trial that is not watched."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.meter: Any = None

    def start(self) -> None:
        from gradsan.repair.trials.cost import Meter

        self.meter = Meter(self.request.steps)
        self.meter.start()

    @property
    def started(self) -> bool:
        return self.meter is not None

    def stop(self) -> None:
        self.meter.stop()

    def look_at_end(self, main: ModuleType) -> None:
        """Do nothing: costs were counted as they arose."""

    def note_exit(self, leaving: SystemExit) -> None:
        """Do nothing: only costs are needed."""

    def answer(self, is_well: bool, exception: tuple[str, str] | None) -> dict[str, Any]:
        """The cost for :class:`Trial`; None where the program failed, as it may under a dispatch mode."""
        return {"cost": self.meter.cost() if is_well else None}


def main() -> None:
    """Run the program that the request names, and write the answer to the file that it names."""
    request: Request = pickle.loads(Path(sys.argv[1]).read_bytes())
    status, is_watched = run_request(request)
    if not is_watched:
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's shutdown: the program's exit handlers are not compared.
    os._exit(status)


def run_request(request: Request) -> tuple[int, bool]:
    """Run the program and write the answer; its exit status, and whether it imported torch, so that it was watched."""
    lay_over(request.files)
    kind, name, arguments = request.target
    launch = prepare(Target(kind, name, arguments))  # type: ignore[arg-type]
    watch = _Measure(request) if request.mode == "measure" else _Watch(request)
    path = launch.variables.get("__file__")
    text = None if path is None else text_of(request.files, path)
    if path is not None and text is not None:
        code = compile(text, path, "exec", dont_inherit=True)
        launch = dataclasses.replace(launch, start=lambda main: exec(code, vars(main)))
    launch = dataclasses.replace(launch, start=functools.partial(_start, launch.start, watch))
    own_path = gradsan_path()
    stage = take_stage(launch)
    seed_generators()
    kept = shifted_addresses() if request.shifted else []
    files, logged = _led_files(request), _logged()
    call_after_torch_import(watch.start)
    began = time.perf_counter()
    ending = perform(launch, stage)
    if ending.exception is None:
        wait_for_threads()
        if watch.started and ending.status == 0:
            watch.look_at_end(stage)
    seconds = time.perf_counter() - began
    kept.clear()
    files.stop()
    if not watch.started:
        recording = Recording(finished=ending.status == 0, exception=ending.exception)
        answer = {"recording": recording, "seconds": seconds}
        Path(request.result).write_bytes(pickle.dumps(answer))
        return ending.status, False

    watch.stop()
    sys.path[:] = own_path
    answer = {
        **watch.answer(ending.status == 0, ending.exception),
        "seconds": seconds,
        "runs_alone": request.lets_through or _runs_alone(),
        "changed_files": files.changed,
        "texts": {**files.texts, "logged numbers": "\n".join(logged)},
        "read_files": own_files([path and os.path.realpath(path), *files.read, *imported_files()]),
    }
    Path(request.result).write_bytes(pickle.dumps(answer))
    return ending.status, True


def _start(start: Callable[[ModuleType], None], watch: _Watch | _Measure, main: ModuleType) -> None:
    try:
        start(main)
    except SystemExit as leaving:
        watch.note_exit(leaving)
        raise


def _logged() -> list[str]:
    """What the program tells its loggers from now on: without the times with which they write it to standard error."""
    said: list[str] = []
    handle = logging.Logger.handle

    @functools.wraps(handle)
    def handling(self: logging.Logger, record: logging.LogRecord) -> None:
        if not record.name.startswith("torch."):
            with contextlib.suppress(Exception):
                said.append(record.getMessage())
        handle(self, record)

    logging.Logger.handle = handling  # type: ignore[method-assign]
    return said


def _led_files(request: Request) -> Redirecting:
    """Redirect the program's writes from now on to a folder beside the answer."""
    folder = os.path.dirname(request.result)  # noqa: PTH120
    files = Redirecting(Scratch(folder, caches()))

    def give_up(what: Uncovered) -> None:
        answer = {"uncovered": (*what, _user_place()), "changed_files": files.changed}
        Path(request.result).write_bytes(pickle.dumps(answer))
        # Kill its children, too; it may be one of them itself.
        os.killpg(0, signal.SIGKILL)

    files.start(None if request.lets_through else give_up)
    return files


def _user_place() -> tuple[str, int] | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if own_files([file]):
            return file, frame.f_lineno
        frame = frame.f_back
    return None


def _runs_alone() -> bool:
    """Whether the program used a resource that exists once on this machine."""
    torch = sys.modules["torch"]
    distributed = sys.modules.get("torch.distributed")
    has_group = "MASTER_PORT" in os.environ or (
        distributed is not None and distributed.is_available() and distributed.is_initialized()
    )
    return torch.cuda.is_initialized() or torch.xpu.is_initialized() or has_group


def _written(diagnosis: Diagnosis) -> frozenset[str]:
    frames = [label.frame for label in diagnosis.labels if label.role == "written"]
    # A graph used twice has no write: the tensor that connects the loss to it is part of the key, since others of one
    # statement may do so, too (``h, c = cell(x, (h, c))``).
    tensor = None if frames else diagnosis.tensor
    name = "" if tensor is None else f"{tensor.name} ({tensor.op}) of "
    frames = frames or [label.frame for label in diagnosis.labels if label.role == "bridge"]
    return frozenset(
        f"{name}{frame.function}: {(source_line(frame.file, frame.line) or '').strip()}" for frame in frames
    )


if __name__ == "__main__":
    main()
