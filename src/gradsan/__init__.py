"""gradsan: a gradient sanitizer for PyTorch.

``with gradsan.watch() as w:`` watches a block, ``gradsan.enable()`` … ``gradsan.disable()`` a stretch of a program.
``gradsan.explain_exception(error)`` and ``gradsan.install()`` explain errors of unwatched programs; ``%load_ext
gradsan`` does both in notebooks. Importing this package imports no torch, and loads the module of a name on its first
use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradsan._lazy import names_on_demand

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gradsan._api import disable, enable, heal, watch
    from gradsan._autopsy import autopsy, explain_exception
    from gradsan._errors import GradsanError, HaltError, HealingEndedError, MemoryFreedError
    from gradsan._install import install, uninstall

_HOMES = {
    "_api": ("disable", "enable", "heal", "watch"),
    "_autopsy": ("autopsy", "explain_exception"),
    "_errors": ("GradsanError", "HaltError", "HealingEndedError", "MemoryFreedError"),
    "_install": ("install", "uninstall"),
}


__getattr__ = names_on_demand(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(ipython: Any) -> None:
    """Load the IPython extension: explains errors below their traceback, and adds the magic ``%%gradsan``."""
    from gradsan import _ipython

    _ipython.load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Unload the IPython extension."""
    from gradsan import _ipython

    _ipython.unload(ipython)


__all__ = [
    "GradsanError",
    "HaltError",
    "HealingEndedError",
    "MemoryFreedError",
    "__version__",
    "autopsy",
    "disable",
    "enable",
    "explain_exception",
    "heal",
    "install",
    "load_ipython_extension",
    "uninstall",
    "unload_ipython_extension",
    "watch",
]
