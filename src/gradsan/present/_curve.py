"""Small curve of a few numbers: a row of characters for a terminal, points for a page."""

from __future__ import annotations

import math
from collections.abc import Sequence

_WIDE = 100.0
"""Times that the largest is the smallest from where on the curve is drawn of logarithms."""


def heights(numbers: Sequence[float]) -> list[float]:
    """How high each of the finite ``numbers`` stands, from 0 to 1; of logarithms where they grow by much."""
    low, high = min(numbers), max(numbers)
    if low > 0 and high / low > _WIDE:
        numbers, low, high = [math.log(one) for one in numbers], math.log(low), math.log(high)
    return [(one - low) / (high - low) if high > low else 0.0 for one in numbers]


def sparkline(numbers: Sequence[float], levels: str) -> str:
    """One character for each of the ``numbers``, of ``levels`` from the lowest to the highest."""
    return "".join(levels[round(height * (len(levels) - 1))] for height in heights(numbers))


def points(numbers: Sequence[float], width: int, height: int) -> str:
    """The ``numbers`` as the points of a polyline in a box of ``width`` by ``height``, its corner at the top left."""
    step = width / max(len(numbers) - 1, 1)
    return " ".join(f"{at * step:.1f},{height * (1 - one):.1f}" for at, one in enumerate(heights(numbers)))
