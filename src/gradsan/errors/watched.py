"""Exceptions and warnings of a watched program: when each is examined; ``failures.py`` classifies them.

That module, and with it those of all topics, is imported at the first one: nearly every program has none.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

from gradsan import _torch
from gradsan._errors import GradsanError
from gradsan.detect.checkpoints import Checkpoints
from gradsan.graph import conflicts, stale_slots
from gradsan.model import Conflict, Failure
from gradsan.record.patches import Patches
from gradsan.record.recorder import FINDINGS_KEPT, Recorder
from gradsan.record.steps import BackwardRecord

_SEEN = "_gradsan_seen"
_EXAMINED = "_gradsan_met"


class WatchedErrors:
    """Examines exceptions while graph and variables exist, and warnings as they are shown."""

    def __init__(self, recorder: Recorder, checkpoints: Checkpoints, keep: Callable[[Failure], None]) -> None:
        """Take ``checkpoints``, which knows recomputations, and ``keep``, which takes separate findings."""
        self._recorder, self._checkpoints, self._keep = recorder, checkpoints, keep

    def install(self, patches: Patches) -> None:
        """Watch every warning that is shown."""
        original, run = warnings.showwarning, self._recorder.guard.run

        @functools.wraps(original)
        def showwarning(message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> None:
            run(functools.partial(self._look_at_warning, message, category))
            original(message, category, *args, **kwargs)

        patches.set(warnings, "showwarning", showwarning)

    def _look_at_warning(self, message: Any, category: type[Warning]) -> None:
        from gradsan.errors import failures

        failure = failures.of_warning(self._recorder, message, category)
        if failure is not None:
            self._keep(failure)

    def backward_failed(self, backward: BackwardRecord, error: BaseException) -> Conflict | Failure | None:
        """Find the cause of an exception that has ended a backward, while graph and variables exist."""
        from gradsan.errors import failures

        found = self._recorder.conflicts
        known = len(found)
        self._find_cause(backward, error)
        return found[-1] if len(found) > known else failures.kept_on(error)

    def _find_cause(self, backward: BackwardRecord, error: BaseException) -> None:
        recorder = self._recorder
        if getattr(error, _SEEN, False) or isinstance(error, GradsanError):
            return
        if not stale_slots.is_version_error(error):
            recorder.guard.run_hushed(functools.partial(self._look_at, error, backward))
            return
        if _torch.is_building_graph(error):
            return
        # One failure passes several engine calls where a backward runs inside another (checkpointing).
        with contextlib.suppress(AttributeError):
            setattr(error, _SEEN, True)

        def collect() -> Conflict | None:
            failed = conflicts.of_failure(recorder.core, recorder.steps, backward, error, None, recorder.backwards)
            return self._checkpoints.kept(failed, error)

        with _torch.hushed():
            recorder.keep(collect)

    def _look_at(self, error: BaseException, backward: BackwardRecord) -> None:
        from gradsan.errors import failures

        recorder = self._recorder
        inputs = _torch.engine_inputs(error, backward.outputs)
        failure = failures.of_exception(
            recorder.core, recorder.steps, error, backwards=recorder.backwards, backward=backward, inputs=inputs
        )
        if failure is not None:
            failures.keep_on(error, failure)

    def program_ended_by(self, error: BaseException) -> None:
        """Keep the Failure behind an exception that has ended the program or left a watched block, if there is one."""
        if len(self._recorder.failures) < FINDINGS_KEPT:
            self._recorder.guard.run(functools.partial(self._keep_ending, error))

    def _keep_ending(self, error: BaseException) -> None:
        from gradsan.errors import failures

        # A number, because the program may send its exceptions to other processes.
        if getattr(error, _EXAMINED, None) == id(self):
            return
        recorder = self._recorder
        looked_at: BaseException | None = error
        while looked_at is not None and not stale_slots.is_version_error(looked_at):
            failure = failures.of_exception(recorder.core, recorder.steps, looked_at, backwards=recorder.backwards)
            if failure is not None:
                recorder.failures.append(failure)
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(error, _EXAMINED, id(self))
                return
            # ``raise TrainingFailed(...) from error``
            looked_at = looked_at.__cause__
