"""How two raw stacks stand to each other."""

from __future__ import annotations

from typing import Any

from gradsan.capture._core_pure import DEPTH_KEPT

_FRAMES_BETWEEN = 8


def begin_elsewhere(one: Any, other: Any) -> bool:
    """Whether two raw stacks are of different threads, as far as their outermost frames tell."""
    whole = len(one.codes) < DEPTH_KEPT and len(other.codes) < DEPTH_KEPT
    return whole and one.codes[-1:] != other.codes[-1:]


def is_around(outer: Any, inner: Any) -> bool:
    """Whether the call at the raw stack ``outer`` was under way at ``inner``, at most a few frames further in."""
    for depth in range(1, min(_FRAMES_BETWEEN, len(inner.codes) - 1) + 1):
        codes, offsets = inner.codes[depth:], inner.lastis[depth:]
        # Both were cut at the same depth, so the outer one may reach further out.
        if codes == outer.codes[: len(codes)] and offsets == outer.lastis[: len(codes)]:
            return True
    return False
