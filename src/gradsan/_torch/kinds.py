"""Kinds of tensors by their dispatch keys: which have elements of their own in ordinary memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_keys_of: Callable[[Any], Any] | None = getattr(torch._C, "_dispatch_keys", None)

# What lies in ordinary memory, with the bits and the bookkeeping that leave it there.
_ORDINARY = ("Autograd", "Autocast", "ADInplaceOrView", "Conjugate", "Negative", "Dense")
_DEVICES = ("CPU", "CUDA", "HIP", "XPU", "MPS", "HPU", "MTIA", "MAIA", "IPU", "VE", "PrivateUse")

_known: dict[int, bool] = {}


def has_elements(tensor: Any) -> bool:
    """Whether the elements of a tensor lie in ordinary memory, to be copied and compared.

    They do not where a class of its own dispatches (subclasses, fake tensors), where a transform wraps it (``vmap``,
    functionalization), and where it is sparse, nested, quantized, of zeros without memory, or on ``meta``. Missing: by
    class and layout.
    """
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return False
    if _keys_of is None:
        is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
        return bool(is_dense and tensor.device.type != "meta")
    keys = _keys_of(tensor)
    number = int(keys.raw_repr())
    known = _known.get(number)
    if known is None:
        known = _known[number] = _is_ordinary(str(keys))
    return known


def _is_ordinary(keys: str) -> bool:
    """``keys`` as ``DispatchKeySet(CPU, ADInplaceOrView, AutogradCPU)``."""
    names = keys.partition("(")[2].rstrip(")").replace(" ", "").split(",")
    return all(name.startswith((*_DEVICES, *_ORDINARY)) for name in names) and not any("Nested" in one for one in names)


def has_values(tensor: Any) -> bool:
    """Whether a tensor stands for values at all: those on ``meta``, and what is only traced with, do not."""
    return tensor.device.type != "meta" and kind_of(tensor) not in ("FakeTensor", "FunctionalTensor", "Functionalize")


def kind_of(tensor: Any) -> str:
    """What a tensor is that :func:`has_elements` denies, in one word of PyTorch's: a class, a layout, ``meta`` …"""
    if tensor.device.type == "meta":
        return "meta"
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return type(tensor).__qualname__
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.").strip("_")
    if tensor.is_quantized:
        return "quantized"
    names = "" if _keys_of is None else str(_keys_of(tensor)).partition("(")[2].rstrip(")")
    return ", ".join(name for name in names.split(", ") if not _is_ordinary(f"({name})"))


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape of a tensor; empty for a nested one, which has one for each of its parts."""
    return () if tensor.is_nested and tensor.layout is torch.strided else tuple(tensor.shape)


def sizes_of(tensor: Any) -> str:
    """The sizes of a tensor as PyTorch's errors write them; of a nested one those of all its parts."""
    if not tensor.is_nested or tensor.layout is not torch.strided:
        return str(list(tensor.shape))
    sizes = tensor._nested_tensor_size()
    rows = sizes.tolist()
    width = max((len(str(size)) for row in rows for size in row), default=0) + 1
    lines = [" ".join(f"{size:>{width}}" for size in row) for row in rows]
    return "\n".join([*lines, f"[ {sizes.type()}{{{','.join(map(str, sizes.shape))}}} ]"])


def type_of(tensor: Any) -> str:
    """The type of a tensor as PyTorch's errors write it."""
    name = str(tensor.type())
    return f"Meta{name.rpartition('.')[2].removesuffix('Tensor')}Type" if tensor.device.type == "meta" else name
