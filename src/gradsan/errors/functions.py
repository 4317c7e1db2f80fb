"""Clues to errors of custom Functions, checkpointing, operators and saved-tensor hooks of the program.

Roles: ``definition`` (where its forward or backward is defined; ``name`` the Function), ``node`` (the call of
``apply``; ``op`` its Node), ``rerun`` (the backward that was running).

Roles: ``operator`` (the definition of a custom operator: ``name``), ``base_written`` (a write in it), ``dispatcher``
(a ``__torch_dispatch__`` of the program's: ``name`` its class).

Roles: ``hooks`` (``name``: ``checkpoint``, ``save_on_cpu``, ``allow_mutation_on_saved_tensors``, or another class of
hooks; ``values``: ``are_outside``, whether they were active before the region began; then only checkpoint
has a name).

Roles: ``checkpointed`` (the definition of that function, or of the ``__call__`` or ``forward`` of that object:
``name``, ``site``; ``values``: ``trains``, whether it has parameters that require grad), ``rerun`` (the backward that
was rerunning it).

Roles: ``cached`` (the operation that made it: ``op``; ``values``: ``shape``, ``dtype``, ``device``),
``base_written`` (the writes to it since, at most three).
"""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

from torch import nn

from gradsan import _torch
from gradsan.catalogue import place_raised
from gradsan.detect.functions import forward_code
from gradsan.errors.context import Context, of_node, writes_to
from gradsan.model import Clue
from gradsan.record.log import logged_writes
from gradsan.record.stacks import definition_site, is_user_file, symbolise


def gather_applied(context: Context) -> tuple[Clue, ...]:
    """Return the Function whose forward was running."""
    return _defined(_applied(context), "forward")


def gather_running(context: Context) -> tuple[Clue, ...]:
    """Return the Function whose backward was running."""
    node = _running(context)
    found = _defined(_torch.function_class(node), "backward")
    call = None if node is None else of_node(context.core, node, "node")
    if call is not None and context.row == "saved_read_twice":
        found = (*found, call)
    if context.backward is not None and context.row == "saved_read_twice":
        found = (*found, Clue("rerun", symbolise(context.backward.stack)))
    return found


def _running(context: Context) -> Any:
    """Return the Node whose backward, in Python, is the innermost on the stack."""
    for frame in reversed(context.frames):
        for value in _torch.locals_of(frame).values():
            if isinstance(value, type):
                continue
            if _torch.function_class(value) is not None:
                return value
    return None


def _applied(context: Context) -> Any:
    """Return the Function that is being applied."""
    for frame in reversed(context.frames):
        known = _torch.locals_of(frame)
        if _torch.is_function_call(frame.f_code.co_filename) and isinstance(known.get("cls"), type):
            return known["cls"]
        for applied in filter(None, map(_torch.function_class, known.values())):
            if forward_code(applied) is frame.f_code:
                return applied
    return None


def _defined(function: Any, method: str) -> tuple[Clue, ...]:
    code = getattr(getattr(function, method, None), "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return ()
    return (Clue("definition", definition_site(code), name=function.__name__),)


_WRITES_SHOWN = 3


def gather_operator(context: Context) -> tuple[Clue, ...]:
    """Return the operator and its writes."""
    function = _torch.checked_operator(context.error)
    code = getattr(function, "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return ()
    writes = [raw for raw in logged_writes(context.core) if code in getattr(raw.stack, "codes", ())]
    shown = {id(raw.stack): Clue("base_written", symbolise(raw.stack), op=raw.op) for raw in writes}
    return (Clue("operator", definition_site(code), name=code.co_name), *list(shown.values())[-_WRITES_SHOWN:])


def gather_dispatcher(context: Context) -> tuple[Clue, ...]:
    """Return the nearest class with its own ``__torch_dispatch__`` among the variables of the user's frames."""
    frame = context.frame
    while frame is not None:
        for value in (*_torch.locals_of(frame).values(), *frame.f_globals.values()):
            kind = value if isinstance(value, type) else type(value)
            method = vars(kind).get("__torch_dispatch__")
            code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None) if method else None
            if code is not None and is_user_file(code.co_filename):
                return (Clue("dispatcher", definition_site(code), name=kind.__name__),)
        frame = frame.f_back
    return ()


def gather_hooks_refused(context: Context) -> tuple[Clue, ...]:
    """Return the owner of the hooks, as far as the stack of the error shows it."""
    are_outside = not place_raised(context.error).endswith(":__enter__")
    name = _torch.owner_of_hooks(context.frames)
    return (Clue("hooks", name=name, values={"are_outside": are_outside}),)


RUN_AGAIN = ("leaf_inplace", "leaf_view_inplace", "cached_overwritten", "checkpoint_unpacked_twice")
"""Rows that are raised, too, while a backward runs a checkpointed function again."""


def gather_checkpointed(context: Context) -> tuple[Clue, ...]:
    """Return the checkpointed function, if it is the program's own."""
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
                return (clue,) if rerun is None or context.row not in RUN_AGAIN else (clue, rerun)
    return ()


def _name(function: Any, code: CodeType) -> str:
    return type(function).__name__ if isinstance(function, nn.Module) else code.co_name


def _trains(function: Any) -> bool:
    """Whether a module, or that of a method, has parameters that require grad."""
    owner = getattr(function, "__self__", function)
    return isinstance(owner, nn.Module) and any(one.requires_grad for one in owner.parameters())


def _code_of(function: Any) -> CodeType | None:
    """Return the code of a function or method, or the code that a module or another callable object runs."""
    code = getattr(function, "__code__", None)
    if code is None:
        kind: Any = type(function)
        method = getattr(kind, "forward", None) or vars(kind).get("__call__")
        code = getattr(method, "__code__", None)
    return code if isinstance(code, CodeType) else None


def gather_cached(context: Context) -> tuple[Clue, ...]:
    """Return the kept tensor, from the frames of checkpoint that found it changed."""
    found = _torch.cached_in_checkpoint(context.frames)
    if found is None:
        return ()
    tensor, op = found
    facts = _torch.facts_of(tensor)
    return (Clue("cached", context.site, op=op, values=facts), *writes_to(context.core, tensor))
