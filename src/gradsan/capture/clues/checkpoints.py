"""Clues to errors of checkpoint's recomputation: which function was checkpointed.

Roles: ``checkpointed`` (the definition of that function, or of the ``__call__`` or ``forward`` of that object:
``name``, ``site``).
"""

from __future__ import annotations

from types import CodeType
from typing import TYPE_CHECKING, Any

from gradsan.capture import _torch
from gradsan.capture.stacks import file_of, is_user_file
from gradsan.model import Clue, Frame, Site

if TYPE_CHECKING:
    from gradsan.capture.failures import Context

ROWS = ("checkpoint_count", "checkpoint_metadata")


def gather(context: Context) -> tuple[Clue, ...]:
    """The checkpointed function, where it is the program's own."""
    for frame in reversed(context.frames):
        for function in _torch.checkpointed_functions(frame):
            code = _code_of(function)
            if code is not None and is_user_file(code.co_filename):
                place = Frame(file_of(code), code.co_firstlineno, code.co_name, is_user=True)
                return (Clue("checkpointed", Site((place,)), name=code.co_name),)
    return ()


def _code_of(function: Any) -> CodeType | None:
    """The code of a function or method, or of what a module or another callable object runs."""
    code = getattr(function, "__code__", None)
    if code is None:
        kind: Any = type(function)
        method = getattr(kind, "forward", None) or vars(kind).get("__call__")
        code = getattr(method, "__code__", None)
    return code if isinstance(code, CodeType) else None
