"""Private state of modules: hooks, parameters, the code of a call, data-parallel and sharded modules."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch.nn import utils
from torch.nn.utils import clip_grad

from gradsan._torch.engine import locals_of
from gradsan._torch.nodes import function_class


def has_backward_hooks(module: Any) -> bool:
    """Whether a module has full backward hooks, which pass its inputs and outputs through a custom Function.

    Of a leaf: whether it has gradient hooks. Missing: False, and a view made by a hook is told like one of any custom
    Function.
    """
    return bool(getattr(module, "_backward_hooks", None) or getattr(module, "_backward_pre_hooks", None))


def has_leaf_hooks(tensor: Any) -> bool:
    """Whether a tensor has hooks that are given its gradient, before it is added up or after. Missing: False."""
    return bool(getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None))


def clip_functions() -> list[tuple[Any, str, bool]]:
    """Where the functions stand that clip gradients, by owner and name, each given the parameters and a bound first;
    and whether these parameters are a list.

    ``clip_grad_norm_`` ends in one of its module's own, however it was imported. Missing: by its public name.
    """
    inner = "_clip_grads_with_norm_"
    norm = (clip_grad, inner, True) if hasattr(clip_grad, inner) else (utils, "clip_grad_norm_", False)
    return [norm, (utils, "clip_grad_value_", False), (clip_grad, "clip_grad_value_", False)]


def is_empty_generator(given: Any, caller: FrameType | None) -> bool:
    """Whether a function that clips has been given a generator that gives nothing; ``caller`` is what called it.

    The inner function has a list; ``clip_grad_norm_``, which calls it, knows what that was. Missing: nothing is known.
    ``filter`` and ``map`` show what they take from.
    """
    if isinstance(given, filter | map):
        return any(is_empty_generator(one, None) for one in given.__reduce__()[1][1:])
    if inspect.isgenerator(given):
        return inspect.getgeneratorstate(given) == inspect.GEN_CLOSED
    if not isinstance(given, list) or given or caller is None:
        return False
    code = caller.f_code
    is_norm = (code.co_name, code.co_filename) == ("clip_grad_norm_", clip_grad.__file__)
    return is_norm and caller.f_locals.get("is_generator") is True


# The names of what ``module(…)`` runs, as they stand on a bound method of it.
MODULE_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl")


def own_tensors(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and buffers of a module itself, some of them None. Missing: read by its iterators."""
    parameters, buffers = getattr(module, "_parameters", None), getattr(module, "_buffers", None)
    if isinstance(parameters, dict) and isinstance(buffers, dict):
        return parameters, buffers
    return dict(module.named_parameters(recurse=False)), dict(module.named_buffers(recurse=False))


def forward_pre_hooks(module: Any) -> tuple[Any, ...]:
    """The hooks of a module that run before its forward; none where torch keeps them elsewhere."""
    return tuple((getattr(module, "_forward_pre_hooks", None) or {}).values())


def forward_hooks(module: Any) -> tuple[Any, ...]:
    """The hooks of a module that run after its forward; none where torch keeps them elsewhere."""
    return tuple((getattr(module, "_forward_hooks", None) or {}).values())


def has_forward_pre_hooks(module: Any) -> bool:
    """Whether something runs before a module's forward. Missing: False."""
    return bool(getattr(module, "_forward_pre_hooks", None))


@functools.lru_cache(maxsize=1)
def normalisation_classes() -> tuple[type, ...]:
    """The modules that keep running statistics. Missing: only the public ones by name."""
    base = getattr(torch.nn.modules.batchnorm, "_NormBase", None)
    return (base,) if base is not None else (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


def wrapped_module(module: Any) -> Any:
    """The user's module inside one that only runs it otherwise (compiled, data parallel); None for any other.

    Missing ``_orig_mod``: a compiled module is taken for one without source.
    """
    inner = vars(module).get("_orig_mod")
    if inner is None and type(module).__name__ == "OptimizedModule":
        inner = dict(module.named_children()).get("_orig_mod")
    if inner is None and type(module).__name__ in ("DataParallel", "DistributedDataParallel"):
        inner = dict(module.named_children()).get("module")
    return inner


def name_in_module(name: str) -> str:
    """A dotted name within a module as programs say it: the wrapper of torch.compile hands on what it holds.

    ``l.weight`` of ``_orig_mod.l.weight``. Missing ``_orig_mod``: names are what they are.
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def cached_parametrizations() -> dict[str, Any]:
    """What ``parametrize.cached()``, entered and not yet left, keeps, by the last name of the parameter.

    Missing: nothing.
    """
    module = sys.modules.get("torch.nn.utils.parametrize")
    known = getattr(module, "_cache", None) if getattr(module, "_cache_enabled", 0) else None
    found = known.items() if isinstance(known, dict) else ()
    return {str(key[-1]): value for key, value in found if isinstance(key, tuple) and isinstance(value, torch.Tensor)}


def wrapped_by_ddp(frames: Iterable[Any]) -> Any:
    """The module within the DistributedDataParallel that the frames know. Missing: None, no parameter has a name."""
    for frame in frames:
        for value in (*locals_of(frame).values(), *frame.f_globals.values()):
            if isinstance(value, torch.nn.parallel.DistributedDataParallel):
                return value.module
    return None


def flat_parameter_names(frames: Iterable[Any]) -> tuple[str, ...]:
    """The names of the parameters whose flat parameter the innermost frame of FSDP1 works on; empty where none does.

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


def is_of_flat_parameter(tensor: Any) -> bool:
    """Whether a tensor is, or is a part of, a flat parameter that FSDP1 gathers and gives back past the counter.

    Missing mark: False, and what FSDP1 does there is taken for writes of the program.
    """
    return hasattr(tensor, "_fsdp_flattened") or hasattr(tensor._base, "_fsdp_flattened")


SHARDED_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def has_other_ranks() -> bool:
    """Whether this process has joined a process group of several."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def may_communicate(nodes: Iterable[Any]) -> bool:
    """Whether a backward through these Nodes may wait for other ranks, which would have to run it just as often.

    Collectives stand in custom Functions, in Nodes of c10d, and in the hooks of FSDP2.
    """
    if not has_other_ranks():
        return False
    is_sharded = sys.modules.get(SHARDED_MODULE) is not None
    return is_sharded or any(function_class(node) is not None or "c10d" in node.name() for node in nodes)


def buffer_sync() -> tuple[Any, str]:
    """(owner, name) of the method by which DistributedDataParallel gives its buffers to the other ranks.

    Missing: (None, ""), and such writes are not seen.
    """
    owner = getattr(torch.nn.parallel, "DistributedDataParallel", None)
    return (owner, "_sync_buffers") if hasattr(owner, "_sync_buffers") else (None, "")


def sharded_group() -> Any:
    """The class of FSDP2 that gathers the parameters of a module, where the program has imported it.

    Missing: None, and what backward gathers anew is not compared with what forward had.
    """
    group = getattr(sys.modules.get(SHARDED_MODULE), "FSDPParamGroup", None)
    return group if all(hasattr(group, name) for name in ("wait_for_unshard", "pre_backward", "is_unsharded")) else None
