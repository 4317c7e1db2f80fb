"""Search for NaN and Inf in tensors, on the CPU without an operator of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Kind of number as the native search counts them, and how many such numbers one element has.
_KINDS = {
    torch.float32: (0, 1),
    torch.float64: (1, 1),
    torch.float16: (2, 1),
    torch.bfloat16: (3, 1),
    torch.complex64: (0, 2),
    torch.complex128: (1, 2),
}

# Missing native core: torch's own ``isfinite``.
try:
    from gradsan.record._native import first_nonfinite as _search
except ImportError:
    _search: Callable[[int, int, int], int] | None = None  # type: ignore[no-redef]

_pointer: Callable[[Any], int] = getattr(torch.Tensor, "const_data_ptr", torch.Tensor.data_ptr)


def can_be_nonfinite(tensor: Any) -> bool:
    """Whether a tensor is of a kind that can hold NaN or Inf and can be searched: ordinary memory, with values."""
    return tensor.dtype in _KINDS and tensor.layout is torch.strided and tensor.device.type != "meta"


def is_nonfinite(tensor: Any) -> bool:
    """Whether an element of a tensor is NaN or Inf; False for a tensor that cannot be searched.

    The caller sees to it that no mode of the program's and no wrapper of gradsan's is asked.
    """
    kind = _KINDS.get(tensor.dtype)
    if kind is None or type(tensor) not in _SEARCHED:
        return False
    if _search is not None and tensor.device.type == "cpu" and tensor.is_contiguous():
        count = tensor.numel() * kind[1]
        return bool(count) and _search(_pointer(tensor), count, kind[0]) >= 0
    if not can_be_nonfinite(tensor) or not tensor.numel():
        return False
    return not bool(torch.isfinite(tensor.detach()).all())


_SEARCHED = frozenset({torch.Tensor, torch.nn.Parameter})
