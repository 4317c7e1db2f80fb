"""Saved-tensor hooks per thread, and torch.utils.checkpoint, which is made of them; what deep mode's core calls."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint as _checkpoint

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


def checkpointed_functions(frame: FrameType) -> list[Any]:
    """Return the functions that checkpoint recomputes, or their closures, for a frame of torch.utils.checkpoint.

    Missing: empty, and the report does not say which function was checkpointed.
    """
    if not frame.f_code.co_filename.replace("\\", "/").endswith("torch/utils/checkpoint.py"):
        return []
    holders = [frame.f_locals.get("frame"), frame.f_locals.get("self")]
    reentrant = getattr(frame.f_locals.get("ctx"), "run_function", None) or frame.f_locals.get("run_function")
    found: list[Any] = [] if reentrant is None else [reentrant]
    for recompute in (getattr(holder, "recompute_fn", None) for holder in holders):
        for cell in getattr(recompute, "__closure__", None) or ():
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            if callable(content) and not isinstance(content, type):
                found.append(content)
    return found


def is_of_checkpoint(hook: Any) -> bool:
    """Whether a saved-tensor hook is one of checkpoint's, which recompute values."""
    # torch's compiler wraps the hook of the recomputation, to leave it alone.
    plain = getattr(hook, "_torchdynamo_orig_callable", hook)
    return getattr(getattr(plain, "__code__", None), "co_filename", "") == _checkpoint.__file__


def is_recomputed(codes: Iterable[types.CodeType]) -> bool:
    """Whether a recomputation of checkpoint made a call, by the code on its stack."""
    return any(code.co_name == "unpack_hook" and code.co_filename == _checkpoint.__file__ for code in codes)


def reentrant_checkpoint() -> Any:
    """Return the custom Function behind ``checkpoint(use_reentrant=True)``. Missing: that form is not watched."""
    return getattr(_checkpoint, "CheckpointFunction", None)


def checkpoint_classes() -> tuple[type, type] | None:
    """Return the hooks class of ``checkpoint(use_reentrant=False)`` and the class of the frames made for its forwards.

    Missing: None, that form is not watched.
    """
    hooks, frames = getattr(_checkpoint, "_checkpoint_hook", None), getattr(_checkpoint, "_CheckpointFrame", None)
    needed = ("save_inputs", "get_inputs", "check_recomputed_tensors_match")
    if hooks is None or frames is None or not all(hasattr(frames, one) for one in needed):
        return None
    return hooks, frames


def cached_in_checkpoint(frames: Iterable[Any]) -> tuple[Any, str] | None:
    """Return the tensor that selective checkpointing kept and found changed, and the operator that made it.

    Read from the frames of the error. Missing: None, and the report does not say what was kept.
    """
    op = "?"
    for frame in frames:
        if not frame.f_code.co_filename.replace("\\", "/").endswith("torch/utils/checkpoint.py"):
            continue
        names = frame.f_locals
        packet = getattr(names.get("func"), "overloadpacket", None)
        op = getattr(packet, "__name__", op)
        kept = getattr(names.get("self"), "val", None)
        if torch.is_tensor(kept) and hasattr(names["self"], "version"):
            return kept, op
    return None


def determinism_checks() -> dict[str, Any]:
    """Return checkpoint's metadata functions for saved tensors, by check. Missing: empty, no value is compared."""
    found = getattr(_checkpoint, "_allowed_determinism_checks_to_fns", None)
    return found if isinstance(found, dict) else {}


def saved_in_checkpoint(frame: FrameType) -> list[tuple[Any, Any]]:
    """Return (holder in the graph, metadata that checkpoint noted) of each tensor that a checkpoint's forward saved.

    Missing: empty, and no value is found changed.
    """
    holders, looked_at = getattr(frame, "weak_holders", ()), getattr(frame, "x_metadatas", ())
    return [(holder(), found) for holder, found in zip(holders, looked_at, strict=False)]


def recomputed_call(frame: FrameType) -> tuple[Any, dict[str, Any]] | None:
    """Return the function that checkpoint recomputes for one of its frames, and its keyword arguments.

    Read from the closure of ``recompute_fn``. Missing: None, and nothing is noted.
    """
    recompute: Any = getattr(frame, "recompute_fn", None)
    found = _closure_of(recompute, ("fn", "kwargs"))
    return (found["fn"], dict(found.get("kwargs") or {})) if "fn" in found else None


def draws_anew(held: Any) -> bool:
    """Whether a recomputation draws other random numbers than its forward, for a frame or a Node of checkpoint.

    Missing: False, and the values are not compared for that.
    """
    kept = getattr(held, "preserve_rng_state", None)
    if kept is None:
        kept = _closure_of(getattr(held, "recompute_fn", None), ("preserve_rng_state",)).get("preserve_rng_state")
    return kept is False


def _closure_of(function: Any, names: Sequence[str]) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    cells = () if code is None else zip(code.co_freevars, function.__closure__ or (), strict=False)
    return {name: cell.cell_contents for name, cell in cells if name in names}
