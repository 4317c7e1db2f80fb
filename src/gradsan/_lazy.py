"""Lazy names of a package, whose modules are imported on first use of a name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names_on_demand(package: str, homes: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``package`` (PEP 562); ``homes`` maps each module to the names it defines."""
    module_of = {name: module for module, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = module_of[name]
        found = import_module(f"{package}.{module}")
        # All names of the module at once: later look-ups bypass this function.
        vars(sys.modules[package]).update((one, getattr(found, one)) for one in homes[module])
        return getattr(found, name)

    return find
