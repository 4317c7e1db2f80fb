"""Saves and writes in different threads, told by the outermost frames of their stacks."""

from __future__ import annotations

from gradsan.diagnose.facts import Facts
from gradsan.diagnose.levels import user_frames
from gradsan.model import Site

_STARTED_BY = ("/threading.py",)


def written_in(facts: Facts) -> str | None:
    """The function that a thread runs which overwrote a value, where another thread had saved it.

    None where both were the same thread, or nothing tells them apart: two threads of Python's own begin alike.
    """
    save = facts.conflict.save.site
    if not save.frames or _began_in_python(save):
        return None
    for write in facts.writes:
        frames = user_frames(write.site)
        if frames and _began_in_python(write.site):
            return frames[0].function
    return None


def _began_in_python(site: Site) -> bool:
    """Whether a stack begins where Python starts a thread, rather than at the program's main module."""
    return bool(site.frames) and site.frames[0].file.replace("\\", "/").endswith(_STARTED_BY)
