"""Clues to the warning that ``.grad`` of a tensor is read that is no leaf.

Role: ``made`` (the operation that made the tensor; ``name`` as the source says it; ``values``: ``is_update``, whether
the statement that made it reads ``.grad`` itself, and ``shape``, ``dtype``, ``device``).
"""

from __future__ import annotations

import ast
import threading
from typing import TYPE_CHECKING, Any

from gradsan import source
from gradsan.capture import _torch
from gradsan.capture.stacks import symbolise
from gradsan.capture.values import tensor_of
from gradsan.model import Clue

if TYPE_CHECKING:
    from gradsan.capture.failures import Context

ROWS = ("grad_of_non_leaf",)


def gather(context: Context) -> tuple[Clue, ...]:
    """The tensor whose ``.grad`` is read, where the source names it."""
    own = context.site.user_frame
    found = None if own is None else source.expression_at(own)
    if found is None or not isinstance(found.node, ast.Attribute) or context.frame is None:
        return ()
    name = found.source.text(found.node.value)
    tensor = tensor_of(context.frame, name)
    number = None if tensor is None or tensor.grad_fn is None else _torch.node_sequence(tensor.grad_fn)
    if number is None:
        return (Clue("made", name=name),)
    near: list[Any] = context.core.nodes_near(number, threading.get_ident())
    made = next((symbolise(entry[3]) for entry in near if entry[0] <= number < entry[1]), None)
    frame = None if made is None else made.user_frame
    values = {
        "is_update": frame is not None and source.reads_gradient(frame),
        "shape": tuple(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
    }
    return (Clue("made", made, name=name, op=tensor.grad_fn.name(), values=values),)
