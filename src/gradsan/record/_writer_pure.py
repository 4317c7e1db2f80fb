"""Wrappers in pure Python that log the writes of the function they wrap; the C ones are part of ``_native.c``."""

from __future__ import annotations

import copy
import functools
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from gradsan import _torch


def is_of_signal(failure: BaseException) -> bool:
    """Whether a signal handler raised it: then it is the program's (a time limit) and only came while gradsan ran."""
    codes = set()
    trace = failure.__traceback__
    while trace is not None:
        codes.add(trace.tb_frame.f_code)
        trace = trace.tb_next
    return any(_code_of(signal.getsignal(number)) in codes for number in signal.valid_signals())


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not isinstance(handler, (FunctionType, MethodType)):
        handler = getattr(type(handler), "__call__", None)  # noqa: B004
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, CodeType) else None


class _OwnCalls(threading.local):
    number = 0
    """How many calls of gradsan's own code this thread is in: torch functions that it calls are not the program's."""


_own_calls = _OwnCalls()


def call_own(hook: Callable[..., Any], /, *args: Any) -> Any:
    """Call a function as gradsan's own: what it calls is neither logged nor followed."""
    _own_calls.number += 1
    try:
        return hook(*args)
    finally:
        _own_calls.number -= 1


_OWN = "__call__ __get__ __eq__ __ne__ __hash__ __reduce__ __reduce_ex__ __deepcopy__"
OWN_NAMES = frozenset(_OWN.split()) | {"_gradsan_original", "_gradsan_method", "_gradsan_relay"}
"""Attributes that a wrapper in C defines itself; all others are its original's."""


class FunctionWriter:
    """Wrapper around a callable that does not become a method in a class, such as a builtin function.

    It equals its original: torch passes the wrapper to ``__torch_function__``, where programs look functions up in
    tables that they filled before.
    """

    __slots__ = ("__dict__", "__weakref__", "_core", "_keyword", "_kind", "_op", "_original", "_position")

    def __init__(self, core: Any, original: Any, op: str, kind: str, position: int, keyword: str | None) -> None:
        """Take the arguments of :meth:`gradsan.record._core_pure.Core.writer`."""
        self._core = core
        self._original = original
        self._op = op
        self._kind = kind
        self._position = position
        self._keyword = keyword

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the original, then log; an exception of the original propagates, and nothing is logged."""
        core = self._core
        if _torch.is_traced_by_dynamo():
            return traced_call(self, *args, **kwargs)
        # Inside a compiler the wrapper logs nothing: these are not the program's operations.
        if (
            not core.active
            or _own_calls.number
            or _torch.is_compiling()
            or (core.open_steps and _called_by_optimizer(core))
        ):
            return self._original(*args, **kwargs)
        if core.before_write is not None and self._kind not in ("plain", "operator"):
            self._emit_before(args, kwargs)
        first = _torch.sequence_number()
        result = self._original(*args, **kwargs)
        if core.active:
            end = _torch.sequence_number()
            if end != first:
                self._log_nodes(first, end)
                is_early = core.quiet_from <= end < core.quiet_from + core.quiet_nodes
                if not is_early and core.on_quiet is not None:
                    self._emit(core.on_quiet, end)
                if core.on_nodes is not None:
                    self._emit(core.on_nodes, args[0] if result is None and args else result, first, end)
            if core.on_result is not None:
                self._emit(core.on_result, self._op, args, kwargs, result)
            if self._kind == "operator":
                self._emit_operator(args, kwargs)
            if self._kind in ("plain", "operator"):
                return result
            target = self._target(args, kwargs)
            if target is not None:
                self._log(target, basic_index(args[1]) if self._kind == "setitem" else None)
        return result

    def _target(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the tensors that a call writes; None where there are none."""
        if self._kind == "setitem":
            return args[0] if len(args) > 1 else None
        if self._keyword is not None:
            return kwargs.get(self._keyword)
        if len(args) > self._position >= 0:
            return args[self._position]
        return next(iter(kwargs.values()), None)

    def _emit_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = self._target(args, kwargs)
        if target is not None:
            self._emit(self._core.before_write, target)

    def _emit(self, listener: Callable[..., object], *args: Any) -> None:
        try:
            call_own(listener, *args)
        except Exception as failure:
            self._core.forgive(failure)

    def _log_nodes(self, first: int, end: int) -> None:
        try:
            self._core.log_nodes(first, end, caller())
        except Exception as failure:
            self._core.forgive(failure)

    def _emit_operator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        core = self._core
        if args and core.on_operator is not None and id(args[0]) not in core.quiet_operators:
            self._emit(core.on_operator, args, kwargs)

    def _log(self, target: Any, index: Any) -> None:
        core = self._core
        try:
            stack = core.stack_from(caller())
            if _torch.is_tensor(target):
                core.log_write(target, self._op, self._kind, index, stack)
            elif isinstance(target, (tuple, list)):
                for item in target:
                    if _torch.is_tensor(item):
                        core.log_write(item, self._op, self._kind, index, stack)
        except Exception as failure:
            core.forgive(failure)

    def __getattr__(self, name: str) -> Any:
        """Look all other attributes up on the original.

        In C this includes ``__class__``, so that isinstance and inspect take it for that; torch.compile would
        take a Python class that did so for the original, too, and read the attributes of such an object itself.
        """
        return getattr(self._original, name)

    def __repr__(self) -> str:
        """Return the original's."""
        return repr(self._original)

    def __eq__(self, other: object) -> Any:
        """Whether both wrap the same callable, or ``other`` is the original."""
        return self._original == (other._original if isinstance(other, FunctionWriter) else other)

    def __hash__(self) -> int:
        """Return the original's."""
        return hash(self._original)

    def __reduce__(self) -> Any:
        """Pickle as the original."""
        return reduction(self, self._original)

    def __copy__(self) -> FunctionWriter:
        """Return itself, as for every function."""
        return self

    def __deepcopy__(self, _: Any) -> FunctionWriter:
        """Return itself, as for every function."""
        return self


class MethodWriter(FunctionWriter):
    """Wrapper around a callable that becomes a method in a class."""

    __slots__ = ()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind as a function does."""
        return self if instance is None else MethodType(self, instance)


class FunctionListener(FunctionWriter):
    """Wrapper that calls listeners instead of logging, around a callable that does not become a method."""

    __slots__ = ("_after", "_before")

    def __init__(self, core: Any, original: Any, before: Any, after: Any) -> None:
        """Take the arguments of :func:`listen`."""
        super().__init__(core, original, "", "plain", -1, None)
        self._before, self._after = before, after

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the original between the two listeners."""
        core = self._core
        if _torch.is_traced_by_dynamo():
            return traced_call(self, *args, **kwargs)
        is_begun, noted = core.active and not _own_calls.number, None
        if is_begun and self._before is not None:
            try:
                noted = call_own(self._before, args, kwargs)
            except Exception as failure:
                core.forgive(failure)
            is_begun = noted is not None
        result = self._original(*args, **kwargs)
        if is_begun and core.active and self._after is not None:
            try:
                call_own(self._after, noted, args, kwargs, result)
            except Exception as failure:
                core.forgive(failure)
        return result


class MethodListener(FunctionListener):
    """Listener wrapper around a callable that becomes a method in a class."""

    __slots__ = ()
    __get__ = MethodWriter.__get__


class Relay(FunctionListener):
    """Wrapper around a saved-tensor hook of the program's that may change its argument and its result.

    ``before(given)`` returns None (only the hook is called), a 1-tuple of the result to use instead of calling
    it, or (argument for the hook, note); then ``after(note, given, result)`` returns the result. Without
    ``before``, ``after`` is called while the core is active. Their exceptions reach the program.
    """

    __slots__ = ()

    def __init__(self, core: Any, original: Any, before: Any, after: Any) -> None:
        """Take the arguments of :func:`listen`."""
        super().__init__(core, original, before, after)
        _torch.dress(self, original)
        vars(self)["_gradsan_relay"] = True

    def __call__(self, given: Any, /) -> Any:
        """Call the original between ``before`` and ``after``."""
        noted, is_begun = None, self._core.active
        if self._before is not None:
            begun = call_own(self._before, given)
            is_begun = begun is not None
            if is_begun and len(begun) == 1:
                return begun[0]
            given, noted = begun if is_begun else (given, None)
        result = self._original(given)
        return call_own(self._after, noted, given, result) if is_begun else result


def is_relay(hook: Any) -> bool:
    """Whether a saved-tensor hook is a relay around one of the program's."""
    return getattr(hook, "_gradsan_relay", False) is True


def traced_call(wrapper: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Stand in for the ``__call__`` of a wrapper in C, which torch.compile cannot trace; otherwise call the wrapper.

    A tensor's method called on its class, ``torch.Tensor.add_(x, 1)``, becomes a call on the tensor:
    the compiler has read its table of methods off the class, where the wrappers are.
    """
    if not _torch.is_traced_by_dynamo():
        return wrapper(*args, **kwargs)
    if wrapper._gradsan_method is not None:
        return getattr(args[0], wrapper._gradsan_method)(*args[1:], **kwargs)
    return wrapper._gradsan_original(*args, **kwargs)


_HERE = globals()


def _called_by_optimizer(core: Any) -> bool:
    """Whether the caller is code of torch's optimizers, whose inner writes are accounted for per step."""
    return is_called_from(core.optimizer_folder)


def is_called_from(folder: str, skip: int = 0) -> bool:
    """Whether the file of the caller, ``skip`` frames further out, lies in ``folder``."""
    frame = caller(skip)
    return frame is not None and frame.f_code.co_filename.startswith(folder)


def caller(skip: int = 0) -> FrameType | None:
    """Return the frame of the caller, ``skip`` frames further out, not counting frames of wrappers.

    One call may pass several wrappers; the caller of the outermost one counts.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (skip > 0 or frame.f_globals is _HERE):
        skip -= frame.f_globals is not _HERE
        frame = frame.f_back
    return frame


def wrap(core: Any, original: Any, op: str, kind: str, position: int, keyword: str | None) -> FunctionWriter:
    """Return a wrapper around ``original`` that becomes a method if ``original`` does."""
    kind_of_wrapper = MethodWriter if hasattr(type(original), "__get__") else FunctionWriter
    wrapper = kind_of_wrapper(core, original, op, kind, position, keyword)
    _torch.dress(wrapper, original)
    return wrapper


def listen(core: Any, original: Any, before: Any, after: Any) -> FunctionListener:
    """Wrap ``original`` so that ``before(args, kwargs)`` and ``after(noted, args, kwargs, result)`` are called.

    Either may be None. ``noted`` is the result of ``before``; if that is None, ``after`` is not called. Their
    failures are counted. In C there is no frame between the caller's and that of ``original``: warnings and tracebacks
    are the same as without the wrapper.
    """
    kind_of_wrapper = MethodListener if hasattr(type(original), "__get__") else FunctionListener
    wrapper = kind_of_wrapper(core, original, before, after)
    _torch.dress(wrapper, original)
    return wrapper


def reduction(wrapper: Any, original: Any) -> Any:
    """Return the value of ``wrapper.__reduce__``: the name of ``original``, so that unpickling needs no gradsan."""
    if isinstance(original, FunctionType):
        return str(wrapper.__qualname__)
    reduced = original.__reduce_ex__(4)
    if isinstance(reduced, str) and getattr(sys.modules.get(original.__module__), reduced, None) is original:
        return copy.copy, (original,)
    return reduced


def basic_index(index: Any) -> tuple[Any, ...] | None:
    """Return ``index`` as a tuple if it consists of ints, slices of ints, None and ``...``; else None (a tensor)."""
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
