"""Traced graphs, read once: saves and writes of their operations to values that the program can reach.

The graph is run on tensors without data, where its operations save as in the eager program.

Each call has the line of the program that made it. The Nodes are those of the eager program.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from gradsan import _torch
from gradsan.graph import walk
from gradsan.model import Site
from gradsan.record.stacks import definition_site, of_formatted


class TracedRun(fx.Interpreter):
    """A run on tensors without data, with the Nodes that each call made and the versions that it moved.

    ``nodes_of`` are (first Node number, last plus one, call); ``moved`` (calls before it, call, storage).
    """

    def __init__(self, graph: Any) -> None:
        """``graph`` is an fx.GraphModule."""
        super().__init__(graph, garbage_collect_values=False)
        self.nodes_of: list[tuple[int, int, fx.Node]] = []
        self.moved: list[tuple[int, fx.Node, int]] = []
        self._versions: dict[int, tuple[Any, int]] = {}

    def placeholders(self) -> list[fx.Node]:
        """Return the placeholders of the arguments."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    def outputs(self, inputs: Iterable[Any]) -> list[Any]:
        """Return the tensors that the traced function returns."""
        return list(_torch.tensors_in(self.run(*inputs)))

    def run_node(self, n: fx.Node) -> Any:
        """Run one call, and record its Nodes and writes."""
        first = _torch.sequence_number()
        result = super().run_node(n)
        if n.op.startswith("call"):
            self.nodes_of.append((first, _torch.sequence_number(), n))
        self._look_for_moves(n)
        for tensor in _torch.tensors_in(result):
            self._versions.setdefault(id(tensor), (tensor, tensor._version))
        return result

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call the method; ``item`` of a float tensor (a dynamic float) returns an arbitrary number."""
        if target == "item" and torch.is_tensor(args[0]) and args[0].is_floating_point() and not args[0].shape:
            return 1.0
        return super().call_method(target, args, kwargs)

    def _look_for_moves(self, n: fx.Node) -> None:
        moved = set()
        for key, (tensor, before) in self._versions.items():
            if tensor._version != before:
                self._versions[key] = (tensor, tensor._version)
                moved.add(_torch.storage_identity(tensor))
        self.moved += [(len(self.nodes_of), n, storage) for storage in moved]

    def call_of(self, number: int | None) -> tuple[int, fx.Node] | None:
        """Return the call that made the Node with this number, and the number of calls before it."""
        if number is None:
            return None
        made = ((at, one) for at, (first, end, one) in enumerate(self.nodes_of) if first <= number < end)
        return next(made, None)

    def is_in(self, node: fx.Node, storage: int) -> bool:
        """Whether the result of a call lies in this memory."""
        value = self.env.get(node)
        return torch.is_tensor(value) and _torch.storage_identity(value) == storage


def site_of(node: fx.Node) -> Site:
    """Return the site of a call in the program, with the modules of torch's own that it ran below it."""
    site = of_formatted(str(node.meta.get("stack_trace") or ""))
    if not site.frames or not site.frames[-1].is_user:
        return site
    below: list[Any] = []
    for _, kind in reversed(list((node.meta.get("nn_module_stack") or {}).values())):
        if not isinstance(kind, type) or not kind.__module__.startswith("torch.nn."):
            break
        code = getattr(getattr(kind, "forward", None), "__code__", None)
        below += [] if code is None else definition_site(code).frames
    return Site((*site.frames, *reversed(below)))


def called(node: fx.Node) -> str:
    """Return the name of a call as in the log of writes: ``mul_``, ``__iadd__``."""
    if isinstance(node.target, str):
        return node.target
    name = getattr(node.target, "__name__", str(node.target))
    return f"__{name}__" if hasattr(operator, f"__{name}__") and node.target in vars(operator).values() else name


class Place(NamedTuple):
    """A value of a traced graph that the program can reach: a tensor argument or a result, with its number."""

    kind: Literal["input", "output"]
    number: int


class InnerSave(NamedTuple):
    """An operation's save of a value within a traced graph, or a use of one: then ``slot`` is None.

    ``outputs`` are the numbers of the graph's results whose backward reads it.
    """

    node: str | None
    slot: str | None
    is_output: bool
    shape: tuple[int, ...]
    dtype: Any
    site: Site
    outputs: frozenset[int]


class InnerWrite(NamedTuple):
    """A call within a traced graph that writes an argument of it."""

    place: Place
    op: str
    shape: tuple[int, ...]
    site: Site


@dataclass(frozen=True, slots=True)
class Inside:
    """Saves, uses and writes of a traced graph, of the values that the program can reach."""

    saves: dict[Place, list[InnerSave]]
    uses: dict[Place, list[InnerSave]]
    writes: list[InnerWrite]
    places_of_arguments: tuple[Place | None, ...]
    values: dict[Place, tuple[tuple[int, ...], Any, bool, bool]]
    """(shape, dtype, whether it requires grad, whether it is a leaf) of each value."""
    needed_first: dict[int, tuple[str, Site]]
    """For each result, the operation (name of its Node) whose saved values its backward needs first."""
    varies: bool
    hides: bool
    """Whether some saves are behind hooks (a checkpoint), so that not all are known."""

    def inputs(self) -> int:
        """Return the number of tensor arguments."""
        return sum(place.kind == "input" for place in self.values)


_known: dict[int, tuple[_torch.Traced, Inside | None]] = {}
_MOST_KNOWN = 64


def inside_of(graph: _torch.Traced) -> Inside | None:
    """Return the saves and writes in a traced graph; None if it does not run on tensors without data."""
    known = _known.get(id(graph))
    if known is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = None
        # Some operation may not work without data.
        with contextlib.suppress(Exception):
            found = _run(graph)
        known = _known[id(graph)] = (graph, found)
    return known[1]


def run_without_data(
    graph: _torch.Traced, *others: contextlib.AbstractContextManager[Any]
) -> tuple[TracedRun, list[Any], list[Any]]:
    """Run a graph on tensors without data, within ``others``; return the run, its arguments, its results.

    Raises the error of an operation that needs data.
    """
    with contextlib.ExitStack() as modes:
        modes.enter_context(_torch.hushed())
        modes.enter_context(_torch.without_hooks())
        modes.enter_context(torch.enable_grad())
        modes.enter_context(_torch.tensors_without_data())
        for device, dtype in graph.autocast:
            modes.enter_context(torch.autocast(device, dtype))
        given = [one.made() if isinstance(one, _torch.Example) else one for one in graph.examples]
        run = TracedRun(graph.module())
        for mode in others:
            modes.enter_context(mode)
        return run, given, run.outputs(given)


def _run(graph: _torch.Traced) -> Inside:
    run, given, results = run_without_data(graph)
    # Reading attributes of these tensors may need the modes that they were made in.
    with _torch.hushed(), _torch.without_hooks(), torch.enable_grad(), _torch.tensors_without_data():
        return _read(graph, run, given, results)


def _read(graph: _torch.Traced, run: TracedRun, given: list[Any], results: list[Any]) -> Inside:
    places: dict[int, Place] = {}
    values: dict[Place, tuple[tuple[int, ...], Any, bool, bool]] = {}
    places_of_arguments: list[Place | None] = []
    for one in given:
        place = Place("input", len(values)) if torch.is_tensor(one) else None
        places_of_arguments.append(place)
        if place is not None:
            places.setdefault(_torch.storage_identity(one), place)
            values[place] = (tuple(one.shape), one.dtype, one.requires_grad, one.is_leaf)
    for number, one in enumerate(results):
        place = Place("output", number)
        places.setdefault(_torch.storage_identity(one), place)
        values[place] = (tuple(one.shape), one.dtype, one.requires_grad, False)
    saves, needed_first, hides = _saves(run, results, places)
    return Inside(
        saves,
        dict(_uses(run, results, places)),
        list(_writes(run, places)),
        tuple(places_of_arguments),
        values,
        needed_first,
        any(isinstance(one, _torch.Example) and one.varies for one in graph.examples),
        hides,
    )


def _saves(
    run: TracedRun, results: list[Any], places: dict[int, Place]
) -> tuple[dict[Place, list[InnerSave]], dict[int, tuple[str, Site]], bool]:
    """Return the saves in the order in which a backward reads them; the first per result; whether hooks hide some."""
    found: dict[Place, list[InnerSave]] = {}
    first: dict[int, tuple[str, Site]] = {}
    hides = False
    roots = [(number, one.grad_fn) for number, one in enumerate(results) if one.grad_fn is not None]
    behind = [(number, set(walk.nodes_behind([root], walk.NODES_WALKED) or ())) for number, root in roots]
    for node in walk.engine_order([root for _, root in roots]):
        made = run.call_of(_torch.node_sequence(node))
        if made is None:
            continue
        _, call = made
        outputs = frozenset(number for number, nodes in behind if node in nodes)
        for slot, saved in _torch.saved_slots(node):
            hides = hides or _torch.is_hooked(saved)
            tensor = _torch.packed_object(saved)
            for number in outputs if torch.is_tensor(tensor) else ():
                first.setdefault(number, (node.name(), site_of(call)))
            place = places.get(_torch.storage_identity(tensor)) if torch.is_tensor(tensor) else None
            if place is None or not _torch.is_read_by_backward(node, slot):
                continue
            # Slots of a Node named ``result`` hold its own outputs.
            one = InnerSave(
                node.name(), slot, slot.startswith("result"), tuple(tensor.shape), tensor.dtype, site_of(call), outputs
            )
            found.setdefault(place, []).append(one)
    return found, first, hides


def _uses(run: TracedRun, results: list[Any], places: dict[int, Place]) -> Iterator[tuple[Place, list[InnerSave]]]:
    """Yield the calls that take or make a value, with the results that they lead to."""
    leads: dict[Any, set[int]] = {}
    ids = {id(one): number for number, one in enumerate(results)}
    for node in reversed(list(run.graph.nodes)):
        own = {ids[id(one)] for one in _torch.tensors_in(run.env.get(node)) if id(one) in ids}
        leads[node] = own.union(*(leads.get(user, set()) for user in node.users))
    found: dict[Place, list[InnerSave]] = {}
    for _, _, call in run.nodes_of:
        touched = {
            places[storage]
            for one in (call, *call.all_input_nodes)
            for tensor in _torch.tensors_in(run.env.get(one))
            if (storage := _torch.storage_identity(tensor)) in places
        }
        result = next(_torch.tensors_in(run.env.get(call)), None)
        if result is None or result.grad_fn is None:
            continue
        node, shape = result.grad_fn.name(), tuple(result.shape)
        for place in touched:
            use = InnerSave(node, None, False, shape, result.dtype, site_of(call), frozenset(leads[call]))
            found.setdefault(place, []).append(use)
    yield from found.items()


def _writes(run: TracedRun, places: dict[int, Place]) -> Iterator[InnerWrite]:
    for _, call, storage in run.moved:
        place = places.get(storage)
        if place is not None and place.kind == "input":
            written = next(iter(call.all_input_nodes), None)
            value = None if written is None else run.env.get(written)
            shape = tuple(value.shape) if torch.is_tensor(value) else ()
            yield InnerWrite(place, called(call), shape, site_of(call))
