"""Sums that keep the graph of every round, as chains of Nodes that one line made, and what a kept graph holds.

Each Node of such a chain depends on the one before by the same edges, and its new terms do not depend on the one
before. That distinguishes ``total = total + loss`` from ``h = h + f(h)``, and from the state of a recurrent layer,
which the next round computes with.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.autograd.graph import Node

from gradsan import _torch

# Operations that add, concatenate, or weigh, as moving averages do.
_ADDING = ("Add", "Sub", "Rsub", "Cat", "Lerp", "Mul", "Div", "To", "Copy")
_DEEPEST = 3
_NODE_BYTES, _STEPS_DOWN = 400, 2_000
_MOST_LINKS = 2_000
_MOST_OF_A_ROUND = 10_000
_SAMPLED = 3


class GrowingSum(NamedTuple):
    """A chain of additions by one line; the Nodes of its last rounds, newest first.

    ``links`` counts its Nodes (``is_whole``: there are no more), ``oldest`` is the number of the last counted.
    ``rounds`` are the Nodes below the last two links, ``younger`` those of the last alone. ``taken_in`` is one Node
    of the term that the last round added.
    """

    links: int
    is_whole: bool
    oldest: int
    rounds: list[Any]
    younger: list[Any]
    taken_in: Any


def sum_of(node: Node | None, maker_of: Callable[[Any], Any]) -> GrowingSum | None:
    """Return the growing sum whose newest Node is ``node``; None where it is none.

    ``maker_of`` returns the line that made a Node, as an object that is the same for one line, None if unknown.
    """
    if node is None or not _adds(node):
        return None
    maker = maker_of(node)
    edges = None if maker is None else _edges_back(node, maker, maker_of)
    if edges is None:
        return None
    links = [node]
    while len(links) <= _MOST_LINKS:
        previous = _follow(links[-1], edges)
        if previous is None or previous.name() != node.name():
            break
        links.append(previous)
    sampled = links[: _SAMPLED + 1]
    if len(sampled) <= _SAMPLED or any(maker_of(one) is not maker for one in (*sampled[1:], links[-2])):
        return None
    younger, rounds = _between(node, links[1]), _between(node, links[2])
    if younger is None or rounds is None or [child for one in younger for child in _children(one)].count(links[1]) != 1:
        return None
    path = [_follow(node, edges[:length]) for length in range(len(edges))]
    taken_in = next((one for one in younger if not any(one is passed for passed in path)), None)
    if taken_in is None:
        return None
    oldest = _torch.node_sequence(links[-1]) or 0
    return GrowingSum(len(links), len(links) <= _MOST_LINKS, oldest, rounds, younger, taken_in)


def _adds(node: Node | None) -> bool:
    return node is not None and str(node.name()).startswith(_ADDING)


def _children(node: Node) -> list[Any]:
    return [child for child, _ in node.next_functions]


def _edges_back(node: Node, maker: Any, maker_of: Callable[[Any], Any]) -> tuple[int, ...] | None:
    """Return the edges, one after the other, from ``node`` to the Node that the same line made before."""
    waiting: list[tuple[tuple[int, ...], Any]] = [((), node)]
    for _ in range(_DEEPEST):
        further = []
        for edges, one in waiting:
            for at, child in enumerate(_children(one)):
                if not _adds(child):
                    continue
                if child.name() == node.name() and maker_of(child) is maker:
                    return (*edges, at)
                further.append(((*edges, at), child))
        waiting = further
    return None


def _follow(node: Node | None, edges: tuple[int, ...]) -> Any:
    for at in edges:
        children = [] if node is None else _children(node)
        node = children[at] if at < len(children) else None
    return node


def _between(node: Node, older: Any) -> list[Any] | None:
    """Return the Nodes below ``node`` that are younger than ``older``, itself first; None where there are many."""
    border = _torch.node_sequence(older)
    if border is None:
        return None
    found, waiting = {node: None}, [node]
    while waiting:
        for child in _children(waiting.pop()):
            number = None if child is None or child in found else _torch.node_sequence(child)
            if number is not None and number > border:
                if len(found) >= _MOST_OF_A_ROUND:
                    return None
                found[child] = None
                waiting.append(child)
    return list(found)


def bytes_kept(order: list[Node]) -> int:
    """Return about how many bytes a graph keeps: tensors its Nodes saved and still hold, and the Nodes themselves."""
    storages: dict[int, int] = {}
    for node in order:
        for _, saved in _torch.saved_slots(node):
            tensor = _torch.packed_object(saved)
            if _torch.is_tensor(tensor):
                storages[_torch.storage_or_none(tensor)] = tensor.numel() * tensor.element_size()
    return sum(storages.values()) + _NODE_BYTES * len(order)


def is_bare_chain(order: list[Node], border: int) -> bool:
    """Whether each Node since ``border`` leads to one other and saves nothing, as those of ``total + x.detach()``."""
    late = [node for node in order if (_torch.node_sequence(node) or 0) >= border]
    branches = (sum(child is not None for child, _ in node.next_functions) > 1 for node in late)
    return bytes_kept(late) == _NODE_BYTES * len(late) and not any(branches)


def reaches_back(node: Node | None, border: int) -> bool:
    """Whether a Node made before ``border`` lies below ``node``; walks down to the oldest Nodes first.

    This avoids walking the graph of the current round: Nodes that Python has touched are costly to free.
    """
    waiting: list[tuple[int, int, Any]] = [(0, 0, node)]
    seen = {node}
    for _ in range(_STEPS_DOWN):
        if not waiting:
            return False
        for child, _ in heapq.heappop(waiting)[2].next_functions:
            number = None if child is None or child in seen else _torch.node_sequence(child)
            if number is None:
                continue
            if number < border:
                return True
            seen.add(child)
            heapq.heappush(waiting, (number, len(seen), child))
    return False
