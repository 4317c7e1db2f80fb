"""Reading saved tensors where torch does not show them: before 2.10 a SavedTensor has ``register_hooks`` only.

There a slot is read as by backward, through ``_saved_*``, but none of the program's code may run for that. A profile
function ends every Python function that the read calls before its first line; such a call shows that the slot has
hooks. Hooks of gradsan's own (:func:`shown_when_read`) may run, and show the packed object.

A stale slot shows its tensor to hooks only (:func:`tensor_refused`). Those that are registered to see it
stay registered, and go on checking the version, with PyTorch's message.

There, too, a leaf read from a slot with hooks is a new tensor, and its destruction takes the gradient hooks of
the program's leaf with it (THPVariable_clear clears those of the accumulator, which both share): see :func:`let_go`.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import re
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from gradsan._collector import CollectorPaused
from gradsan._torch.modes import hushed, without_dispatch_modes

SAVED_TENSORS: Any = BackwardCFunction.saved_tensors

_SHOWS_DATA = hasattr(torch._C._autograd.SavedTensor, "data")
# Read past the properties shown to the program (user_hooks.py, default_hooks.py).
_DATA: Any = vars(torch._C._autograd.SavedTensor).get("data")
_UNPACK_HOOK: Any = vars(torch._C._autograd.SavedTensor).get("unpack_hook")
_TENSOR_DATA: Any = vars(torch._C.TensorBase)["data"]
_UNPACKS = hasattr(torch._C._autograd.SavedTensor, "unpack")
_PATIENCE = 2.0
_VERSIONS = re.compile(r"is at version \d+; expected version (?P<saved>\d+) instead")


class _UnknownPacked:
    """Stand-in for an object packed by hooks of the program's."""


class _HookedError(Exception):
    """A Python function was about to run while a slot was read."""


class _Reading(threading.local):
    """State of gradsan's hooks while this thread reads a slot; ``shown`` is None while it reads none."""

    shown: list[Any] | None = None
    given: list[_Standing] | None = None
    raised_by: _Standing | None = None


_reading = _Reading()
_UNKNOWN = _UnknownPacked()


def saved_tensor(node: Node, attribute: str, position: int | None, saved: Any) -> Any:
    """Return a SavedTensor that shows its content: ``saved`` itself where this torch's does.

    Reading ``attribute`` of the Node reads the slot; of a list as a whole, in which this one has a ``position``.
    """
    return saved if _SHOWS_DATA else _SlotRead(node, attribute, position)


def packed_object(saved: Any) -> Any:
    """Return the result of the pack hook of a SavedTensor; the tensor if it has no hooks; None if it is freed.

    Before 2.10 also None where the tensor is stale (see :func:`tensor_refused`).
    """
    try:
        held = _DATA.__get__(saved) if _SHOWS_DATA else saved.data
    except (RuntimeError, AttributeError):
        return None
    return held.tensor if isinstance(held, _Standing) else held


def is_hooked(saved: Any) -> bool:
    """Whether a SavedTensor has saved-tensor hooks: reading it would run the program's code.

    Missing ``unpack_hook``: True, and nothing is read.
    """
    are_shown = _SHOWS_DATA and _UNPACK_HOOK is not None
    hook = _UNPACK_HOOK.__get__(saved) if are_shown else getattr(saved, "unpack_hook", True)
    return hook is not None and hook is not _give


def shown_when_read(unpack: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return an unpack hook of gradsan's for installation: one that shows the packed object where torch does not."""
    if _SHOWS_DATA:
        return unpack

    def shows(packed: Any) -> Any:
        if _reading.shown is None:
            return unpack(packed)
        _reading.shown.append(packed)
        return torch.empty(0, device="cpu")

    _let_in.add(shows.__code__)
    return functools.wraps(unpack)(shows)


def tensor_refused(node: Node, attribute: str, position: int | None, saved: Any) -> Any:
    """Return the tensor of a slot whose reading raises the version error.

    None where another member of the list raises. The arguments are those of :func:`saved_tensor`.
    """
    if _SHOWS_DATA and position is None:
        return packed_object(saved)
    if _UNPACKS:
        return packed_object(saved) if _raises(saved.unpack) else None
    error, found = _refusal(node, attribute)
    if error is not None and found is None:
        with hushed(), without_dispatch_modes():
            found = _ask(node, attribute, position is not None, error)
    return _unchecked(node, attribute, found) if found is not None and found.position == position else None


def _unchecked(node: Node, attribute: str, standing: _Standing) -> Any:
    """Return the value that backward would get without the write; the Node's own result without the Node."""
    version, standing.version = standing.version, None
    try:
        value, _ = _read(node, attribute)
    except (RuntimeError, _HookedError):
        return standing.tensor
    finally:
        standing.version = version
    value = value if standing.position is None else value[standing.position]
    return standing.tensor if value.grad_fn in (node, None) else value


def let_go(value: Any) -> None:
    """Separate a leaf read from a slot with hooks from its accumulator, which the program's leaf shares.

    It is useless afterwards: a tensor without elements. Kinds that cannot be given other memory are kept unchanged.
    """
    if not _SHOWS_DATA and isinstance(value, torch.Tensor) and value.requires_grad and value.grad_fn is None:
        with hushed(), without_dispatch_modes():
            # Memory of another dtype makes PyTorch drop the accumulator.
            other = torch.float32 if value.dtype is torch.float64 else torch.float64
            is_dense = value.layout is torch.strided
            shape = torch.empty(0, device=value.device) if is_dense else value.detach()
            give_memory(value, torch.zeros_like(shape, dtype=other))


def give_memory(tensor: torch.Tensor, other: Any) -> None:
    """Set ``tensor.data = other``, past gradsan's own property; nothing happens for kinds that PyTorch refuses."""
    with contextlib.suppress(RuntimeError):
        _TENSOR_DATA.__set__(tensor, other)


def _raises(read: Callable[[], Any]) -> bool:
    try:
        read()
    except RuntimeError:
        return True
    return False


class _SlotRead:
    """A SavedTensor with the attributes that torch has since 2.10, found by reading the slot once."""

    def __init__(self, node: Node, attribute: str, position: int | None) -> None:
        self._node, self._attribute, self._position = node, attribute, position

    @functools.cached_property
    def _held(self) -> tuple[Any, bool]:
        """(content, whether it has hooks)."""
        try:
            value, shown = _read(self._node, self._attribute)
        except _HookedError:
            return _UNKNOWN, True
        except RuntimeError:
            return None, False
        position = self._position or 0
        if shown:
            # One operation has saved the whole list, so under one pair of hooks.
            return (shown[position] if position < len(shown) else _UNKNOWN), True
        if self._position is not None:
            value = value[position]
        if isinstance(value, torch.Tensor) and value.grad_fn is self._node:
            # A Node keeps its own result without itself.
            with hushed(), without_dispatch_modes():
                value = value.detach()
        return value, False

    @property
    def data(self) -> Any:
        """The tensor, or the object packed by hooks; None where it is freed or stale."""
        return self._held[0]

    @property
    def unpack_hook(self) -> Any:
        """Not None where the slot has hooks."""
        return _UNKNOWN if self._held[1] else None


class _Standing:
    """Object packed by gradsan's hooks on a stale slot: the tensor, and its version check."""

    def __init__(self, position: int | None, words: str) -> None:
        self.position, self._words = position, words
        self.tensor: torch.Tensor | None = None
        self.version: int | None = None
        """The saved version; None where another member of its list is stale, and raises before."""

    def pack(self, tensor: torch.Tensor) -> _Standing:
        self.tensor = tensor
        return self

    def check(self) -> None:
        """Raise PyTorch's error if the tensor has been written since it was saved."""
        now = self.version if self.tensor is None else self.tensor._version
        if self.version is not None and now != self.version:
            _reading.raised_by = self
            versions = f"is at version {now}; expected version {self.version} instead"
            raise RuntimeError(_VERSIONS.sub(versions, self._words))


def _give(standing: _Standing) -> Any:
    standing.check()
    if _reading.given is not None:
        _reading.given.append(standing)
    return standing.tensor


_let_in = {_give.__code__, _Standing.check.__code__}


def _ask(node: Node, attribute: str, is_list: bool, error: RuntimeError) -> _Standing | None:
    """Register hooks on a slot that raises ``error``, to see its tensor; None where it does not take them.

    Backward reads a list in order, and stops at the first stale member. Members get hooks from
    the last one on: the stale one is found when the list raises no more. The others need no check, as backward stops
    before.
    """
    stated = _VERSIONS.search(str(error))
    raw = getattr(node, "_raw_saved_tensors" if attribute == "saved_tensors" else f"_raw{attribute}")
    members = list(enumerate(raw)) if is_list else [(None, raw)]
    for position, member in reversed(members):
        standing = _Standing(position, str(error))
        try:
            member.register_hooks(standing.pack, _give)
        except RuntimeError:
            continue  # nothing was saved there, or under hooks of the program's
        if stated is not None and _refusal(node, attribute)[0] is None:
            standing.version = int(stated["saved"])
            return standing
    return None


def _refusal(node: Node, attribute: str) -> tuple[RuntimeError | None, _Standing | None]:
    """Return the version error of reading an attribute of a Node, and the gradsan hook that raised it, if any."""
    _reading.raised_by = None
    error = _version_error(lambda: _read(node, attribute))
    found, _reading.raised_by = _reading.raised_by, None
    return error, found


def _version_error(read: Callable[[], Any]) -> RuntimeError | None:
    try:
        read()
    except _HookedError:
        return None
    except RuntimeError as error:
        return error if _VERSIONS.search(str(error)) else None
    return None


def _read(node: Node, attribute: str) -> tuple[Any, list[Any]]:
    """Return an attribute of a Node, and the objects that gradsan's own hooks have shown meanwhile.

    Raises:
        _HookedError: if another Python function was about to run.
        RuntimeError: PyTorch's own.
    """
    if sys.getprofile() is None:
        return _read_under_guard(node, attribute)
    # This thread has a profiler; a new one has none.
    outcome: list[Any] = []
    done = _thread.allocate_lock()
    done.acquire()

    def read() -> None:
        try:
            outcome.append(_read_under_guard(node, attribute))
        except Exception as error:
            outcome.extend((error, _reading.raised_by))
        finally:
            done.release()

    _thread.start_new_thread(read, ())
    if not done.acquire(timeout=_PATIENCE):
        raise _HookedError  # it waits for a lock that this thread holds
    if isinstance(outcome[0], Exception):
        _reading.raised_by = outcome[1]
        raise outcome[0]
    found: tuple[Any, list[Any]] = outcome[0]
    return found


def _read_under_guard(node: Node, attribute: str) -> tuple[Any, list[Any]]:
    shown: list[Any] = []
    given: list[_Standing] = []
    # Gradsan's own property may replace it (default_hooks.py).
    is_function = attribute == "saved_tensors" and isinstance(node, BackwardCFunction)
    # Garbage collection may run finalisers of the program's, which must not be ended.
    with hushed(), without_dispatch_modes(), CollectorPaused():
        _reading.shown, _reading.given = shown, given
        sys.setprofile(_end_calls)
        try:
            value = SAVED_TENSORS.__get__(node) if is_function else getattr(node, attribute)
        finally:
            sys.setprofile(None)
            _reading.shown = _reading.given = None
    # One operation has saved the whole list, so all of it has one pair of hooks, or none.
    hooked = list(value if isinstance(value, tuple) else (value,)) if shown else []
    hooked += [value if one.position is None else value[one.position] for one in given]
    for one in hooked:
        let_go(one)
    return value, shown


def _end_calls(frame: FrameType, event: str, _: Any) -> None:
    if event == "call" and frame.f_code not in _let_in and not _handles_signal(frame.f_code):
        raise _HookedError


def _handles_signal(code: Any) -> bool:
    handlers = map(signal.getsignal, signal.valid_signals())
    return any(getattr(handler, "__code__", None) is code for handler in handlers)
