"""Saved-tensor hooks per thread: reading, pushing and suspending them; the C functions that deep mode's core calls."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from gradsan._torch import memory, weak

# The innermost default saved-tensor hooks of this thread as (pack, unpack). Missing: None, hooks cannot be inspected.
_top_hooks: Callable[[bool], Any] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


# Pushing and popping is what the public context manager ``saved_tensors_hooks`` does; it is the fallback.
push_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks


pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks


# Why hooks are forbidden in this thread now (functorch transforms do that). Missing: never known to be forbidden.
hooks_forbidden: Callable[[], str | None] = getattr(
    torch._C._autograd, "_saved_tensors_hooks_get_disabled_error_message", lambda: None
)


# Forbids hooks in this thread, and allows them again. Missing: None, hooks are not detected this way.
_forbid: Callable[[str], None] | None = getattr(torch._C._autograd, "_saved_tensors_hooks_disable", None)
_allow: Callable[[], None] = getattr(torch._C._autograd, "_saved_tensors_hooks_enable", lambda: None)


# The class of ``_raw_saved_*`` attributes. Missing: None, and in deep mode slots take no hooks of the program's.
SAVED_TENSOR: Any = getattr(torch._C._autograd, "SavedTensor", None)


def top_hooks() -> tuple[Any, Any] | None:
    """Return the innermost (pack, unpack) pair of this thread; None where there is none or torch cannot tell."""
    if _top_hooks is None:
        return None
    pair = _top_hooks(True)
    return None if pair is None else (pair[0], pair[1])


def has_hooks() -> bool:
    """Whether saved-tensor hooks are active in this thread. False if neither name exists."""
    if _top_hooks is not None:
        return top_hooks() is not None
    if _forbid is None or hooks_forbidden() is not None:
        return False
    try:
        # Before 2.7 the only test: it raises where there are hooks, but forbids further ones all the same.
        _forbid("gradsan looks for hooks")
    except RuntimeError:
        return True
    finally:
        _allow()
    return False


@contextlib.contextmanager
def without_hooks() -> Iterator[None]:
    """A block in which this thread has no saved-tensor hooks. Missing: saves in it still go through the hooks."""
    pairs = []
    while (pair := top_hooks()) is not None:
        pairs.append(pair)
        pop_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(pairs):
            push_hooks(pack, unpack)


def owner_of_hooks(frames: Iterable[Any]) -> str | None:
    """Return the owner of the hooks that torch's frames (outermost first) enter or run under: ``checkpoint``, …

    Missing: None, and the report only mentions hooks.
    """
    owner = None
    for frame in frames:
        file = frame.f_code.co_filename.replace("\\", "/")
        if file.endswith("torch/utils/checkpoint.py"):
            owner = "checkpoint"
        elif file.endswith("torch/autograd/graph.py"):
            entered = frame.f_locals.get("self")
            if frame.f_code.co_name == "allow_mutation_on_saved_tensors":
                owner = "allow_mutation_on_saved_tensors"
            elif owner is None and isinstance(entered, torch.autograd.graph.saved_tensors_hooks):
                owner = type(entered).__name__
    return owner


def hooks_switch() -> Any:
    """Return the namespace of ``_saved_tensors_hooks_disable`` and ``_enable``, which forbid hooks; None if missing."""
    switch = torch._C._autograd
    return switch if hasattr(switch, "_saved_tensors_hooks_disable") else None


def removal_of(handle: Any) -> Any:
    """Return a mapping that is empty once the hook of ``handle`` was removed. Missing: it never is."""
    kept = OrderedDict({0: True})
    with contextlib.suppress(AttributeError, TypeError):
        kept = OrderedDict({handle.id: True})
        handle.extra_dict_ref = (*handle.extra_dict_ref, weakref.ref(kept))
    return kept


def parts_of_saves() -> dict[str, Any] | None:
    """Return the functions by which the C core keeps and unpacks an ordinary saved tensor (see ``originals``).

    Missing: None, and the Python hooks do everything.
    """
    try:
        base, storage = torch._C.TensorBase, torch._C.StorageBase
        return {
            "address": vars(base)["const_data_ptr"],
            "detach": base.detach,
            "dispatch_depth": torch._C._len_torch_dispatch_stack,
            "dlpack_types": memory.DLPACK_TYPES,
            "from_dlpack": torch._C._from_dlpack,
            "function_node": torch._C._FunctionBase,
            "is_cow": vars(torch._C)["_is_cow_tensor"],
            "is_negated": base.is_neg,
            "is_tracing": torch._C._is_tracing,
            "lazy_clone": torch._lazy_clone,
            "lent_storages": memory.lent_storages,
            "nbytes": vars(storage)["nbytes"],
            "resizable": vars(storage)["resizable"],
            "weak_tensor": weak.weak_tensor,
        }
    except (AttributeError, KeyError):
        return None
