"""Leaves, their gradients, and how the leaves have moved since: a few elements of each, without keeping any alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from gradsan.capture import _torch

_LEAVES, _ELEMENTS = 64, 256
_ALONG = 0.9
"""So much of what has moved must have moved against the gradient: weight decay and momentum turn a few elements."""


class Sample(NamedTuple):
    """A leaf as it was: its memory, and some elements of it and of the gradient that was taken (float64)."""

    leaf: Any
    storage: int
    values: Any
    gradient: Any


def samples_of(pairs: Iterable[tuple[Any, Any]]) -> list[Sample]:
    """Samples of (leaf, gradient), of the first ``64`` pairs; other than dense real leaves are left out."""
    found: list[Sample] = []
    with torch.no_grad():
        for leaf, gradient in pairs:
            if len(found) == _LEAVES:
                break
            if leaf.is_leaf and leaf.requires_grad and _is_plain(leaf) and _is_plain(gradient):
                storage = _torch.storage_or_none(leaf)
                found.append(Sample(weakref.ref(leaf), storage, _some(leaf), _some(gradient)))
    return found


def descended(samples: Iterable[Sample]) -> list[Sample]:
    """The leaves that have moved, if they have moved against their gradients, as a descent does; else none."""
    moved: list[Sample] = []
    against = total = 0
    with torch.no_grad():
        for one, leaf in _living(samples):
            now = _some(leaf)
            if now.shape != one.values.shape:
                continue
            way = now - one.values
            if bool(way.any()):
                moved.append(one)
                against += int((way * one.gradient < 0).sum())
                total += int((way != 0).sum())
    return moved if against and against >= _ALONG * total else []


def stand_again(samples: Iterable[Sample]) -> bool:
    """Whether all the leaves have the values that they had; False where one of them is gone."""
    wanted = list(samples)
    with torch.no_grad():
        living = list(_living(wanted))
        return bool(living) and len(living) == len(wanted) and all(_is_as_before(one, leaf) for one, leaf in living)


def _living(samples: Iterable[Sample]) -> Iterator[tuple[Sample, Any]]:
    for one in samples:
        leaf = one.leaf()
        if leaf is not None and _is_plain(leaf):
            yield one, leaf


def _is_as_before(one: Sample, leaf: Any) -> bool:
    now = _some(leaf)
    return now.shape == one.values.shape and bool(torch.equal(now, one.values))


def _is_plain(tensor: Any) -> bool:
    return (
        type(tensor) in _torch.PLAIN_TENSORS
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.numel() > 0
        and tensor.device.type != "meta"
    )


def _some(tensor: Any) -> Any:
    """Elements at even distances, with no copy of the rest where memory is contiguous."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // _ELEMENTS))].to(torch.float64, copy=True)
