"""Nodes that a backward passes on its way to the one that kept a value, as data: names and lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradsan import _torch
from gradsan.graph import stale_slots, walk
from gradsan.model import Frame, Passed
from gradsan.record.stacks import symbolise


def passed(core: Any, roots: Iterable[Any], node: Any, moment: int) -> tuple[Passed, ...]:
    """The Nodes of a shortest way from one of ``roots`` to ``node``, that one last; empty where there is none.

    ``moment`` is the sequence number that tells the Nodes made after the first write from older ones. Empty, too, where
    more than ``walk.NODES_WALKED`` Nodes would have to be looked at.
    """
    way = [] if node is None else walk.path(list(roots), node, most=walk.NODES_WALKED)
    threads = stale_slots.threads_of(core) if way else ()
    frames: dict[int, Frame | None] = {}
    found: list[Passed] = []
    for one, _ in way:
        number = _torch.node_sequence(one)
        found.append(
            Passed(
                one.name(),
                None if number is None else _line_of(core, number, threads, frames),
                number is not None and number >= moment,
            )
        )
    return tuple(found)


def _line_of(core: Any, number: int, threads: Iterable[int], frames: dict[int, Frame | None]) -> Frame | None:
    """The user's line whose call made the Node of that number; None where calls of two threads may have."""
    stacks = [
        stack for thread in threads for first, end, _, stack in core.nodes_near(number, thread) if first <= number < end
    ]
    if len(stacks) != 1:
        return None
    stack = stacks[0]
    if id(stack) not in frames:
        frames[id(stack)] = symbolise(stack).user_frame
    return frames[id(stack)]
