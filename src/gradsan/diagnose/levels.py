"""Levels of a stack: the frame to show, the innermost common function of two stacks, and names at another level."""

from __future__ import annotations

from collections.abc import Sequence

from gradsan import source
from gradsan.model import Frame, Site


def shared_level(first: Sequence[Frame], second: Sequence[Frame]) -> int:
    """The index of the innermost function on both stacks, -1 where they share none (other threads)."""
    level = -1
    for a, b in zip(first, second, strict=False):
        if (a.file, a.function) != (b.file, b.function):
            break
        level += 1
        if a.line != b.line:
            break
    return level


def lifted(name: str, frames: Sequence[Frame], level: int, site: Site | None = None) -> str | None:
    """The expression in the function at ``level`` for ``name`` of the innermost of ``frames``; None if not known.

    ``site`` is the whole stack of the user frames: the frames in between show the arguments of a hook.
    """
    found = name
    for depth in range(len(frames) - 1, level, -1):
        inner, outer = frames[depth], frames[depth - 1]
        between = _between(site, outer, inner)
        given = source.callers_expression(found, inner, outer, between)
        if given is None and (alias := source.alias_of(inner, found)) is not None:
            given = source.callers_expression(alias, inner, outer, between)
        if given is None:
            return None
        found = given
    return found


def _between(site: Site | None, outer: Frame, inner: Frame) -> tuple[Frame, ...]:
    if site is None:
        return ()
    first, last = (next(at for at, frame in enumerate(site.frames) if frame is one) for one in (outer, inner))
    return site.frames[first + 1 : last]
