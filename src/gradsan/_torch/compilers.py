"""torch.compile: whether it traces, and where it failed."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterable
from types import CodeType
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


def is_within_graph_capture(codes: Iterable[CodeType]) -> bool:
    """Whether a call with these functions on its stack is one that torch.compile traces, and none of the program.

    Missing: False.
    """
    return any(_is_graph_capture(code.co_filename) for code in codes)


def _captures_graph(frame: Any) -> bool:
    return _is_graph_capture(frame.f_code.co_filename)


def _is_graph_capture(file: str) -> bool:
    # Compiled functions run in files of the same folder; before torch 2.9 the other name is that of the file.
    return "_aot_autograd" in file and ("graph_capture" in file or "traced_function_transforms" in file)


COMPILER_ERRORS = "torch._dynamo.exc"
"""The module of the error that a failing compiler becomes. Missing: nothing is kept for :func:`traced_graph`."""

_TRACED = "_gradsan_traced"


COMPILER_FRAMES = "torch._dynamo.eval_frame"
"""The module without which no frame is compiled. Missing: frames of gradsan's own functions are compiled, too."""


def never_compile(code: CodeType, *, with_callees: bool) -> None:
    """Have torch.compile run the frames of ``code`` as they are, ``with_callees`` whatever these call, too.

    Such a frame comes to the compiler where compiled code has called something that it could not trace. Whether a
    function is traced as a part of its caller's graph does not change.
    """
    native: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(native, "set_code_exec_strategy"):
        skip = native._FrameAction.SKIP
        callees = skip if with_callees else native._FrameAction.DEFAULT
        native.set_code_exec_strategy(code, native._FrameExecStrategy(skip, callees))
    elif hasattr(native, "skip_code"):
        native.skip_code(code)


TRACER = "torch.fx.experimental.proxy_tensor"
"""The module of the tracer that make_fx, torch.export and AOTAutograd use. Missing: it meets the hooks of deep mode."""


def tracer_class() -> Any:
    """The mode that is entered as long as that tracer traces; None where this torch has none, or not yet."""
    return getattr(sys.modules.get(TRACER), "ProxyTorchDispatchMode", None)


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


INDUCTOR_SETTINGS = "torch._inductor.config"
"""The module of inductor's settings. Missing: its random numbers are not those of eager code."""

_BACKEND = "_torchdynamo_orig_backend"


def draw_as_eager() -> None:
    """Have inductor draw the random numbers that eager code draws, which by design it does not."""
    settings: Any = sys.modules.get(INDUCTOR_SETTINGS)
    if hasattr(settings, "fallback_random"):
        settings.fallback_random = True


def force_backend(name: str) -> None:
    """Have everything that is compiled be compiled by the backend ``name``. Raises TypeError where it cannot be."""
    torch.compiler.set_stance("default", force_backend=name)


def backend_of_builder(builder: Any) -> tuple[str, Any]:
    """Name of the backend that gets a traced graph, and the backend itself. Missing: ``?`` and None."""
    found = getattr(builder, "compiler_fn", None)
    while hasattr(found, _BACKEND):
        found = getattr(found, _BACKEND)
    name = getattr(found, "compiler_name", None) or getattr(found, "__name__", None)
    return str(name or "?"), found


def frame_left_out() -> BaseException:
    """What a backend raises to have a frame run as eager code. Missing: RuntimeError, and the program fails."""
    errors: Any = sys.modules.get(COMPILER_ERRORS)
    kind = getattr(errors, "SkipFrame", RuntimeError)
    made: BaseException = kind("left out of the comparison")
    return made


def gave_up_compiling() -> bool:
    """Whether some function was compiled so often that it is run as eager code. Missing: False."""
    utilities: Any = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utilities, "counters", {})
    reasons = [str(reason) for name in ("unimplemented", "graph_break") for reason in counters.get(name, ())]
    return any("recompile_limit" in reason or "cache_size_limit" in reason for reason in reasons)
