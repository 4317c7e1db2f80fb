"""Fixes for what earlier rounds have left in an object, where a library runs the rounds."""

from __future__ import annotations

from collections.abc import Sequence

from gradsan import source
from gradsan.diagnose.collected import detached
from gradsan.model import Fix, Frame, Held, Site


def cut_on_entry(used: Site, made: Sequence[Site], held: tuple[Held, ...]) -> Fix | None:
    """Empty the list, or detach the attributes, in the method that the library calls first in each round.

    ``used`` is the backward, ``made`` where an earlier round made the value. None where the program runs the rounds.
    """
    entry = entry_of(used, made)
    if entry is None:
        return None
    emptied = source.emptied_on_entry(entry, held)
    if emptied is not None:
        values = {"name": emptied[1]}
        lines = source.changed_lines(entry.file, emptied[0])
        return Fix.worded("help.forget_on_entry", values, lines, kind="forget_collected")
    found = source.detached_on_entry(entry, [one for one in held if any(each.kind == "object" for each in one.around)])
    return None if found is None else detached(*found, entry.file)


def entry_of(used: Site, made: Sequence[Site]) -> Frame | None:
    """The frame of the program that a library called, where one statement of the program ran forward and backward."""
    at = used.user_frame
    if at is None or used.library_frame is None:
        return None
    for site in made:
        frames = site.user_frames
        same = [index for index, one in enumerate(frames[:-1]) if (one.file, one.line) == (at.file, at.line)]
        if same:
            return frames[same[-1] + 1]
    return None
