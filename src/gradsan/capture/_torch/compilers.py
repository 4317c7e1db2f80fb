"""What torch.compile traces, and where it fails."""

from __future__ import annotations

import contextlib
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


def traced_graph(error: BaseException) -> Any:
    """The program's own operations as torch.compile had traced them (an fx.GraphModule), where a compiler failed.

    Read off the frames of ``error`` and of what it was raised from. Missing: None, and the report names no line within
    the compiled function.
    """
    seen: set[int] = set()
    looked_at: BaseException | None = error
    while looked_at is not None and id(looked_at) not in seen:
        seen.add(id(looked_at))
        trace = looked_at.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            graph = frame.f_locals.get("gm") if "/_dynamo/" in frame.f_code.co_filename.replace("\\", "/") else None
            if isinstance(graph, torch.fx.GraphModule):
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
