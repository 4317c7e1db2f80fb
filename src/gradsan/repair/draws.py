"""What a run draws: batches of DataLoaders and tensors of random numbers, counted.

A dropout's mask is no such tensor: it is drawn anew wherever a forward runs again, as everybody expects.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradsan._imports import call_after_import

_FACTORIES = (
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("normal", "bernoulli", "multinomial", "poisson"),
)


class Draws:
    """Counts from :meth:`start` on."""

    def __init__(self) -> None:
        """Nothing was drawn yet."""
        self._counts: Counter[str] = Counter()

    def start(self) -> None:
        """Begin to count, for as long as this process lives."""
        for name in _FACTORIES:
            setattr(torch, name, self._counting(getattr(torch, name), "random numbers"))
        call_after_import("torch.utils.data.dataloader", self._count_batches)

    def counts(self) -> Mapping[str, int]:
        """How many were drawn so far, by their kind."""
        return dict(self._counts)

    def _count_batches(self) -> None:
        iterator = sys.modules["torch.utils.data.dataloader"]._BaseDataLoaderIter
        iterator.__next__ = self._counting(iterator.__next__, "batches")

    def _counting(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def drawing(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._counts[kind] += 1
            return original(*args, **kwargs)

        return drawing
