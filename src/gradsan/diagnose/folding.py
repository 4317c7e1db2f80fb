"""Long ways through a graph as a few lines: what repeats is said once, with how often."""

from __future__ import annotations

from collections.abc import Sequence

from gradsan.model import Passed, PathNode

LONGEST_REPEATED = 12
"""Nodes of one round of a loop, at most."""

_FIRST_SHOWN = 6
_LAST_SHOWN = 5
_FEWEST_ROUNDS = 3


def folded(nodes: Sequence[Passed]) -> tuple[PathNode, ...]:
    """``nodes`` as they follow each other; rounds of a loop become one entry, and of a long way both ends are kept."""
    keys = [(one.name, one.frame and (one.frame.file, one.frame.line)) for one in nodes]
    shown: list[PathNode] = []
    at = 0
    while at < len(nodes):
        length, rounds = _repeated(keys, at)
        part = nodes[at : at + length]
        lines = {key[1] for key in keys[at : at + length]}
        frame = part[0].frame if len(lines) == 1 else None
        if rounds == 1:
            shown.append(PathNode("node", part[0].name, frame=frame))
        else:
            name = " → ".join(one.name for one in part)
            shown.append(PathNode("repeat", name, count=rounds, frame=frame, nodes=length * rounds))
        at += length * rounds
    if len(shown) <= _FIRST_SHOWN + _LAST_SHOWN + 1:
        return tuple(shown)
    left_out = sum(one.nodes for one in shown[_FIRST_SHOWN:-_LAST_SHOWN])
    return (*shown[:_FIRST_SHOWN], PathNode("gap", nodes=left_out), *shown[-_LAST_SHOWN:])


def _repeated(keys: Sequence[object], at: int) -> tuple[int, int]:
    """How many Nodes from ``at`` on are a round, and how many rounds follow each other: most Nodes, shortest round."""
    best = (1, 1)
    for length in range(1, LONGEST_REPEATED + 1):
        rounds = 1
        while keys[at + rounds * length : at + (rounds + 1) * length] == keys[at : at + length]:
            rounds += 1
        if rounds >= _FEWEST_ROUNDS and length * rounds > best[0] * best[1]:
            best = (length, rounds)
    return best
