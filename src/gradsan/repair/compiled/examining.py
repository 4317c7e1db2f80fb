"""Examination of compiled graphs: each compared by itself with eager code, and the first that differs minimized.

Parts of a graph are compiled anew with the values that eager code computes for their inputs. So the differing part is
found by bisection, at module boundaries first, and needs nothing of the program.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from gradsan.graph.traced_graphs import called, site_of
from gradsan.repair.compiled.counting import Counting
from gradsan.repair.compiled.parts import Part, Parts, layer_of
from gradsan.repair.compiled.rounding import tolerance
from gradsan.repair.compiled.values import Call, Gap, KeptGraph, gap, ran
from gradsan.repair.compiled.writing import program_of
from gradsan.repair.trials.compiling import Compiling, Examined, Fragment
from gradsan.source.tree import source_line

_NO_OPERATIONS = ("getitem", "_enter_autocast", "_exit_autocast", "_set_grad_enabled")
_AOT = "aot_eager"


def examine(graphs: Sequence[KeptGraph], asked: Compiling, left: int) -> Examined:
    """Compare each of ``graphs`` as compiled by its backend; ``left`` were not kept."""
    ends_at = time.monotonic() + asked.seconds
    compared = 0
    for graph in graphs:
        if time.monotonic() > ends_at:
            left += 1
            continue
        try:
            fragment = _looked_at(graph, asked, ends_at)
        except Exception:
            # A graph may not run alone: it may need the state of its first call, or hold values that cannot be copied.
            left += 1
            continue
        compared += bool(graph.calls)
        left += not graph.calls
        if fragment is not None:
            return Examined(compared, left, fragment)
    return Examined(compared, left)


def _looked_at(graph: KeptGraph, asked: Compiling, ends_at: float) -> Fragment | None:
    for call in graph.calls:
        whole = ran(fx.Interpreter(graph.module).run, call)
        difference = gap(whole, ran(graph.run, call))
        allowed = _allowed(graph.module, call)
        if difference.size > allowed:
            parts = Parts(graph.module, call)
            found = _smallest(parts, _Differing(parts, graph.compile), ends_at)
            return _fragment(graph, parts, found, difference, allowed, None)
        if asked.looks_for_writes:
            fragment = _unnoticed(graph, call, whole, allowed, ends_at)
            if fragment is not None:
                return fragment
    return None


def _unnoticed(graph: KeptGraph, call: Call, whole: Any, allowed: float, ends_at: float) -> Fragment | None:
    """The part of a graph that does not notice that an argument is overwritten before its backward."""
    for position, one in enumerate(call.arguments):
        if not torch.is_tensor(one) or not one.is_floating_point():
            continue
        difference = _gap_after_write(graph.run, call, whole, position)
        if difference is None or difference.size <= allowed:
            continue
        parts = Parts(graph.module, call)
        test = _Unnoticed(parts, graph.compile, parts.placeholders()[position])
        found = _smallest(parts, test, ends_at)
        fragment = _fragment(graph, parts, found, difference, allowed, test.node)
        if fragment is not None:
            return fragment
    return None


def _gap_after_write(run: Any, call: Call, right: Any, position: int) -> Gap | None:
    """The gap between ``right`` and the gradients after a write to an argument; None if backward detects the write."""

    def overwrite(given: tuple[Any, ...]) -> None:
        given[position].add_(1.0)

    try:
        return gap(right, ran(run, call, overwrite))
    except RuntimeError:
        return None


class _Differing:
    """Test whether a compiled part computes something else than eager code."""

    def __init__(self, parts: Parts, backend: Any) -> None:
        self.parts, self.backend = parts, backend

    def __call__(self, start: int, end: int) -> bool:
        with contextlib.suppress(Exception):
            part = self.parts.part(start, end)
            return self.gap_of(part, self.backend).size > _allowed(part.module, part.call)
        return False

    def gap_of(self, part: Part, backend: Any) -> Gap:
        """The gap between a part compiled by ``backend`` and eager code."""
        right = ran(fx.Interpreter(part.module).run, part.call)
        return gap(right, ran(_compiled(part, backend), part.call))


class _Unnoticed(_Differing):
    """Test whether a compiled part does not notice that ``node``, one of its arguments, is overwritten."""

    def __init__(self, parts: Parts, backend: Any, node: fx.Node) -> None:
        super().__init__(parts, backend)
        self.node = node

    def gap_of(self, part: Part, backend: Any) -> Gap:
        """The gap between its gradients with and without the write."""
        right = ran(fx.Interpreter(part.module).run, part.call)
        position = part.inputs.index(self.node)
        return _gap_after_write(_compiled(part, backend), part.call, right, position) or Gap(0.0, True)


def _compiled(part: Part, backend: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(part.module, backend=backend, dynamic=False)


def _smallest(parts: Parts, test: Callable[[int, int], bool], ends_at: float) -> tuple[int, int] | None:
    """The smallest part found for which ``test`` holds; None if it does not hold for the whole graph, compiled anew."""
    start, end = 0, len(parts.calls)
    if not test(start, end):
        return None
    while end - start > 1 and time.monotonic() < ends_at:
        middle = parts.border(start, end)
        if test(start, middle):
            end = middle
        elif test(middle, end):
            start = middle
        else:
            break
    step = (end - start) // 2
    while step and time.monotonic() < ends_at:
        if step < end - start and test(start + step, end):
            start += step
        elif step < end - start and test(start, end - step):
            end -= step
        else:
            step //= 2
    return start, end


def _fragment(
    graph: KeptGraph,
    parts: Parts,
    found: tuple[int, int] | None,
    difference: Gap,
    allowed: float,
    overwritten: fx.Node | None,
) -> Fragment | None:
    if found is None:
        if overwritten is not None:
            return None
        return Fragment(
            graph.function, graph.backend, (), None, ("", ""), difference.of_gradient, difference.size, allowed,
            also_aot=False, draws=False, overwritten=None, program="",
        )  # fmt: skip
    part = parts.part(*found)
    test = _Differing(parts, graph.compile) if overwritten is None else _Unnoticed(parts, graph.compile, overwritten)
    with contextlib.suppress(Exception):
        difference, allowed = test.gap_of(part, graph.compile), _allowed(part.module, part.call)
    operations = [node for node in parts.calls[slice(*found)] if called(node) not in _NO_OPERATIONS]
    also_aot = False
    with contextlib.suppress(Exception):
        also_aot = graph.backend != _AOT and test.gap_of(part, _AOT).size > allowed
    position = None if overwritten is None else part.inputs.index(overwritten)
    program, inputs = program_of(part, graph.backend, graph.compile, position, allowed)
    last = operations[-1] if operations else None
    return Fragment(
        graph.function,
        graph.backend,
        tuple(called(node) for node in operations),
        None if last is None else _place(last),
        ("", "") if last is None else layer_of(last),
        difference.of_gradient,
        difference.size,
        allowed,
        also_aot,
        _draws(part),
        position,
        program,
        inputs,
    )


def _counted(module: nn.Module, call: Call) -> Counting:
    counting = Counting()
    with call.around(), torch.no_grad(), counting:
        given, _ = call.fresh()
        fx.Interpreter(module).run(*given)
    return counting


def _draws(part: Part) -> bool:
    return bool(_counted(part.module, part.call).draws)


def _allowed(module: nn.Module, call: Call) -> float:
    counting = _counted(module, call)
    return tolerance(counting.squared_errors, counting.coarsest or "float32")


def _place(node: fx.Node) -> tuple[str, int, str] | None:
    frame = site_of(node).user_frame
    return None if frame is None else (frame.file, frame.line, (source_line(frame.file, frame.line) or "").strip())
