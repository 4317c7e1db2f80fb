"""Clues to a value that selective checkpointing kept, and that was overwritten before it was asked for.

Roles: ``cached`` (the operation whose result it is: ``op``; ``values``: ``shape``, ``dtype``, ``device``),
``base_written`` (the writes to it since, at most three).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradsan.capture import _torch
from gradsan.capture.clues.tensors import writes_to
from gradsan.model import Clue

if TYPE_CHECKING:
    from gradsan.capture.failures import Context

ROWS = ("cached_overwritten",)


def gather(context: Context) -> tuple[Clue, ...]:
    """The kept tensor, off the frames of checkpoint that found it changed."""
    found = _torch.cached_in_checkpoint(context.frames)
    if found is None:
        return ()
    tensor, op = found
    facts = {
        "shape": tuple(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
    }
    return (Clue("cached", context.site, op=op, values=facts), *writes_to(context.core, tensor))
