"""Walks over autograd's graph: in the engine's order, to one Node, and to the edge that crosses a write."""

from __future__ import annotations

import heapq
import itertools
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from gradsan import _torch

# From torch 2.13 on, a Node that Python has touched is destroyed within its consumer, on the C stack: a chain of
# 45,000 such Nodes overflows 8 MB of it and ends the process. Real programs fail far nearer to their roots.
NODES_WALKED = 10_000


class _SharedWalks(threading.local):
    """A block in which each walk is done once, per thread: the graph does not change while a backward is examined.

    The results are dropped at the end: a list of Nodes keeps their graph alive.
    """

    depth = 0

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if not self.depth:
            self.known.clear()


SHARED = _SharedWalks()


def roots_of(tensors: Iterable[torch.Tensor]) -> list[Node]:
    """Return the Nodes that made the tensors; leaves have none."""
    return [one.grad_fn for one in tensors if one.grad_fn is not None]


class Crossing(NamedTuple):
    """An edge from a Node made after a moment to an older one; ``output`` is the output number of the older Node."""

    younger: Node
    older: Node
    output: int


def oldest_of(inputs: Iterable[Any]) -> int:
    """Return the number of the oldest Node that made one of ``inputs``; 0 if one is a leaf, or there is none.

    A backward with these inputs runs no older Node, in graphs that one thread has made.
    """
    nodes = [getattr(one, "node", None) or getattr(one, "grad_fn", None) for one in inputs]
    return min((0 if node is None else _torch.node_sequence(node) or 0 for node in nodes), default=0)


def engine_order(
    roots: Iterable[Node], inputs: tuple[Any, ...] = (), accumulates: bool = True, since: int = 0
) -> list[Node]:
    """Return the Nodes that a backward from ``roots`` runs, in the order in which the engine runs them on one device.

    The engine takes the youngest Node of those whose consumers have all run; Nodes of several threads make the two
    conditions differ. With ``inputs`` (tensors or GradientEdges), Nodes that lead to none of them are left out;
    ``accumulates`` distinguishes ``backward(inputs=...)``, which runs the inputs' own Nodes, from ``grad``, which does
    not. AccumulateGrad Nodes, which save nothing, are left out, and so are Nodes older than ``since``, with all behind
    them. Of a graph of more than ``NODES_WALKED`` Nodes only the youngest are returned, whatever ``inputs``. Within
    ``SHARED`` the list is shared: do not modify it.
    """
    starts = list(dict.fromkeys(roots))
    if not SHARED.depth:
        return _in_order(starts, inputs, accumulates, since)
    key = (*map(id, starts), None, *map(id, inputs), accumulates, since)
    if key not in SHARED.known:
        # The key's ids stay valid: the entry keeps these objects alive.
        SHARED.known[key] = (starts, inputs), _in_order(starts, inputs, accumulates, since)
    return SHARED.known[key][1]


def _in_order(starts: list[Any], inputs: tuple[Any, ...], accumulates: bool, since: int) -> list[Any]:
    youngest, consumers = _youngest_first(starts, since)
    if consumers is None:
        return youngest
    order = _when_ready(starts, consumers)
    return _leading_to(inputs, accumulates, order) if inputs else order


def nodes_behind(roots: Iterable[Node], most: int) -> list[Any] | None:
    """Return all Nodes of a graph; None where there are more than ``most``."""
    found = list(itertools.islice(each_behind(roots), most + 1))
    return found if len(found) <= most else None


def each_behind(roots: Iterable[Node], through: Callable[[Any], bool] | None = None) -> Iterator[Node]:
    """Yield every Node that a backward from ``roots`` may run, once, in no particular order.

    Nodes for which ``through`` is false are left out, and so are those that only they lead to.
    """
    waiting = list(dict.fromkeys(roots))
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if through is not None and not through(node):
            continue
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)


def has_older(roots: Iterable[Node], number: int) -> bool:
    """Whether a backward from ``roots`` may run a Node of a smaller number; of a graph too large to walk, yes.

    Most graphs hold no Node from before the last update: that is known sooner than their order.
    """
    waiting = list(dict.fromkeys(roots))
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        own = _torch.node_sequence(node)
        if (own is not None and own < number) or len(seen) > NODES_WALKED:
            return True
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return False


def _youngest_first(starts: list[Any], since: int) -> tuple[list[Any], dict[Any, int] | None]:
    """Return at most ``NODES_WALKED`` Nodes, and the number of edges into each (None if there are more Nodes)."""
    order: list[Node] = []
    consumers: dict[Any, int] = dict.fromkeys(starts, 0)
    arrivals = itertools.count()
    waiting: list[tuple[int, int, Any]] = []
    for root in starts:
        _push(waiting, arrivals, root)
    while waiting:
        if len(consumers) >= NODES_WALKED:
            return order, None
        node = heapq.heappop(waiting)[2]
        order.append(node)
        for child, _ in node.next_functions:
            if child is None or (since and (_torch.node_sequence(child) or since) < since):
                continue
            if child not in consumers:
                consumers[child] = 0
                _push(waiting, arrivals, child)
            consumers[child] += 1
    return order, consumers


def _when_ready(starts: list[Any], consumers: dict[Any, int]) -> list[Any]:
    order: list[Node] = []
    arrivals = itertools.count()
    ready: list[tuple[int, int, Any]] = []
    for root in starts:
        if not consumers[root]:
            _push(ready, arrivals, root)
    while ready:
        node = heapq.heappop(ready)[2]
        order.append(node)
        for child, _ in node.next_functions:
            if child in consumers:
                consumers[child] -= 1
                if not consumers[child]:
                    _push(ready, arrivals, child)
    return order


def _push(heap: list[tuple[int, int, Any]], arrivals: Iterator[int], node: Node) -> None:
    number = _torch.node_sequence(node)
    if number is not None:
        heapq.heappush(heap, (-number, next(arrivals), node))


def _leading_to(inputs: tuple[Any, ...], accumulates: bool, order: list[Node]) -> list[Any]:
    leaves = {id(one) for one in inputs if getattr(one, "grad_fn", None) is None}
    wanted = {
        node for one in inputs if (node := getattr(one, "node", None) or getattr(one, "grad_fn", None)) is not None
    }
    running = set(wanted) if accumulates else set()
    for node in reversed(order):
        for child, _ in node.next_functions:
            is_input = child in wanted or id(getattr(child, "variable", None)) in leaves
            if child in running or is_input:
                running.add(node)
                break
    return [node for node in order if node in running]


def leaves_of(nodes: Iterable[Node]) -> list[torch.Tensor]:
    """Return the leaves to which ``nodes`` pass gradients, each once."""
    if not SHARED.depth or not isinstance(nodes, list):
        found = _accumulating(nodes)
    else:
        # Leaves kept here would not be ``unheld_leaves``.
        key = "accumulating", id(nodes)
        if key not in SHARED.known:
            SHARED.known[key] = nodes, _accumulating(nodes)
        found = SHARED.known[key][1]
    return list({id(leaf): leaf for one in found if (leaf := one.variable) is not None}.values())


def _accumulating(nodes: Iterable[Node]) -> list[Any]:
    """Return the Nodes with a leaf that ``nodes`` lead to, each once."""
    found: dict[Any, bool] = {}
    for node in nodes:
        for child, _ in node.next_functions:
            if child is not None and child not in found:
                found[child] = _torch.is_tensor(getattr(child, "variable", None))
    return [one for one, has_leaf in found.items() if has_leaf]


def unheld_leaves(nodes: Iterable[Node]) -> list[tuple[Node, Node]]:
    """Return each Node that reads a leaf which nothing in Python holds, with the Node that accumulates its gradient.

    Nobody can give such a leaf to an optimizer, or read its gradient: it is known to the graph alone. A module of
    TorchScript holds its parameters in C++, and they are here, too.
    """
    found: dict[Node, Node] = {}
    for node in nodes:
        for child, _ in node.next_functions:
            if child is not None and child not in found and 0 < _uses_of_leaf(child) <= _ALONE:
                found[child] = node
    return [(node, child) for child, node in found.items()]


def _uses_of_leaf(node: Node) -> int:
    """The references to the leaf of an ``AccumulateGrad`` Node, those of this function included; 0 for other Nodes."""
    leaf = getattr(node, "variable", None)
    return sys.getrefcount(leaf) if _torch.is_tensor(leaf) else 0


def _uses_in_a_graph() -> int:
    with torch.enable_grad():
        node = torch.ones(1, requires_grad=True, device="cpu").view(1).grad_fn
    child = None if node is None else node.next_functions[0][0]
    return 0 if child is None else _uses_of_leaf(child)


_ALONE = _uses_in_a_graph()
"""The references to a leaf that its graph alone holds, as :func:`_uses_of_leaf` counts them."""


_OF_ONE_LEAF = re.compile(
    "(T|Transpose|View|UnsafeView|ReshapeAlias|Permute|Expand|Unsqueeze|Select|Slice|Clone|Exp|Sigmoid|Softplus|Tanh)"
    r"Backward\d+"
)
_STEPS_TO_LEAF = 5


def meets_parameters(order: Iterable[Node], target: Any) -> bool:
    """Whether a Node between the roots and ``target`` also computes with a leaf, as with a hidden state and weights.

    The value of a state, an old prediction or a sum of losses is not: it is a term of the loss. ``order`` is that
    of :func:`engine_order`.
    """
    leading = {target}
    for node in reversed(list(order)):
        if any(child in leading for child, _ in node.next_functions):
            leading.add(node)
    children = [child for node in leading - {target} for child, _ in node.next_functions]
    return any(_is_parameter(child) for child in children if child is not None and child not in leading)


def _is_parameter(node: Node) -> bool:
    for _ in range(_STEPS_TO_LEAF):
        if _torch.is_tensor(getattr(node, "variable", None)):
            return True
        children = [child for child, _ in node.next_functions if child is not None]
        if len(children) != 1 or not _OF_ONE_LEAF.fullmatch(node.name()):
            return False
        node = children[0]
    return False


def learns_elsewhere(value: Any, written: Any) -> bool:
    """Whether the graph of ``value`` leads to a leaf of another shape than the leaf that ``written`` is, or is part of.

    Such a value is computed by a network. An average of weights or a normalised weight depends on leaves like it alone.
    """
    whole = written if written.is_leaf or written._base is None else written._base
    nodes = None if value.grad_fn is None else nodes_behind([value.grad_fn], NODES_WALKED)
    return nodes is not None and any(leaf.shape != whole.shape for leaf in leaves_of(nodes))


def path(roots: list[Node], target: Any, most: int | None = None) -> list[tuple[Any, int]]:
    """Return a shortest path from a root to ``target`` as (Node, output number by which it was entered); empty if none.

    Nodes older than the target cannot lead to it, so the walk never goes past it. It gives up after ``most`` Nodes.
    """
    oldest = _torch.node_sequence(target) or 0
    came_from: dict[Any, tuple[Any, int] | None] = dict.fromkeys(roots)
    queue = deque(roots)
    while queue:
        node = queue.popleft()
        if node is target or (most is not None and len(came_from) > most):
            break
        for child, output in node.next_functions:
            if child is None or child in came_from:
                continue
            number = _torch.node_sequence(child)
            if number is not None and number >= oldest:
                came_from[child] = (node, output)
                queue.append(child)
    if target not in came_from:
        return []
    steps: list[tuple[Any, int]] = []
    node = target
    while True:
        step = came_from[node]
        if step is None:
            steps.append((node, 0))
            return steps[::-1]
        steps.append((node, step[1]))
        node = step[0]


def crossing(path: list[tuple[Any, int]], moment: int) -> Crossing | None:
    """Return the last edge of ``path`` from a Node made after ``moment`` (a sequence number) to one made before it."""
    for (younger, _), (older, output) in reversed(list(itertools.pairwise(path))):
        newer, past = _torch.node_sequence(younger), _torch.node_sequence(older)
        if newer is not None and past is not None and newer >= moment > past:
            return Crossing(younger, older, output)
    return None


def lead_to(starts: Iterable[Node], *targets: Node, most: int = 200_000) -> set[Node]:
    """Return those of the Nodes ``starts`` that lead to one of ``targets``; undecided after ``most`` Nodes is no."""
    oldest = min((_torch.node_sequence(target) or 0 for target in targets), default=0)
    known = dict.fromkeys(targets, True)
    for start in starts:
        # A Node is decided when all its children are, so it stays on the stack below them.
        stack = [start]
        while stack and len(known) < most:
            node = stack[-1]
            if node in known:
                stack.pop()
                continue
            children = [child for child, _ in node.next_functions if child is not None and _not_older(child, oldest)]
            open_ones = [child for child in children if child not in known]
            if open_ones and not any(known.get(child) for child in children):
                stack.extend(open_ones)
            else:
                known[node] = any(known.get(child) for child in children)
                stack.pop()
    return {start for start in starts if known.get(start)}


def _not_older(node: Node, oldest: int) -> bool:
    number = _torch.node_sequence(node)
    return number is not None and number >= oldest
