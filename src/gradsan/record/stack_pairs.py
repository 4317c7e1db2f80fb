"""Pairs of raw stacks: whether one is around the other, and whether they are of different threads."""

from __future__ import annotations

from typing import Any

from gradsan import _torch
from gradsan.record._core_pure import DEPTH_KEPT
from gradsan.record.stacks import is_own_file

_FRAMES_BETWEEN = 8


def begin_elsewhere(one: Any, other: Any) -> bool:
    """Whether two raw stacks are of different threads, as far as their outermost frames show."""
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


def within_torch(one: Any, other: Any) -> bool:
    """Whether torch's own Python code made the call at ``one``, in a function that was under way at ``other``, too.

    What such a function does to a value of the same call (``gaussian_nll_loss`` to its copy of the variance) or puts
    back before it returns (``gradgradcheck``) is its own affair.
    """
    shared = 0
    outer = zip(reversed(one.codes), reversed(one.lastis), reversed(other.codes), reversed(other.lastis), strict=False)
    for code, at, other_code, other_at in outer:
        if code is not other_code:
            break
        shared += 1
        if at != other_at:
            break
    folder = _torch.package_folder()
    inner = one.codes[: len(one.codes) - shared + 1]
    # What torch called may be wrapped by a detector.
    return shared > 0 and all(code.co_filename.startswith(folder) or is_own_file(code.co_filename) for code in inner)
