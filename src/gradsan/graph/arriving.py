"""Gradient arriving at a value that was written without autograd's knowledge, read while backward runs.

Backward uses such a value as if it were still the computed one. That matters only where a nonzero gradient arrives at
an element that was written: padding that is zeroed and masked out later, or a score of -inf before a softmax, has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.model import Region
from gradsan.overlap import narrowed
from gradsan.record.guarding import Guard, before_node

_SELECTIVE = ("index", "masked", "put", "scatter", "setitem", "fill_diagonal")
_SCALING = ("mul", "imul", "multiply", "div", "itruediv", "divide", "true_divide")


class Part(NamedTuple):
    """The elements of a value that one write may have changed; which of them may be unknown for a selective write.

    ``value`` is the region of the value, ``written`` the written part of its memory, None for all of it; ``changed``
    marks the elements that differ from a copy made before, None without one.
    """

    value: Region
    written: Region | None
    is_selective: bool
    changed: Any = None


def part(tensor: torch.Tensor, value: Region, op: str, written: Region | None, changed: Any = None) -> Part:
    """The part of ``tensor``, whose region is ``value``, that the operation ``op`` changed by writing ``written``."""
    name = op.strip("_")
    if name in _SCALING and _torch.has_elements(tensor) and tensor.layout is torch.strided:
        # A mask leaves zeros, and the other elements unchanged.
        is_selective = bool((tensor.detach() == 0).any())
    else:
        is_selective = name.startswith(_SELECTIVE) and (written is None or written.index is None)
    narrow = None if written is None else narrowed(written)
    if narrow is None or narrow == value or narrow.itemsize != value.itemsize:
        return Part(value, None, is_selective, changed)
    return Part(value, narrow, is_selective, changed)


class Arrival:
    """Gradients that arrive during one backward at the Node that made a value."""

    def __init__(self, node: Node, parts: Iterable[Part], guard: Guard) -> None:
        """Register a hook on ``node``; ``parts`` of its output have been written since."""
        self._parts, self._guard = tuple(parts), guard
        self._has_run = self._is_known = self._is_reached = False
        self._handle = before_node(node, self._look)

    def is_harmless(self, has_ended: bool = True) -> bool:
        """Whether no gradient has reached a written element; call it once, after the backward (even a failed one)."""
        self._handle.remove()
        return self._is_known and not self._is_reached if self._has_run else has_ended

    def _look(self, gradients: Any) -> None:
        self._has_run = True
        self._guard.run_hushed(partial(self._read, [one for one in gradients if one is not None]))

    def _read(self, given: list[Any]) -> None:
        if all(map(_torch.has_elements, given)):
            with torch.no_grad():
                self._is_reached |= any(_reaches(one.detach() != 0, part) for one in given for part in self._parts)
            self._is_known = True


def _reaches(flows: Any, part: Part) -> bool:
    """Whether a gradient reaches a part of a value; ``flows`` marks the elements at which it is not zero."""
    if part.written is None and not part.is_selective:
        # The whole value was written: that may be why it has no gradient at all.
        return True
    if part.is_selective and part.changed is not None and flows.shape == part.changed.shape:
        return bool((flows & part.changed).any())
    if part.written is not None and tuple(flows.shape) == part.value.shape:
        flows = flows[_mask(part.value, part.written, flows.device)]
    return bool(flows.numel()) and bool(flows.all() if part.is_selective else flows.any())


def _mask(value: Region, written: Region, device: Any) -> Any:
    low = min(value.offset, written.offset)
    marks = torch.zeros(max(_end(value), _end(written)) - low, dtype=torch.bool, device=device)
    marks.as_strided(written.shape, written.strides, written.offset - low).fill_(True)
    return marks.as_strided(value.shape, value.strides, value.offset - low)


def _end(region: Region) -> int:
    return region.offset + sum((size - 1) * step for size, step in zip(region.shape, region.strides, strict=True)) + 1
