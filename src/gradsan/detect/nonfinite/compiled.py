"""Origins of NaN and Inf inside compiled graphs: the traced operations, run again without the compiler.

A compiled graph is one Node, and none of its operations is called. Dynamo has traced a list of operations of
torch, each with the line that called it. Run on the arguments of the call, it makes the same values, so that the first
non-finite one is found as everywhere else. Where it does not (random numbers, arguments written since, a
graph that cannot be run this way), the inside stays unknown.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.detect.nonfinite.backward import Backward
from gradsan.detect.nonfinite.forward import Forward
from gradsan.detect.nonfinite.origins import Origin, Origins, first_cause
from gradsan.graph.compiled import joined
from gradsan.graph.traced_graphs import TracedRun, called, inside_of, site_of
from gradsan.record.compilers import TRACED
from gradsan.record.log import Core, RawStack
from gradsan.record.stacks import symbolise

_CALLS_KEPT = 16
_CLOCK = -1


class CompiledCalls:
    """The arguments of the latest calls of compiled graphs, kept until a backward has ended."""

    def __init__(self, core: Core, origins: Origins) -> None:
        """Start empty; origins inside go to ``origins``."""
        self._core, self._origins = core, origins
        self._arguments: OrderedDict[int, tuple[Any, ...]] = OrderedDict()

    def forget(self) -> None:
        """Drop all arguments."""
        self._arguments.clear()

    def note(self, args: tuple[Any, ...], result: Any) -> None:
        """Keep the arguments of a call, if it was ``apply`` of a compiled graph's class."""
        node = _compiled_node(result)
        number = _torch.node_sequence(node)
        if number is not None:
            self._arguments[number] = args[1:]
            if len(self._arguments) > _CALLS_KEPT:
                self._arguments.popitem(last=False)

    def in_forward(self, result: Any, stack: RawStack) -> Origin | None:
        """Return the origin, inside a compiled graph called at ``stack``, of its non-finite ``result``."""
        node, found = result.grad_fn, self._arguments_of(result.grad_fn)
        if found is None:
            return None
        traced, arguments = found
        with _aside(self._core, traced):
            forward = _InnerForward(self._core, self._origins, lambda *_: None)
            run = _LookedAt(traced, forward, lambda call: _site(call, traced, stack))
            random = torch.get_rng_state()
            outputs = run.outputs(_inputs(traced, arguments))
            number = int(result.output_nr) - _torch.written_inputs(node)
            if 0 <= number < len(outputs) and _torch.is_nonfinite(outputs[number]):
                return _known(self._origins.of(outputs[number]), random)
        return None

    def in_backward(self, node: Node, given: Sequence[Any], stack: RawStack) -> Origin | None:
        """Return the origin of non-finite gradients inside a compiled Node that was ``given`` finite ones."""
        found = self._arguments_of(node)
        if found is None or any(one is not None and _torch.is_nonfinite(one) for one in given):
            return None
        traced, arguments = found
        with _aside(self._core, traced):
            inputs, random = _inputs(traced, arguments), torch.get_rng_state()
            run = TracedRun(traced.module())
            written = _torch.written_inputs(node)
            pairs = [
                (one, gradient)
                for one, gradient in zip(run.outputs(inputs), given[written:], strict=False)
                if one.grad_fn is not None and gradient is not None
            ]
            backward = _InnerBackward(self._core, self._origins, run, lambda call: _site(call, traced, stack))
            backward.begin(_CLOCK, tuple(one.grad_fn for one, _ in pairs))
            leaves = [one for one in inputs if torch.is_tensor(one) and one.requires_grad]
            try:
                torch.autograd.grad(
                    [one for one, _ in pairs], leaves, [gradient for _, gradient in pairs], allow_unused=True
                )
                origins = backward.given(_CLOCK)
            finally:
                backward.end(_CLOCK)
            return _known(min(origins, key=lambda one: one.number, default=None), random)
        return None

    def _arguments_of(self, node: Node) -> tuple[_torch.Traced, tuple[Any, ...]] | None:
        """Return the traced graph of a compiled Node and the arguments of its call; None where unknown or unfitting."""
        number = _torch.node_sequence(node)
        arguments = None if number is None else self._arguments.get(number)
        traced = TRACED.numbered(_torch.compiled_number(node))
        if arguments is None or traced is None or len(arguments) != len(traced.examples):
            return None
        if any(isinstance(one, _torch.Example) for one in traced.attributes.values()):
            return None
        pairs = zip(arguments, traced.examples, strict=True)
        fits = all(torch.is_tensor(one) == isinstance(example, _torch.Example) for one, example in pairs)
        return (traced, arguments) if fits else None


class _InnerForward(Forward):
    """Checks the operations of a traced graph; ``site`` is that of the current one."""

    site: Any = None

    def stack_here(self) -> Any:
        """Return the site of the current operation."""
        return self.site


class _InnerBackward(Backward):
    """Checks the Nodes of the operations of a traced graph."""

    def __init__(self, core: Core, origins: Origins, run: TracedRun, site_of_call: Callable[[fx.Node], Any]) -> None:
        """Use the Nodes of ``run``."""
        super().__init__(core, origins, threading.local(), lambda: None)
        self._run, self._site_of_call = run, site_of_call
        self.install(lambda work: work())

    def stack_of(self, node: Node) -> Any:
        """Return the site of the operation that made a Node."""
        made = self._run.call_of(_torch.node_sequence(node))
        return None if made is None else self._site_of_call(made[1])


class _LookedAt(TracedRun):
    """A run in which each result is checked."""

    def __init__(self, traced: _torch.Traced, forward: _InnerForward, site_of_call: Callable[[fx.Node], Any]) -> None:
        """Check by ``forward``; ``site_of_call`` returns the site of a call."""
        super().__init__(traced.module())
        self._forward, self._site_of_call = forward, site_of_call

    def run_node(self, n: fx.Node) -> Any:
        """Run one call, and check its result."""
        result = super().run_node(n)
        if n.op.startswith("call"):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self._forward.site = self._site_of_call(n)
            self._forward.on_result(called(n), args, kwargs, result)
        return result


def _compiled_node(result: Any) -> Any:
    nodes = (one.grad_fn for one in _torch.tensors_in(result, 1))
    return next((one for one in nodes if one is not None and _torch.is_compiled_node(one)), None)


def _known(origin: Origin | None, random: Any) -> Origin | None:
    """Return ``origin``, marked ``redrawn`` if the run has drawn random numbers since ``random``."""
    if origin is not None and not torch.equal(random, torch.get_rng_state()):
        first_cause(origin)[0].redrawn = True
    return origin


def _site(call: fx.Node, traced: _torch.Traced, stack: RawStack) -> Any:
    inner = site_of(call)
    return inner if stack is None else joined(symbolise(stack), traced, inner)


def _inputs(traced: _torch.Traced, arguments: tuple[Any, ...]) -> list[Any]:
    """Return the arguments as leaves of a graph of their own, sharing memory except where the graph writes."""
    inside = inside_of(traced)
    places = [None] * len(arguments) if inside is None else inside.places_of_arguments
    written = {write.place for write in inside.writes} if inside is not None else set(places)
    return [
        _leaf(one, is_written=place in written) if torch.is_tensor(one) else one
        for one, place in zip(arguments, places, strict=True)
    ]


def _leaf(tensor: torch.Tensor, *, is_written: bool) -> Any:
    leaf = tensor.detach().requires_grad_(tensor.requires_grad)
    return leaf.clone() if is_written else leaf


@contextlib.contextmanager
def _aside(core: Core, traced: _torch.Traced) -> Iterator[None]:
    """A block that leaves the program's state alone; errors in it are suppressed, and leave the origin unknown."""
    was_active, core.active = core.active, False
    try:
        with contextlib.ExitStack() as modes, contextlib.suppress(Exception):
            modes.enter_context(_torch.hushed())
            modes.enter_context(_torch.without_hooks())
            modes.enter_context(torch.enable_grad())
            modes.enter_context(torch.random.fork_rng(devices=()))
            for device, dtype in traced.autocast:
                modes.enter_context(torch.autocast(device, dtype))
            yield
    finally:
        core.active = was_active
