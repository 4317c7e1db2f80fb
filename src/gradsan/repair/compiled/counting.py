"""Rounding errors counted over a run's operations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradsan import _torch
from gradsan.repair.compiled.rounding import UNITS, squared_error

_SHARE_OF_BACKWARD = 3.0
"""Ratio of the operations of a forward and its backward to those of the forward."""

_CONTRACTIONS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "attention", "linear", "einsum", "mv", "dot")


class Counting(TorchDispatchMode):
    """Dispatch mode that counts the rounding errors of a forward; the backward's are inferred.

    ``squared_errors`` as :func:`tolerance` takes them, ``coarsest`` the coarsest dtype, ``draws`` the
    operations that draw random numbers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.squared_errors = 0.0
        self.coarsest = ""
        self.draws: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func``, and count its errors."""
        given = dict(kwargs or {})
        result = func(*args, **given)
        if torch.Tag.nondeterministic_seeded in func.tags:
            name = func.overloadpacket.__name__
            # Attention has the tag for its dropout.
            if name not in self.draws and ("attention" not in name or _drops_out(func, args, given)):
                self.draws.append(name)
        self._count(
            func.overloadpacket.__name__, [*_torch.tensors_in([*args, *given.values()]), *_torch.tensors_in(result)]
        )
        return result

    def _count(self, name: str, met: list[Any]) -> None:
        dtypes = [str(one.dtype).removeprefix("torch.") for one in met]
        dtype = max(dtypes, key=lambda one: UNITS.get(one, 0.0), default="")
        if dtype not in UNITS:
            return
        if UNITS[dtype] > UNITS.get(self.coarsest, 0.0):
            self.coarsest = dtype
        sizes = sorted(one.numel() for one in met if one.is_floating_point() and one.numel())
        if sizes:
            product = math.sqrt(math.prod(map(float, sizes[-3:]))) if len(sizes) > 2 else 0.0
            largest = max(product, sizes[-1]) if any(one in name for one in _CONTRACTIONS) else sizes[-1]
            self.squared_errors += _SHARE_OF_BACKWARD * squared_error(dtype, largest / sizes[0])


def _drops_out(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    for position, one in enumerate(func._schema.arguments):
        if one.name == "dropout_p":
            return bool(args[position] if position < len(args) else kwargs.get("dropout_p", 0.0))
    return True
