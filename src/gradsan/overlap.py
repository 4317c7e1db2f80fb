"""Regions of a storage: the bytes that each covers, and whether two of them overlap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from gradsan.model import Region

_MOST_ROWS = 100_000


def narrowed(region: Region) -> Region | None:
    """Return the region written by ``tensor[index] = value``, where ``index`` has ints and slices.

    None if nothing was written (an empty slice). A region without index, or with one that does not fit its shape,
    is returned whole, without its index.
    """
    if region.index is None:
        return region
    whole = replace(region, index=None)
    taken = sum(1 for part in region.index if part is not None and part is not Ellipsis)
    if taken > len(region.shape):
        return whole
    parts: list[int | slice] = []
    for part in region.index:
        if part is Ellipsis:
            parts.extend([slice(None)] * (len(region.shape) - taken))
        elif part is not None:
            parts.append(part)
    parts.extend([slice(None)] * (len(region.shape) - len(parts)))
    offset, shape, strides = region.offset, [], []
    for part, size, stride in zip(parts, region.shape, region.strides, strict=True):
        if isinstance(part, slice):
            start, stop, step = part.indices(size)
            count = len(range(start, stop, step))
            if count == 0:
                return None
            offset += start * stride
            shape.append(count)
            strides.append(stride * step)
        else:
            if not -size <= part < size:
                return whole
            offset += (part % size) * stride
    return Region(offset, tuple(shape), tuple(strides), region.itemsize)


def overlap(first: Region, second: Region) -> bool:
    """Whether two regions of one storage share a byte: exact up to a size, beyond it True unless clearly disjoint."""
    a, b = narrowed(first), narrowed(second)
    if a is None or b is None or _is_empty(a) or _is_empty(b):
        return False
    (a_low, a_high), (b_low, b_high) = _range(a), _range(b)
    if a_high <= b_low or b_high <= a_low:
        return False
    rows_a, rows_b = _rows(a), _rows(b)
    if rows_a is None or rows_b is None:
        return True
    spans_a, spans_b = _merged(rows_a), _merged(rows_b)
    i = j = 0
    while i < len(spans_a) and j < len(spans_b):
        if spans_a[i][1] <= spans_b[j][0]:
            i += 1
        elif spans_b[j][1] <= spans_a[i][0]:
            j += 1
        else:
            return True
    return False


def covers(first: Region, second: Region) -> bool:
    """Whether the first region has every byte of the second one; False where there are too many rows to tell."""
    a, b = narrowed(first), narrowed(second)
    if a is None or b is None or _is_empty(a) or _is_empty(b):
        return False
    rows_a, rows_b = _rows(a), _rows(b)
    if rows_a is None or rows_b is None:
        return False
    spans, i = _merged(rows_a), 0
    for low, high in _merged(rows_b):
        while i < len(spans) and spans[i][1] < high:
            i += 1
        if i == len(spans) or low < spans[i][0]:
            return False
    return True


def covers_itself(region: Region) -> bool:
    """Whether several elements of a region lie in one place: of an expanded tensor, of windows that overlap.

    Of the whole region: who writes a part of it by an index writes others with it.
    """
    if _is_empty(region) or len(region.strides) != len(region.shape):
        return False
    dims = sorted((abs(stride), size) for size, stride in zip(region.shape, region.strides, strict=True) if size > 1)
    if not is_folded(dims):
        return False
    if math.prod(size for _, size in dims) > _MOST_ROWS:
        return True
    places = [sum(steps) for steps in itertools.product(*(range(0, size * step, step or size) for step, size in dims))]
    return not all(step for step, _ in dims) or len(set(places)) < len(places)


def is_folded(dims: Iterable[tuple[int, int]]) -> bool:
    """Whether one of ascending ``(stride, size)`` does not reach beyond those before it, so that they may coincide."""
    reach = 0
    for stride, size in dims:
        if stride <= reach and size > 1:
            return True
        reach += stride * (size - 1)
    return False


def _is_empty(region: Region) -> bool:
    return any(size == 0 for size in region.shape)


def _range(region: Region) -> tuple[int, int]:
    low = high = region.offset
    for size, stride in zip(region.shape, region.strides, strict=False):
        reach = (size - 1) * stride
        low, high = low + min(reach, 0), high + max(reach, 0)
    return low * region.itemsize, (high + 1) * region.itemsize


def _rows(region: Region) -> Iterator[tuple[int, int]] | None:
    """Return byte spans of the region, adjacent elements merged; None where there are too many."""
    if len(region.strides) != len(region.shape):
        return None
    dims = sorted(
        (
            (abs(stride), size, stride)
            for size, stride in zip(region.shape, region.strides, strict=True)
            if size > 1 and stride
        ),
        reverse=True,
    )
    run = 1
    while dims and dims[-1][0] == run:
        run *= dims.pop()[1]
    count = 1
    for _, size, _ in dims:
        count *= size
    if count > _MOST_ROWS:
        return None
    low = region.offset + sum(
        (size - 1) * stride for size, stride in zip(region.shape, region.strides, strict=True) if stride < 0
    )
    axes = [range(0, size * step, step) for step, size, _ in dims]
    return (
        ((low + sum(steps)) * region.itemsize, (low + sum(steps) + run) * region.itemsize)
        for steps in itertools.product(*axes)
    )


def _merged(spans: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged
