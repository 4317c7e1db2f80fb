"""Function modes, dispatch modes, tracing and compilation: tests for them, and blocks without them."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")

is_tensor = torch.is_tensor


is_grad_enabled = torch.is_grad_enabled


is_compiling = torch.compiler.is_compiling


is_traced_by_dynamo = torch.compiler.is_dynamo_compiling


# Missing: modes are not noticed, and see gradsan's reads.
has_function_modes: Callable[[], bool] = getattr(torch._C, "_is_torch_function_mode_enabled", lambda: False)


PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
"""The classes without a ``__torch_function__`` of the program's."""


_STATES = getattr(torch._C, "_TorchFunctionState", None)
_set_state: Callable[[Any], None] | None = getattr(torch._C, "_set_torch_function_state", None)


def hush() -> Any:
    """Disable every ``__torch_function__``, of modes and of subclasses; returns the argument for :func:`unhush`.

    Missing: None, and they see gradsan's reads.
    """
    if _STATES is None or _set_state is None:
        return None
    before = function_state()
    _set_state(_STATES.ALL_DISABLED)
    return before


def unhush(before: Any) -> None:
    """End what :func:`hush` began."""
    if before is not None and _set_state is not None:
        _set_state(before)


def modes_now() -> tuple[Any, bool]:
    """Return the state of ``__torch_function__`` and of gradient recording, for :func:`put_modes_back`."""
    return function_state(), is_grad_enabled()


def put_modes_back(state: Any, records: bool) -> None:
    """Restore both: an exception of a signal handler may come between two lines of any context manager."""
    unhush(state)
    torch._C._set_grad_enabled(records)


# Missing: not restored.
function_state: Callable[[], Any] = getattr(torch._C, "_get_torch_function_state", lambda: None)


class hushed:  # noqa: N801
    """A block, or a function, without ``__torch_function__``, without dispatch modes and without jit.trace.

    Missing: they see what gradsan reads and computes. A generator would take twice as long, at each event of a run.
    """

    __slots__ = ("_before", "_modes", "_traced")

    def __enter__(self) -> None:
        self._before = hush()
        self._traced = _trace() if is_tracing() else None
        if self._traced is not None:
            _set_trace(None)
        self._modes = without_dispatch_modes() if _modes_entered() else None
        if self._modes is not None:
            self._modes.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._modes is not None:
            self._modes.__exit__(*raised)
        if self._traced is not None:
            _set_trace(self._traced)
        unhush(self._before)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def inner(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with hushed():
                return function(*args, **kwargs)

        return inner


def without_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """A block without dispatch modes of the program (such as a counter of operations).

    Missing: modes see what gradsan computes.
    """
    return _disable_modes() if _disable_modes is not None and _modes_entered() else contextlib.nullcontext()


def has_dispatch_modes() -> bool:
    """Whether a dispatch mode is active in this thread: the program's, or of a compiler's trace."""
    return bool(_modes_entered())


def has_modes() -> bool:
    """Whether :func:`hushed` makes a difference for ordinary tensors: a mode of either kind, or jit.trace, is on."""
    return bool(_modes_entered()) or has_function_modes() or is_tracing()


_disable_modes: Callable[[], Any] | None = getattr(torch.utils._python_dispatch, "_disable_current_modes", None)
# Missing: jit.trace records gradsan's computations.
is_tracing: Callable[[], bool] = getattr(torch._C, "_is_tracing", lambda: False)
_trace: Callable[[], Any] = getattr(torch._C, "_get_tracing_state", lambda: None)
_set_trace: Callable[[Any], None] = getattr(torch._C, "_set_tracing_state", lambda trace: None)
_modes_entered: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Return ``hook`` for eager calls only: torch.compile, which traces step hooks, gets no graph break from it."""
    # Dynamo treats this function as a constant of the trace; it is the shortest of its kind.
    compiling = is_traced_by_dynamo

    def call(*args: Any) -> None:
        if not compiling():
            hook(*args)

    return call


def is_untraced_call(code: CodeType) -> bool:
    """Whether ``code`` is that of a hook made by :func:`untraced`."""
    return code in untraced.__code__.co_consts


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` is active in this thread. Missing: False."""
    return _dispatches_to is not None and _dispatches_to(_OF_TRANSFORMS)


def is_compiled_autograd() -> bool:
    """Whether backward calls are compiled, together with the hooks of their Nodes. Missing: False."""
    return bool(getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False))


# torch._C._functorch.maybe_current_level() tells it, too, but creates a thread state, which the engine then copies
# three times for every Node: 0.1 µs (torch 2.13).
_OF_TRANSFORMS: Any = getattr(torch._C.DispatchKey, "FuncTorchDynamicLayerFrontMode", None)
_dispatches_to: Callable[[Any], bool] | None = (
    None if _OF_TRANSFORMS is None else getattr(torch._C, "_dispatch_tls_is_dispatch_key_included", None)
)
