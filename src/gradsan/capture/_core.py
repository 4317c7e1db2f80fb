"""Which hot path runs: the C extension where it was built, else pure Python."""

from __future__ import annotations

import os
from typing import Any

from gradsan.capture import _core_pure


def native_available() -> bool:
    """Whether the C extension was built for this Python."""
    try:
        from gradsan.capture import _native  # noqa: F401
    except ImportError:
        return False
    return True


def make_core(native: bool | None = None) -> Any:
    """A fresh core. ``native``: True asks for the C extension, False for pure Python, None takes the best there is.

    Raises ImportError where the C extension is asked for and was not built.
    """
    if native is None:
        native = os.environ.get("GRADSAN_NATIVE", "1") != "0" and native_available()
    if native:
        from gradsan.capture import _native

        return _native.Core()
    return _core_pure.Core()
