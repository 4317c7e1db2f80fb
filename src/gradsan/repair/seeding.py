"""The same random numbers in every trial, for programs that do not ask for it.

The global generators of Python, NumPy and PyTorch take entropy from the system where nobody seeds them; a program that
does so does it afterwards, and gets what it asks for. A generator that a program makes itself without a seed
(``numpy.random.default_rng()``) stays as random as it is.
"""

from __future__ import annotations

import random
import sys

from gradsan._imports import call_after_import

_SEED = 0


def seed_generators() -> None:
    """Seed Python's generator now, those of NumPy and PyTorch as soon as these have been imported."""
    random.seed(_SEED)
    call_after_import("numpy", _seed_numpy)
    call_after_import("torch", _seed_torch)


def _seed_numpy() -> None:
    sys.modules["numpy"].random.seed(_SEED)


def _seed_torch() -> None:
    sys.modules["torch"].manual_seed(_SEED)
