"""Saves and writes inside compiled graphs, reported as those of the same program without the compiler.

A compiled graph is one Node. The values it has saved that the program can reach are its arguments and its results;
names and edges of the graph tell which. The saves of the operations inside, in the order in which
a backward asks for them, are read from the traced graph (``traced_graphs.py``).
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Literal

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.graph import naming, walk
from gradsan.graph.traced_graphs import InnerSave, Inside, Place, inside_of
from gradsan.model import Conflict, Frame, Site, Write
from gradsan.record.compilers import TRACED
from gradsan.record.ledger import call_that_made
from gradsan.record.log import Log
from gradsan.record.stacks import symbolise
from gradsan.record.steps import BackwardRecord

_ARGUMENT = re.compile(r"primals_(\d+)$")
_OF_COMPILERS = ("/torch/_dynamo/", "/torch/_functorch/", "/torch/_inductor/")


def as_uncompiled(
    conflict: Conflict, node: Node | None, slot: str | None, tensor: torch.Tensor | None, backward: BackwardRecord
) -> Conflict:
    """Return ``conflict`` with save and writes at the program's own lines, as far as these are known.

    ``node`` and ``slot`` have saved ``tensor``; any may be None.
    """
    shape = conflict.save.tensor.shape
    conflict = replace(conflict, writes=tuple(one for write in conflict.writes for one in _written(write, shape)))
    if node is None or slot is None or not torch.is_tensor(tensor) or not _torch.is_compiled_node(node):
        return conflict
    graph = TRACED.numbered(_torch.compiled_number(node))
    inside = None if graph is None else inside_of(graph)
    if graph is None or inside is None:
        return conflict
    place = _place(inside, node, slot, tensor, sys._getframe(1))
    reached = _reached(node, backward)
    found = None if place is None else _asked_first(inside, place, reached, conflict.save.tensor.shape)
    if place is None or found is None:
        return conflict
    save, (one, kind) = conflict.save, found
    _, _, requires_grad, is_leaf = inside.values[place]
    return replace(
        conflict,
        save=replace(
            save,
            site=joined(save.site, graph, one.site),
            node=one.node,
            slot=one.slot,
            is_output=one.is_output,
            tensor=replace(save.tensor, requires_grad=requires_grad, is_leaf=is_leaf),
            compiled=kind,
        ),
    )


def needed_first(node: Node, output: int, site: Site) -> tuple[str, Site]:
    """Return the operation inside a compiled Node whose saved values a backward from its ``output`` needs first.

    As (name of its Node, site). If the graph does not show it: the compiled Node itself and ``site``, that of the call
    of the compiled function.
    """
    graph = TRACED.numbered(_torch.compiled_number(node)) if _torch.is_compiled_node(node) else None
    inside = None if graph is None else inside_of(graph)
    found = None if inside is None else inside.needed_first.get(output - _torch.written_inputs(node))
    if graph is None or found is None:
        return node.name(), site
    return found[0], joined(site, graph, found[1])


def is_called_again(core: Log, site: Site, nodes: Iterable[Node], thread: int) -> bool:
    """Whether one of the ``nodes`` is of a compiled function called at the same place as the one at ``site``.

    The compiler may have recompiled it for that call, so that the stacks below differ.
    """
    calls = (
        call_that_made(core, _torch.node_sequence(node), thread) for node in nodes if _torch.is_compiled_node(node)
    )
    above = _callers(site)
    return bool(above) and any(call is not None and _callers(symbolise(call.stack)) == above for call in calls)


def _callers(site: Site) -> tuple[tuple[str, int], ...]:
    """Return the frames that called a compiled function; empty for a stack without one."""
    at = _first_entry(site.frames)
    return () if at == len(site.frames) else tuple((frame.file, frame.line) for frame in site.frames[:at])


def _place(inside: Inside, node: Node, slot: str, tensor: torch.Tensor, frame: FrameType) -> Place | None:
    """Return the value of the traced graph that a saved tensor is; None where that is not decided."""
    slots = [name for name, _ in _torch.saved_slots(node)]
    names = _torch.saved_in_graph(node, len(slots))
    name = names[slots.index(slot)] if names and slot in slots else ""
    argument = _ARGUMENT.match(name)
    if argument is not None:
        number = int(argument[1]) - 1
        if number < len(inside.places_of_arguments):
            return inside.places_of_arguments[number]
    storage = _torch.storage_identity(tensor)
    held = _output_held(node, storage, frame)
    if held is not None and Place("output", held) in inside.values:
        return Place("output", held)
    edges = [child for child, _ in node.next_functions]
    others = set()
    if len(edges) == inside.inputs():
        for number, child in enumerate(edges):
            variable = getattr(child, "variable", None)
            if variable is not None and _torch.storage_identity(variable) == storage:
                return Place("input", number)
            if variable is not None:
                others.add(Place("input", number))
    sizes = _sizes_now(inside, node) if inside.varies else {}
    fitting = [
        place
        for place, (size, kind, _, _) in inside.values.items()
        if place not in others
        and any(
            tensor.dtype == other and _fits(tuple(tensor.shape), known, inside.varies)
            for known, other in ((size, kind), *((one.shape, one.dtype) for one in inside.saves.get(place, ())))
        )
        and (place not in sizes or _may_be(place, inside, sizes[place], tensor))
    ]
    # A value with a name of its own is the result of an operation, or a view of an argument.
    made = [place for place in fitting if place.kind == "output"]
    saved = [place for place in fitting if place in inside.saves]
    viewed = _viewed(inside, tensor, others, sizes) if _is_view(name) else []
    alike = [place for place in _named_alike(inside, name) if place in fitting]
    for choice in (alike, made if name and not _is_view(name) else [], saved, fitting, viewed):
        if len(choice) == 1:
            return choice[0]
    return None


def _output_held(node: Node, storage: int, frame: FrameType) -> int | None:
    """The number of the graph's result that lies in ``storage``, found by a tensor that the program still holds."""
    for found in naming.find(frame, lambda one: one.grad_fn is not None and _torch.storage_identity(one) == storage):
        maker, number = found.tensor.grad_fn, found.tensor.output_nr
        # The first edge of each in-place operation, and of each view, leads to its input.
        for _ in range(_EDGES_FOLLOWED):
            if maker is node:
                return int(number) - _torch.written_inputs(node)
            edges = () if maker is None else maker.next_functions
            if not edges:
                break
            maker, number = edges[0]
    return None


_EDGES_FOLLOWED = 64


def _named_alike(inside: Inside, name: str) -> list[Place]:
    """Return the results whose operation has the name of the saved tensor in the compiled graph (``sigmoid_1``)."""
    op = name.rstrip("0123456789").strip("_").replace("_", "")
    return [
        place
        for place, saves in inside.saves.items()
        if any(one.is_output and (one.node or "").partition("Backward")[0].lower() == op for one in saves)
    ]


def _sizes_now(inside: Inside, node: Node) -> dict[Place, tuple[int, ...]]:
    """The sizes in this call of the results, and of the arguments with edges; they may differ from those traced."""
    written, edges = _torch.written_inputs(node), node.next_functions
    made = {place: (node, place.number + written) for place in inside.values if place.kind == "output"}
    given = {Place("input", number): (child, at) for number, (child, at) in enumerate(edges) if child is not None}
    known = {**made, **(given if len(edges) == inside.inputs() else {})}
    found = {place: _torch.output_info(*maker) for place, maker in known.items()}
    return {place: info[0] for place, info in found.items() if info is not None}


def _may_be(place: Place, inside: Inside, size: tuple[int, ...], tensor: torch.Tensor) -> bool:
    """Whether a value of ``size``, or a part of it that an operation saves, may have as many elements as ``tensor``."""
    has_parts = any(math.prod(one.shape) != math.prod(inside.values[place][0]) for one in inside.saves.get(place, ()))
    return has_parts or math.prod(size) == tensor.numel()


def _viewed(
    inside: Inside, tensor: torch.Tensor, others: set[Place], sizes: dict[Place, tuple[int, ...]]
) -> list[Place]:
    """Return the arguments of which a saved tensor may be a view with all elements in another order."""
    return [
        place
        for place, (size, kind, _, _) in inside.values.items()
        if place.kind == "input"
        and place not in others
        and kind == tensor.dtype
        and ((inside.varies and place not in sizes) or math.prod(sizes.get(place, size)) == tensor.numel())
    ]


def _is_view(name: str) -> bool:
    return name.rstrip("0123456789").rstrip("_") in _VIEWS


_VIEWS = frozenset(
    {"alias", "as_strided", "expand", "permute", "select", "slice", "squeeze", "t", "transpose", "unsqueeze", "view"}
)


def _fits(shape: tuple[int, ...], known: tuple[int, ...], varies: bool) -> bool:
    return len(shape) == len(known) if varies else shape == known


def _reached(node: Node, backward: BackwardRecord) -> frozenset[int] | None:
    """Return the results of a compiled graph from which a backward starts, or which it reaches; None if unknown."""
    found = set()
    for one in backward.outputs or ():
        maker = getattr(one, "grad_fn", None) if torch.is_tensor(one) else getattr(one, "node", None)
        if maker is node:
            found.add(one.output_nr)
    for other in walk.engine_order(backward.roots):
        found.update(number for child, number in other.next_functions if child is node)
    written = _torch.written_inputs(node)
    return frozenset(number - written for number in found if number >= written) or None


def _asked_first(
    inside: Inside, place: Place, reached: frozenset[int] | None, shape: tuple[int, ...]
) -> tuple[InnerSave, Literal["inside", "again", "only"]] | None:
    """Return the save that backward asks for first, and its relation to the eager program (``Save.compiled``)."""
    saves = inside.saves.get(place, [])
    needed = [one for one in saves if reached is None or one.outputs & reached]
    same = [one for one in needed if one.shape in (shape, shape[::-1])]
    for one in same or needed:
        return one, "inside"
    for one in saves:
        return one, "only"
    uses = inside.uses.get(place, [])
    for one in uses:
        if reached is not None and one.outputs & reached:
            return one, "inside" if inside.hides else "again"
    return (uses[0], "only") if uses and not inside.hides else None


def is_of_graph(site: Site, node: Node) -> bool:
    """Whether a write was made by the graph that a compiled Node stands for."""
    own = TRACED.numbered(_torch.compiled_number(node))
    return own is not None and any(one is own for one in _around(site))


def _written(write: Write, shape: tuple[int, ...]) -> Iterator[Write]:
    """Yield a compiled graph's write as the calls in it that write such a value; unchanged where they are unknown."""
    graphs, inside = _around(write.site), None
    for graph in graphs:
        inside = inside_of(graph)
        sizes = write.region.shape if write.region is not None else shape
        fitting = [one for one in inside.writes if _fits(sizes, one.shape, inside.varies)] if inside is not None else []
        if len({one.place for one in fitting}) == 1:
            for one in fitting:
                yield replace(write, op=one.op, site=joined(write.site, graph, one.site))
            return
    yield write


def _around(site: Site) -> tuple[_torch.Traced, ...]:
    """Return the graphs traced from the compiled function that a stack is in, the latest first."""
    for at in range(len(site.frames) - 1, -1, -1):
        frame = site.frames[at]
        if frame.is_user:
            below = (one.file.replace("\\", "/") for one in site.frames[at + 1 :])
            if not any(part in file for file in below for part in _OF_COMPILERS):
                return ()
            return TRACED.of_function(frame.file, _short(frame))
    return ()


def joined(site: Site, graph: _torch.Traced, inner: Site) -> Site:
    """Return the stack of a call inside a compiled function: that of the function's caller, and the traced one."""
    frames = site.frames
    at = len(frames) - 1
    while at >= 0 and (frames[at].file, _short(frames[at])) != (graph.file, graph.function):
        at -= 1
    if at < 0:
        return inner if not frames else Site((*frames[: _first_entry(frames)], *inner.frames))
    resumed = _RESUMED.match(graph.function)
    if resumed is not None:
        # The rest of a function is called by the function itself.
        own = [number for number in range(at) if _is_part_of(frames[number], graph.file, resumed[1])]
        at = own[0] if own else at
    return Site((*frames[:at], *inner.frames))


_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+$")


def _is_part_of(frame: Frame, file: str, function: str) -> bool:
    name = _short(frame)
    resumed = _RESUMED.match(name)
    return frame.file == file and (resumed[1] if resumed else name) == function


def _first_entry(frames: tuple[Frame, ...]) -> int:
    entry = (
        at for at, frame in enumerate(frames) if frame.file.replace("\\", "/").endswith("/torch/_dynamo/eval_frame.py")
    )
    return next(entry, len(frames))


def _short(frame: Frame) -> str:
    return frame.function.rpartition(".")[2]
