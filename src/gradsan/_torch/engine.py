"""Calls into the autograd engine, recognised by their frames; frames of threads and their local variables."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd import graph as _graph

from gradsan._collector import CollectorPaused
from gradsan._torch.nodes import current_node


def engine_entry_points() -> list[tuple[Any, str]]:
    """Return (namespace, name) of the function through which ``backward`` and ``grad`` enter the engine."""
    return [
        (namespace, "_engine_run_backward")
        for namespace in (torch.autograd, _graph)
        if hasattr(namespace, "_engine_run_backward")
    ]


def engine_inputs(error: BaseException, outputs: Any) -> tuple[Any, ...]:
    """Return the ``inputs`` of the engine call on ``outputs`` that ended with ``error``; empty where none were given.

    Read from the frame of the Python function through which torch enters the engine. Missing: empty, and all Nodes are
    assumed to run.
    """
    for frame in filter(enters_engine, frames_of(error)):
        args = frame.f_locals.get("args", ())
        if frame.f_locals["t_outputs"] is outputs and len(args) > 3:
            return tuple(args[3])
    return ()


class EngineCall(NamedTuple):
    """A call into the engine that ended with an exception, read from its traceback; ``trace`` is the engine's part.

    ``outputs`` and ``inputs`` as given; ``accumulates`` distinguishes ``backward`` from ``grad``.
    """

    outputs: tuple[Any, ...]
    inputs: tuple[Any, ...]
    accumulates: bool
    retain_graph: bool
    trace: Any


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a function's frame, without the frame keeping them alive afterwards.

    Before Python 3.13 a frame keeps its ``f_locals`` dict: values that the function deletes or rebinds
    would live on in it. The variables are removed from it where only the frame has the dict (a program gets it by
    ``locals()``) and no trace function runs, here or for that frame, after which CPython reads the dict back.
    """
    kept = frame.f_locals
    code = frame.f_code
    if _HAS_SNAPSHOTS and code.co_flags & inspect.CO_OPTIMIZED:
        found = dict(kept)
        if sys.getrefcount(kept) <= _FRAMES_OWN and sys.gettrace() is None and frame.f_trace is None:
            for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
                kept.pop(name, None)
        return found
    return dict(kept)


def is_module_level(frame: FrameType) -> bool:
    """Whether the variables of a frame are those of its module."""
    return not frame.f_code.co_flags & inspect.CO_OPTIMIZED and frame.f_locals is frame.f_globals


_HAS_SNAPSHOTS = sys.version_info < (3, 13)
# References of the frame, of the variable, and of the call that counts them.
_FRAMES_OWN = 3


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames that an exception passed, outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def enters_engine(frame: FrameType) -> bool:
    """Whether this is the frame of the Python function through which torch enters the engine. Missing: False."""
    return frame.f_code.co_name == "_engine_run_backward" and "t_outputs" in frame.f_locals


def engine_call(error: BaseException) -> EngineCall | None:
    """Return the innermost engine call that ``error`` passed; None where it passed none.

    Read from the frame of the Python function through which torch enters the engine. Missing: None, and an error that
    nobody watched is not explained.
    """
    found = None
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if enters_engine(frame):
            names = frame.f_locals
            args, keywords = tuple(names.get("args", ())), names.get("kwargs", {})
            inputs = tuple(args[3]) if len(args) > 3 else ()
            retain = bool(args[1]) if len(args) > 1 else False
            found = EngineCall(tuple(names["t_outputs"]), inputs, keywords.get("accumulate_grad", True), retain, trace)
        trace = trace.tb_next
    return found


def is_module_call(file: str) -> bool:
    """Whether a frame of this file is ``nn.Module`` calling ``forward``."""
    return file == torch.nn.modules.module.__file__


def is_function_call(file: str) -> bool:
    """Whether a frame of this file is ``autograd.Function`` applying a Function."""
    return file == torch.autograd.function.__file__


def puts_back_what_it_writes(file: str) -> bool:
    """Whether a file is that of ``gradcheck``: it changes inputs by ``.data``, and changes them back."""
    return file == _gradcheck_file


_gradcheck_file: str | None = getattr(sys.modules.get("torch.autograd.gradcheck"), "__file__", None)


def is_engine_frame(frame: FrameType) -> bool:
    """Whether a frame is torch's call into the engine: its callees run inside a backward."""
    code = frame.f_code
    return bool(code.co_name == "_engine_run_backward" and code.co_filename == _graph.__file__)


def frames_of_threads() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by its ident.

    Meanwhile CPython holds a lock that the end of a ``threading.local`` needs, too: if garbage collection ended one,
    it would deadlock (3.11.7; https://github.com/python/cpython/issues/106883).
    """
    with CollectorPaused():
        return sys._current_frames()


def callers_of_engine(frame: FrameType | None) -> list[FrameType]:
    """Return, where ``frame`` runs in a thread of the engine, the frames by which other threads wait for the engine.

    Empty where the engine runs in the thread of ``frame``, or does not run at all.
    """
    if current_node() is None:
        return []
    while frame is not None:
        if is_engine_frame(frame):
            return []
        frame = frame.f_back
    callers = []
    for other in frames_of_threads().values():
        at: Any = other
        while at is not None and not is_engine_frame(at):
            at = at.f_back
        if at is not None:
            callers.append(at)
    return callers


def gradients_given(frame: FrameType) -> tuple[Any, ...]:
    """Return the gradients that a backward began with; ``frame`` as in :func:`is_engine_frame`. Missing: empty."""
    args = frame.f_locals.get("args", ())
    return tuple(args[0] or ()) if args and isinstance(args[0], tuple) else ()


def inputs_given(frame: FrameType) -> tuple[Any, ...]:
    """Return the ``inputs`` of a backward; ``frame`` as in :func:`is_engine_frame`. Missing: all Nodes seem to run."""
    args = frame.f_locals.get("args", ())
    return tuple(args[3] or ()) if len(args) > 3 and isinstance(args[3], (tuple, list)) else ()


def is_hook_frame(frame: FrameType) -> bool:
    """Whether a frame is torch's own between the engine and a module hook, or the backward of a Function."""
    return frame.f_code.co_filename in (torch.utils.hooks.__file__, torch.autograd.function.__file__)
