"""torch.compile: whether it is tracing, where it failed, its graphs and their saved tensors."""

from __future__ import annotations

import contextlib
import copy
import re
import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node


def is_building_graph(error: BaseException) -> bool:
    """Whether an error arose while torch.compile traced a backward, so that no backward of the program has failed.

    Read from the files of the traceback. Missing: False.
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
    """Whether a call with these functions on its stack is traced by torch.compile, and none of the program's.

    Missing: False.
    """
    return any(_is_graph_capture(code.co_filename) for code in codes)


def _captures_graph(frame: FrameType) -> bool:
    return _is_graph_capture(frame.f_code.co_filename)


def _is_graph_capture(file: str) -> bool:
    # Compiled functions run in files of the same folder; before torch 2.9 the file has the other name.
    return "_aot_autograd" in file and ("graph_capture" in file or "traced_function_transforms" in file)


COMPILER_ERRORS = "torch._dynamo.exc"
"""The module of the error that wraps a compiler's failure. Missing: nothing is kept for :func:`traced_graph`."""

_TRACED = "_gradsan_traced"


COMPILER_FRAMES = "torch._dynamo.eval_frame"
"""The module that compiles frames. Missing: frames of gradsan's own functions are compiled, too."""


def never_compile(code: CodeType, *, with_callees: bool) -> None:
    """Have torch.compile run the frames of ``code`` uncompiled, ``with_callees`` also those of its callees.

    Such a frame reaches the compiler where compiled code has called a function that it could not trace. Whether a
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
"""The module of the tracer of make_fx, torch.export and AOTAutograd. Missing: deep mode's hooks run under it."""


def tracer_class() -> Any:
    """Return the dispatch mode of that tracer; None where this torch has none, or has not imported it."""
    return getattr(sys.modules.get(TRACER), "ProxyTorchDispatchMode", None)


def compiler_error_class() -> Any:
    """Return the class of the error that wraps a compiler's failure; None if missing or not imported yet."""
    return getattr(sys.modules.get(COMPILER_ERRORS), "BackendCompilerFailed", None)


def keep_traced_graph(error: BaseException, frame: FrameType) -> None:
    """Keep a copy of the traced graph on ``error``, which the Dynamo frame ``frame`` is just creating.

    Since 2.15 Dynamo takes the graphs of a failed attempt apart before the program sees the error. Missing: nothing is
    kept.
    """
    graph = frame.f_locals.get("gm")
    if isinstance(graph, torch.fx.GraphModule):
        setattr(error, _TRACED, torch.fx.GraphModule(graph, copy.deepcopy(graph.graph)))


def traced_graph(error: BaseException) -> Any:
    """Return the program's own operations as torch.compile traced them (an fx.GraphModule), after a compiler failed.

    The copy of :func:`keep_traced_graph`, else read from the frames of ``error`` and of its causes.
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
    """Return the fake mode in which a graph was traced: tensors made in it have no data. Missing: a null context."""
    for node in graph.graph.nodes:
        mode = getattr(node.meta.get("example_value"), "fake_mode", None)
        if mode is not None:
            found: contextlib.AbstractContextManager[Any] = mode
            return found
    return contextlib.nullcontext()


INDUCTOR_SETTINGS = "torch._inductor.config"
"""The module of inductor's settings. Missing: its random numbers differ from those of eager code."""

_BACKEND = "_torchdynamo_orig_backend"


def draw_as_eager() -> None:
    """Make inductor draw the random numbers of eager code, which it does not by default."""
    settings: Any = sys.modules.get(INDUCTOR_SETTINGS)
    if hasattr(settings, "fallback_random"):
        settings.fallback_random = True


def force_backend(name: str) -> None:
    """Compile everything with the backend ``name`` from now on. Raises TypeError where that is not possible."""
    torch.compiler.set_stance("default", force_backend=name)


def backend_of_builder(builder: Any) -> tuple[str, Any]:
    """Return the name of the backend that gets a traced graph, and the backend. Missing: ``?`` and None."""
    found = getattr(builder, "compiler_fn", None)
    while hasattr(found, _BACKEND):
        found = getattr(found, _BACKEND)
    name = getattr(found, "compiler_name", None) or getattr(found, "__name__", None)
    return str(name or "?"), found


def frame_left_out() -> BaseException:
    """Return the exception by which a backend leaves a frame to eager code. Missing: RuntimeError; programs fail."""
    errors: Any = sys.modules.get(COMPILER_ERRORS)
    kind = getattr(errors, "SkipFrame", RuntimeError)
    made: BaseException = kind("left out of the comparison")
    return made


def gave_up_compiling() -> bool:
    """Whether some function reached the recompile limit and runs as eager code. Missing: False."""
    utilities: Any = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utilities, "counters", {})
    reasons = [str(reason) for name in ("unimplemented", "graph_break") for reason in counters.get(name, ())]
    return any("recompile_limit" in reason or "cache_size_limit" in reason for reason in reasons)


GRAPH_BUILDER = "torch._dynamo.output_graph"
"""The module that passes traced graphs to a compiler. Missing: no save within a compiled graph has a line."""

_NUMBERED_BY = "torch._functorch.aot_autograd"
_NODE = "CompiledFunctionBackward"
_NOT_SAVED = ("tangents", "bwd_seed", "bwd_base_offset", "bwd_rng_state")


class Example(NamedTuple):
    """Metadata of an argument of a traced graph; dynamic sizes are those of the first call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    device: Any
    requires_grad: bool
    is_leaf: bool
    varies: bool

    def made(self) -> Any:
        """Return a new tensor with this metadata; without data within a fake mode."""
        kwargs = {"dtype": self.dtype, "device": self.device}
        fresh = torch.empty_strided(self.shape, self.strides, **kwargs)
        if not self.requires_grad:
            return fresh
        leaf = fresh.requires_grad_()
        return leaf if self.is_leaf else leaf.clone()


class Traced(NamedTuple):
    """A copy of a graph traced by torch.compile, without tensors.

    ``examples`` are its arguments in order (an :class:`Example`, a number, or None for anything else), ``attributes``
    its other inputs. ``file`` and ``function`` are those of the compiled code; the autograd graphs made
    from it are numbered from ``first`` up to ``end``, exclusive.
    """

    graph: Any
    examples: tuple[Any, ...]
    attributes: dict[str, Any]
    file: str
    function: str
    autocast: tuple[tuple[str, Any], ...]
    first: int = 0
    end: int = 0

    def module(self) -> Any:
        """Return the graph as a module that can be run."""
        root = {name: one.made() if isinstance(one, Example) else one for name, one in self.attributes.items()}
        return torch.fx.GraphModule(root, self.graph)


def graph_builder() -> Any:
    """Return the class that passes traced graphs to a compiler; None if missing or not imported yet."""
    found = getattr(sys.modules.get(GRAPH_BUILDER), "OutputGraph", None)
    return found if hasattr(found, "call_user_compiler") else None


def code_of_builder(builder: Any) -> CodeType | None:
    """Return the code that is being compiled. Missing: None, and nothing is kept."""
    found = getattr(getattr(builder, "root_tx", None), "f_code", None)
    return found if isinstance(found, CodeType) else None


def traced_copy(module: Any, code: CodeType) -> Traced:
    """Return a copy of a traced graph: operations with the lines that called them, and metadata of the arguments.

    Dynamic sizes are not evaluated, as that would add a guard to the compiled graph.
    """
    graph = copy.deepcopy(module.graph)
    examples, attributes = [], {}
    for node in graph.nodes:
        example = node.meta.get("example_value")
        if node.op == "placeholder":
            examples.append(_example(example))
        elif node.op in ("get_attr", "call_module"):
            held = _attribute(module, node.target)
            attributes[node.target] = _example(held) if isinstance(held, torch.Tensor) else held
        node.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
    return Traced(graph, tuple(examples), attributes, code.co_filename, code.co_name, _autocast())


def _attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def _example(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return _hint(value)
    if value.layout is not torch.strided:
        return None
    shape, strides = tuple(map(_hint, value.shape)), tuple(map(_hint, value.stride()))
    if None in shape or None in strides:
        return None
    varies = not all(isinstance(size, int) for size in value.shape)
    return Example(shape, strides, value.dtype, value.device, value.requires_grad, value.is_leaf, varies)


def _hint(size: Any) -> Any:
    if isinstance(size, int | float | bool):
        return size
    try:
        hint = size.node.hint
    except Exception:
        return None
    return hint if isinstance(hint, int | float | bool) else None


def _autocast() -> tuple[tuple[str, Any], ...]:
    found = []
    for device in ("cpu", "cuda"):
        with contextlib.suppress(Exception):
            if torch.is_autocast_enabled(device):
                found.append((device, torch.get_autocast_dtype(device)))
    return tuple(found)


def graphs_numbered() -> int:
    """Return the number of the next autograd graph made for a compiled one. Missing: 0."""
    found = re.search(r"\d+", repr(getattr(sys.modules.get(_NUMBERED_BY), "AOT_COUNTER", None)))
    return int(found[0]) if found else 0


def is_compiled_node(node: Node) -> bool:
    """Whether a Node stands for a whole compiled graph."""
    return bool(node.name() == _NODE and _function_of(node) is not None)


def compiled_number(node: Node) -> int | None:
    """Return the number of the graph that a compiled Node stands for. Missing: None, and its saves have no line."""
    number = getattr(_function_of(node), "_aot_id", None)
    return number if isinstance(number, int) else None


def _function_of(node: Node) -> Any:
    return getattr(type(node), "_forward_cls", None)


def saved_in_graph(node: Node, count: int) -> tuple[str, ...]:
    """Return the names of a compiled Node's ``count`` saved tensors in its backward graph.

    ``primals_3`` is the third argument of the traced graph, any other name an operation. Missing: empty.
    """
    function = _function_of(node)
    info: Any = getattr(function, "_lazy_backward_info", None)
    graph = getattr(getattr(info, "bw_module", None), "graph", None)
    if graph is not None:
        names = [one.name for one in graph.nodes if one.op == "placeholder"]
    else:
        names = _arguments_in_cache(getattr(info, "bw_module_fn", None))
    names = [name for name in names if not name.startswith(_NOT_SAVED)]
    names = names[getattr(function, "num_symints_saved_for_bw", 0) :]
    return tuple(names) if len(names) == count else ()


def _arguments_in_cache(load: Any) -> list[str]:
    """Return the arguments of a backward from an earlier run's cache, parsed from its code: loading it would run it."""
    arguments = getattr(getattr(load, "__self__", None), "args", None)
    body = arguments[0] if isinstance(arguments, tuple) and arguments else None
    found = (
        re.search(r"def forward\(self, (.*?)\):?$", str(body.get("_code", "")), re.M)
        if isinstance(body, dict)
        else None
    )
    return [] if found is None else re.findall(r"(?:^|, )([A-Za-z_]\w*)", found[1])


def written_inputs(node: Node) -> int:
    """Return how many outputs of a compiled Node, the first ones, are inputs written by its graph. Missing: 0."""
    found = getattr(getattr(_function_of(node), "metadata", None), "num_mutated_inp_runtime_indices", 0)
    return int(found)


class _Aside:
    """A compiled Node for one more call of its backward, which may overwrite its saved tensors and frees none."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self.saved_tensors = _copies(node.saved_tensors)
        self._tensors_no_vc_check = _copies(getattr(node, "_tensors_no_vc_check", ()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def maybe_clear_saved_tensors(self) -> None:
        """Do nothing: the saved tensors belong to the program."""


def _copies(values: Any) -> Any:
    found = [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in values]
    return found if isinstance(values, list) else tuple(found)


def run_compiled_backward(node: Node, gradients: list[Any], *, keeps_graph: bool) -> tuple[Any, ...]:
    """Run the backward of a compiled Node once more, on copies of its saved tensors; one result for each argument.

    ``keeps_graph`` is the value that the program's own backward will pass: it affects the compilation where that has
    not happened yet. Raises RuntimeError if missing, or where the backward counts its runs; nothing is measured then.
    """
    engine: Any = torch._C._autograd
    asked = "_get_current_graph_task_keep_graph"
    if hasattr(node, "_curr_iter") or not hasattr(engine, asked):
        raise RuntimeError("a backward that cannot be run once more")
    original = getattr(engine, asked)
    setattr(engine, asked, lambda: keeps_graph)
    try:
        kind: Any = type(node)
        results = kind.apply(_Aside(node), *gradients)
    finally:
        setattr(engine, asked, original)
    return tuple(results)


def tensors_without_data() -> Any:
    """Return a mode in which tensors are made without data. Missing: raises, and saves have no line."""
    return torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
