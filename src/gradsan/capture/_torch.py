"""Every private torch name that gradsan touches, feature-detected, each with what happens where it is missing.

Nothing outside this module may name something of torch that starts with an underscore, except ``Tensor._version``,
``Tensor._base`` and ``UntypedStorage._cdata``, which the hot path reads directly.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._VF
import torch.fft
import torch.jit._builtins as _jit_builtins
import torch.linalg
import torch.nn.functional
import torch.optim
import torch.sparse
import torch.special
from torch.autograd import graph as _graph

is_tensor = torch.is_tensor
is_grad_enabled = torch.is_grad_enabled
is_compiling = torch.compiler.is_compiling


def _zero() -> int:
    return 0


def _none() -> None:
    return None


# The number the next autograd Node of this thread will carry. Missing: 0, and the order of nodes and writes is unknown.
sequence_number: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", _zero)

# The Node whose backward runs in this thread. Missing: None, and the operation that saved a tensor stays unnamed.
current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", _none)

# The innermost default saved-tensor hooks of this thread as (pack, unpack). Missing: None, hooks cannot be inspected.
_top_hooks: Callable[[bool], Any] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

# Pushing and popping are what the public context manager ``saved_tensors_hooks`` does; it is the fallback.
push_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks

# Why hooks may not be used in this thread just now (functorch transforms set it). Missing: never known to be forbidden.
hooks_forbidden: Callable[[], str | None] = getattr(
    torch._C._autograd, "_saved_tensors_hooks_get_disabled_error_message", _none
)


def top_hooks() -> tuple[Any, Any] | None:
    """The innermost (pack, unpack) pair of this thread, None where there is none or torch cannot tell."""
    if _top_hooks is None:
        return None
    pair = _top_hooks(True)
    return None if pair is None else (pair[0], pair[1])


@functools.lru_cache(maxsize=4096)
def _slot_names(kind: Any) -> tuple[str, ...]:
    """The names of the ``_raw_saved_*`` attributes of a class of Nodes; of a custom Function's there is one list."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_slots(node: Any) -> Iterator[tuple[str, Any]]:
    """(slot name, SavedTensor) of every saved tensor that a Node shows; list slots come as ``name[i]``.

    A custom Function has one list, ``saved_tensors``. Nodes such as CopySlices and the foreach nodes show none. A slot
    already freed is left out.
    """
    kind: Any = type(node)
    for attribute in _slot_names(kind):
        try:
            value = getattr(node, attribute)
        except RuntimeError:
            continue
        slot = attribute[len("_raw_saved_") :]
        slot = "saved_tensors" if slot == "tensors" and hasattr(node, "saved_tensors") else slot
        if isinstance(value, (tuple, list)):
            for position, item in enumerate(value):
                if item is not None:
                    yield f"{slot}[{position}]", item
        elif value is not None:
            yield slot, value


def packed_object(saved: Any) -> Any:
    """What the pack hook returned for a SavedTensor; None where there were no hooks or it is freed."""
    try:
        return saved.data
    except (RuntimeError, AttributeError):
        return None


def node_sequence(node: Any) -> int | None:
    """A Node's sequence number: creation order within a thread. None for AccumulateGrad, which has none."""
    number: int = node._sequence_nr()
    return None if number >= 2**63 else number


def weak_identity(tensor: Any) -> tuple[int, int | None, tuple[Any, ...]]:
    """(storage, version, geometry) for tensors without an ordinary storage or version (sparse, inference, nested)."""
    try:
        version = tensor._version
    except RuntimeError:
        version = None
    try:
        storage = tensor.untyped_storage()._cdata
        geometry: tuple[Any, ...] = (
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.element_size(),
        )
    except (RuntimeError, NotImplementedError):
        storage, geometry = storage_identity(tensor), (0, tuple(tensor.shape), None, 1)
    return storage, version, geometry


def storage_identity(tensor: Any) -> int:
    """A number that two tensors share while they share memory. Sparse tensors: that of their values."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        pass
    try:
        if tensor.layout is torch.sparse_coo:
            return int(tensor._values().untyped_storage()._cdata)
        return int(tensor.values().untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, AttributeError):
        return int(tensor._cdata)


def storage_or_none(tensor: Any) -> int:
    """The identity of an ordinary storage, 0 where the tensor has none (sparse, nested)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


def optimizer_folder() -> str:
    """The folder of torch's own optimizers, whose inner writes are accounted for per step."""
    return str(Path(torch.optim.__file__).parent) + os.sep


def package_folder() -> str:
    """The folder torch is installed in."""
    return str(Path(torch.__file__).parent) + os.sep


def dress(wrapper: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """Give ``wrapper`` the name, documentation and signature of ``original``."""
    return functools.wraps(original)(wrapper)


def engine_entry_points() -> list[tuple[Any, str]]:
    """(namespace, name) of the one function through which ``backward`` and ``grad`` enter the engine."""
    return [
        (namespace, "_engine_run_backward")
        for namespace in (torch.autograd, _graph)
        if hasattr(namespace, "_engine_run_backward")
    ]


def all_schemas() -> list[Any]:
    """The schema of every operator known to the dispatcher."""
    return list(torch._C._jit_get_all_schemas())


def function_namespaces() -> list[Any]:
    """Every namespace of torch that holds builtin functions which may write to a tensor."""
    names = ("_nn", "_linalg", "_fft", "_special", "_sparse", "_nested")
    inner = [getattr(torch._C, name) for name in names if hasattr(torch._C, name)]
    return [torch, torch._VF, *inner, torch.nn.functional, torch.linalg, torch.fft, torch.special, torch.sparse]


def variable_function(name: str) -> Any:
    """The builtin behind ``torch.<name>``, None where there is none."""
    return getattr(torch._C._VariableFunctions, name, None)


def operator_class() -> Any:
    """The class of ``torch.ops.<library>.<op>.<overload>``. Missing: operators called directly are a blind spot."""
    return getattr(getattr(torch, "_ops", None), "OpOverload", None)


def operator_packet_class() -> Any:
    """The class of ``torch.ops.<library>.<op>``; as for :func:`operator_class`."""
    return getattr(getattr(torch, "_ops", None), "OpOverloadPacket", None)


def function_apply() -> tuple[Any, str, Any]:
    """(owner, name, function) of the classmethod by which every custom Function makes its Node."""
    function = torch.autograd.Function
    return function, "apply", vars(function)["apply"].__func__


def vf_module() -> Any:
    """The module object by which ``torch.nn.functional`` reaches builtin functions."""
    return torch._VF


def introduce_to_jit(original: Any, wrapper: Any) -> Callable[[], None] | None:
    """Make ``torch.jit.script`` take ``wrapper`` for the builtin ``original``; returns how to undo that.

    Missing table: None, and scripting a function that calls the wrapper says that the builtin is unknown.
    """
    find = getattr(_jit_builtins, "_find_builtin", None)
    table_of = getattr(_jit_builtins, "_get_builtin_table", None)
    if find is None or table_of is None:
        return None
    name = find(original)
    if name is None:
        return None
    table = table_of()
    table[id(wrapper)] = name

    def undo() -> None:
        table.pop(id(wrapper), None)

    return undo
