"""Facts about a tensor with NaN or Inf: its first such element, their number, and the values of its operands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from gradsan import _torch
from gradsan.model import NonFiniteValue, Operand


def arguments_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (position or keyword, tensor) of every tensor argument of a call."""
    for position, value in enumerate(args):
        for one in _torch.tensors_in(value, 1):
            yield str(position), one
    for name, value in kwargs.items():
        for one in _torch.tensors_in(value, 1):
            yield name, one


def scalars_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (position or keyword, number) of every plain number among the arguments of a call."""
    for name, value in (*((str(position), one) for position, one in enumerate(args)), *kwargs.items()):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)


def kind_of(number: Any) -> NonFiniteValue | None:
    """Return which non-finite value a number is, None for a finite one; for a complex number the worse part."""
    if isinstance(number, complex):
        kinds = (kind_of(number.real), kind_of(number.imag))
        return "nan" if "nan" in kinds else kinds[0] or kinds[1]
    if number != number:
        return "nan"
    return "inf" if number == float("inf") else "-inf" if number == float("-inf") else None


class Searched:
    """Facts about a tensor with non-finite elements, searched once: their kinds, the first index, their number."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Search ``tensor``, which must have such an element; modes and wrappers must be off."""
        # A device may lack operators, or free memory.
        values = tensor.detach().cpu()
        bad = ~torch.isfinite(values)
        flat = bad.reshape(-1)
        first = int(flat.to(torch.uint8).argmax()) if flat.numel() else 0
        self.elements, self.of = int(bad.sum()), values.numel()
        self.shape, self.device = tuple(values.shape), str(tensor.device)
        self.dtype = str(values.dtype).removeprefix("torch.")
        self.index = unravelled(first, self.shape)
        self.has_nan = bool(torch.isnan(values).any())
        self.has_inf = not values.is_complex() and bool(torch.isposinf(values).any())
        self.value: NonFiniteValue = kind_of(_torch.number(values[self.index])) or "nan"


def unravelled(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of the element at ``position`` of a tensor of ``shape``, counted row by row."""
    index: list[int] = []
    for size in reversed(shape):
        index.insert(0, position % size)
        position //= size
    return tuple(index)


def operands_of(
    named: Iterable[tuple[str, Any]], index: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Operand, ...]:
    """Return the floating-point operands, with their elements that made element ``index`` of the result."""
    return tuple(_operand(argument, tensor, index, shape) for argument, tensor in named if tensor.dtype != torch.bool)


def _operand(argument: str, tensor: torch.Tensor, index: tuple[int, ...], shape: tuple[int, ...]) -> Operand:
    values = tensor.detach().cpu()
    where = _broadcast_index(tuple(values.shape), index, shape)
    finite = values[torch.isfinite(values)] if _torch.can_be_nonfinite(values) else values
    is_ordered = finite.numel() > 0 and not finite.is_complex()
    number = None if where is None else _torch.number(values[where])
    return Operand(
        argument,
        tuple(values.shape),
        str(values.dtype).removeprefix("torch."),
        str(tensor.device),
        index=where,
        at=f"{number:.6g}" if isinstance(number, float) else None if number is None else str(number),
        low=float(finite.min()) if is_ordered else None,
        high=float(finite.max()) if is_ordered else None,
        kind=None if not _torch.is_nonfinite(values) else "nan" if bool(torch.isnan(values).any()) else "inf",
    )


def _broadcast_index(shape: tuple[int, ...], index: tuple[int, ...], result: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the index in an operand of ``shape`` that broadcasts to ``index``; None where it does not fit."""
    if len(shape) > len(result):
        return None
    pairs = list(zip(shape, result[len(result) - len(shape) :], strict=True))
    if any(size not in (1, whole) for size, whole in pairs):
        return None
    kept = index[len(result) - len(shape) :]
    return tuple(0 if size == 1 else at for (size, _), at in zip(pairs, kept, strict=True))
