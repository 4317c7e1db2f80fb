"""Weights kept in a list without a copy, round after round: ``path.append([p.data for p in net.parameters()])``.

``detach()``, ``.data`` and ``numpy()`` share the memory of the parameter. Reported where a list or dict has the memory
of one trained weight more often than at the look before, and the weight was written in between: states of different
times were meant. One that has it as often as before shares it on purpose, or for the next update.

Row: ``weights_are_one``. Role ``bound`` (``name`` of the list; ``op``, the weight's; ``site``: the line that adds,
where the source shows it; ``values``: ``shape``, ``dtype``, ``device``, ``times``).
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch

from gradsan import _torch, source
from gradsan.detect.one_tensor.second_names import at_line
from gradsan.graph import naming
from gradsan.graph.variables import reached, spaces_of
from gradsan.model import Clue, Frame, Site


class KeptWeights:
    """How often lists held a weight at the look before, and its version then."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, Hashable], tuple[int, int]] = {}
        self._told: set[str] = set()

    def grown(self, leaves: Iterable[Any], frame: FrameType, site: Site) -> Iterator[Clue]:
        """Yield a clue for each list that holds one of ``leaves`` more often now; ``frame`` runs at ``site``."""
        known = {_place(one): one for one in leaves if one.numel() > 1 and _torch.has_elements(one)}
        held = collections.Counter[tuple[str, Hashable]]()
        for one in reached(spaces_of(frame)) if known else ():
            tensor = one.value.base if type(one.value).__name__ == "ndarray" else one.value
            if "[" in one.path and torch.is_tensor(tensor) and not tensor.requires_grad and _torch.has_elements(tensor):
                held[one.path.partition("[")[0], _place(tensor)] += 1
        before, self._counted = self._counted, {}
        for (name, place), times in held.items():
            leaf = known.get(place)
            if leaf is None:
                continue
            self._counted[name, place] = times, int(leaf._version)
            last, version = before.get((name, place), (times, 0))
            if times > last and version < int(leaf._version) and name not in self._told:
                self._told.add(name)
                weight = naming.name_of(leaf, frame) or "?"
                yield Clue("bound", added_at(site, name), name, weight, {**_torch.facts_of(leaf), "times": times})


def copied(leaves: list[Any], frame: FrameType, site: Site, place: Frame) -> Iterator[tuple[Clue, Clue]]:
    """Yield a leaf and the list that got a copy of its gradient, to which a backward at ``place`` adds now.

    The copy may have lost the signs.
    """
    for name, held in _torch.locals_of(frame).items():
        last = held[-1] if type(held) is list and len(held) == 1 and torch.is_tensor(held[0]) else None
        same = [] if last is None else [leaf for leaf in leaves if _is_copy(last.detach(), leaf.grad)]
        line = source.line_adding(place, name) if len(same) == 1 else None
        bound = None if line is None else at_line(site, place, line)
        leaf = None if bound is None else naming.name_of(same[0], frame)
        if bound is not None and leaf is not None and source.in_same_loops(place, bound.frames[-1]):
            yield Clue("gradient", name=leaf, values=_torch.facts_of(same[0])), Clue("bound", bound, name)


def _is_copy(kept: torch.Tensor, gradient: torch.Tensor) -> bool:
    is_alike = (kept.shape, kept.dtype, kept.device) == (gradient.shape, gradient.dtype, gradient.device)
    is_apart = is_alike and _place(kept) != _place(gradient)
    return is_apart and bool(gradient.any()) and torch.equal(kept.abs(), gradient.abs())


def added_at(site: Site, name: str) -> Site | None:
    """The line that adds to the list, in a file of the running functions."""
    lines = ((frame, source.line_adding(frame, name)) for frame in reversed(site.user_frames))
    return next((at_line(site, frame, line) for frame, line in lines if line is not None), None)


def _place(tensor: torch.Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.numel()
