"""Choice of the core that records: the C extension where it was built, else pure Python."""

from __future__ import annotations

import os

from gradsan.record import _core_pure
from gradsan.record._core_pure import Core

_SWITCH = "GRADSAN_NATIVE"


def native_available() -> bool:
    """Whether the C extension was built for this Python."""
    try:
        from gradsan.record import _native  # noqa: F401
    except ImportError:
        return False
    return True


def make_core(native: bool | None = None) -> Core:
    """A fresh core. ``native``: True asks for the C extension, False for pure Python, None takes the best there is.

    ``GRADSAN_NATIVE=0`` in the environment makes pure Python the best there is. Raises ImportError where the C
    extension is asked for and was not built. The C core is typed as the pure one, which has the same interface.
    """
    if native is None:
        native = os.environ.get(_SWITCH, "1") != "0" and native_available()
    if native:
        from gradsan.record import _native

        return _native.Core()
    return _core_pure.Core()
