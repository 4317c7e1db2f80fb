"""Clues to errors that come from what the program tells torch about its operators.

Roles: ``operator`` (the definition of a custom operator: ``name``), ``base_written`` (a write in it), ``dispatcher``
(a ``__torch_dispatch__`` of the program's: ``name`` its class).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gradsan.capture import _torch
from gradsan.capture.ledger import RawWrite
from gradsan.capture.stacks import definition_site, is_user_file, symbolise
from gradsan.model import Clue

if TYPE_CHECKING:
    from gradsan.capture.failures import Context

_UNDECLARED = ("undeclared_mutation", "undeclared_mutation_checked")
_NOT_FRESH = ("view_same_as_base", "view_with_history")
ROWS = (*_UNDECLARED, *_NOT_FRESH)

_WRITES_TOLD = 3


def gather(context: Context) -> tuple[Clue, ...]:
    """The operator and its writes; or the classes that take operators over."""
    if context.row in _NOT_FRESH:
        return tuple(_dispatchers(context.frame))[:1]
    function = _torch.checked_operator(context.error)
    code = getattr(function, "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return ()
    writes = [raw for raw in (RawWrite(*entry) for entry in context.core.writes()) if code in _codes(raw.stack)]
    told = {id(raw.stack): Clue("base_written", symbolise(raw.stack), op=raw.op) for raw in writes}
    return (Clue("operator", definition_site(code), name=code.co_name), *list(told.values())[-_WRITES_TOLD:])


def _codes(stack: Any) -> tuple[Any, ...]:
    """The code objects of a raw stack; none of what was read off the source."""
    return tuple(getattr(stack, "codes", ()))


def _dispatchers(frame: Any) -> Iterator[Clue]:
    """The classes with a ``__torch_dispatch__`` of their own that the user's frames know by name, nearest first."""
    while frame is not None:
        for value in (*frame.f_locals.values(), *frame.f_globals.values()):
            kind = value if isinstance(value, type) else type(value)
            method = vars(kind).get("__torch_dispatch__")
            code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None) if method else None
            if code is not None and is_user_file(code.co_filename):
                yield Clue("dispatcher", definition_site(code), name=kind.__name__)
        frame = frame.f_back
