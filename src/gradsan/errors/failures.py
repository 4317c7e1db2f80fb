"""Failure: an exception or warning of autograd other than the version check's, as plain data with its clues.

:func:`of_exception` recognises the message in the catalogue, reads the stack from the traceback, and calls the
topic that serves the row. The result holds no tensor and no frame. An error of a
backward is examined where it leaves the engine, while graph and variables are unchanged; the Failure is then kept on
the exception until it is known whether the program ends by it.

A topic is a function ``gather_<topic>(context)``, which returns the clues of a :class:`gradsan.errors.context.Context`;
their roles are in its module's docstring. ``_TOPICS`` has the catalogue's rows that it serves. A clue holds no tensor
and no frame; its facts are found here, their meaning in ``diagnose/failures``.

Python's filters decide first whether a warning is shown, once or always; only shown warnings come here, and they are
passed on unchanged.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable
from types import FrameType
from typing import Any

from gradsan.catalogue import place_raised, recognise
from gradsan.errors import compiled, distributed, freed_graphs, functions, graph_nodes, refused_writes
from gradsan.errors.context import Context
from gradsan.model import Clue, Failure, Frame, Site
from gradsan.record.backwards import BackwardLog
from gradsan.record.log import Log
from gradsan.record.stacks import is_own_file, is_user_file, of_traceback, symbolise
from gradsan.record.steps import BackwardRecord, StepLog

_TOPICS: tuple[tuple[Callable[[Context], Iterable[Clue]], Collection[str]], ...] = (
    (refused_writes.gather_written, (*refused_writes.OPERAND, *refused_writes.WRITTEN_ONLY)),
    (refused_writes.gather_optimized, ("result_optimized",)),
    (refused_writes.gather_assigned, ("parameter_assigned", "parameter_result")),
    (refused_writes.gather_stale_view, ("multi_view_base_written", "unrecorded_view_base_written")),
    (refused_writes.gather_hooked_modules, ("function_view_inplace",)),
    (refused_writes.gather_live, ("no_graph", "unused_in_graph")),
    (refused_writes.gather_non_leaf, ("grad_of_non_leaf",)),
    (freed_graphs.gather_second_backward, ("freed_graph",)),
    (graph_nodes.gather_overlapping_writes, ("memory_overlap",)),
    (graph_nodes.gather_negative_slope, ("negative_slope",)),
    (graph_nodes.gather_detached, ("saved_detached",)),
    (graph_nodes.gather_inputs, ("unused_in_graph", "input_needs_no_gradient")),
    (graph_nodes.gather_loss, ("output_not_scalar",)),
    (graph_nodes.gather_node, ("differentiated_once_only", "derivative_missing", "nan_in_backward")),
    (graph_nodes.gather_node, ("custom_backward_count", "custom_backward_shape", "custom_backward_type")),
    (functions.gather_checkpointed, ("checkpoint_count", "checkpoint_metadata", "checkpoint_input_plain")),
    (functions.gather_checkpointed, functions.RUN_AGAIN),
    (functions.gather_applied, ("dirty_not_input",)),
    (functions.gather_running, ("saved_read_twice", "checkpoint_unpacked_twice")),
    (functions.gather_cached, ("cached_overwritten",)),
    (functions.gather_operator, ("undeclared_mutation", "undeclared_mutation_checked")),
    (functions.gather_dispatcher, ("view_same_as_base", "view_with_history")),
    (functions.gather_hooks_refused, ("hooks_disabled", "hooks_under_transform")),
    (compiled.gather_traced, ("compiled_version_error", "compiled_inputs_share")),
    (distributed.gather_reduced_twice, ("ready_twice",)),
    (distributed.gather_checkpoint_calls, ("checkpoint_reentrant_grad",)),
    (distributed.gather_unfinished, ("reduction_unfinished",)),
    (distributed.gather_past_backward, ("hooks_on_freed",)),
    (
        distributed.gather_sharded,
        (
            "sharded_after_inference",
            "sharded_called_past",
            "sharded_changed_between",
            "sharded_second_order",
            "sharded_shape_changed",
        ),
    ),
)


def gather(context: Context) -> tuple[Clue, ...]:
    """Return the clues of every topic that serves the row. A topic that fails is left out."""
    found: list[Clue] = []
    for look, rows in _TOPICS:
        if context.row in rows:
            try:
                found += tuple(look(context))
            except Exception:
                if os.environ.get("GRADSAN_DEBUG"):
                    raise
    return tuple(found)


_WAITING = "_gradsan_failure"
_TRACED = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def of_exception(
    core: Log,
    steps: StepLog,
    error: BaseException,
    *,
    backwards: BackwardLog | None = None,
    backward: BackwardRecord | None = None,
    inputs: tuple[Any, ...] = (),
) -> Failure | None:
    """Return the Failure behind ``error``; None for exceptions that the catalogue does not know."""
    waiting = kept_on(error)
    if waiting is not None:
        return waiting
    found = recognise([kind.__name__ for kind in type(error).__mro__], str(error), place_raised(error))
    if found is None:
        return None
    row, values = found
    site, frames, frame = of_traceback(error.__traceback__)
    compiled = _compiled_frames(str(error))
    if compiled:
        # The compiler ran the user's lines itself; the traceback ends at the call of the compiled function.
        site = Site((*_up_to_user(site), *compiled))
    context = Context(core, steps, backwards, error, row.slug, dict(values), site, frames, frame, backward, inputs)
    return Failure(
        row=row.slug, kind=type(error).__name__, message=str(error), site=site, clues=gather(context), values=values
    )


def _compiled_frames(message: str) -> tuple[Frame, ...]:
    """Return the lines that torch.compile reports as the user's code it was tracing, outermost first."""
    _, found, traced = message.partition("from user code:")
    if not found:
        return ()
    return tuple(
        Frame(file, int(line), name, is_user=True) for file, line, name in _TRACED.findall(traced) if is_user_file(file)
    )


def _up_to_user(site: Site) -> tuple[Frame, ...]:
    """Return the frames of a stack down to the user frame."""
    last = max((index for index, frame in enumerate(site.frames) if frame.is_user), default=-1)
    return site.frames[: last + 1]


def kept_on(error: BaseException) -> Failure | None:
    """Return the Failure kept on an exception, or None."""
    waiting = getattr(error, _WAITING, None)
    return waiting if isinstance(waiting, Failure) else None


def keep_on(error: BaseException, failure: Failure) -> None:
    """Keep ``failure`` on its exception; exceptions without settable attributes are examined again later."""
    with contextlib.suppress(AttributeError, TypeError):
        setattr(error, _WAITING, failure)


def of_warning(recorder: Any, message: Any, category: type[Warning]) -> Failure | None:
    """Return the Failure for a warning of the catalogue, with the clues of its row; None for all others."""

    kinds = [kind.__name__ for kind in category.__mro__]
    found = recognise(kinds, str(message))
    if found is None:
        return None
    row, values = found
    core = recorder.core
    frame: FrameType | None = sys._getframe(1)
    frames: list[Any] = []
    while frame is not None and not _is_users(frame):
        frames.insert(0, frame)
        frame = frame.f_back
    site = symbolise(core.stack())
    backward = recorder.steps.current_backward()
    error = Warning(str(message))
    context = Context(
        core, recorder.steps, recorder.backwards, error, row.slug, dict(values), site, tuple(frames), frame, backward
    )
    return Failure(
        row=row.slug,
        kind=category.__name__,
        message=str(message),
        site=site,
        clues=gather(context),
        values=values,
        raised=False,
    )


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return is_user_file(file) and not is_own_file(file)
