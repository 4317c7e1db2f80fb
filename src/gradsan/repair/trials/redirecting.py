"""Python's file functions, redirected to the scratch layer of a trial; other effects end the trial.

Programs open files by ``open``, ``os`` and functions built on them. A child process, a database, a library that
writes by itself cannot be redirected: the first of these ends the trial, unless the user agreed to it.
"""

from __future__ import annotations

import builtins
import functools
import multiprocessing.util
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gradsan._imports import call_after_import
from gradsan.repair.trials.harmless import command_of, is_harmless
from gradsan.repair.trials.held_functions import (
    BY_MODE,
    CHANGED,
    LOADING,
    MADE,
    NOT_FOLLOWED,
    READ,
    REMOVED,
    SAVING,
    Entries,
    leading_class,
    leading_function,
    replace_everywhere,
)
from gradsan.repair.trials.scratch import WRITING, Scratch, TooLargeError, as_text

_PATHS_OF = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.utime", "os.truncate"), (0,)),
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
    "sqlite3.connect": (0,),
}
"""Audit events of writes to the file system, with the positions of their path arguments."""
_STARTS = {"subprocess.Popen": (0, 1), "os.system": (0, 0), "os.exec": (0, 1), "os.posix_spawn": (0, 1)}
_HEARD = frozenset({"open", *_PATHS_OF, *_STARTS})
_OWN_OF_MULTIPROCESSING = ("resource_tracker", "semaphore_tracker")
_MOST_READ, _LARGEST = 10_000, 1 << 22
Uncovered = tuple[str, str]
"""An effect of a trial outside of the scratch layer: ``writes`` or ``starts``, and the file or the command."""


class Redirecting:
    """Redirection of this process's writes to ``scratch``."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._give_up: Callable[[Uncovered], None] | None = None
        self._inside = threading.local()
        self._open = os.open
        self._read: set[str] = set()

    def start(self, give_up: Callable[[Uncovered], None] | None) -> None:
        """Redirect from now on, for as long as this process lives.

        ``give_up`` is called with an effect that cannot be redirected, and ends this process; without it, that is
        allowed.
        """
        self._give_up = give_up
        self._scratch.start()
        led = {getattr(os, name): new for name, new in self._functions() if hasattr(os, name)}
        led[builtins.open] = self._leading_open(builtins.open)
        for names in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            names.update(new for old, new in led.items() if old in names)
        replace_everywhere(led)
        # Walking by descriptors would bypass the layer.
        vars(shutil)["_use_fd_functions"] = False
        for table, where in ((SAVING, self._saved), (LOADING, self._loaded), (BY_MODE, self._opened_by_mode)):
            for module, name, position in table:
                call_after_import(module, functools.partial(self._lead_argument, module, name, position, where))
        call_after_import("torch", self._lead_mapped_memory)
        multiprocessing.util.spawnv_passfds = self._asking_first(multiprocessing.util.spawnv_passfds)
        sys.addaudithook(self._hear)

    def _asking_first(self, start: Callable[..., int]) -> Callable[..., int]:
        """Ask before processes that multiprocessing spawns; a fork inherits the redirection of its parent."""

        @functools.wraps(start)
        def starting(path: Any, words: Any, handles: Any) -> int:
            command = command_of(path, [os.fsdecode(word) for word in words])
            if not any(own in command for own in _OWN_OF_MULTIPROCESSING):
                self._note("starts", command)
            return start(path, words, handles)

        return starting

    def stop(self) -> None:
        """Stop, once the program has ended: later calls are not its own."""
        self.__enter__()
        self._scratch.stop()

    @property
    def changed(self) -> tuple[str, ...]:
        """The files that the program wrote or removed."""
        return tuple(sorted(self._scratch.written))

    @property
    def texts(self) -> dict[str, str]:
        """The contents of the text files and NumPy arrays that the program wrote, by their paths."""
        with self:
            there = ((path, Path(self._scratch.there(path))) for path in self._scratch.written)
            found = {path: one.read_bytes() for path, one in there if one.is_file() and one.stat().st_size < _LARGEST}
        texts = {path: as_text(content) for path, content in found.items()}
        return {path: text for path, text in texts.items() if text is not None}

    @property
    def read(self) -> tuple[str, ...]:
        """The files that it opened to read, without those that it wrote."""
        with self:
            return tuple(sorted(one for one in self._read if os.path.isfile(one) and not self._scratch.passes(one)))

    def _functions(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        scratch = self._scratch
        for name in READ:
            yield name, self._leading(getattr(os, name, None), lambda path, follow: scratch.there(path))
        for name in NOT_FOLLOWED:
            yield name, self._leading(getattr(os, name), lambda path, follow: scratch.there(path), follows=False)
        for name in CHANGED:
            yield name, self._leading(getattr(os, name, None), lambda path, follow: scratch.changed(path), writes=True)
        for name in MADE:
            yield (
                name,
                self._leading(getattr(os, name), lambda path, follow: scratch.made(path), writes=True, follows=False),
            )
        for name in REMOVED:
            yield name, self._leading_removal(getattr(os, name))
        yield "rename", self._leading_rename(os.rename)
        yield "replace", self._leading_rename(os.replace)
        yield "symlink", self._leading_second(os.symlink, lambda source: source)
        yield "link", self._leading_second(os.link, lambda source: scratch.changed(scratch.logical(source)))
        yield "open", self._leading_descriptor(os.open)
        yield "listdir", self._leading_list(os.listdir)
        yield "scandir", self._leading_scan(os.scandir)
        yield "chdir", self._leading_chdir(os.chdir)
        yield "getcwd", self._leading_getcwd(os.getcwd, os.fsdecode)
        yield "getcwdb", self._leading_getcwd(os.getcwdb, os.fsencode)

    def _leading(
        self, original: Any, place: Callable[[str, bool], str], *, follows: bool = True, writes: bool = False
    ) -> Callable[..., Any]:
        def led(call: Callable[..., Any], path: Any, args: Any, kwargs: Any) -> Any:
            follow = follows and kwargs.get("follow_symlinks", True)
            logical = self._scratch.logical(path, kwargs.pop("dir_fd", None), follow=follow)
            return call(place(logical, follow), *args, **kwargs)

        return self._wrapped(original, led, writes=writes)

    def _leading_removal(self, original: Any) -> Callable[..., Any]:
        scratch = self._scratch

        def led(call: Callable[..., Any], path: Any, args: Any, kwargs: Any) -> None:
            logical = scratch.logical(path, kwargs.pop("dir_fd", None), follow=False)
            there = scratch.there(logical)
            if scratch.passes(logical):
                call(logical, *args, **kwargs)
                return
            is_directory = os.path.isdir(there) and not os.path.islink(there)
            if call.__name__ == "rmdir" and is_directory:
                names = scratch.names(logical)
                if os.listdir(there) if names is None else names:
                    raise OSError(39, os.strerror(39), path)
            elif is_directory or not os.path.lexists(there) or call.__name__ == "rmdir":
                call(there, *args, **kwargs)  # fails, with the system's own error
            if there != logical:
                call(there, *args, **kwargs)
            elif not os.access(os.path.dirname(logical), os.W_OK):
                raise PermissionError(13, os.strerror(13), path)
            scratch.removed(logical)

        return self._wrapped(original, led, writes=True)

    def _leading_rename(self, original: Any) -> Callable[..., Any]:
        scratch = self._scratch

        def led(call: Callable[..., Any], path: Any, args: Any, kwargs: Any) -> None:
            source = scratch.logical(path, kwargs.pop("src_dir_fd", None), follow=False)
            other, *_ = args or (kwargs["dst"],)
            target = scratch.logical(other, kwargs.pop("dst_dir_fd", None), follow=False)
            there, aim = scratch.there(source), scratch.there(target)
            if (scratch.passes(source) and scratch.passes(target)) or not os.path.lexists(there):
                call(there, aim)
                return
            if source == target:
                return
            if os.path.isdir(aim) and not os.path.islink(aim):
                names = scratch.names(target)
                if not os.path.isdir(there) or (os.listdir(aim) if names is None else names):
                    raise OSError(39, os.strerror(39), path)
            if aim == target and os.path.lexists(target) and not scratch.passes(target):
                scratch.removed(target)
            moved = scratch.moved(source)
            # The scratch folder and the target are on different disks.
            shutil.move(moved, scratch.made(target) if not os.path.lexists(scratch.there(target)) else aim)
            scratch.removed(source)

        return self._wrapped(original, led, writes=True)

    def _leading_second(self, original: Any, first: Callable[[Any], Any]) -> Callable[..., Any]:
        """``symlink`` and ``link``, whose second argument is created."""

        def led(call: Callable[..., Any], path: Any, args: Any, kwargs: Any) -> None:
            other, *rest = args or (kwargs.pop("dst"),)
            directory = kwargs.pop("dir_fd", kwargs.pop("dst_dir_fd", None))
            made = self._scratch.made(self._scratch.logical(other, directory, follow=False))
            call(first(path), made, *rest, **kwargs)

        return self._wrapped(original, led, writes=True)

    def _leading_descriptor(self, original: Any) -> Callable[..., Any]:
        def led(call: Callable[..., Any], path: Any, args: Any, kwargs: Any) -> int:
            flags, *rest = args or (kwargs.pop("flags"),)
            return int(call(self._to_open(path, flags, kwargs.pop("dir_fd", None)), flags, *rest, **kwargs))

        return self._wrapped(original, led, writes=True)

    def _leading_open(self, original: Any) -> Callable[..., Any]:
        def opener(path: Any, flags: int) -> int:
            with self:
                return self._open(self._to_open(path, flags), flags, 0o666)

        @functools.wraps(original)
        def leading(*args: Any, **kwargs: Any) -> Any:
            file = args[0] if args else kwargs.get("file")
            own = args[7] if len(args) > 7 else kwargs.get("opener")
            if not isinstance(file, str | bytes | os.PathLike) or self.is_inside:
                return original(*args, **kwargs)
            if own is not None:
                # It opens by os.open, which is redirected.
                self._inside.opens_itself = True
                try:
                    return original(*args, **kwargs)
                finally:
                    self._inside.opens_itself = False
            kwargs["opener"] = opener
            try:
                # The file keeps the name that it was opened by.
                with self:
                    return original(*args[:7], **kwargs)
            except OSError as failure:
                _name(failure, file)
                raise
            except TooLargeError as failure:
                self._note("writes", str(failure))
                return original(*args, **{**kwargs, "opener": None})

        return leading

    def _to_open(self, path: Any, flags: int, directory: int | None = None) -> str:
        is_link_named = flags & os.O_NOFOLLOW or (flags & os.O_CREAT and flags & os.O_EXCL)
        logical = self._scratch.logical(path, directory, follow=not is_link_named)
        there = self._scratch.opened(logical, flags)
        if there == logical and not flags & WRITING and len(self._read) < _MOST_READ:
            self._read.add(logical)
        return there

    def _leading_list(self, original: Any) -> Callable[..., Any]:
        def led(call: Callable[..., Any], path: Any, args: Any, kwargs: Any) -> Any:
            logical = self._scratch.logical(path)
            names = self._scratch.names(logical)
            if names is None:
                return call(self._scratch.there(logical))
            return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

        return self._wrapped(original, led, default=os.curdir)

    def _leading_scan(self, original: Any) -> Callable[..., Any]:
        def led(call: Callable[..., Any], path: Any, args: Any, kwargs: Any) -> Any:
            names = self._scratch.names(self._scratch.logical(path))
            return call(path) if names is None else Entries(path, names)

        return self._wrapped(original, led, default=os.curdir)

    def _leading_chdir(self, original: Any) -> Callable[..., Any]:
        def led(call: Callable[..., Any], path: Any, args: Any, kwargs: Any) -> None:
            logical = self._scratch.logical(path)
            call(self._scratch.entered(logical))
            self._scratch.enter(logical)

        return self._wrapped(original, led, writes=True)

    def _leading_getcwd(self, original: Any, form: Callable[[str], Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def leading() -> Any:
            found = original()
            return form(self._scratch.directory) if self._scratch.is_above(os.fsdecode(found)) else found

        return leading

    def _wrapped(
        self, original: Any, led: Callable[..., Any], *, writes: bool = False, default: Any = None
    ) -> Callable[..., Any]:
        """``original``, called by ``led`` where its first argument is a path that may be in the layer."""

        @functools.wraps(original)
        def leading(*args: Any, **kwargs: Any) -> Any:
            name = "src" if "src" in kwargs else "path"
            path = args[0] if args else kwargs.get(name, default)
            is_path = isinstance(path, str | bytes | os.PathLike)
            if not is_path or self.is_inside or not (writes or self._scratch.is_used):
                return original(*args, **kwargs)
            rest = {key: value for key, value in kwargs.items() if key != name}
            try:
                with self:
                    return led(original, os.fspath(path), args[1:], rest)
            except OSError as failure:
                _name(failure, path, args[1] if len(args) > 1 else None)
                raise
            except TooLargeError as failure:
                self._note("writes", str(failure))
                return original(*args, **kwargs)

        return leading

    def _saved(self, path: str, *_: Any) -> str:
        return self._to_open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def _loaded(self, path: str, *_: Any) -> str:
        return self._to_open(path, os.O_RDONLY)

    def _opened_by_mode(self, path: str, rest: list[Any], kwargs: dict[str, Any]) -> str:
        mode = str(rest[0] if rest else kwargs.get("mode", "r"))
        flags = {"r": os.O_RDONLY, "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC}.get(mode, os.O_RDWR | os.O_CREAT)
        return self._to_open(path, flags)

    def _lead_argument(self, module: str, name: str, position: int, where: Callable[..., str]) -> None:
        owner = sys.modules[module]
        original = getattr(owner, name, None)
        if original is None:
            return

        def led(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
            given = list(args)
            path = given[position] if len(given) > position else None
            if isinstance(path, str | os.PathLike):
                with self:
                    given[position] = where(os.fspath(path), given[position + 1 :], kwargs)
            return given

        replace_everywhere({original: leading_class(original, led) or leading_function(original, led)})

    def _lead_mapped_memory(self) -> None:
        """Redirect files that PyTorch maps into memory itself: shared ones are written."""
        torch: Any = sys.modules["torch"]
        for owner in (torch, torch.UntypedStorage):
            original = owner.from_file
            owner.from_file = staticmethod(self._mapping(original)) if owner is not torch else self._mapping(original)

    def _mapping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def mapping(filename: Any, shared: bool = False, *args: Any, **kwargs: Any) -> Any:
            with self:
                there = self._to_open(filename, os.O_RDWR | os.O_CREAT if shared else os.O_RDONLY)
            return original(there, shared, *args, **kwargs)

        return mapping

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _HEARD or self.is_inside:
            return
        if event == "open" and not getattr(self._inside, "opens_itself", False):
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITING:
                self._note_written(path)
        elif event in _PATHS_OF:
            for position in _PATHS_OF[event]:
                self._note_written(arguments[position])
        elif event in _STARTS:
            program, words = (arguments[position] for position in _STARTS[event])
            with self:
                command = command_of(program, words)
                if not is_harmless(command, sys._getframe(1)):
                    self._note("starts", command)

    def _note_written(self, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike) or os.fspath(path) in (":memory:", b":memory:", ""):
            return
        with self:
            logical = self._scratch.logical(path)
            if not (self._scratch.passes(logical) or self._scratch.is_above(logical)):
                self._note("writes", logical)

    def _note(self, kind: str, what: str) -> None:
        if self._give_up is not None:
            with self:
                self._give_up((kind, what))

    @property
    def is_inside(self) -> bool:
        """Whether this thread is executing code of the layer itself."""
        return getattr(self._inside, "depth", 0) > 0

    def __enter__(self) -> None:
        """Exempt this thread's calls from redirection."""
        self._inside.depth = getattr(self._inside, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        """Redirect this thread's calls again."""
        self._inside.depth -= 1


def _name(failure: OSError, path: Any, other: Any = None) -> None:
    """Set the error's file name to the path that the program used."""
    if failure.filename is not None:
        failure.filename = path
    if failure.filename2 is not None:
        failure.filename2 = other
