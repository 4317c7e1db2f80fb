"""Seeds of a trial: the same random numbers for programs that do not ask for it.

The generators of Python, NumPy and PyTorch take entropy from the system where nobody seeds them, and some programs seed
them with the time. In a trial they get numbers that are the same in the next one: the global generators at the start, a
generator that the program makes or seeds without a number when it does so, and what is a time or a process's number
instead of it. Any other seed stays what it is.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from gradsan._imports import call_after_import

_SEED = 0
_CLOSE_SECONDS = 100_000.0
_UNITS = (1.0, 1e3, 1e6, 1e9)
"""Of a second, in which programs take the time as a seed."""
_fresh = count(1)


def seed_generators() -> None:
    """Seed Python's generator now, those of NumPy and PyTorch as soon as these have been imported."""
    random.seed(_SEED)
    seed = random.Random.seed

    def seeding(generator: random.Random, a: Any = None, version: int = 2) -> None:
        # Names of temporary files are to differ in trials that run side by side.
        if sys._getframe(2).f_globals.get("__name__") != "tempfile":
            a = _settled(a)
        seed(generator, a, version)

    random.Random.seed = seeding  # type: ignore[method-assign, assignment]
    random.seed = _settling(random.seed)
    call_after_import("numpy", _seed_numpy)
    call_after_import("torch", _seed_torch)


def _seed_numpy() -> None:
    numpy: Any = sys.modules["numpy"]
    numpy.random.seed(_SEED)
    # What every generator without a seed takes its entropy from.
    bits: Any = sys.modules.get("numpy.random.bit_generator")
    if hasattr(bits, "randbits"):
        bits.randbits = lambda many: next(_fresh)
    for name in ("seed", "default_rng"):
        setattr(numpy.random, name, _settling(getattr(numpy.random, name)))


def _seed_torch() -> None:
    torch: Any = sys.modules["torch"]
    torch.manual_seed(_SEED)
    manual_seed = _settling(torch.manual_seed)

    @functools.wraps(torch.seed)
    def seed() -> int:
        number = next(_fresh)
        torch.random.manual_seed(number)
        return number

    for owner in (torch, torch.random):
        owner.manual_seed, owner.seed = manual_seed, seed


def _settling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def settling(*args: Any, **kwargs: Any) -> Any:
        if args:
            return original(_settled(args[0]), *args[1:], **kwargs)
        if "seed" in kwargs or "a" in kwargs:
            return original(**{key: _settled(value) for key, value in kwargs.items()})
        return original(*args, **kwargs) if original.__name__ == "default_rng" else original(next(_fresh))

    return settling


def _settled(seed: Any) -> Any:
    """``seed``, or the same number in every trial where it would differ in the next one."""
    if seed is None:
        return next(_fresh)
    if isinstance(seed, int | float) and (seed == os.getpid() or _is_time(float(seed))):
        return next(_fresh)
    return seed


def _is_time(seed: float) -> bool:
    now = time.time()
    return any(abs(seed / unit - now) < _CLOSE_SECONDS for unit in _UNITS)
