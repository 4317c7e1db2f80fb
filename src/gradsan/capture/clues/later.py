"""Clues to errors that a backward raises although an earlier statement was at fault.

Roles: ``overlapping_write`` (a logged write to a tensor with several elements at one place of memory: ``op``, and
``values`` with its ``shape`` and ``turn``, how many writes by the same line came before), ``detached`` (a logged
``detach_``), ``forward`` (the call that made the failing Node).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradsan.capture import _torch, graphs, naming
from gradsan.capture.clues.tensors import of_node
from gradsan.capture.ledger import RawWrite
from gradsan.capture.stacks import symbolise
from gradsan.model import Clue

if TYPE_CHECKING:
    from gradsan.capture.failures import Context

ROWS = ("memory_overlap", "negative_slope", "saved_detached")


def gather(context: Context) -> tuple[Clue, ...]:
    """What the logs know; nothing for an error raised at the statement."""
    if context.backward is None or context.is_at_statement:
        return ()
    if context.row == "negative_slope":
        for node in graphs.engine_order(context.backward.roots, context.inputs, context.backward.via == "backward"):
            slope = _torch.saved_number(node, "negative_slope")
            if slope is not None and slope < 0:
                clue = of_node(context.core, node, "forward")
                return () if clue is None else (clue,)
        return ()
    writes = [RawWrite(*entry) for entry in context.core.writes()]
    if context.row == "saved_detached":
        return tuple(Clue("detached", symbolise(raw.stack), op=raw.op) for raw in writes if raw.op == "detach_")[-3:]
    overlapping = [raw for raw in writes if _overlaps_itself(raw)]
    stacks = [raw.stack for raw in overlapping]
    return tuple(
        Clue(
            "overlapping_write",
            symbolise(raw.stack),
            op=raw.op,
            values={"turn": stacks[:position].count(raw.stack), **_described(context, raw)},
        )
        for position, raw in enumerate(overlapping)
    )[-3:]


def _described(context: Context, raw: RawWrite) -> dict[str, Any]:
    """The shape of the written tensor, and further facts where a live variable still holds it.

    What is only read off the source has no shape that is known, and elements of no size.
    """
    return {"shape": raw.shape, **_alive(context, raw)} if raw.itemsize else {}


def _alive(context: Context, raw: RawWrite) -> dict[str, str]:
    """Further facts of the written tensor, where a live variable still holds it."""
    for found in naming.find(context.frame, lambda tensor: _torch.storage_identity(tensor) == raw.storage):
        tensor = found.tensor
        return {"dtype": str(tensor.dtype).removeprefix("torch."), "device": str(tensor.device)}
    return {}


def _overlaps_itself(raw: RawWrite) -> bool:
    """Whether an expanded dimension puts several elements at one place."""
    if raw.strides is None:
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(raw.shape, raw.strides, strict=True))
