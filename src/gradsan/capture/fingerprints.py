"""Fingerprints of the tensors that a checkpointed function saves, taken in the forward and in the recomputation.

checkpoint itself compares what it saved with what it recomputed, by shape, type and device. In deep mode a fingerprint
travels with that, so that it is known whether the recomputation gave the same values. checkpoint's own verdict stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gradsan.capture import _torch
from gradsan.capture.originals import fits_its_memory
from gradsan.capture.patches import Patches

# Kernels that add up in no fixed order differ by about the last digit.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


class Fingerprint(NamedTuple):
    """Sums over a tensor: enough to tell values that differ, not enough to know them."""

    sums: tuple[float, ...]
    size: float
    tolerance: float

    def differs(self, other: Fingerprint) -> bool:
        """Whether two tensors had other values, beyond the rounding of sums."""
        allowed = self.tolerance * max(self.size, other.size)
        pairs = zip(self.sums, other.sums, strict=False)
        return any((one != another and not abs(one - another) <= allowed) and one == one for one, another in pairs)


def fingerprint(tensor: Any) -> Fingerprint | None:
    """The fingerprint of a tensor; None where it has no ordinary memory, or none any more.

    Kernels keep workspaces as bytes; what stands there need not be the same twice. Sharded training gives the memory of
    parameters back before checkpoint compares.
    """
    if not torch.is_tensor(tensor) or not _torch.has_elements(tensor):
        return None
    if tensor.dtype is torch.uint8 or not fits_its_memory(tensor):
        return None
    with torch.no_grad(), _torch.hushed():
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        tolerance = _TOLERANCE.get(flat.dtype, 0.0)
        flat = flat.to(torch.float64)
        sums = [
            float(flat.sum()),
            float(flat[::2].sum()),
            float(flat[::3].sum()),
            float(flat[: flat.numel() // 2].sum()),
        ]
        return Fingerprint(tuple(sums), float(flat.abs().sum()), tolerance)


class Tally:
    """What checkpoint compared in this thread since :meth:`begin`."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._local = threading.local()

    def begin(self) -> None:
        """Count anew."""
        self._local.compared, self._local.different = 0, []

    def add(self, saved: object, different: bool) -> None:
        """Count one more; ``saved`` is what stood for the tensor in the forward."""
        self._local.compared = self.compared + 1
        self._local.different = [*self.different, saved] if different else self.different

    @property
    def compared(self) -> int:
        """How many tensors were compared."""
        return getattr(self._local, "compared", 0)

    @property
    def different(self) -> list[object]:
        """Those that differed, by what stood for them in the forward."""
        return getattr(self._local, "different", [])


class _Metadata(dict):  # type: ignore[type-arg]
    """What checkpoint looks at of a tensor, equal where that is equal; comparing compares fingerprints on the way."""

    __slots__ = ("fingerprint", "tally")
    __hash__ = None

    fingerprint: Fingerprint | None
    tally: Tally

    def __ne__(self, other: object) -> bool:
        if isinstance(other, _Metadata) and self.fingerprint is not None and other.fingerprint is not None:
            self.tally.add(self, self.fingerprint.differs(other.fingerprint))
        return dict.__ne__(self, other)

    def __eq__(self, other: object) -> bool:
        return not self != other


def compare_values(patches: Patches, wanted: Callable[[], bool], tally: Tally) -> None:
    """Have checkpoint compare values while ``wanted()``, until ``patches`` is undone; ``tally`` counts them."""
    checks = _torch.determinism_checks()
    for name, extract in list(checks.items()):
        if not isinstance(_sample(extract), dict):
            continue

        def watched(tensor: Any, extract: Any = extract) -> Any:
            found = extract(tensor)
            if not wanted():
                return found
            told = _Metadata(found)
            told.tally, told.fingerprint = tally, fingerprint(tensor)
            return told

        checks[name] = watched
        patches.on_undo(lambda name=name, extract=extract: checks.__setitem__(name, extract))  # type: ignore[misc]


def _sample(extract: Any) -> Any:
    return extract(torch.empty(0))
