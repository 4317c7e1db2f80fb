"""Search for NaN and Inf in tensors, on the CPU without an operator of torch; addresses of their elements."""

from __future__ import annotations

import cmath
from collections.abc import Callable
from typing import Any

import torch

from gradsan._torch.kinds import has_elements
from gradsan._torch.modes import has_function_modes, has_modes

# Kind of number in the native search, and how many such numbers one element has.
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
    from gradsan.record._native import holds_nonfinite as _look
except ImportError:
    _search: Callable[[int, int, int], int] | None = None  # type: ignore[no-redef]
    _look: Callable[[Any], bool | None] | None = None  # type: ignore[no-redef]

# Of torch as it is without gradsan's wrappers, which would take a non-finite sum for one of the program's.
_sum = torch.sum
number: Callable[[Any], Any] = torch.Tensor.item
_pointer: Callable[[Any], int] = getattr(torch.Tensor, "const_data_ptr", torch.Tensor.data_ptr)


def can_be_nonfinite(tensor: torch.Tensor) -> bool:
    """Whether a tensor can hold NaN or Inf and can be searched: ordinary memory, with values."""
    return tensor.dtype in _KINDS and tensor.layout is torch.strided and tensor.device.type != "meta"


def is_nonfinite(tensor: torch.Tensor) -> bool:
    """Whether an element of a tensor is NaN or Inf; False for a tensor that cannot be searched.

    The caller makes sure that no mode of the program's and no wrapper of gradsan's is called.
    """
    seen = None if _look is None else _look(tensor)
    if seen is not None:
        return seen
    kind = _KINDS.get(tensor.dtype)
    if kind is None or type(tensor) not in _SEARCHED:
        return False
    if _search is not None and tensor.is_cpu:
        elements = _elements_in_memory(tensor)
        if elements is not None:
            return bool(elements) and _is_bad(tensor, elements, kind)
    if not (can_be_nonfinite(tensor) and has_elements(tensor) and tensor.numel()):
        return False
    values = tensor.detach()
    try:
        # The sum is finite only if all elements are; it takes no memory, but may overflow.
        total = number(_sum(values, dtype=torch.float32 if tensor.element_size() == 2 else None))
        return not cmath.isfinite(total) and not bool(torch.isfinite(values).all())
    except RuntimeError:
        # A device may lack an operator for a layout, or free memory.
        return not bool(torch.isfinite(values.cpu()).all())


def is_seen_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor was searched without any operator, and all elements are finite; False: search it properly.

    It may be called anywhere: where a mode of the program's would notice the search, the answer is False.
    """
    seen = None if _look is None else _look(tensor)
    if seen is not None:
        return not seen
    kind = type(tensor) in _SEARCHED and not has_modes() and _KINDS.get(tensor.dtype, _EXACT)
    if kind is _EXACT:
        return True
    if not kind or _search is None or not tensor.is_cpu:
        return False
    elements = _elements_in_memory(tensor)
    return elements is not None and not (elements and _is_bad(tensor, elements, kind))


def is_view_of(result: Any, tensor: Any) -> bool:
    """Whether a result is known to be a view of ``tensor`` or of its base."""
    if type(result) is not torch.Tensor or type(tensor) not in _SEARCHED or has_function_modes():
        return False
    if not result._is_view():
        return False
    base = result._base
    return base is tensor or (tensor._is_view() and base is tensor._base)


def _address(tensor: torch.Tensor, elements: int) -> int:
    """Return the address of a tensor's ``elements``; 0 if it has no memory: wrapped by a transform, zero tensors."""
    try:
        address = _pointer(tensor)
        # A program may have shrunk the storage below the size of its tensors.
        is_there = tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + elements) * tensor.element_size()
    except RuntimeError:
        return 0
    return address if is_there else 0


def _is_bad(tensor: torch.Tensor, elements: int, kind: tuple[int, int]) -> bool:
    """Whether one of the ``elements`` of a tensor is NaN or Inf; False where it has no memory of its own."""
    address = _address(tensor, elements)
    return bool(address) and _search is not None and _search(address, elements * kind[1], kind[0]) >= 0


def _elements_in_memory(tensor: torch.Tensor) -> int | None:
    """Return the number of elements that lie without gaps from the first one of a tensor on; None where there are gaps.

    Permuted tensors have no gaps; elements repeated by ``expand`` count once.
    """
    if tensor.layout is not torch.strided:
        return None
    if tensor.is_contiguous():
        return int(tensor.numel())
    elements = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return 0
        if size > 1 and stride:
            if stride != elements:
                return None
            elements *= size
    return elements


_EXACT = (-1, 0)
_SEARCHED = frozenset({torch.Tensor, torch.nn.Parameter})
