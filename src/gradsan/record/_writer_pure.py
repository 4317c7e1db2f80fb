"""Wrappers in pure Python that log what the function they wrap has written; in C they are part of ``_native.c``."""

from __future__ import annotations

import copy
import functools
import signal
import sys
from types import CodeType, FunctionType, MethodType
from typing import Any

from gradsan import _torch


def is_of_signal(failure: BaseException) -> bool:
    """Whether a handler of signals raised it: it is the program's, a time limit, and only came while gradsan worked."""
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


_OWN = "__call__ __get__ __eq__ __ne__ __hash__ __reduce__ __reduce_ex__"
OWN_NAMES = frozenset(_OWN.split()) | {"_gradsan_original", "_gradsan_method", "_gradsan_relay"}
"""What a wrapper in C tells of itself; all else it is asked for is its original's."""


class FunctionWriter:
    """A wrapper around a callable that does not become a method in a class, as builtin functions do not.

    It equals what it wraps: torch hands the wrapper to ``__torch_function__``, where programs look functions up in
    tables that they filled before.
    """

    __slots__ = ("__dict__", "__weakref__", "_core", "_keyword", "_kind", "_op", "_original", "_position")

    def __init__(self, core: Any, original: Any, op: str, kind: str, position: int, keyword: str | None) -> None:
        """The arguments of :meth:`gradsan.record._core_pure.Core.writer`."""
        self._core = core
        self._original = original
        self._op = op
        self._kind = kind
        self._position = position
        self._keyword = keyword

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the original, then log; an exception of the original passes, and nothing is logged."""
        core = self._core
        if _torch.is_traced_by_dynamo():
            return traced_call(self, *args, **kwargs)
        # Inside a compiler the wrapper steps aside: what it would log there are not the program's operations.
        if not core.active or _torch.is_compiling() or (core.open_steps and _called_by_optimizer(core)):
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
                    self._emit_quiet(end)
                if core.on_nodes is not None:
                    self._emit_nodes(args[0] if result is None and args else result, first, end)
            if core.on_result is not None:
                self._emit_result(args, kwargs, result)
            if self._kind == "operator":
                self._emit_operator(args, kwargs)
            if self._kind in ("plain", "operator"):
                return result
            target = self._target(args, kwargs)
            if target is not None:
                self._log(target, basic_index(args[1]) if self._kind == "setitem" else None)
        return result

    def _target(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call is given to write to; None where it is given nothing."""
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
            try:
                self._core.before_write(target)
            except Exception as failure:
                self._core.forgive(failure)

    def _log_nodes(self, first: int, end: int) -> None:
        try:
            self._core.log_nodes(first, end, caller())
        except Exception as failure:
            self._core.forgive(failure)

    def _emit_nodes(self, holder: Any, first: int, end: int) -> None:
        try:
            self._core.on_nodes(holder, first, end)
        except Exception as failure:
            self._core.forgive(failure)

    def _emit_result(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        try:
            self._core.on_result(self._op, args, kwargs, result)
        except Exception as failure:
            self._core.forgive(failure)

    def _emit_quiet(self, end: int) -> None:
        try:
            self._core.on_quiet(end)
        except Exception as failure:
            self._core.forgive(failure)

    def _emit_operator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        core = self._core
        if args and core.on_operator is not None and id(args[0]) not in core.quiet_operators:
            try:
                core.on_operator(args, kwargs)
            except Exception as failure:
                core.forgive(failure)

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
        """What a wrapper is asked for is told by its original.

        In C its ``__class__``, too, so that isinstance and inspect take it for that; a class in Python that said so
        would be taken for it by torch.compile, which reads the attributes of such an object by itself.
        """
        return getattr(self._original, name)

    def __repr__(self) -> str:
        """As the original's."""
        return repr(self._original)

    def __eq__(self, other: object) -> Any:
        """Whether both wrap the same, or ``other`` is what this wraps."""
        return self._original == (other._original if isinstance(other, FunctionWriter) else other)

    def __hash__(self) -> int:
        """As the original's."""
        return hash(self._original)

    def __reduce__(self) -> Any:
        """As the original's."""
        return reduction(self, self._original)

    def __copy__(self) -> FunctionWriter:
        """Itself, as for every function."""
        return self

    def __deepcopy__(self, _: Any) -> FunctionWriter:
        """Itself, as for every function."""
        return self


class MethodWriter(FunctionWriter):
    """The same for a callable that becomes a method in a class."""

    __slots__ = ()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind as a function does."""
        return self if instance is None else MethodType(self, instance)


class FunctionListener(FunctionWriter):
    """A wrapper that logs nothing itself, around a callable that does not become a method in a class."""

    __slots__ = ("_after", "_before")

    def __init__(self, core: Any, original: Any, before: Any, after: Any) -> None:
        """The arguments of :func:`listen`."""
        super().__init__(core, original, "", "plain", -1, None)
        self._before, self._after = before, after

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the original between the two."""
        core = self._core
        if _torch.is_traced_by_dynamo():
            return traced_call(self, *args, **kwargs)
        is_told, noted = core.active, None
        if is_told and self._before is not None:
            try:
                noted = self._before(args, kwargs)
            except Exception as failure:
                core.forgive(failure)
            is_told = noted is not None
        result = self._original(*args, **kwargs)
        if is_told and core.active and self._after is not None:
            try:
                self._after(noted, args, kwargs, result)
            except Exception as failure:
                core.forgive(failure)
        return result


class MethodListener(FunctionListener):
    """The same for a callable that becomes a method in a class."""

    __slots__ = ()
    __get__ = MethodWriter.__get__


class Relay(FunctionListener):
    """A wrapper around a saved-tensor hook of the program's that changes what it is given, and what it gives.

    ``before(given)`` answers None (the hook is called, and nothing else), a tuple of what is given instead of calling
    it, or what it is called with and what is noted; then ``after(noted, given, result)`` answers the result. Without
    ``before``, ``after`` is called while the core is active. What they raise reaches the program.
    """

    __slots__ = ()

    def __init__(self, core: Any, original: Any, before: Any, after: Any) -> None:
        """The two as above."""
        super().__init__(core, original, before, after)
        _torch.dress(self, original)
        vars(self)["_gradsan_relay"] = True

    def __call__(self, given: Any, /) -> Any:
        """Call the original between the two."""
        noted, is_told = None, self._core.active
        if self._before is not None:
            told = self._before(given)
            is_told = told is not None
            if is_told and len(told) == 1:
                return told[0]
            given, noted = told if is_told else (given, None)
        result = self._original(given)
        return self._after(noted, given, result) if is_told else result


def is_relay(hook: Any) -> bool:
    """Whether a saved-tensor hook is one of the program's within a relay."""
    return getattr(hook, "_gradsan_relay", False) is True


def traced_call(wrapper: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What torch.compile sees as the ``__call__`` of a wrapper in C, which it cannot look into; else a call of it.

    A tensor's method that is called by way of its class, ``torch.Tensor.add_(x, 1)``, becomes one of the tensor's own:
    the compiler has read its table of methods off the class, where wrappers stand.
    """
    if not _torch.is_traced_by_dynamo():
        return wrapper(*args, **kwargs)
    if wrapper._gradsan_method is not None:
        return getattr(args[0], wrapper._gradsan_method)(*args[1:], **kwargs)
    return wrapper._gradsan_original(*args, **kwargs)


_HERE = globals()


def _called_by_optimizer(core: Any) -> bool:
    """Whether the code that called lies in torch's optimizers, whose inner writes are accounted for per step."""
    frame = caller()
    return frame is not None and frame.f_code.co_filename.startswith(core.optimizer_folder)


def caller(skip: int = 0) -> Any:
    """The frame that called, ``skip`` frames further out, not counting frames of wrappers.

    One call may pass several wrappers, and what called the outermost one counts.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and (skip > 0 or frame.f_globals is _HERE):
        skip -= frame.f_globals is not _HERE
        frame = frame.f_back
    return frame


def wrap(core: Any, original: Any, op: str, kind: str, position: int, keyword: str | None) -> FunctionWriter:
    """A wrapper around ``original`` that becomes a method where ``original`` does."""
    kind_of_wrapper = MethodWriter if hasattr(type(original), "__get__") else FunctionWriter
    wrapper = kind_of_wrapper(core, original, op, kind, position, keyword)
    _torch.dress(wrapper, original)
    return wrapper


def listen(core: Any, original: Any, before: Any, after: Any) -> FunctionListener:
    """Wrap ``original`` so that ``before(args, kwargs)`` and ``after(noted, args, kwargs, result)`` hear of its calls.

    Either may be None. ``noted`` is what ``before`` answered; if that is None, ``after`` is not called. What goes wrong
    in them is counted. In C there is no frame between the caller's and that of ``original``: warnings and tracebacks
    are as without the wrapper.
    """
    kind_of_wrapper = MethodListener if hasattr(type(original), "__get__") else FunctionListener
    wrapper = kind_of_wrapper(core, original, before, after)
    _torch.dress(wrapper, original)
    return wrapper


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
