"""Weights kept in a list without a copy, round after round: ``path.append([p.data for p in net.parameters()])``.

``detach()``, ``.data`` and ``numpy()`` share the memory of the parameter. Reported where a list or dict has the memory
of one trained weight more often than at the look before, and the weight was written in between: states of different
times were meant. One that has it as often as before shares it on purpose, or for the next update.

Row: ``weights_are_one``. Role ``bound`` (``name`` of the list; ``op``, the weight's; ``site``: the line that adds,
where the source shows it; ``values``: ``shape``, ``dtype``, ``device``, ``times``).

Best values kept without a copy: ``if val < top: top, best = val, [p.detach() for p in net.parameters()]``.

``detach()``, ``.data`` and ``numpy()`` share the memory of the parameter, which every step writes. A variable of a
running function counts if the source binds it in a branch that keeps the best score, too, and reads it behind the loop
around that. It is reported where it holds the same tensors, or arrays, at two of the backwards that are looked at, over
the memory of a parameter that a step has written in between.

Row: ``best_values_of_now``. Roles: ``bound`` (where it was kept; ``name``; ``op``, the name of the parameter;
``values``: ``shape``, ``dtype``, ``device``) and ``read``.
"""

from __future__ import annotations

import collections
import itertools
import sys
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from gradsan import _torch, source
from gradsan.detect.one_tensor.second_names import at_line
from gradsan.graph import naming
from gradsan.graph.live import value_of
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


ROW = "best_values_of_now"
_VARIABLES, _ELEMENTS = 256, 16


class BestValues:
    """What variables held when they were looked at before."""

    def __init__(self) -> None:
        self._held: dict[Hashable, tuple[weakref.ref[Any], int]] = {}
        self._told: set[Hashable] = set()
        self._searched: dict[Hashable, list[tuple[str, int, int]]] = {}

    @property
    def has_any(self) -> bool:
        """Whether a function that has been looked at keeps such values."""
        return any(self._searched.values())

    def changed(
        self, running: Iterable[FrameType], site: Site, parameters: Iterable[Any]
    ) -> Iterator[tuple[Clue, Clue]]:
        """Yield the clues of what has changed since the look before, in the functions that run at ``site``."""
        known: dict[int, Any] = {}
        for frame in running:
            for place in site.frames:
                name = place.function.rpartition(".")[2]
                if (place.file, place.line, name) != (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name):
                    continue
                for best, bound, read in self._kept_in(place, frame):
                    known = known or {one.data_ptr(): one for one in parameters if _torch.has_elements(one)}
                    clues = self._judge((frame.f_code, best), value_of(frame, best), known)
                    if clues is not None:
                        kept = Clue("bound", at_line(site, place, bound), best, clues[0], values=clues[1])
                        yield kept, Clue("read", at_line(site, place, read), best)
                break

    def _kept_in(self, place: Frame, frame: FrameType) -> list[tuple[str, int, int]]:
        if frame.f_code not in self._searched and len(self._searched) < _VARIABLES:
            self._searched[frame.f_code] = source.values_kept_as_best(place)
        return self._searched.get(frame.f_code, [])

    def _judge(self, key: Hashable, value: Any, parameters: dict[int, Any]) -> tuple[str, dict[str, Any]] | None:
        held = ((one, parameters.get(_begin_of(one))) for one in _values_in(value))
        kept, owner = next((pair for pair in held if pair[1] is not None), (None, None))
        before = self._held.pop(key, None)
        if owner is None or key in self._told:
            return None
        self._held[key] = weakref.ref(kept), int(owner._version)
        if before is None or before[0]() is not kept or before[1] == int(owner._version):
            return None
        self._told.add(key)
        return naming.name_of(owner, sys._getframe(1)) or "?", _torch.facts_of(owner)


def _values_in(value: Any) -> Iterator[Any]:
    """Tensors without a graph, and arrays, in a variable or directly in its list or dict."""
    parts = value.values() if isinstance(value, Mapping) else value if type(value) in (list, tuple) else (value,)
    for one in itertools.islice(parts, _ELEMENTS):
        is_plain = type(one) in _torch.PLAIN_TENSORS and not one.requires_grad and _torch.has_elements(one)
        if is_plain or type(one).__name__ == "ndarray":
            yield one


def _begin_of(value: Any) -> int:
    if type(value).__name__ == "ndarray":
        return int(value.__array_interface__["data"][0])
    return int(value.data_ptr())
