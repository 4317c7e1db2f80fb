"""Private state of modules: hooks, parameters, code of a call; data-parallel and sharded modules."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.nn import utils
from torch.nn.utils import clip_grad

from gradsan._torch.engine import locals_of
from gradsan._torch.nodes import function_class
from gradsan._torch.operations import package_folder


def has_backward_hooks(module: Any) -> bool:
    """Whether a module has full backward hooks, which pass its inputs and outputs through a custom Function.

    For a leaf: whether it has gradient hooks. Missing: False, and a view made by a hook is reported like one of any
    custom Function.
    """
    return bool(getattr(module, "_backward_hooks", None) or getattr(module, "_backward_pre_hooks", None))


def hooked_tensors() -> tuple[Any, str]:
    """Return (owner, name) of the method by which a module's gradient hooks replace its inputs and outputs by views.

    It returns them with their places. Missing: (None, ""), and writes to such views stay rejected.
    """
    owner = torch.utils.hooks.BackwardHook
    return (owner, "_apply_on_tensors") if hasattr(owner, "_apply_on_tensors") else (None, "")


def has_leaf_hooks(tensor: torch.Tensor) -> bool:
    """Whether a tensor has hooks that get its gradient, before it is accumulated or after. Missing: False."""
    return bool(getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None))


def clip_functions() -> list[tuple[Any, str, bool]]:
    """Return the functions that clip gradients, by owner and name, and whether their parameters are a list.

    Each gets the parameters and a bound first.

    ``clip_grad_norm_`` ends in an inner function of its module, however it was imported. Missing: by its public name.
    """
    inner = "_clip_grads_with_norm_"
    norm = (clip_grad, inner, True) if hasattr(clip_grad, inner) else (utils, "clip_grad_norm_", False)
    return [norm, (utils, "clip_grad_value_", False), (clip_grad, "clip_grad_value_", False)]


def is_within_clip(frame: FrameType | None) -> bool:
    """Whether a function that clips gradients, or computes their norm for it, runs at most eight calls out."""
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_globals is vars(clip_grad):
            return True
        frame = frame.f_back
    return False


def is_empty_generator(given: Any, caller: FrameType | None) -> bool:
    """Whether a clip function has been given an exhausted generator; ``caller`` is the frame that called it.

    The inner function has a list; its caller ``clip_grad_norm_`` knows whether that was a generator. Missing: unknown.
    ``filter`` and ``map`` reveal their source; clip_grad_norm_ has none of them left, but its own caller has.
    """
    if isinstance(given, filter | map):
        return any(is_empty_generator(one, None) for one in given.__reduce__()[1][1:])
    if inspect.isgenerator(given):
        return inspect.getgeneratorstate(given) == inspect.GEN_CLOSED
    if not isinstance(given, list) or given or caller is None:
        return False
    code = caller.f_code
    is_norm = (code.co_name, code.co_filename) == ("clip_grad_norm_", clip_grad.__file__)
    outer: FrameType | None = caller
    while outer is not None and outer.f_code.co_filename.startswith(package_folder()):
        outer = outer.f_back
    if not is_norm or outer is None:
        return False
    if caller.f_locals.get("is_generator") is True:
        return True
    names = {name: outer.f_globals.get(name) for name in outer.f_code.co_names} | locals_of(outer)
    held = [*names.values(), *getattr(names.get("self"), "__dict__", {}).values()]
    # An empty list may be what was given.
    if any(isinstance(one, list) and not one for one in held):
        return False
    return any(isinstance(one, filter | map) and is_empty_generator(one, None) for one in held)


# Names of the code that ``module(…)`` runs, as found on a bound method of it.
MODULE_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl")


def own_tensors(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return parameters and buffers of a module itself, some of them None. Missing: read by its iterators."""
    parameters, buffers = getattr(module, "_parameters", None), getattr(module, "_buffers", None)
    if isinstance(parameters, dict) and isinstance(buffers, dict):
        return parameters, buffers
    return dict(module.named_parameters(recurse=False)), dict(module.named_buffers(recurse=False))


def forward_pre_hooks(module: Any) -> tuple[Any, ...]:
    """Return the hooks of a module that run before its forward; empty where torch keeps them elsewhere."""
    return tuple((getattr(module, "_forward_pre_hooks", None) or {}).values())


def forward_hooks(module: Any) -> tuple[Any, ...]:
    """Return the hooks of a module that run after its forward; empty where torch keeps them elsewhere."""
    return tuple((getattr(module, "_forward_hooks", None) or {}).values())


def has_forward_pre_hooks(module: Any) -> bool:
    """Whether hooks run before a module's forward. Missing: False."""
    return bool(getattr(module, "_forward_pre_hooks", None))


@functools.lru_cache(maxsize=1)
def normalisation_classes() -> tuple[type, ...]:
    """Return the modules that keep running statistics. Missing: only the public ones by name."""
    base = getattr(torch.nn.modules.batchnorm, "_NormBase", None)
    return (base,) if base is not None else (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


def wrapped_module(module: Any) -> Any:
    """Return the user's module inside a wrapper (compiled, data parallel); None for any other module.

    Missing ``_orig_mod``: a compiled module counts as one without source.
    """
    inner = vars(module).get("_orig_mod")
    if inner is None and type(module).__name__ == "OptimizedModule":
        inner = dict(module.named_children()).get("_orig_mod")
    if inner is None and type(module).__name__ in ("DataParallel", "DistributedDataParallel"):
        inner = dict(module.named_children()).get("module")
    return inner


def name_in_module(name: str) -> str:
    """Return a dotted name within a module as programs write it: without the wrapper of torch.compile.

    ``l.weight`` for ``_orig_mod.l.weight``. Missing ``_orig_mod``: names stay unchanged.
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def cached_parametrizations() -> dict[str, Any]:
    """Return the tensors cached by an active ``parametrize.cached()``, by the last name of the parameter.

    Missing: empty.
    """
    module = sys.modules.get("torch.nn.utils.parametrize")
    known = getattr(module, "_cache", None) if getattr(module, "_cache_enabled", 0) else None
    found = known.items() if isinstance(known, dict) else ()
    return {str(key[-1]): value for key, value in found if isinstance(key, tuple) and isinstance(value, torch.Tensor)}


def wrapped_by_ddp(frames: Iterable[Any]) -> Any:
    """Return the module within a DistributedDataParallel among the frames' variables. Missing: None, no names."""
    for frame in frames:
        for value in (*locals_of(frame).values(), *frame.f_globals.values()):
            if isinstance(value, torch.nn.parallel.DistributedDataParallel):
                return value.module
    return None


def flat_parameter_names(frames: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of the parameters in the flat parameter that FSDP1's innermost frame works on; empty if none.

    One name where that frame copies a single parameter back. Missing: empty, no parameter has a name.
    """
    for frame in reversed(tuple(frames)):
        if "torch/distributed/fsdp/" not in frame.f_code.co_filename.replace("\\", "/"):
            continue
        for holder in (frame.f_locals.get("handle"), frame.f_locals.get("self")):
            names = tuple(getattr(getattr(holder, "flat_param", None), "_fqns", ()))
            position = frame.f_locals.get("tensor_index")
            if names:
                return names[position : position + 1] if isinstance(position, int) else names
    return ()


def is_of_flat_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is, or is part of, a flat parameter that FSDP1 gathers and frees past the counter.

    Missing mark: False, and FSDP1's writes count as writes of the program.
    """
    return hasattr(tensor, "_fsdp_flattened") or hasattr(tensor._base, "_fsdp_flattened")


SHARDED_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def has_other_ranks() -> bool:
    """Whether this process has joined a process group of several."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def may_communicate(nodes: Iterable[Node]) -> bool:
    """Whether a backward through these Nodes may wait for other ranks, which would have to run it just as often.

    Collectives are in custom Functions, in Nodes of c10d, and in the hooks of FSDP2.
    """
    if not has_other_ranks():
        return False
    is_sharded = sys.modules.get(SHARDED_MODULE) is not None
    return is_sharded or any(function_class(node) is not None or "c10d" in node.name() for node in nodes)


def buffer_sync() -> tuple[Any, str]:
    """Return (owner, name) of the method by which DistributedDataParallel broadcasts its buffers.

    Missing: (None, ""), and such writes are not seen.
    """
    owner = getattr(torch.nn.parallel, "DistributedDataParallel", None)
    return (owner, "_sync_buffers") if hasattr(owner, "_sync_buffers") else (None, "")


def sharded_group() -> Any:
    """Return the FSDP2 class that gathers a module's parameters, if the program has imported it.

    Missing: None, and parameters gathered in backward are not compared with those of forward.
    """
    group = getattr(sys.modules.get(SHARDED_MODULE), "FSDPParamGroup", None)
    return group if all(hasattr(group, name) for name in ("wait_for_unshard", "pre_backward", "is_unsharded")) else None
