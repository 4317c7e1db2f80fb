"""Operands of older Nodes that a step has changed since: what a backward through a kept graph would have needed."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

from torch.autograd.graph import Node

from gradsan import _torch

_MOST = 50


def written_operands(nodes: Iterable[Node], moved: Set[int]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The names of the Nodes that computed with a leaf in ``moved``, or a view of it, and their operands.

    Of each operand: ``written``, ``asked`` (it has a gradient), ``constant``. Whether the Node has saved what was
    written depends on its operation and on which operands have a gradient.
    """
    found: dict[tuple[str, tuple[str, ...]], None] = {}
    for node in nodes:
        operands = tuple(_state(child, moved) for child, _ in node.next_functions)
        if "written" in operands:
            found[node.name(), operands] = None
            if len(found) == _MOST:
                break
    return tuple(found)


def _state(child: Any, moved: Set[int]) -> str:
    if child is None:
        return "constant"
    while _torch.makes_view(child) and len(child.next_functions) == 1 and child.next_functions[0][0] is not None:
        child = child.next_functions[0][0]
    leaf = getattr(child, "variable", None)
    return "written" if _torch.is_tensor(leaf) and _torch.storage_identity(leaf) in moved else "asked"
