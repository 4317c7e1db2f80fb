"""Clues to errors about views: the writes to the base, and the module whose hook made the view.

Roles: ``base_written`` (a logged write to the memory of the view since it was made), ``hooked_module`` (a module with
backward hooks: ``name`` the expression that reaches it, ``values``: ``module`` its class, ``certain`` whether it was
being called).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from gradsan.capture import _torch, naming
from gradsan.capture.clues.tensors import described, is_refused, made_by, writes_to
from gradsan.capture.clues.written import gather as gather_target
from gradsan.capture.values import tensor_of
from gradsan.model import Clue

if TYPE_CHECKING:
    from gradsan.capture.failures import Context

_BASE_WRITTEN = ("multi_view_base_written", "unrecorded_view_base_written")
ROWS = (*_BASE_WRITTEN, "function_view_inplace")


def gather(context: Context) -> tuple[Clue, ...]:
    """The writes, or the module."""
    if context.row == "function_view_inplace":
        return _hooked_modules(context)
    if context.frame is None:
        return ()
    if context.backward is None:
        target = next(iter(gather_target(context)), None)
        view = None if target is None or target.name is None else tensor_of(context.frame, target.name)
        return () if view is None else writes_to(context.core, view)
    found = next(iter(naming.find(context.frame, is_refused)), None)
    if found is None:
        return ()
    target = Clue("target", context.site, name=found.path, values=described(found.tensor, context.frame))
    made = made_by(context.core, found.tensor)
    return (target, *((made,) if made else ()), *writes_to(context.core, found.tensor))


def _hooked_modules(context: Context) -> tuple[Clue, ...]:
    """The modules being called that have backward hooks, else those that live variables reach."""
    called = [frame.f_locals.get("self") for frame in context.frames if frame.f_code.co_name == "_call_impl"]
    running = [one for one in called if isinstance(one, nn.Module) and _torch.has_backward_hooks(one)]
    if running:
        return tuple(_module_clue("", one, True) for one in running[-1:])
    frame = context.frame
    if frame is None:
        return ()
    found: dict[int, Clue] = {}
    for name, value in {**frame.f_globals, **frame.f_locals}.items():
        if isinstance(value, nn.Module):
            for inner, module in value.named_modules():
                if _torch.has_backward_hooks(module):
                    found.setdefault(id(module), _module_clue(f"{name}.{inner}" if inner else name, module, False))
    return tuple(found.values())[:3]


def _module_clue(name: str, module: Any, certain: bool) -> Clue:
    return Clue("hooked_module", name=name or None, values={"module": type(module).__name__, "certain": certain})
