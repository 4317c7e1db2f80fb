"""Clues to what FullyShardedDataParallel refuses: which parameters it was busy with.

Roles: ``parameters`` (``name``: up to three names as the program's modules have them, ``values``: ``total``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradsan.capture import _torch
from gradsan.model import Clue

if TYPE_CHECKING:
    from gradsan.capture.failures import Context

ROWS = (
    "sharded_after_inference",
    "sharded_called_past",
    "sharded_changed_between",
    "sharded_second_order",
    "sharded_shape_changed",
)
_TOLD = 3


def gather(context: Context) -> tuple[Clue, ...]:
    """The parameters of the group that the innermost frame of FSDP worked on."""
    names = _torch.flat_parameter_names(context.frames)
    if not names:
        return ()
    shown = ", ".join(names[:_TOLD]) + (", …" if len(names) > _TOLD else "")
    return (Clue("parameters", name=shown, values={"total": len(names)}),)
