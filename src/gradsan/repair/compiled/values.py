"""Arguments of a compiled graph, kept and recreated for further calls, and comparison of the results of two calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gradsan import _torch
from gradsan.repair.trials.compiling import Function

_SEED = 0
_SHARE_OF_ALL = 1 / 32
"""Share of the norm of all results below which the rounding of one is not relative to its own norm."""


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments as they were when a graph was called: in memory of their own, shared where they shared it."""

    arguments: tuple[Any, ...]
    needs_grad: tuple[bool, ...]
    leaves: tuple[bool, ...]
    grad_enabled: bool
    autocast: tuple[tuple[str, Any], ...]
    bytes: int

    @classmethod
    def of(cls, arguments: tuple[Any, ...]) -> Call | None:
        """The call with copies of ``arguments``; None for arguments other than plain strided tensors and numbers."""
        found = list(_torch.tensors_in(list(arguments)))
        if any(not _is_plain(one) for one in found):
            return None
        copies = _copied(arguments, {})
        autocast = tuple(
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        )
        return cls(
            copies,
            tuple(one.requires_grad for one in found),
            tuple(one.is_leaf for one in found),
            torch.is_grad_enabled(),
            autocast,
            sum(one.numel() * one.element_size() for one in found),
        )

    def fresh(self) -> tuple[tuple[Any, ...], list[Any]]:
        """The arguments once more, in memory of their own, and the leaves whose gradients are computed."""
        copies = _copied(self.arguments, {})
        wanted: list[Any] = []
        flags = iter(zip(self.needs_grad, self.leaves, strict=True))

        def given(one: Any) -> Any:
            needs, is_leaf = next(flags)
            if not needs:
                return one
            wanted.append(one.requires_grad_())
            return one if is_leaf else one.clone()

        return tuple(_mapped(one, given) for one in copies), wanted

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """The modes in which it was called, and always the same random numbers."""
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for device, dtype in self.autocast:
                modes.enter_context(torch.autocast(device, dtype))
            torch.manual_seed(_SEED)
            yield


@dataclass(frozen=True, slots=True)
class Ran:
    """The outcome of a call: its results, and its arguments' gradients for one random draw of output gradients."""

    results: list[Any]
    gradients: list[Any]


@dataclass(frozen=True, slots=True)
class Gap:
    """The largest relative difference of two calls, and whether it is in a gradient."""

    size: float
    of_gradient: bool


def ran(function: Callable[..., Any], call: Call, between: Callable[[tuple[Any, ...]], None] | None = None) -> Ran:
    """Call ``function``, and its backward; ``between`` is called with the arguments between the two."""
    given, wanted = call.fresh()
    with call.around():
        results = list(_torch.tensors_in(function(*given)))
        kept = [one.detach().clone() for one in results]
    if between is not None:
        with torch.no_grad():
            between(given)
    roots = [one for one in results if one.requires_grad]
    gradients: list[Any] = []
    if roots and wanted:
        generator = torch.Generator().manual_seed(_SEED)
        drawn = [torch.randn(one.shape, generator=generator).to(one.device, one.dtype) for one in roots]
        gradients = list(torch.autograd.grad(roots, wanted, drawn, allow_unused=True))
    return Ran(kept, gradients)


def gap(right: Ran, tried: Ran) -> Gap:
    """The gap between ``tried`` and ``right``."""
    found = [(_apart(right.results, tried.results), False), (_apart(right.gradients, tried.gradients), True)]
    return Gap(*max(found))


def _apart(right: list[Any], tried: list[Any]) -> float:
    if len(right) != len(tried):
        return float("inf")
    pairs = [(a, b) for a, b in zip(right, tried, strict=True) if _is_number(a) or _is_number(b)]
    whole = sum(float(_flat(a).nan_to_num().norm()) ** 2 for a, _ in pairs if a is not None) ** 0.5
    largest = 0.0
    for before, after in pairs:
        # A gradient of zeros equals a missing one.
        a = torch.zeros(1) if before is None else _flat(before)
        b = torch.zeros_like(a) if after is None else _flat(after)
        if before is None:
            a = torch.zeros_like(b)
        if a.shape != b.shape:
            return float("inf")
        same = (a == b) | (a.isnan() & b.isnan())
        apart = float((a - b).masked_fill(same, 0.0).norm())
        size = max(float(a.nan_to_num(0.0, 0.0, 0.0).norm()), whole * _SHARE_OF_ALL)
        largest = max(largest, apart / size if size and apart == apart else (float("inf") if apart else 0.0))
    return largest


def _flat(one: Any) -> Any:
    dense = one.detach()
    dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return dense.reshape(-1).to("cpu", torch.float64)


def _is_number(one: Any) -> bool:
    return one is not None and (one.is_floating_point() or one.is_complex())


def _is_plain(one: Any) -> bool:
    plain = type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout is torch.strided
    return plain and not one.is_meta and not one.is_quantized


def _copied(value: Any, storages: dict[int, Any]) -> Any:
    def copy(one: Any) -> Any:
        own = one.detach()
        storage = own.untyped_storage()
        kept = storages.setdefault(storage.data_ptr() or id(one), None)
        if kept is None:
            kept = storages[storage.data_ptr() or id(one)] = storage.clone()
        empty = torch.empty(0, dtype=own.dtype, device=own.device)
        return empty.set_(kept, own.storage_offset(), own.shape, own.stride())

    with torch.no_grad():
        return _mapped(value, copy)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if torch.is_tensor(value):
        return change(value)
    if isinstance(value, tuple) and type(value) is not torch.Size:
        return tuple(_mapped(one, change) for one in value)
    return [_mapped(one, change) for one in value] if isinstance(value, list) else value


@dataclass(slots=True)
class KeptGraph:
    """A compiled graph: ``module`` as traced, ``run`` as the backend compiled it, and calls of it."""

    function: Function
    backend: str
    compile: Any
    module: nn.Module
    run: Any
    calls: list[Call] = field(default_factory=list)
