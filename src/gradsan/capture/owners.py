"""Whose a parameter is: the program's own module that holds it, and by which of its attributes."""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any

from torch import nn

from gradsan.capture.stacks import definition_site, is_user_file
from gradsan.capture.values import value_of
from gradsan.model import Clue, Site


def owner_in(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The innermost module of the program's own classes on the way to ``name`` (``block.0.weight``), and the rest.

    ``module`` itself and the whole name where all others are torch's.
    """
    parts = name.split(".")
    found, rest = module, name
    at: Any = module
    for position, part in enumerate(parts[:-1]):
        at = dict(at.named_children()).get(part)
        if at is None:
            break
        if forward_of(at) is not None:
            found, rest = at, ".".join(parts[position + 1 :])
    return found, rest


def owner_of(path: str, frame: FrameType | None) -> tuple[nn.Module, str] | None:
    """The same for an expression (``net.block.0.weight``) as the frames from ``frame`` outwards know it."""
    parts = path.split(".")
    while frame is not None:
        for length in range(1, len(parts)):
            module = value_of(frame, ".".join(parts[:length]))
            if isinstance(module, nn.Module):
                return owner_in(module, ".".join(parts[length:]))
        frame = frame.f_back
    return None


def forward_of(module: nn.Module) -> Site | None:
    """Where the forward of a module of the program's own is defined; None for torch's and other packages' modules."""
    code = getattr(type(module).forward, "__code__", None)
    return None if code is None or not is_user_file(code.co_filename) else definition_site(code)


def clue_of(path: str | None, frame: FrameType | None, facts: Mapping[str, Any]) -> Clue:
    """The clue ``parameter`` of what ``path`` names: at the forward of its owner, with ``facts``."""
    owner = None if path is None else owner_of(path, frame)
    if owner is None:
        return Clue("parameter", name=path, values=dict(facts))
    module, rest = owner
    values = {**facts, "owner": type(module).__name__, "attribute": rest.partition(".")[0]}
    return Clue("parameter", forward_of(module), name=path, values=values)
