"""Wrapper subclasses: tensors whose memory is that of tensors they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gradsan._torch.modes import PLAIN_TENSORS

_DISPATCHED_BY_TORCH = ("torch.distributed.", "torch.nested.", "torch._subclasses.", "torch.sparse.", "torch.masked.")
_CLASSES_READ = 500


def inner_tensors(tensor: Any) -> tuple[tuple[str, Any], ...]:
    """(name, tensor) of what a wrapper subclass holds its values in; empty for other tensors.

    A class tells by ``__tensor_flatten__``, which torch.compile calls, too. Of one that does not, the only tensor among
    its attributes is taken; where there are several, some may be no part of the value, and none is. Torch's own
    wrappers (DTensor, nested tensors) let nobody else have their inside, and are left out.
    """
    kind = type(tensor)
    if kind in PLAIN_TENSORS or not _is_wrapper(kind):
        return ()
    if hasattr(kind, "__tensor_flatten__"):
        try:
            names, _ = tensor.__tensor_flatten__()
            held = [(name, getattr(tensor, name)) for name in names]
        except Exception:
            return ()  # the program's own code, which nobody but gradsan has asked
    else:
        held = [(name, one) for name, one in _attributes(tensor) if torch.is_tensor(one)]
        held = held if len(held) == 1 else []
    return tuple((name, one) for name, one in held if torch.is_tensor(one))


def _attributes(tensor: Any) -> Iterator[tuple[str, Any]]:
    yield from vars(tensor).items()
    for kind in type(tensor).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name != "__dict__" and hasattr(tensor, name):
                yield name, getattr(tensor, name)


def has_wrapper_classes() -> bool:
    """Whether the program knows a wrapper subclass that is not torch's own."""
    waiting, seen = list(torch.Tensor.__subclasses__()), 0
    while waiting and seen < _CLASSES_READ:
        kind = waiting.pop()
        seen += 1
        if _is_wrapper(kind) and not kind.__module__.startswith("torch."):
            return True
        waiting += kind.__subclasses__()
    return False


def dispatches(kind: type) -> bool:
    """Whether a class of tensors has a ``__torch_dispatch__`` of its own."""
    if kind in PLAIN_TENSORS:
        return False
    own = getattr(kind, "__torch_dispatch__", None)
    return own is not None and getattr(own, "__func__", own) is not _NO_DISPATCH


_NO_DISPATCH = getattr(torch._C, "_disabled_torch_dispatch_impl", None)


def _is_wrapper(kind: type) -> bool:
    return dispatches(kind) and not kind.__module__.startswith(_DISPATCHED_BY_TORCH)
