"""Clues to errors that stop a writing statement: what it would have written, and what that tensor is.

Roles: ``target`` (the written tensor: ``name`` as the source says it, ``op`` the operation; ``values``: ``part`` the
written expression, ``known_as`` its name in a module or another variable, ``shape``, ``dtype``, ``device``,
``is_parameter``, ``is_leaf``, ``has_grad``, ``backwards`` before it), ``made`` (the operation that made it, where it is
the result of one).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from gradsan import source
from gradsan.capture import _torch, naming
from gradsan.capture.stacks import symbolise
from gradsan.capture.values import tensor_of
from gradsan.model import Clue, Site

if TYPE_CHECKING:
    from gradsan.capture.failures import Context

ROWS = ("leaf_inplace", "leaf_view_inplace", "out_requires_grad")


def gather(context: Context) -> tuple[Clue, ...]:
    """The written tensor; nothing where the source does not show a write."""
    own = context.site.user_frame
    if own is None or context.frame is None:
        return ()
    written = source.writing_at(own, inner_frames(context.site))
    if written is None:
        return ()
    tensor = tensor_of(context.frame, written.target)
    facts = {} if tensor is None else described(tensor, context.frame)
    target = Clue(
        "target",
        context.site,
        name=written.target,
        op=written.op,
        values={"part": written.expression, "backwards": context.core.backwards, **facts},
    )
    return (target, *made_by(context, tensor))


def inner_frames(site: Site) -> tuple[Any, ...]:
    """The frames below the user frame of ``site``."""
    own = site.user_frame
    position = max((index for index, frame in enumerate(site.frames) if frame is own), default=len(site.frames))
    return site.frames[position + 1 :]


def described(tensor: Any, frame: Any) -> dict[str, Any]:
    """What ``tensor`` is, as plain facts."""
    names = [name.text for name in naming.names_of(tensor, frame) if name.origin == "module"]
    is_leaf = bool(tensor.is_leaf)
    return {
        "shape": tuple(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
        "is_parameter": isinstance(tensor, nn.Parameter),
        "is_leaf": is_leaf,
        "has_grad": is_leaf and tensor.grad is not None,
        "known_as": names[0] if names else "",
    }


def made_by(context: Context, tensor: Any) -> tuple[Clue, ...]:
    """The call that made ``tensor``, where a Node tells."""
    try:
        node = None if tensor is None else tensor.grad_fn
    except RuntimeError:
        return ()
    number = None if node is None else _torch.node_sequence(node)
    if number is None:
        return ()
    import threading

    for first, end, _, stack in context.core.nodes_near(number, threading.get_ident()):
        if first <= number < end:
            return (Clue("made", symbolise(stack), op=node.name()),)
    return ()
