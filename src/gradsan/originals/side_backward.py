"""Backward on the side: calls each Node by itself, and passes its gradients on, without the engine.

The engine would call the hooks of tensors, Nodes and modules, fill ``.grad`` after ``retain_grad()``, and
compiled graphs would donate their memory to it. None of that may happen more often than without
gradsan; the only hooks called are those of tensors that do nothing but compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.graph import walk

UNKNOWN: Any = object()
"""A gradient that depends on code that was passed over."""


@dataclass(slots=True)
class HooksOnTheWay:
    """Gradient hooks of the program: ``at`` returns, for a Node, the outputs that have hooks, each with its hooks.

    Hooks that only compute are applied. ``reached`` gets the gradients that reach other hooks, by Node and output
    number; the results of these are unknown, and no gradient is passed on from those in ``closed``.
    """

    at: Callable[[Any], list[tuple[int, list[Any]]]]
    closed: frozenset[tuple[Any, int]] = frozenset()
    reached: dict[tuple[Any, int], Any] = field(default_factory=dict)

    def apply(self, node: Node, received: dict[int, Any], passed_over: Callable[[str], None]) -> None:
        """Apply its hooks to the gradients that a Node has received, by output number."""
        for number, hooks in self.at(node):
            gradient = received.get(number)
            if gradient is None or gradient is UNKNOWN:
                continue
            from gradsan.originals.repeatable import is_pure

            if all(map(is_pure, hooks)):
                received[number] = _through(hooks, gradient)
            elif (node, number) in self.closed:
                received[number] = UNKNOWN
            else:
                self.reached[node, number] = gradient
            if received[number] is UNKNOWN:
                passed_over(", ".join(name_of(hook) for hook in hooks))


def _through(hooks: list[Any], gradient: torch.Tensor) -> Any:
    for hook in hooks:
        try:
            made = hook(gradient)
        except Exception:
            return UNKNOWN
        gradient = gradient if made is None else made
    return gradient


def name_of(hook: Any) -> str:
    """Return the name of a hook."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


class NotOnTheSideError(RuntimeError):
    """Code of the program's own would have to be run again to go on; the argument is its name."""


def gradients(
    outputs: Any,
    given: Any,
    wanted: list[Any],
    order: list[Node],
    running: Callable[[Any], None],
    passed_over: Callable[[str], None],
    hooks: HooksOnTheWay | None = None,
    *,
    keeps_graph: bool = False,
) -> list[Any]:
    """Return the gradients of ``wanted`` (leaves, other tensors, GradientEdges), None for those without any.

    ``outputs`` and ``given`` are the engine's arguments, ``order`` the Nodes between in the engine's order
    (:func:`gradsan.graph.walk.engine_order`); ``running`` is called with each Node before it runs. The graph is kept.

    A Node with code of the program's own that may do more than compute is passed over: ``passed_over`` is called with
    its name, and gradients that depend on it are :data:`UNKNOWN`. Compiled graphs run on copies; ``keeps_graph`` says
    whether the program's own backward will keep them.

    Raises:
        RuntimeError: as the engine does, if a Node fails.
    """
    if len(order) >= walk.NODES_WALKED:
        raise RuntimeError("more Nodes than are walked")
    waiting: dict[Any, dict[int, Any]] = {}
    leaves: dict[int, Any] = {}
    captured: dict[tuple[Any, int], Any] = {}
    places = [_place(one) for one in wanted]
    inner = {place for place in places if not torch.is_tensor(place[0])}
    with torch.no_grad():
        for position, output in enumerate(outputs):
            gradient = given[position] if given is not None else None
            if gradient is None and torch.is_tensor(output):
                gradient = torch.ones_like(output)
            _pass_on(_place(output), gradient, waiting, leaves)
        for node in order:
            received = waiting.pop(node, {})
            if hooks is not None:
                hooks.apply(node, received, passed_over)
            for number in received:
                if (node, number) in inner:
                    captured[node, number] = received[number]
            if received:
                running(node)
                for edge, result in zip(
                    node.next_functions, _known(node, received, passed_over, keeps_graph), strict=False
                ):
                    _pass_on(_past_accumulation(*edge), result, waiting, leaves)
    for place in inner:
        if place not in captured:
            captured[place] = waiting.get(place[0], {}).get(place[1])
    return [leaves.get(id(place[0])) if torch.is_tensor(place[0]) else captured[place] for place in places]


def _known(
    node: Node, received: dict[int, Any], passed_over: Callable[[str], None], keeps_graph: bool
) -> tuple[Any, ...]:
    if not any(one is UNKNOWN for one in received.values()):
        try:
            return _results(node, received, keeps_graph)
        except NotOnTheSideError as stopped:
            passed_over(str(stopped))
    return (UNKNOWN,) * len(node.next_functions)


def _place(one: Any) -> tuple[Any, int]:
    """Return (Node, output number) of a tensor or a GradientEdge; (leaf, 0) for a leaf."""
    if not torch.is_tensor(one):
        return _past_accumulation(one.node, one.output_nr)
    return (one, 0) if one.grad_fn is None else (one.grad_fn, one.output_nr)


def _past_accumulation(node: Node | None, number: int) -> tuple[Any, int]:
    if node is None or _torch.node_sequence(node) is not None:
        return node, number
    return getattr(node, "variable", None), 0


def _results(node: Any, received: dict[int, Any], keeps_graph: bool) -> tuple[Any, ...]:
    count = _torch.count_of_outputs(node)
    arguments = [received.get(position) for position in range(max(count, max(received) + 1))]
    function = _torch.function_class(node)
    if function is not None and not _torch.hands_gradients_through(function):
        return _results_of_function(node, function, arguments, keeps_graph)
    results = arguments if function is not None else node(*arguments)
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _results_of_function(node: Any, function: Any, arguments: list[Any], keeps_graph: bool) -> tuple[Any, ...]:
    """Return one result per edge of a custom Function whose backward only computes, or of a compiled graph."""
    from gradsan.originals.repeatable import is_repeatable

    is_compiled = _torch.is_compiled_node(node)
    if not is_compiled and not is_repeatable(node, function, arguments):
        raise NotOnTheSideError(function.__qualname__)
    try:
        if is_compiled:
            filled = [_zeros(node, number) if one is None else one for number, one in enumerate(arguments)]
            results = _torch.run_compiled_backward(node, filled, keeps_graph=keeps_graph)
        else:
            results = node.apply(*arguments)
    except Exception as failure:
        raise NotOnTheSideError(function.__qualname__) from failure
    results = results if isinstance(results, tuple) else (results,)
    # Only tensors among its inputs have edges; those that need no gradient lead nowhere.
    wanted = iter([result for result, needed in zip(results, node.needs_input_grad, strict=False) if needed])
    return tuple(None if child is None else next(wanted, None) for child, _ in node.next_functions)


def _zeros(node: Node, number: int) -> Any:
    """Return the zeros that autograd passes to a Function for a missing gradient."""
    kind = _torch.kind_of_output(node, number)
    return None if kind is None else torch.zeros(kind[0], dtype=kind[1])


def _pass_on(
    place: tuple[Any, int], gradient: torch.Tensor | None, waiting: dict[Any, dict[int, Any]], leaves: dict[int, Any]
) -> None:
    holder, number = place
    if gradient is None or holder is None:
        return
    kind: tuple[Any, Any] | None
    if torch.is_tensor(holder):
        into, number, kind = leaves, id(holder), (holder.shape, holder.dtype)
    else:
        into, kind = waiting.setdefault(holder, {}), _torch.kind_of_output(holder, number)
    if kind is not None and gradient is not UNKNOWN:
        gradient = _fitting(gradient, *kind)
    known = into.get(number)
    if gradient is UNKNOWN or known is UNKNOWN:
        into[number] = UNKNOWN
        return
    into[number] = gradient if known is None else _sum(known, gradient)


def _sum(one: Any, other: Any) -> Any:
    return other + one if one.layout is not torch.strided else one + other


def _fitting(gradient: torch.Tensor, shape: Any, dtype: Any) -> Any:
    """Convert a gradient as the engine does before the next Node gets it (``validate_outputs`` in its engine.cpp)."""
    if tuple(gradient.shape) != tuple(shape):
        gradient = gradient.sum_to_size(tuple(shape))
    if gradient.is_complex() and not dtype.is_complex:
        gradient = gradient.real
    return gradient if gradient.dtype == dtype else gradient.to(dtype)
