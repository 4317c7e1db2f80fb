"""Clues to errors and warnings about leaves: which of the live variables require a gradient.

Roles: ``live``, one clue for each of the user's frames, outermost first; ``values``: ``requires_grad`` (expression ->
whether it does; of a module, whether any parameter does) and ``callees`` (expression -> file, first line and name of
what runs). ``mode``: whether gradients are switched on (``grad_enabled``). ``loss``: its ``shape``, ``dtype`` and
``device``.

Role: ``made`` (the operation that made the tensor; ``name`` as the source says it; ``values``: ``is_update``, whether
the statement that made it reads ``.grad`` itself, and ``shape``, ``dtype``, ``device``).
"""

from __future__ import annotations

import ast
import threading
from typing import TYPE_CHECKING

import torch

from gradsan import _torch, source
from gradsan.graph.live import live_clues
from gradsan.graph.values import tensor_of
from gradsan.model import Clue
from gradsan.record.ledger import call_that_made
from gradsan.record.stacks import symbolise

if TYPE_CHECKING:
    from gradsan.errors.failures import Context

LIVE_ROWS = ("no_graph",)


def gather_live(context: Context) -> tuple[Clue, ...]:
    """The mode, and the clues of the frames from the failing one outwards."""
    found = [Clue("mode", values={"grad_enabled": torch.is_grad_enabled()})]
    losses = [] if context.backward is None else [one for one in context.backward.outputs if torch.is_tensor(one)]
    found += [
        Clue(
            "loss",
            values=_torch.facts_of(one),
        )
        for one in losses[:1]
    ]
    return (*live_clues(context.frame), *reversed(found))


NON_LEAF_ROWS = ("grad_of_non_leaf",)


def gather_non_leaf(context: Context) -> tuple[Clue, ...]:
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
    call = call_that_made(context.core, number, threading.get_ident())
    made = None if call is None else symbolise(call.stack)
    frame = None if made is None else made.user_frame
    values = {
        "is_update": frame is not None and source.reads_gradient(frame),
        **_torch.facts_of(tensor),
    }
    return (Clue("made", made, name=name, op=tensor.grad_fn.name(), values=values),)
