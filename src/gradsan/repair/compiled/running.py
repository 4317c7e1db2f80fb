"""Compilation in the process of a compared run: the backend, and the record of its compiled graphs."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from gradsan import _torch
from gradsan._imports import call_after_import
from gradsan.graph.traced_graphs import run_without_data
from gradsan.record.compilers import TRACED
from gradsan.record.recorder import unwatched
from gradsan.record.stacks import is_user_file
from gradsan.repair.compiled.counting import Counting
from gradsan.repair.compiled.values import Call, KeptGraph
from gradsan.repair.trials.compiling import Compiled, Compiling, Function

_CALLS_KEPT = 2
_GRAPHS_KEPT = 64
_BYTES_KEPT = 4 * 1024**3
_PERTURBED_BY = 20_041
_RESUMED = "torch_dynamo_resume_in_"


class CompiledRun:
    """Hook of torch.compile, started when the program imports torch; ``graphs`` are kept if they are to be examined."""

    def __init__(self, asked: Compiling) -> None:
        self.asked = asked
        self.graphs: list[KeptGraph] = []
        self.left = 0
        self._functions: dict[Function, str] = {}
        self._backends: dict[str, None] = {}
        self._count = 0
        self._bytes = 0
        self._perturbed: set[int] = set()
        self._generator: Any = None

    def start(self) -> None:
        """Compile code as requested from now on."""
        if self.asked.backend == "none":
            torch.compiler.set_stance("force_eager")
        else:
            if self.asked.backend:
                _torch.force_backend(self.asked.backend)
            call_after_import(_torch.GRAPH_BUILDER, self._listen)
            call_after_import(_torch.INDUCTOR_SETTINGS, _torch.draw_as_eager)
        if self.asked.perturbs:
            self._generator = torch.Generator().manual_seed(_PERTURBED_BY)
            torch.nn.modules.module.register_module_forward_pre_hook(self._perturb)

    def results(self, names: dict[str, tuple[str, ...]]) -> Compiled:
        """The record of the compiled graphs when the program has ended."""
        counting = Counting()
        with unwatched():
            for traced in TRACED.latest():
                # Some graphs do not run without data.
                with contextlib.suppress(Exception):
                    run_without_data(traced, counting)
        return Compiled(
            tuple(self._functions),
            tuple(self._functions.values()),
            tuple(self._backends),
            self._count,
            tuple(counting.draws),
            counting.coarsest or "float32",
            counting.squared_errors,
            _torch.gave_up_compiling(),
            names,
            self._examined() if self.asked.examines else None,
        )

    def _examined(self) -> Any:
        from gradsan.repair.compiled.examining import examine

        with unwatched():
            return examine(self.graphs, self.asked, self.left)

    def _listen(self) -> None:
        builder_class = _torch.graph_builder()
        if builder_class is None:
            return
        original = builder_class.call_user_compiler

        @functools.wraps(original)
        def call_user_compiler(builder: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            code = _torch.code_of_builder(builder)
            function = ("?", "?") if code is None else (code.co_filename, code.co_name)
            if function in self.asked.left_out:
                raise _torch.frame_left_out()
            self._count += 1
            self._functions.setdefault(function, _title(function, module))
            name, backend = _torch.backend_of_builder(builder)
            self._backends[name] = None
            if not self.asked.examines:
                return original(builder, module, *args, **kwargs)
            traced = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
            run = original(builder, module, *args, **kwargs)
            return self._keeping(KeptGraph(function, name, backend, traced, run))

        builder_class.call_user_compiler = call_user_compiler

    def _keeping(self, graph: KeptGraph) -> Callable[..., Any]:
        if len(self.graphs) >= _GRAPHS_KEPT or not callable(graph.run):
            self.left += 1
            run: Callable[..., Any] = graph.run
            return run
        self.graphs.append(graph)

        @functools.wraps(graph.run)
        def keeping(*args: Any, **kwargs: Any) -> Any:
            if len(graph.calls) < _CALLS_KEPT and self._bytes < _BYTES_KEPT and not kwargs:
                with unwatched():
                    call = Call.of(args)
                if call is not None:
                    self._bytes += call.bytes
                    graph.calls.append(call)
            return graph.run(*args, **kwargs)

        return keeping

    def _perturb(self, module: Any, _: Any) -> None:
        for one in module.parameters():
            if id(one) in self._perturbed:
                continue
            self._perturbed.add(id(one))
            if one.is_floating_point():
                with torch.no_grad(), unwatched():
                    noise = torch.rand(one.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
                    one.mul_((1 + self.asked.perturbs * noise).to(one.device, one.dtype))


def _title(function: Function, module: Any) -> str:
    """The display name of a compiled function; the class of the outermost module for torch's own functions."""
    file, name = function
    if is_user_file(file):
        return name.removeprefix(_RESUMED).rpartition("_at_")[0] if name.startswith(_RESUMED) else name
    stacks = (list((node.meta.get("nn_module_stack") or {}).values()) for node in module.graph.nodes)
    kind = next((stack[0][1] for stack in stacks if stack), name)
    return kind if isinstance(kind, str) else kind.__name__
