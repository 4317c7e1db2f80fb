"""Walks over autograd's graph: from the roots of a backward to the Node that failed, and where it crosses a write."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any, NamedTuple

from gradsan.capture import _torch


class Crossing(NamedTuple):
    """An edge from a Node younger than a moment to a Node older than it; ``output`` is which output of the older."""

    younger: Any
    older: Any
    output: int


def path(roots: list[Any], target: Any) -> list[tuple[Any, int]]:
    """A shortest way from a root to ``target`` as (Node, output number by which it was entered); empty if none.

    Nodes older than the target cannot lead to it, so the walk never looks behind it.
    """
    oldest = _torch.node_sequence(target) or 0
    came_from: dict[Any, tuple[Any, int] | None] = dict.fromkeys(roots)
    queue = deque(roots)
    while queue:
        node = queue.popleft()
        if node is target:
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
    way: list[tuple[Any, int]] = []
    node = target
    while True:
        step = came_from[node]
        if step is None:
            way.append((node, 0))
            return way[::-1]
        way.append((node, step[1]))
        node = step[0]


def crossing(way: list[tuple[Any, int]], moment: int) -> Crossing | None:
    """The last edge of ``way`` that leads from a Node made after ``moment`` (a sequence number) to one made before."""
    for (younger, _), (older, output) in reversed(list(itertools.pairwise(way))):
        newer, past = _torch.node_sequence(younger), _torch.node_sequence(older)
        if newer is not None and past is not None and newer >= moment > past:
            return Crossing(younger, older, output)
    return None
