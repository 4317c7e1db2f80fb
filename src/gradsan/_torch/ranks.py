"""Data-parallel and sharded modules, and whether ranks wait for each other."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from gradsan._torch.nodes import function_class


def wrapped_by_ddp(frames: Iterable[Any]) -> Any:
    """The module within the DistributedDataParallel that the frames know. Missing: None, no parameter has a name."""
    for frame in frames:
        for value in (frame.f_locals.get("self"), *frame.f_locals.values(), *frame.f_globals.values()):
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
