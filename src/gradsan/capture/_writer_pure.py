"""Wrappers in pure Python that log what the function they wrap has written; in C they are part of ``_native.c``."""

from __future__ import annotations

import copy
import sys
from types import FunctionType, MethodType
from typing import Any

from gradsan.capture import _torch


class FunctionWriter:
    """A wrapper around a callable that does not become a method in a class, as builtin functions do not.

    It equals what it wraps: torch hands the wrapper to ``__torch_function__``, where programs look functions up in
    tables that they filled before.
    """

    __slots__ = ("__dict__", "__weakref__", "_core", "_keyword", "_kind", "_op", "_original", "_position")

    def __init__(self, core: Any, original: Any, op: str, kind: str, position: int, keyword: str | None) -> None:
        """The arguments of :meth:`gradsan.capture._core_pure.Core.writer`."""
        self._core = core
        self._original = original
        self._op = op
        self._kind = kind
        self._position = position
        self._keyword = keyword

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the original, then log; an exception of the original passes, and nothing is logged."""
        result = self._original(*args, **kwargs)
        if self._core.active:
            if self._kind == "setitem":
                if len(args) > 1:
                    self._log(args[0], basic_index(args[1]))
            elif self._keyword is not None:
                if kwargs and kwargs.get(self._keyword) is not None:
                    self._log(kwargs[self._keyword], None)
            elif len(args) > self._position >= 0:
                self._log(args[self._position], None)
            elif kwargs:
                self._log(next(iter(kwargs.values())), None)
        return result

    def _log(self, target: Any, index: Any) -> None:
        core = self._core
        try:
            caller: Any = sys._getframe()
            # One call may pass several wrappers; what called the outermost one is what wrote.
            while caller is not None and caller.f_globals is _HERE:
                caller = caller.f_back
            if core.open_steps and caller and caller.f_code.co_filename.startswith(core.optimizer_folder):
                return
            stack = core._stack_from(caller)
            if _torch.is_tensor(target):
                core.log_write(target, self._op, self._kind, index, stack)
            elif isinstance(target, (tuple, list)):
                for item in target:
                    if _torch.is_tensor(item):
                        core.log_write(item, self._op, self._kind, index, stack)
        except Exception:
            core.log_errors += 1

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


_HERE = globals()


def wrap(core: Any, original: Any, op: str, kind: str, position: int, keyword: str | None) -> FunctionWriter:
    """A wrapper around ``original`` that becomes a method where ``original`` does."""
    kind_of_wrapper = MethodWriter if hasattr(type(original), "__get__") else FunctionWriter
    wrapper = kind_of_wrapper(core, original, op, kind, position, keyword)
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
