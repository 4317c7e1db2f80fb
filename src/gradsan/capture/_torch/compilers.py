"""What torch.compile traces, and where it fails."""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import Any

import torch


def is_building_graph(error: BaseException) -> bool:
    """Whether an error arose while torch.compile traced a backward, so that no backward of the program has failed.

    Read off the files of the traceback. Missing: False.
    """
    trace = error.__traceback__
    while trace is not None:
        if _captures_graph(trace.tb_frame):
            return True
        trace = trace.tb_next
    frame: Any = sys._getframe(1)
    while frame is not None:
        if _captures_graph(frame):
            return True
        frame = frame.f_back
    return False


def _captures_graph(frame: Any) -> bool:
    # Compiled functions run in files of the same folder.
    file: str = frame.f_code.co_filename
    return "_aot_autograd" in file and "graph_capture" in file


COMPILER_ERRORS = "torch._dynamo.exc"
"""The module of the error that a failing compiler becomes. Missing: nothing is kept for :func:`traced_graph`."""

_TRACED = "_gradsan_traced"


def compiler_error_class() -> Any:
    """The class of the error that a failing compiler becomes; None where this torch has none, or not yet."""
    return getattr(sys.modules.get(COMPILER_ERRORS), "BackendCompilerFailed", None)


def keep_traced_graph(error: BaseException, frame: Any) -> None:
    """Keep a copy of what was traced on ``error``, which the Dynamo frame ``frame`` is just making.

    Since 2.15 Dynamo takes the graphs of a failed attempt apart before the program sees the error. Missing: nothing is
    kept.
    """
    graph = frame.f_locals.get("gm")
    if isinstance(graph, torch.fx.GraphModule):
        setattr(error, _TRACED, torch.fx.GraphModule(graph, copy.deepcopy(graph.graph)))


def traced_graph(error: BaseException) -> Any:
    """The program's own operations as torch.compile had traced them (an fx.GraphModule), where a compiler failed.

    What was kept by :func:`keep_traced_graph`; else read off the frames of ``error`` and of what it was raised from.
    Missing: None, and the report names no line within the compiled function.
    """
    kept = getattr(error, _TRACED, None)
    if kept is not None:
        return kept
    seen: set[int] = set()
    looked_at: BaseException | None = error
    while looked_at is not None and id(looked_at) not in seen:
        seen.add(id(looked_at))
        trace = looked_at.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            graph = frame.f_locals.get("gm") if "/_dynamo/" in frame.f_code.co_filename.replace("\\", "/") else None
            if isinstance(graph, torch.fx.GraphModule) and len(graph.graph.nodes):
                return graph
            trace = trace.tb_next
        looked_at = looked_at.__cause__
    return None


def without_data(graph: Any) -> contextlib.AbstractContextManager[Any]:
    """The mode in which a traced graph was traced: tensors made in it have no data. Missing: a context of no effect."""
    for node in graph.graph.nodes:
        mode = getattr(node.meta.get("example_value"), "fake_mode", None)
        if mode is not None:
            found: contextlib.AbstractContextManager[Any] = mode
            return found
    return contextlib.nullcontext()
