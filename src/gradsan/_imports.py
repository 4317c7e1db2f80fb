"""Import hooks: a callback right after torch (or another module), and libraries shadowed by modules of the program.

Importing torch for the program would be too early: programs set environment variables and warning filters first, and
some never import it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_TORCH = "torch"


def modules_loaded() -> tuple[int, str]:
    """How many modules are loaded, and the latest: what has gone through them all need not again while this stays.

    There are thousands. They are listed within one call into C, as other threads import.
    """
    names = list(sys.modules)
    return len(names), names[-1]


def stored_in(module: object) -> dict[str, Any]:
    """What an entry of ``sys.modules`` holds, without asking it: some import a module when asked for any attribute."""
    try:
        found = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def torch_is_installed() -> bool:
    """Whether ``import torch`` would find a module; imports nothing."""
    if _TORCH in sys.modules:
        # None marks a module that must not be imported.
        return sys.modules[_TORCH] is not None
    try:
        return find_spec(_TORCH) is not None
    except (ImportError, ValueError):
        return False


def call_after_torch_import(action: Callable[[], None]) -> None:
    """Call ``action`` once, as soon as torch has been imported (at once if it is); ``action`` must not raise."""
    call_after_import(_TORCH, action)


def call_after_import(name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Call ``action`` once, as soon as the module ``name`` has been imported; ``action`` must not raise.

    Returns a function that cancels it, as long as the module has not been imported.
    """
    if sys.modules.get(name) is not None:
        action()
        return lambda: None
    finder = _NotifyingFinder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.forget


class _NotifyingFinder(MetaPathFinder):
    """Finds a module by the other finders, and wraps its loader in a _NotifyingLoader."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        # Only finders after it: another notifying finder (another gradsan, a tracer) would ask this one in turn.
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
        """Remove this finder from ``sys.meta_path``."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._action()


class _NotifyingLoader:
    """Loader that calls back after the module has been executed; leaves no trace on the module."""

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


@contextmanager
def imports_by(path: Sequence[str] | None = None) -> Iterator[None]:
    """Import along ``path``, ignoring modules of the program that shadow a library.

    Without ``path``, the program's directory comes last.

    A program with a ``rich.py`` has it in ``sys.modules`` as ``rich``. Such modules, with their submodules, are
    restored at the end; the library's own are kept for the next time, hidden from later imports of the program.
    """
    programs_path = sys.path
    path = _libraries_first(programs_path) if path is None else path
    sys.path = list(path)
    before = set(sys.modules)
    preferred = _preferred_directories(path, programs_path)
    hiding = {
        name for name, file in _top_level(before) if _directory(file) in preferred and _is_other(name, file, path)
    }
    aside = _taken(sys.modules, hiding)
    sys.modules.update(_taken(_hidden, hiding))
    try:
        yield
    finally:
        sys.path = programs_path
        new = _top_level(set(sys.modules) - before)
        hiding |= {name for name, file in new if _is_other(name, file, sorted(preferred))}
        _hidden.update(_taken(sys.modules, hiding))
        sys.modules.update(aside)


_hidden: dict[str, ModuleType] = {}
"""Modules of libraries that the program's modules shadow; reused by the next report."""


def _libraries_first(path: Sequence[str]) -> list[str]:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    own = ("", str(Path(main).absolute().parent) if isinstance(main, str) else _current_directory())
    return [*(entry for entry in path if entry not in own), *(entry for entry in path if entry in own)]


def _taken(modules: dict[str, ModuleType], names: set[str]) -> dict[str, ModuleType]:
    return {name: modules.pop(name) for name in list(modules) if name.partition(".")[0] in names}


def _preferred_directories(path: Sequence[str], programs_path: Sequence[str]) -> set[str]:
    """Return directories that come earlier on the program's path than on ``path``, or are missing there."""
    place = {entry: number for number, entry in enumerate(path)}
    return {
        entry or _current_directory()
        for number, entry in enumerate(programs_path)
        if isinstance(entry, str) and number < place.get(entry, len(programs_path))
    }


def _top_level(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the top-level modules among ``names`` that come from a file, each with it."""
    files = ((name, stored_in(sys.modules.get(name)).get("__file__")) for name in names if "." not in name)
    return [(name, file) for name, file in files if isinstance(file, str)]


def _directory(file: str) -> str:
    """Return the entry of ``sys.path`` by which a module in ``file`` was found."""
    path = Path(file)
    return str(path.parent.parent if path.stem == "__init__" else path.parent)


def _is_other(name: str, file: str, path: Sequence[str]) -> bool:
    """Whether ``path`` has a module of that name in another file."""
    spec = PathFinder.find_spec(name, list(path))
    return spec is not None and spec.origin != file


def _current_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return ""
