"""Clues to errors of custom Functions that the Function's own source explains.

Roles: ``definition`` (where its forward or backward is defined; ``name`` the Function), ``node`` (the call of
``apply``; ``op`` its Node), ``rerun`` (the backward that was running).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradsan.capture import _torch
from gradsan.capture.applied import is_application
from gradsan.capture.clues.tensors import of_node
from gradsan.capture.stacks import definition_site, is_user_file, symbolise
from gradsan.model import Clue

if TYPE_CHECKING:
    from gradsan.capture.failures import Context

ROWS = ("saved_read_twice", "checkpoint_unpacked_twice", "dirty_not_input")


def gather(context: Context) -> tuple[Clue, ...]:
    """The Function whose forward or backward was running."""
    if context.row == "dirty_not_input":
        return _defined(_applied(context), "forward")
    node = _running(context)
    found = _defined(_torch.function_class(node), "backward")
    call = None if node is None else of_node(context.core, node, "node")
    if call is not None and context.row == "saved_read_twice":
        found = (*found, call)
    if context.backward is not None and context.row == "saved_read_twice":
        found = (*found, Clue("rerun", symbolise(context.backward.stack)))
    return found


def _running(context: Context) -> Any:
    """The Node whose backward, a function of the program's, is the innermost of the stack."""
    for frame in reversed(context.frames):
        for value in frame.f_locals.values():
            if isinstance(value, type):
                continue
            if _torch.function_class(value) is not None:
                return value
    return None


def _applied(context: Context) -> Any:
    """The Function that is being applied."""
    for frame in reversed(context.frames):
        if is_application(frame.f_code):
            applied = frame.f_locals.get("cls", frame.f_locals.get("kind"))
            if isinstance(applied, type):
                return applied
    return None


def _defined(function: Any, method: str) -> tuple[Clue, ...]:
    code = getattr(getattr(function, method, None), "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return ()
    return (Clue("definition", definition_site(code), name=function.__name__),)
