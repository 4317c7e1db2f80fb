"""Saved-tensor hooks as torch keeps them, per thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# The innermost default saved-tensor hooks of this thread as (pack, unpack). Missing: None, hooks cannot be inspected.
_top_hooks: Callable[[bool], Any] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


# Pushing and popping are what the public context manager ``saved_tensors_hooks`` does; it is the fallback.
push_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks


pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks


# Why hooks may not be used in this thread just now (functorch transforms set it). Missing: never known to be forbidden.
hooks_forbidden: Callable[[], str | None] = getattr(
    torch._C._autograd, "_saved_tensors_hooks_get_disabled_error_message", lambda: None
)


def top_hooks() -> tuple[Any, Any] | None:
    """The innermost (pack, unpack) pair of this thread, None where there is none or torch cannot tell."""
    if _top_hooks is None:
        return None
    pair = _top_hooks(True)
    return None if pair is None else (pair[0], pair[1])


def hooks_switch() -> Any:
    """The namespace whose ``_saved_tensors_hooks_disable`` and ``_enable`` forbid hooks, None where there is none."""
    switch = torch._C._autograd
    return switch if hasattr(switch, "_saved_tensors_hooks_disable") else None
