"""The hot path of capture in pure Python; ``_native.c`` is the same in C and is tested against this file.

Hot means: runs once per saved tensor, per use and per in-place operation of the user's program. Everything here
records a few integers and references and defers all thinking to the moment a report is made.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable
from types import CodeType
from typing import Any

from gradsan.capture import _torch, _writer_pure

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
        self.backwards = 0
        self.on_stale: Callable[[Save], Any] | None = None
        self.running: list[tuple[Any, ...]] = []
        self.step_log: Any = []
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
        self.saves = self.write_count = self.steps = self.log_errors = self.backwards = 0
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
        return _writer_pure.wrap(self, original, op, kind, position, keyword)

    def step_begin(self, optimizer: Any, *_: Any) -> None:
        """Log that a step begins: an optimizer's pre-hook.

        The entry is ("begin", clock, steps before, id of the optimizer, its class, stack, sequence number, storages of
        its parameters and their versions, both as bytes of 8-byte integers).
        """
        self.clock += 1
        self.open_steps += 1
        try:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            storages = array("q", map(_torch.storage_or_none, parameters)).tobytes()
            versions = array("q", [p._version for p in parameters]).tobytes()
            stack = self._stack_from(sys._getframe().f_back)
            name, sequence = type(optimizer).__name__, _torch.sequence_number()
            entry = ("begin", self.clock, self.steps, id(optimizer), name, stack, sequence, storages, versions)
            self.step_log.append(entry)
        except Exception:
            self.log_errors += 1

    def step_end(self, optimizer: Any, *_: Any) -> None:
        """Log that a step has ended: an optimizer's post-hook.

        The entry is ("end", clock, id of the optimizer, versions of its parameters as bytes).
        """
        self.open_steps = max(0, self.open_steps - 1)
        self.steps += 1
        self.clock += 1
        try:
            versions = array("q", [p._version for group in optimizer.param_groups for p in group["params"]])
            self.step_log.append(("end", self.clock, id(optimizer), versions.tobytes()))
        except Exception:
            self.log_errors += 1

    def engine(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the engine's entry point so that every backward call is known while it runs.

        ``running`` then holds (clock, stack, thread, outputs, retain_graph, accumulate_grad) for it.
        """
        core = self

        def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not core.active:
                return original(t_outputs, *args, **kwargs)
            core.clock += 1
            core.backwards += 1
            retain = args[1] if len(args) > 1 else None
            accumulate = kwargs.get("accumulate_grad", True)
            stack = core._stack_from(sys._getframe().f_back)
            record = (core.clock, stack, threading.get_ident(), t_outputs, retain, accumulate)
            core.running.append(record)
            try:
                return original(t_outputs, *args, **kwargs)
            finally:
                core.running[:] = [other for other in core.running if other is not record]

        return _torch.dress(run_backward, original)

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
            result = tensor if on_stale is None else on_stale(save)
            if isinstance(result, BaseException):
                raise result
            return result

        return unpack
