"""Saved-tensor hooks as torch keeps them, per thread."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from gradsan._torch import memory

# The innermost default saved-tensor hooks of this thread as (pack, unpack). Missing: None, hooks cannot be inspected.
_top_hooks: Callable[[bool], Any] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


# Pushing and popping are what the public context manager ``saved_tensors_hooks`` does; it is the fallback.
push_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks


pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks


# Why hooks may not be used in this thread just now (functorch transforms set it). Missing: never known to be forbidden.
hooks_forbidden: Callable[[], str | None] = getattr(
    torch._C._autograd, "_saved_tensors_hooks_get_disabled_error_message", lambda: None
)


# What forbids hooks in this thread, and allows them again, as torch has it. Missing: None, nothing is found so.
_forbid: Callable[[str], None] | None = getattr(torch._C._autograd, "_saved_tensors_hooks_disable", None)
_allow: Callable[[], None] = getattr(torch._C._autograd, "_saved_tensors_hooks_enable", lambda: None)


# The class of what ``_raw_saved_*`` gives. Missing: None, and in deep mode slots take no hooks of the program's.
SAVED_TENSOR: Any = getattr(torch._C._autograd, "SavedTensor", None)


def top_hooks() -> tuple[Any, Any] | None:
    """The innermost (pack, unpack) pair of this thread, None where there is none or torch cannot tell."""
    if _top_hooks is None:
        return None
    pair = _top_hooks(True)
    return None if pair is None else (pair[0], pair[1])


def has_hooks() -> bool:
    """Whether saved-tensor hooks are entered in this thread. Missing both ways to tell: False."""
    if _top_hooks is not None:
        return top_hooks() is not None
    if _forbid is None or hooks_forbidden() is not None:
        return False
    try:
        # Before 2.7 the only one that tells: it raises where there are hooks, and forbids further ones all the same.
        _forbid("gradsan looks for hooks")
    except RuntimeError:
        return True
    finally:
        _allow()
    return False


@contextlib.contextmanager
def without_hooks() -> Iterator[None]:
    """A block in which this thread has no saved-tensor hooks. Missing: what is saved in it is hidden by them."""
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
    """Whose hooks the frames of torch (outermost first) are entering, or run under: ``checkpoint``, ``save_on_cpu``, …

    Missing: None, and the report speaks of hooks.
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
    """The namespace whose ``_saved_tensors_hooks_disable`` and ``_enable`` forbid hooks, None where there is none."""
    switch = torch._C._autograd
    return switch if hasattr(switch, "_saved_tensors_hooks_disable") else None


def removal_of(handle: Any) -> Any:
    """A mapping that is empty once the hook of ``handle`` was removed. Missing: it never is."""
    kept = OrderedDict({0: True})
    with contextlib.suppress(AttributeError, TypeError):
        kept = OrderedDict({handle.id: True})
        handle.extra_dict_ref = (*handle.extra_dict_ref, weakref.ref(kept))
    return kept


def parts_of_saves() -> dict[str, Any] | None:
    """What the C core calls to keep an ordinary saved tensor and to hand it out, as :mod:`gradsan.originals` does.

    Missing: None, and the hooks in Python do it all.
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
            "weak_tensor": memory.weak_tensor,
        }
    except (AttributeError, KeyError):
        return None
