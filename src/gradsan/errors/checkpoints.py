"""Clues to errors of checkpointing: the function that was checkpointed, the value that was kept.

Roles: ``checkpointed`` (the definition of that function, or of the ``__call__`` or ``forward`` of that object:
``name``, ``site``; ``values``: ``trains``, whether it has parameters that require grad), ``rerun`` (the backward that
was running it again).

Roles: ``cached`` (the operation whose result it is: ``op``; ``values``: ``shape``, ``dtype``, ``device``),
``base_written`` (the writes to it since, at most three).
"""

from __future__ import annotations

from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import nn

from gradsan import _torch
from gradsan.errors.tensors import writes_to
from gradsan.model import Clue
from gradsan.record.stacks import definition_site, is_user_file, symbolise

if TYPE_CHECKING:
    from gradsan.errors.failures import Context

_AGAIN = ("leaf_inplace", "leaf_view_inplace", "cached_overwritten", "checkpoint_unpacked_twice")
CHECKPOINTED_ROWS = ("checkpoint_count", "checkpoint_metadata", "checkpoint_input_plain", *_AGAIN)


def gather_checkpointed(context: Context) -> tuple[Clue, ...]:
    """The checkpointed function, where it is the program's own."""
    rerun = None if context.backward is None else Clue("rerun", symbolise(context.backward.stack))
    for frame in reversed(context.frames):
        for function in _torch.checkpointed_functions(frame):
            code = _code_of(function)
            if code is not None and is_user_file(code.co_filename):
                clue = Clue(
                    "checkpointed",
                    definition_site(code),
                    name=_name(function, code),
                    values={"trains": _trains(function)},
                )
                return (clue,) if rerun is None or context.row not in _AGAIN else (clue, rerun)
    return ()


def _name(function: Any, code: CodeType) -> str:
    return type(function).__name__ if isinstance(function, nn.Module) else code.co_name


def _trains(function: Any) -> bool:
    """Whether a module, or the one whose method or forward it is, has parameters that require grad."""
    owner = getattr(function, "__self__", function)
    return isinstance(owner, nn.Module) and any(one.requires_grad for one in owner.parameters())


def _code_of(function: Any) -> CodeType | None:
    """The code of a function or method, or of what a module or another callable object runs."""
    code = getattr(function, "__code__", None)
    if code is None:
        kind: Any = type(function)
        method = getattr(kind, "forward", None) or vars(kind).get("__call__")
        code = getattr(method, "__code__", None)
    return code if isinstance(code, CodeType) else None


CACHED_ROWS = ("cached_overwritten",)


def gather_cached(context: Context) -> tuple[Clue, ...]:
    """The kept tensor, off the frames of checkpoint that found it changed."""
    found = _torch.cached_in_checkpoint(context.frames)
    if found is None:
        return ()
    tensor, op = found
    facts = _torch.facts_of(tensor)
    return (Clue("cached", context.site, op=op, values=facts), *writes_to(context.core, tensor))
