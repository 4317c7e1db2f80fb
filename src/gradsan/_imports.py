"""Import hooks: a callback right after the program has imported torch (or another module), and nothing before.

Importing torch for the program would come too early: programs set environment variables and warning filters first, and
some never import it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_TORCH = "torch"


def torch_is_installed() -> bool:
    """Whether ``import torch`` would find something; nothing is imported."""
    if _TORCH in sys.modules:
        # None stands for a module that must not be imported.
        return sys.modules[_TORCH] is not None
    try:
        return find_spec(_TORCH) is not None
    except (ImportError, ValueError):
        return False


def call_after_torch_import(action: Callable[[], None]) -> None:
    """Call ``action`` once, as soon as torch has been imported: now, if it is; ``action`` must not raise."""
    call_after_import(_TORCH, action)


def call_after_import(name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Call ``action`` once, as soon as the module ``name`` has been imported; ``action`` must not raise.

    What is returned takes the wish back, as long as nothing has been imported.
    """
    if sys.modules.get(name) is not None:
        action()
        return lambda: None
    finder = _NotifyingFinder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.forget


class _NotifyingFinder(MetaPathFinder):
    """Finds a module with the other finders, and puts a _NotifyingLoader before its loader."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        # Only those behind it: one that does the same (another gradsan, a tracer) would ask this one in turn.
        position = sys.meta_path.index(self) + 1 if self in sys.meta_path else 0
        for finder in sys.meta_path[position:]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _NotifyingLoader(spec.loader, self._imported)  # type: ignore[assignment]
                return spec
        return None

    def forget(self) -> None:
        """Stand in nobody's way any more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._action()


class _NotifyingLoader:
    """Another loader, and a call when the module has been executed; leaves no trace on the module."""

    def __init__(self, loader: Any, imported: Callable[[], None]) -> None:
        self._loader = loader
        self._imported = imported

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._imported()
