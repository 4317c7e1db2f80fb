"""Names of a package whose modules are imported when a name is first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names_on_demand(package: str, homes: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``package``: ``homes`` has the names that each of its modules defines (PEP 562)."""
    module_of = {name: module for module, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = module_of[name]
        found = import_module(f"{package}.{module}")
        # All of them at once: later look-ups do not come here.
        vars(sys.modules[package]).update((one, getattr(found, one)) for one in homes[module])
        return getattr(found, name)

    return find
