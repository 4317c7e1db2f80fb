"""The log of a run: counters, entries and listeners as both cores have them, and the choice of a core.

The C core and the pure one record the same; readers of the log need not know which. A core keeps tuples;
:func:`logged_writes`, :func:`calls_near` and :func:`backward_calls` give their fields names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch.optim import Optimizer

from gradsan.record.raw_stacks import RawStack as RawStack

_SWITCH = "GRADSAN_NATIVE"

Stack: TypeAlias = Any
"""The stack of an entry: a :data:`RawStack` of a core, or a :class:`gradsan.model.Site` of the post-mortem reader."""


class RawWrite(NamedTuple):
    """The fields of one entry of the write log, in both cores."""

    clock: int
    storage: int
    version: int | None
    op: str
    kind: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    itemsize: int
    item: tuple[Any, ...] | None
    stack: Stack
    sequence: int
    grad_enabled: bool
    is_parameter: bool
    step: int


class RawCall(NamedTuple):
    """The fields of one entry of the log of Nodes: a call, and the numbers of the Nodes it made, ``end`` exclusive."""

    first: int
    end: int
    clock: int
    stack: Stack


class RawBackwardCall(NamedTuple):
    """The fields of one entry of ``Log.backward_log``: a call into the engine that has begun.

    ``begun_at`` is the number of the next Node when it began, ``ended_at`` when it ended (or the same again until
    then), of PyTorch's own count in this thread. ``life`` numbers the thread: idents are used again. ``outputs`` are
    weak references; None for one that has none.
    """

    clock: int
    stack: Stack
    thread: int
    retain_graph: bool | None
    accumulates: bool
    begun_at: int
    ended_at: int
    step: int
    life: int
    outputs: Sequence[Callable[[], object] | None]


class Log(Protocol):
    """Log of a run for reading: filled by a core, or by the post-mortem reader from source files.

    ``clock`` orders all events. Numbers of Nodes are PyTorch's own, which each thread counts for itself.
    """

    @property
    def clock(self) -> int:
        """The clock of the latest event."""

    @property
    def saves(self) -> int:
        """The number of Nodes made that may have saved something."""

    @property
    def write_count(self) -> int:
        """The number of writes."""

    @property
    def steps(self) -> int:
        """The number of optimizer steps that have ended."""

    @property
    def backwards(self) -> int:
        """The number of calls into the engine that have begun."""

    @property
    def running(self) -> Sequence[tuple[Any, ...]]:
        """The running backward calls, outermost first."""

    @property
    def backward_log(self) -> Sequence[tuple[Any, ...]]:
        """The logged calls into the engine, oldest first."""

    def stack(self) -> Stack:
        """The stack of the caller, equal stacks being one object."""

    def nodes_near(self, sequence: int, thread: int, /) -> list[tuple[int, int, int, Any]]:
        """The call that made the Node with this number, else the calls just before and just after it."""

    def ran_since(self, stack: Stack, sequence: int, thread: int, /) -> bool:
        """Whether the call at ``stack`` made Nodes again, numbered ``sequence`` or later."""

    def writes(self) -> list[tuple[Any, ...]]:
        """The logged writes, oldest first."""

    def writes_after(self, clock: int, /) -> list[tuple[Any, ...]]:
        """Return the logged writes that are younger than ``clock``, oldest first."""

    def lost_writes_after(self, clock: int, /) -> bool:
        """Whether the bounded log may have dropped a write younger than ``clock``."""


def logged_writes(log: Log, after: int = 0) -> list[RawWrite]:
    """The logged writes that are younger than the clock ``after``, oldest first."""
    return list(map(RawWrite._make, log.writes_after(after)))


def calls_near(log: Log, number: int, thread: int) -> Iterator[RawCall]:
    """The call that made the Node with this number in ``thread``, else the calls just before and just after it."""
    return map(RawCall._make, log.nodes_near(number, thread))


def backward_calls(log: Log) -> Iterator[RawBackwardCall]:
    """The logged calls into the engine, oldest first."""
    return map(RawBackwardCall._make, log.backward_log)


def latest_backward(log: Log) -> RawBackwardCall | None:
    """The last logged call into the engine."""
    calls = log.backward_log
    return RawBackwardCall._make(calls[-1]) if calls else None


class Core(Log, Protocol):
    """A log while it is written, with the callbacks and wrappers that feed it; see :mod:`gradsan.record._core_pure`."""

    active: bool
    clock: int
    saves: int
    open_steps: int
    step_changes: int
    log_errors: int
    backward_end: int
    quiet_from: int
    quiet_nodes: int
    settled: set[int]
    quiet_operators: set[int]
    optimizer_folder: str
    tells_all_writes: bool
    lets_pass: type[BaseException] | None

    on_failure: Callable[[Any, BaseException], None] | None
    on_nonfinite: Callable[[Any], None] | None
    on_enter: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None
    on_leave: Callable[[Any], None] | None
    on_operator: Callable[[tuple[Any, ...], dict[str, Any]], None] | None
    on_round: Callable[[Any, int], None] | None
    on_differentiable: Callable[[Any, Any, Any], None] | None
    on_gradients: Callable[[Any, Any, Any], None] | None
    on_step_begin: Callable[[Any], None] | None
    on_step_end: Callable[[Any], None] | None
    on_result: Callable[[str, tuple[Any, ...], dict[str, Any], Any], None] | None
    on_nodes: Callable[[Any, int, int], None] | None
    on_quiet: Callable[[int], None] | None
    on_write: Callable[[Any, str, Any], None] | None
    before_write: Callable[[Any], None] | None

    @property
    def is_native(self) -> bool:
        """Whether this is the C core."""

    @property
    def step_log(self) -> list[tuple[Any, ...]]:
        """The logged beginnings and ends of steps, oldest first."""

    def tick(self) -> int:
        """Advance the clock and return its new value."""

    def clear(self) -> None:
        """Forget everything logged; the clock goes on."""

    def stack(self, skip: int = 0) -> Any:
        """The stack of the caller (``skip`` frames further out), equal stacks being one object."""

    def log_write(self, tensor: torch.Tensor, op: str, kind: str, index: Any, stack: RawStack) -> None:
        """Put one in-place change of ``tensor`` into the log."""

    def writer(self, original: Any, op: str, kind: str, position: int, keyword: str | None) -> Callable[..., Any]:
        """Wrap ``original`` so that what it writes is logged after it returned."""

    def listener(self, original: Any, before: Callable[..., Any] | None, after: Callable[..., Any] | None) -> Any:
        """Wrap ``original`` so that ``before`` and ``after`` are called around it, without a frame in between."""

    def relay(self, original: Any, before: Callable[..., Any] | None, after: Callable[..., Any] | None) -> Any:
        """Wrap a saved-tensor hook: ``before`` changes its argument, ``after`` its result, with no frame in between."""

    def watch_indexing(self, wanted: bool, /) -> None:
        """Log the Nodes that ``tensor[index]`` makes from now on, or no longer."""

    def step_begin(self, optimizer: Optimizer, *_: Any) -> None:
        """Log that a step begins: an optimizer's pre-hook."""

    def step_end(self, optimizer: Optimizer, *_: Any) -> None:
        """Log that a step has ended: an optimizer's post-hook."""

    def engine(self, original: Callable[..., Any], /) -> Callable[..., Any]:
        """Wrap the engine's entry point so that every backward call is known while it runs."""


def native_available() -> bool:
    """Whether the C extension was built for this Python."""
    try:
        from gradsan.record import _native  # noqa: F401
    except ImportError:
        return False
    return True


def has_native_core() -> bool:
    """Whether :func:`make_core` makes the C core by default."""
    return os.environ.get(_SWITCH, "1") != "0" and native_available()


def make_core(native: bool | None = None) -> Core:
    """Return a new core. ``native``: True for the C extension, False for pure Python, None for the best there is.

    ``GRADSAN_NATIVE=0`` in the environment makes pure Python the best there is. Raises ImportError where the C
    extension is asked for and was not built. The C core is typed as the pure one, which has the same interface.
    """
    if native is None:
        native = has_native_core()
    if native:
        from gradsan.record import _native

        return _native.Core()
    from gradsan.record import _core_pure

    return _core_pure.Core()
