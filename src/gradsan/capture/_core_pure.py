"""The hot path of capture in pure Python; ``_native.c`` is the same in C and is tested against this file.

Hot means: runs once per saved tensor, per use and per in-place operation of the user's program. Everything here
records a few integers and references and defers all thinking to the moment a report is made.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from gradsan.capture import _torch

WRITES_KEPT = 32_768
SAVES_KEPT = 65_536
STACKS_KEPT = 65_536
DEPTH_KEPT = 128


class Stack:
    """A raw stack, innermost frame first: code objects and instruction offsets; frames would keep tensors alive."""

    __slots__ = ("codes", "lastis")

    def __init__(self, codes: tuple[CodeType, ...], lastis: tuple[int, ...]) -> None:
        """Keep the code objects and, for each, ``f_lasti`` at the moment of capture."""
        self.codes = codes
        self.lastis = lastis


class Save:
    """What the pack hook leaves with autograd in place of the tensor."""

    __slots__ = ("clock", "stack", "tensor", "version", "was_leaf")

    clock: int
    stack: Stack
    tensor: Any
    version: int
    was_leaf: bool


class Core:
    """Counters, logs and the functions that fill them. One per process; see :mod:`gradsan.capture.recorder`."""

    is_native = False

    def __init__(self) -> None:
        """Start with empty logs, inactive."""
        self.active = False
        self.clock = 0
        self.saves = 0
        self.write_count = 0
        self.steps = 0
        self.open_steps = 0
        self.silent_clock = -1
        self.log_errors = 0
        self.on_stale: Callable[[Save], Any] | None = None
        self.optimizer_folder = _torch.optimizer_folder()
        self._stacks: dict[tuple[int, ...], Stack] = {}
        self._recent_saves: deque[tuple[int, Stack]] = deque(maxlen=SAVES_KEPT)
        self._writes: deque[tuple[Any, ...]] = deque(maxlen=WRITES_KEPT)
        self.pack = self._make_pack()
        self.unpack = self._make_unpack()

    def tick(self) -> int:
        """Advance the clock that orders all events and return its new value."""
        self.clock += 1
        return self.clock

    def clear(self) -> None:
        """Forget everything logged; the clock goes on."""
        self._stacks.clear()
        self._recent_saves.clear()
        self._writes.clear()
        self.saves = self.write_count = self.steps = self.log_errors = 0
        self.silent_clock = -1

    def stack(self, skip: int = 0) -> Stack:
        """The stack of the caller (``skip`` frames further out), equal stacks being one object.

        It is empty where no Python frame is left: a hook called in a thread of the engine.
        """
        frame: Any = sys._getframe().f_back
        while skip > 0 and frame is not None:
            frame = frame.f_back
            skip -= 1
        return self._stack_from(frame)

    def _stack_from(self, frame: Any) -> Stack:
        codes: list[CodeType] = []
        key: list[int] = []
        depth = 0
        while frame is not None and depth < DEPTH_KEPT:
            code = frame.f_code
            codes.append(code)
            key.append(id(code))
            key.append(frame.f_lasti)
            frame = frame.f_back
            depth += 1
        known = tuple(key)
        found = self._stacks.get(known)
        if found is None:
            if len(self._stacks) >= STACKS_KEPT:
                self._stacks.clear()
            found = self._stacks[known] = Stack(tuple(codes), known[1::2])
        return found

    def recent_saves(self) -> list[tuple[int, Stack]]:
        """(sequence number of the node that saved, stack) of the most recent saves, oldest first."""
        return list(self._recent_saves)

    def writes(self) -> list[tuple[Any, ...]]:
        """The logged writes, oldest first, as the fields of :class:`gradsan.capture.ledger.RawWrite`."""
        return list(self._writes)

    @property
    def writes_were_cut(self) -> bool:
        """Whether the bounded write log has dropped its oldest entries."""
        return self.write_count > len(self._writes)

    def log_write(self, tensor: Any, op: str, kind: str, index: Any, stack: Stack) -> None:
        """Put one in-place change of ``tensor`` into the log."""
        try:
            storage = tensor.untyped_storage()._cdata
            version = tensor._version
            geometry = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.element_size())
        except (RuntimeError, NotImplementedError, AttributeError):
            storage, version, geometry = _torch.weak_identity(tensor)
        sequence, grad_enabled = _torch.sequence_number(), _torch.is_grad_enabled()
        try:
            is_parameter = tensor.is_leaf and tensor.requires_grad
        except RuntimeError:
            # A view made under no_grad whose base was then written refuses to tell its grad_fn; it is no leaf.
            is_parameter = False
        self.clock += 1
        self.write_count += 1
        moment, steps = self.clock, self.steps
        self._writes.append(
            (moment, storage, version, op, kind, *geometry, index, stack, sequence, grad_enabled, is_parameter, steps)
        )

    def writer(self, original: Any, op: str, kind: str, position: int, keyword: str | None) -> Callable[..., Any]:
        """Wrap ``original`` so that what it writes is logged after it returned.

        ``position`` is the written positional argument (-1: none), ``keyword`` the keyword that names written tensors
        (``out``). What goes wrong while logging never reaches the caller; ``log_errors`` counts it. Like ``original``,
        the wrapper becomes a method in a class or it does not (a builtin function does not).
        """
        core = self
        becomes_method = hasattr(type(original), "__get__")
        here = globals()
        optimizer_folder = self.optimizer_folder
        is_tensor = _torch.is_tensor

        def log(target: Any, index: Any) -> None:
            try:
                caller: Any = sys._getframe()
                # One call may pass several wrappers; what called the outermost one is what wrote.
                while caller is not None and caller.f_globals is here:
                    caller = caller.f_back
                if core.open_steps and caller and caller.f_code.co_filename.startswith(optimizer_folder):
                    return
                stack = core._stack_from(caller)
                if is_tensor(target):
                    core.log_write(target, op, kind, index, stack)
                elif isinstance(target, (tuple, list)):
                    for item in target:
                        if is_tensor(item):
                            core.log_write(item, op, kind, index, stack)
            except Exception:
                core.log_errors += 1

        if kind == "setitem":

            def write(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                if core.active and len(args) > 1:
                    log(args[0], basic_index(args[1]))
                return result

        elif keyword is not None:

            def write(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                if kwargs and core.active and kwargs.get(keyword) is not None:
                    log(kwargs[keyword], None)
                return result

        else:

            def write(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                if core.active:
                    if len(args) > position >= 0:
                        log(args[position], None)
                    elif kwargs:
                        log(next(iter(kwargs.values())), None)
                return result

        return _torch.dress(write if becomes_method else _Function(write, original), original)

    def _make_pack(self) -> Callable[[Any], Save]:
        core = self
        sequence_number = _torch.sequence_number

        def pack(tensor: Any) -> Save:
            save = Save()
            # A leaf cannot be the output of the node that saves it, so keeping it makes no cycle and needs no alias.
            save.was_leaf = leaf = tensor.is_leaf
            save.tensor = tensor if leaf else tensor.detach()
            save.version = tensor._version
            core.clock += 1
            core.saves += 1
            save.clock = core.clock
            save.stack = stack = core._stack_from(sys._getframe().f_back)
            core._recent_saves.append((sequence_number() - 1, stack))
            return save

        return pack

    def _make_unpack(self) -> Callable[[Save], Any]:
        core = self

        def unpack(save: Save) -> Any:
            tensor = save.tensor
            if tensor._version == save.version and save.clock > core.silent_clock:
                return tensor
            on_stale = core.on_stale
            return tensor if on_stale is None else on_stale(save)

        return unpack


class _Function:
    """A wrapper around a callable that does not become a method in a class."""

    __slots__ = ("__dict__", "_original", "_write")

    def __init__(self, write: Callable[..., Any], original: Any) -> None:
        self._write = write
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._write(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self._original)

    def __reduce__(self) -> Any:
        return reduction(self, self._original)

    def __copy__(self) -> _Function:
        return self

    def __deepcopy__(self, _: Any) -> _Function:
        return self


def reduction(wrapper: Any, original: Any) -> Any:
    """What ``wrapper.__reduce__`` returns: pickled by the name of ``original``, so that loading needs no gradsan."""
    if isinstance(original, FunctionType):
        return str(wrapper.__qualname__)
    reduced = original.__reduce_ex__(4)
    if isinstance(reduced, str) and getattr(sys.modules.get(original.__module__), reduced, None) is original:
        return copy.copy, (original,)
    return reduced


def basic_index(index: Any) -> tuple[Any, ...] | None:
    """``index`` as a tuple if it is made of ints, slices of ints, None and ``...`` only; else None (a tensor index)."""
    parts = index if type(index) is tuple else (index,)
    for part in parts:
        kind = type(part)
        if kind is slice:
            for bound in (part.start, part.stop, part.step):
                if bound is not None and type(bound) is not int:
                    return None
        elif not (kind is int or part is None or part is Ellipsis):
            return None
    return parts
