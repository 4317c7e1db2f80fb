"""State of torch.utils.checkpoint, reentrant or not, and its recomputation."""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint as _checkpoint


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
