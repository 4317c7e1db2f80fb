"""Scratch layer of a trial: a copy-on-write overlay for the files that the program writes, which stay unchanged.

Writes go to a folder that is deleted afterwards; reads look there first. Paths that the program
names are *logical*: they name what the program sees, the scratch copy or the file itself.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import io
import mmap
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
_SYSTEM = ("/dev", "/proc", "/sys")
_NAMED_CACHES = (
    *("XDG_CACHE_HOME", "TORCH_HOME", "HF_HOME", "CUDA_CACHE_PATH"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR"),
)
_MOST_LINKS = 40
LARGEST_COPY = 1 << 31
"""Largest size in bytes of a file that is copied for a write to a part of it."""


class TooLargeError(Exception):
    """A file too large to be copied for a write to a part of it."""


class Scratch:
    """The layer over the whole file system from its creation on; ``folder`` is where it keeps written files.

    Paths below ``passing`` are written directly: caches, and the files beside the trial's own answer.
    """

    def __init__(self, folder: str, passing: tuple[str, ...]) -> None:
        self._upper = os.path.join(os.path.realpath(folder), "files")
        self._passing = tuple(dict.fromkeys((*_SYSTEM, os.path.realpath(folder), *map(os.path.realpath, passing))))
        self._gone: set[str] = set()
        # Forked children write into the same layer.
        self._used = mmap.mmap(-1, 1)
        self._directory = os.path.realpath(os.curdir)
        self._temporary = os.path.realpath(tempfile.gettempdir())
        self._random_names: set[str] = set()
        self.written: set[str] = set()

    def start(self) -> None:
        """Exempt files and folders of ``tempfile``: sockets are made in them, which the layer cannot hold."""
        names: Any = type(tempfile._get_candidate_names())  # type: ignore[attr-defined]
        draw = names.__next__

        def drawing(sequence: Any) -> str:
            name = str(draw(sequence))
            self._random_names.add(name)
            return name

        names.__next__ = drawing

    def stop(self) -> None:
        """Delete the temporary files that the program left."""
        for one in os.listdir(self._temporary) if self._random_names else ():
            path = os.path.join(self._temporary, one)
            if self._is_temporary(path) and os.stat(path).st_uid == os.getuid():
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    os.unlink(path)

    @property
    def is_used(self) -> bool:
        """Whether something was written or removed."""
        return self._used[0] != 0

    @property
    def directory(self) -> str:
        """The working directory as the program sees it."""
        return self._directory

    def passes(self, path: str) -> bool:
        """Whether writes to the logical ``path`` are not redirected."""
        return any(path == one or path.startswith(one + os.sep) for one in self._passing) or self._is_temporary(path)

    def logical(self, path: Any, directory: int | None = None, *, follow: bool = True) -> str:
        """The absolute path with links resolved; a link as the last part is kept where ``follow`` is False."""
        text = os.fsdecode(path)
        if not text:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
        found = "" if text.startswith(os.sep) else self._base(directory)
        rest = text.split(os.sep)[::-1]
        links = 0
        while rest:
            name = rest.pop()
            if name in ("", os.curdir):
                continue
            if name == os.pardir:
                found = found.rpartition(os.sep)[0]
                continue
            one = f"{found}{os.sep}{name}"
            if follow or any(part not in ("", os.curdir) for part in rest):
                there = self.there(one)
                if os.path.islink(there) and not one.startswith("/proc/"):  # /proc/self/fd/1 leads to no path at all
                    links += 1
                    if links > _MOST_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), text)
                    target = os.readlink(there)
                    found = "" if target.startswith(os.sep) else found
                    rest.extend(target.split(os.sep)[::-1])
                    continue
            found = one
        return found or os.sep

    def there(self, path: str) -> str:
        """The real location of the logical ``path``; a nonexistent path where there is no such file."""
        above = self._upper + path
        if self.is_used and (os.path.lexists(above) or self._is_gone(path)):
            return above
        return path

    def names(self, path: str) -> list[str] | None:
        """The entries of the logical directory ``path``; None where the real directory is unchanged."""
        above = self._upper + path
        is_hidden = self._is_gone(path)
        if not self.is_used or (not is_hidden and not os.path.isdir(above) and not self._has_gone_below(path)):
            return None
        upper = os.listdir(above) if os.path.isdir(above) else []
        lower = os.listdir(path) if not is_hidden and os.path.isdir(path) else []
        kept = [name for name in lower if name not in upper and not self._is_gone(os.path.join(path, name))]
        return [*kept, *upper]

    def opened(self, path: str, flags: int) -> str:
        """The file to open for the logical ``path``: a scratch copy where ``flags`` write.

        Raises:
            OSError: as opening the file itself would.
        """
        there = self.there(path)
        if not flags & WRITING or self.passes(path):
            return there
        try:
            mode = os.stat(there).st_mode
        except FileNotFoundError:
            return self._new(path) if flags & os.O_CREAT else there
        if not stat.S_ISREG(mode) or (flags & os.O_CREAT and flags & os.O_EXCL):
            return there
        if there == path:
            _check_writable(path)
            there = self._copied(path, with_content=not flags & os.O_TRUNC)
        self._note(path)
        return there

    def made(self, path: str) -> str:
        """The real location for creating the logical ``path``; an existing file there is still in the way."""
        there = self.there(path)
        return there if self.passes(path) or os.path.lexists(there) else self._new(path)

    def changed(self, path: str) -> str:
        """A copy of the file at the logical ``path``, whose mode or times may be changed."""
        there = self.there(path)
        if there != path or self.passes(path) or not os.path.lexists(path):
            return there
        self._note(path)
        return self._copied(path, with_content=True)

    def moved(self, path: str) -> str:
        """A copy, of a directory with its content, that may be moved away; :meth:`removed` hides the original."""
        there = self.there(path)
        if os.path.islink(there) or not os.path.isdir(there):
            return self.changed(path)
        names = self.names(path)
        above = self._upper + path
        os.makedirs(above, exist_ok=True)
        for name in os.listdir(path) if names is None else names:
            self.moved(os.path.join(path, name))
        self._note(path)
        return above

    def removed(self, path: str) -> None:
        """Mark the logical ``path`` as removed."""
        self._note(path)
        self._gone.add(path)

    def entered(self, path: str) -> str:
        """The directory to change to for the logical ``path``."""
        return path if os.path.isdir(path) and not self._is_gone(path) else self.there(path)

    def enter(self, path: str) -> None:
        """Set the working directory to the logical ``path``."""
        self._directory = path

    def shown(self, path: str) -> str:
        """The logical path of a path in the scratch folder; any other path as it is."""
        return path[len(self._upper) :] or os.sep if self.is_above(path) else path

    def is_above(self, path: str) -> bool:
        """Whether ``path`` is in the scratch folder."""
        return path == self._upper or path.startswith(self._upper + os.sep)

    def _is_temporary(self, path: str) -> bool:
        if not self._random_names or not path.startswith(self._temporary + os.sep):
            return False
        first = path[len(self._temporary) + 1 :].partition(os.sep)[0]
        return any(name in first for name in self._random_names)

    def _base(self, directory: int | None) -> str:
        if directory is None:
            return self._directory
        return self.shown(os.readlink(f"/proc/self/fd/{directory}"))

    def _is_gone(self, path: str) -> bool:
        return bool(self._gone) and any(path == one or path.startswith(one + os.sep) for one in self._gone)

    def _has_gone_below(self, path: str) -> bool:
        return any(one.rpartition(os.sep)[0] == path for one in self._gone)

    def _new(self, path: str) -> str:
        parent = os.path.dirname(path)
        there = self.there(parent)
        if not stat.S_ISDIR(os.stat(there).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        _check_writable(there)
        os.makedirs(self._upper + parent, exist_ok=True)
        self._note(path)
        return self._upper + path

    def _copied(self, path: str, *, with_content: bool) -> str:
        above = self._upper + path
        os.makedirs(os.path.dirname(above), exist_ok=True)
        self._used[0] = 1
        if os.path.islink(path):
            os.symlink(os.readlink(path), above)
        elif os.path.isdir(path):
            os.makedirs(above, exist_ok=True)
        elif with_content:
            if os.stat(path).st_size > LARGEST_COPY:
                raise TooLargeError(path)
            shutil.copyfile(path, above)
        else:
            Path(above).touch()
        if not os.path.islink(path):
            shutil.copystat(path, above)
        return above

    def _note(self, path: str) -> None:
        self.written.add(path)
        self._used[0] = 1


def _check_writable(path: str) -> None:
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def caches() -> tuple[str, ...]:
    """Folders in which libraries keep downloaded or compiled files: every trial may use and fill them."""
    home = os.path.expanduser("~")
    temporary = tempfile.gettempdir()
    given = [os.environ[name] for name in _NAMED_CACHES if os.environ.get(name)]
    user = f"torchinductor_{_user()}"
    own = (".cache", ".triton", ".nv", os.path.join("Library", "Caches"))
    return (*given, os.path.join(temporary, user), *(os.path.join(home, one) for one in own))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def as_text(content: bytes) -> str | None:
    """The text of a file, or the numbers of the arrays that NumPy saved in it; None for other binary files."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and content.startswith((b"\x93NUMPY", b"PK")):
        with contextlib.suppress(Exception):
            held = numpy.load(io.BytesIO(content))
            arrays = [held] if isinstance(held, numpy.ndarray) else [held[name] for name in held.files]
            return " ".join(repr(number) for one in arrays for number in one.ravel().tolist())
    return None if b"\0" in content else content.decode("utf-8", "replace")
