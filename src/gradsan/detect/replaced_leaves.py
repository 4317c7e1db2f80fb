"""Leaves that the program computes with in place of those that an optimizer has."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from gradsan import _torch
from gradsan.graph import naming, walk
from gradsan.graph.variables import Found
from gradsan.model import Frame


def replacements(
    held: list[Any], missing: list[Any], frame: FrameType, made: Frame | None
) -> Iterator[tuple[Any, Found]]:
    """Yield (tensor without a gradient that no module holds any more, tensor that the program has instead).

    The latter has the same shape, requires grad and is unknown to every optimizer: a parameter of a module, or
    the result of an operation on the old one. A parameter of another shape counts, too, if it has a gradient,
    lies in the same model and no optimizer has it. A leaf whose name is first bound after the optimizer was ``made``
    replaces none: it is another one.
    """
    from gradsan.detect.meaning.evidence import is_bound_after

    known = {id(one) for one in held}
    wanted = {tuple(one.shape) for one in missing}
    others, strangers = list[Found](), list[Found]()
    models, alive = set[str](), set[int]()
    for one in naming.find(frame, lambda tensor: tensor.requires_grad and not is_lazy(tensor)):
        if id(one.tensor) in known:
            if one.origin == "module" or one.within is None:
                alive.add(id(one.tensor))
            if one.origin == "module":
                models.add(_model_of(one))
        else:
            if tuple(one.tensor.shape) in wanted:
                others.append(one)
            if one.origin == "module" and one.tensor.is_leaf and one.tensor.grad is not None:
                strangers.append(one)
    used: set[int] = set()
    gone = [one for one in missing if id(one) not in alive]
    if gone and others:
        # What another optimizer has stands in for nothing that this one was given.
        elsewhere = set(map(id, _torch.parameters_of(*naming.optimizers_alive())))
        others = [one for one in others if id(one.tensor) not in elsewhere]
    if not any(tuple(one.shape) == tuple(other.tensor.shape) for one in gone for other in others):
        yield from zip(gone, _without_optimizer(strangers, models) if gone else (), strict=False)
        return
    for parameter in gone:
        for one in others:
            fits = one.tensor.shape == parameter.shape and id(one.tensor) not in used
            is_given = one.tensor.is_leaf and not (made and is_bound_after(made, one.path))
            if fits and (one.origin == "module" or is_given or comes_from(one.tensor, parameter)):
                used.add(id(one.tensor))
                yield parameter, one
                break


def is_reached(tensor: torch.Tensor) -> bool:
    """Whether a backward has reached ``tensor``, or would reach leaves through it."""
    return not tensor.is_leaf or tensor.grad is not None


def _without_optimizer(strangers: list[Found], models: set[str]) -> list[Found]:
    """The ``strangers`` in one of the models that no live optimizer has; optimizers are searched only if needed."""
    inside = [one for one in strangers if _model_of(one) in models]
    held = set(map(id, _torch.parameters_of(*naming.optimizers_alive()))) if inside else set()
    return [one for one in inside if id(one.tensor) not in held]


def _model_of(found: Found) -> str:
    return found.path.partition(".")[0].partition("[")[0]


def comes_from(tensor: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether ``tensor`` was computed from ``leaf``; graphs of more than 1,000 Nodes are not searched whole."""
    order = walk.engine_order([tensor.grad_fn]) if tensor.grad_fn is not None else []
    children = (child for node in order[:1_000] for child, _ in node.next_functions)
    return any(getattr(child, "variable", None) is leaf for child in children)
