"""Rounding errors counted over a run's operations, and the tolerance that follows from dtypes and reduction sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradsan import _torch

UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of each dtype: half the distance from 1 to the next number."""

_SUMMED_IN = {"float16": "float32", "bfloat16": "float32"}
_LAMBDA = 4.0
_LEAST = 8.0
"""Unit roundoffs that are allowed in any case: a graph without sums is fused in another order, too."""


def squared_error(dtype: str, terms: float) -> float:
    """The square of the relative error of one operation whose longest sum has ``terms`` terms.

    A sum of n terms in floating point has a relative error of at most ``n u`` (Higham, Accuracy and Stability of
    Numerical Algorithms, 2nd edition, section 4.2), and with independent roundings of
    ``lambda sqrt(n) u`` with a probability that depends on lambda (Higham and Mary, A New Approach to Probabilistic
    Rounding Error Analysis, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4). ``u`` is the unit roundoff of the
    accumulator's dtype, which is float32 for the half types; the result is rounded once to its own dtype.
    """
    own, summed = UNITS.get(dtype, 0.0), UNITS.get(_SUMMED_IN.get(dtype, dtype), 0.0)
    return own**2 + max(terms, 1.0) * summed**2


def tolerance(squared_errors: float, dtype: str, position: int = 0) -> float:
    """Relative difference (Euclidean norm) that rounding explains, in the round ``position`` (from 0).

    ``squared_errors`` is the sum of :func:`squared_error` over the operations of a round, ``dtype`` the coarsest of
    them. Errors of independent operations add up by their squares; there are two computations, each with its own, and
    lambda is 4. Every round starts from the errors of the rounds before it, so as much is allowed once more.
    """
    allowed = _LAMBDA * math.sqrt(2.0 * squared_errors)
    return max(allowed, _LEAST * UNITS.get(dtype, UNITS["float32"])) * (1 + position)


_SHARE_OF_BACKWARD = 3.0
"""Ratio of the operations of a forward and its backward to those of the forward."""

_CONTRACTIONS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "attention", "linear", "einsum", "mv", "dot")


class Counting(TorchDispatchMode):
    """Dispatch mode that counts the rounding errors of a forward; the backward's are inferred.

    ``squared_errors`` as :func:`tolerance` takes them, ``coarsest`` the coarsest dtype, ``draws`` the
    operations that draw random numbers.
    """

    def __init__(self) -> None:
        """Start with nothing counted."""
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
