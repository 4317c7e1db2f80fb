"""Sums that take the graph of a round into theirs each time a line runs: ``total += loss``, where nobody asked for it.

Such a sum is a chain of Nodes that one line made, each hanging on the one before by the same edges; and what each takes
in does not hang on the one before. That tells ``total = total + loss`` from ``h = h + f(h)``, and from the state of a
recurrent layer, which is what the next round computes with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gradsan.capture import _torch

# What adds up, joins, or weighs, as moving averages do.
_ADDING = ("Add", "Sub", "Rsub", "Cat", "Lerp", "Mul", "Div", "To", "Copy")
_DEEPEST = 3
_MOST_LINKS = 2_000
_MOST_OF_A_ROUND = 10_000
_SAMPLED = 3


class GrowingSum(NamedTuple):
    """A chain of additions by one line; the Nodes of its last rounds, newest first.

    ``links`` counts its Nodes (``is_whole`` says that there are no more), ``oldest`` is the number of the last counted.
    ``rounds`` are the Nodes that the last two links took in, ``younger`` those of the last alone. ``taken_in`` is one
    that the last round handed to the sum.
    """

    links: int
    is_whole: bool
    oldest: int
    rounds: list[Any]
    younger: list[Any]
    taken_in: Any


def sum_of(node: Any, maker_of: Callable[[Any], Any]) -> GrowingSum | None:
    """The growing sum whose newest Node is ``node``; None where it is none.

    ``maker_of`` tells which line made a Node, as an object that is the same for one line, None where that is not known.
    """
    if not _adds(node):
        return None
    maker = maker_of(node)
    way = None if maker is None else _way_back(node, maker, maker_of)
    if way is None:
        return None
    links = [node]
    while len(links) <= _MOST_LINKS:
        previous = _follow(links[-1], way)
        if previous is None or previous.name() != node.name():
            break
        links.append(previous)
    sampled = links[: _SAMPLED + 1]
    if len(sampled) <= _SAMPLED or any(maker_of(one) is not maker for one in (*sampled[1:], links[-2])):
        return None
    younger, rounds = _between(node, links[1]), _between(node, links[2])
    if younger is None or rounds is None or not _hangs_by_one_edge(younger, links[1]):
        return None
    taken_in = next((one for one in younger if one is not node and not _is_on_way(node, one, way)), None)
    if taken_in is None:
        return None
    oldest = _torch.node_sequence(links[-1]) or 0
    return GrowingSum(len(links), len(links) <= _MOST_LINKS, oldest, rounds, younger, taken_in)


def _adds(node: Any) -> bool:
    return node is not None and str(node.name()).startswith(_ADDING)


def _children(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions]


def _way_back(node: Any, maker: Any, maker_of: Callable[[Any], Any]) -> tuple[int, ...] | None:
    """By which edges, one after the other, ``node`` leads to the Node that the same line made before."""
    ways: list[tuple[tuple[int, ...], Any]] = [((), node)]
    for _ in range(_DEEPEST):
        further = []
        for way, one in ways:
            for at, child in enumerate(_children(one)):
                if not _adds(child):
                    continue
                if child.name() == node.name() and maker_of(child) is maker:
                    return (*way, at)
                further.append(((*way, at), child))
        ways = further
    return None


def _follow(node: Any, way: tuple[int, ...]) -> Any:
    for at in way:
        children = [] if node is None else _children(node)
        node = children[at] if at < len(children) else None
    return node


def _is_on_way(node: Any, other: Any, way: tuple[int, ...]) -> bool:
    return any(_follow(node, way[:length]) is other for length in range(1, len(way)))


def _between(node: Any, older: Any) -> list[Any] | None:
    """The Nodes that ``node`` leads to and that are younger than ``older``, itself first; None where there are many."""
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


def _hangs_by_one_edge(nodes: list[Any], older: Any) -> bool:
    return sum(child is older for node in nodes for child in _children(node)) == 1
