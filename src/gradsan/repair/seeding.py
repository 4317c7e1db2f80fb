"""The same random numbers in every trial, for programs that do not ask for it.

PyTorch's own generators start from a constant seed. Python's and NumPy's global ones take entropy from the system; a
program that seeds them does so afterwards, and gets what it asks for. A generator that a program makes itself without a
seed (``numpy.random.default_rng()``) stays as random as it is.
"""

from __future__ import annotations

import random
import sys

from gradsan.cli._torch_import import call_after_import

_SEED = 0


def seed_generators() -> None:
    """Seed Python's generator now, and NumPy's as soon as NumPy has been imported."""
    random.seed(_SEED)
    call_after_import("numpy", _seed_numpy)


def _seed_numpy() -> None:
    sys.modules["numpy"].random.seed(_SEED)
