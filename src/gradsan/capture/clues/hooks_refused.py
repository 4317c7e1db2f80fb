"""Clues to saved-tensor hooks that met a region where they are forbidden: whose hooks these are, and what came first.

Roles: ``hooks`` (``name``: ``checkpoint``, ``save_on_cpu``, ``allow_mutation_on_saved_tensors``, or another class of
hooks; ``values``: ``are_outside``, whether they were active already when the region began; then there is no name but
for checkpoint).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradsan.capture import _torch
from gradsan.catalogue import place_raised
from gradsan.model import Clue

if TYPE_CHECKING:
    from gradsan.capture.failures import Context

ROWS = ("hooks_disabled", "hooks_under_transform")


def gather(context: Context) -> tuple[Clue, ...]:
    """Whose hooks they are, as far as the stack of the error tells."""
    are_outside = not place_raised(context.error).endswith(":__enter__")
    name = _torch.owner_of_hooks(context.frames)
    return (Clue("hooks", name=name, values={"are_outside": are_outside}),)
