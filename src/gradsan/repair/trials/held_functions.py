"""Replacements of file functions, and the modules that hold such functions by a name of their own."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from gradsan._imports import stored_in

READ = ("stat", "access", "listxattr", "getxattr", "statvfs")
CHANGED = ("chmod", "chown", "utime", "truncate", "setxattr", "removexattr")
NOT_FOLLOWED = ("lstat", "readlink")
MADE = ("mkdir", "mkfifo", "mknod")
REMOVED = ("remove", "unlink", "rmdir")
SAVING = (
    ("torch._C", "PyTorchFileWriter", 0),
    ("safetensors.torch", "save_file", 1),
    ("safetensors.torch", "save_model", 1),
    ("safetensors.numpy", "save_file", 1),
    ("torch.jit", "save", 1),
    ("cv2", "imwrite", 0),
)
"""Functions that open a file outside of Python, with the position of its path."""
LOADING = (
    ("torch._C", "PyTorchFileReader", 0),
    ("safetensors.torch", "load_file", 0),
    ("safetensors", "safe_open", 0),
    ("torch.jit", "load", 0),
    ("cv2", "imread", 0),
)
BY_MODE = (("h5py", "File", 0),)
FUNCTIONS = (
    *(*READ, *CHANGED, *NOT_FOLLOWED, *MADE, *REMOVED),
    *("rename", "replace", "symlink", "link", "open", "listdir", "scandir", "chdir", "getcwd", "getcwdb"),
)
_NOT_LED = ("importlib", "_frozen_importlib", "gradsan.repair.")
_CLASSES_OF = ("pathlib", "pathlib._local", "glob")
"""Modules whose classes keep functions of ``os`` as their own."""


class Entries:
    """The result of ``os.scandir`` for a directory of the layer."""

    def __init__(self, path: Any, names: list[str]) -> None:
        """Entries below ``path``, as bytes where that is given as bytes."""
        folder, make = (path, os.fsencode) if isinstance(path, bytes) else (path, str)
        self._entries = iter([_Entry(folder, make(name)) for name in names])

    def __iter__(self) -> Iterator[_Entry]:
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration."""
        self._entries = iter(())


class _Entry:
    """A replacement of ``os.DirEntry``: the functions that it calls are redirected themselves."""

    def __init__(self, folder: Any, name: Any) -> None:
        self.name = name
        self.path = os.path.join(folder, name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path) and (follow_symlinks or not os.path.islink(self.path))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path) and (follow_symlinks or not os.path.islink(self.path))

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def is_junction(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return os.lstat(self.path).st_ino


def leading_class(original: Any, led: Callable[..., list[Any]]) -> Any:
    """A class that replaces the class ``original``; None where it is not a class, or allows no subclass."""
    if not isinstance(original, type):
        return None

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        original.__init__(self, *led(args, kwargs), **kwargs)  # type: ignore[misc]

    try:
        return type(original)(original.__name__, (original,), {"__init__": begin, "__module__": original.__module__})
    except TypeError:
        return None


def leading_function(original: Any, led: Callable[..., list[Any]]) -> Any:
    """A function that replaces ``original``, which is called with the arguments returned by ``led``."""

    @functools.wraps(original, updated=())
    def leading(*args: Any, **kwargs: Any) -> Any:
        return original(*led(args, kwargs), **kwargs)

    return leading


_holders: list[tuple[Any, str, int]] = []
_looked_through: set[str] = set()


def look_for_holders() -> None:
    """Note which modules hold functions of ``os``, or ``open``, by a name of their own.

    In the process that trials are forked from: searching all modules in each child would copy their memory pages.
    """
    originals = {id(vars(os)[name]) for name in FUNCTIONS if name in vars(os)} | {id(open)}
    for owner, name, _ in (*SAVING, *LOADING, *BY_MODE):
        if name in getattr(sys.modules.get(owner), "__dict__", {}):
            originals.add(id(vars(sys.modules[owner])[name]))
    for name, module in list(sys.modules.items()):
        if name in _looked_through or name in ("posix", "nt") or name.startswith(_NOT_LED):
            continue
        _looked_through.add(name)
        space = stored_in(module)
        _holders.extend((space, key, id(value)) for key, value in list(space.items()) if id(value) in originals)
        for one in [value for value in space.values() if isinstance(value, type)] if name in _CLASSES_OF else ():
            for key, value in list(vars(one).items()):
                inner = value.__func__ if isinstance(value, staticmethod) else value
                if id(inner) in originals:
                    _holders.append((one, key, id(inner)))


def replace_everywhere(led: dict[Any, Any]) -> None:
    """Bind the new functions where imported modules hold the old ones by a name of their own."""
    by_identity = {id(old): new for old, new in led.items()}
    look_for_holders()
    for holder, key, identity in _holders:
        if identity not in by_identity:
            continue
        if isinstance(holder, type):
            setattr(holder, key, staticmethod(by_identity[identity]))
        elif id(holder.get(key)) == identity:
            holder[key] = by_identity[identity]
