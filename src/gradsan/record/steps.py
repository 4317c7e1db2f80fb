"""Optimizer steps and running backward calls, read from the core's logs; first and later checks of optimizers.

The core logs steps: a Python hook at every step costs more than all that the core records of the step.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

from torch.autograd.graph import Node
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradsan import _torch
from gradsan.model import Moment
from gradsan.record.backwards import Backwards, MadeByEngine
from gradsan.record.guarding import numbered_apart
from gradsan.record.log import Core, Log, RawStack, Stack
from gradsan.record.patches import Patches
from gradsan.record.stacks import symbolise


@dataclass(slots=True)
class StepRecord:
    """One ``optimizer.step()``: when, where, and the version of each parameter before and after.

    ``end`` is None while it runs, ``number`` the count of steps that had ended before it. ``sequence`` is the number
    that the next Node would have got when it ended (when it began, while it runs): ``step(closure)`` makes Nodes
    itself. A step that raised counts for nothing: its writes are in the log of writes. ``identity`` is the ``id`` of
    the optimizer.
    """

    clock: int
    number: int
    optimizer: str
    stack: Stack
    sequence: int
    storages: array[int]
    before: array[int]
    after: array[int]
    end: int | None = None
    identity: int = 0


def steps_of_round(steps: Iterable[StepRecord], begun: int, later: Sequence[int]) -> list[StepRecord] | None:
    """Return the steps that use what the backward at ``begun`` filled, by its order among them.

    A step whose closure has called it updates at its end, and its ``clock`` is that here. None where a closure has
    also called one of the backwards at ``later``: such an optimizer (LBFGS) uses the gradients as it runs.
    """
    own = [one for one in steps if (one.clock < begun if one.end is None else one.end > begun)]
    around = [one for one in own if one.clock < begun]
    if any(one.end is None or any(clock < one.end for clock in later) for one in around):
        return None
    return [replace(one, clock=one.end) if one.end is not None and one.clock < begun else one for one in own]


class RawBackward(NamedTuple):
    """The fields of one entry of ``core.running``: a call into the engine with its outputs, in both cores."""

    clock: int
    stack: Stack
    thread: int
    outputs: Any
    retain_graph: Any
    accumulates: bool


as_backward: Callable[[Any], RawBackward] = functools.partial(tuple.__new__, RawBackward)
"""Convert an entry of ``core.running``; makes no Python frame, which a compiler would intercept."""


@dataclass(frozen=True, slots=True)
class BackwardRecord:
    """A running call into the autograd engine. ``roots`` are the Nodes of ``outputs``, where it starts."""

    clock: int
    stack: Stack
    thread: int
    via: str
    retain_graph: bool
    roots: tuple[Node, ...]
    outputs: Any = ()

    @property
    def root_sequence(self) -> int | None:
        """The sequence number of the youngest root."""
        numbers = [number for number in map(_torch.node_sequence, self.roots) if number is not None]
        return max(numbers, default=None)


class StepLog(Protocol):
    """The steps of a run, and the Nodes that the engine's threads made: of a recorder, or read off the program."""

    made_by_engine: MadeByEngine

    @property
    def steps(self) -> Sequence[StepRecord]:
        """The known steps, oldest first."""

    def current_backward(self) -> BackwardRecord | None:
        """The innermost backward that runs here; None where none does."""


class Steps:
    """The steps and backward calls of a run, read from the core's logs on demand."""

    def __init__(self, core: Core) -> None:
        """Read from the log of ``core``: two entries a step."""
        self._core = core
        self.made_by_engine = MadeByEngine()
        self._read_at = -1
        self._read: list[StepRecord] = []

    def install(self, patches: Patches) -> None:
        """Watch every optimizer's ``step`` (by torch's public hooks) and every entry into the engine."""
        core = self._core
        begin = numbered_apart(register_optimizer_step_pre_hook(_torch.untraced(core.step_begin)))
        end = numbered_apart(register_optimizer_step_post_hook(_torch.untraced(core.step_end)))
        patches.on_undo(begin.remove)
        patches.on_undo(end.remove)
        for namespace, name in _torch.engine_entry_points():
            patches.set(namespace, name, core.engine(getattr(namespace, name)))

    @property
    def steps(self) -> list[StepRecord]:
        """The steps still in the log, oldest first; read again if a step has been logged meanwhile."""
        changes = self._core.step_changes
        if changes != self._read_at:
            records, has_open = self._records()
            if has_open:
                return records
            self._read_at, self._read = changes, records
        return self._read

    def _records(self) -> tuple[list[StepRecord], bool]:
        """Return the steps in the log, and whether the log has no end of one of them, which may still run."""
        records: list[StepRecord] = []
        open_by_optimizer: dict[int, StepRecord] = {}
        for entry in self._core.step_log:
            if entry[0] == "begin":
                _, clock, number, optimizer, name, stack, sequence, storages, versions = entry
                short = name.rpartition(".")[2]
                before = _numbers(versions)
                held = _numbers(storages)
                record = StepRecord(clock, number, short, stack, sequence, held, before, array("q"), identity=optimizer)
                records.append(record)
                open_by_optimizer[optimizer] = record
            else:
                _, clock, optimizer, versions, sequence = entry
                # A step whose beginning has dropped out of the log is ignored.
                ended = open_by_optimizer.pop(optimizer, None)
                if ended is not None:
                    ended.end, ended.after, ended.sequence = clock, _numbers(versions), sequence
        for record in records:
            # Left open, it would be blamed for every later write to memory that its parameters once had.
            if record.end is None and not _still_runs(record.stack):
                record.end, record.after = record.clock, record.before
        return records, bool(open_by_optimizer)

    def current_backward(self) -> BackwardRecord | None:
        """Return the innermost backward that runs here; see :func:`running_here`."""
        chosen = running_here(self._core)
        return None if chosen is None else read_backward(chosen)


def moved_storages(log: StepLog, since: int) -> set[int]:
    """Return the storages of parameters that a step logged after the clock ``since`` has changed."""
    later = (one for one in log.steps if one.clock > since)
    moves = (zip(one.storages, one.before, one.after, strict=False) for one in later)
    return {storage for one in moves for storage, before, after in one if before != after}


def optimizers_of(log: StepLog, since: int) -> dict[int, int]:
    """Return the ``id`` of the optimizer that changed each storage of parameters last after the clock ``since``."""
    later = (one for one in log.steps if one.clock > since)
    moves = ((one.identity, zip(one.storages, one.before, one.after, strict=False)) for one in later)
    return {storage: identity for identity, each in moves for storage, before, after in each if before != after}


def running_here(core: Log) -> RawBackward | None:
    """The entry of the innermost backward that this thread works for; None where none runs, or it is not known.

    A thread of the engine works for a call of another thread: if several are waiting, for the one whose graph has
    the running Node.
    """
    here, running = threading.get_ident(), list(map(as_backward, core.running))
    own = next((entry for entry in reversed(running) if entry.thread == here), None)
    if own is not None or len({entry.thread for entry in running}) <= 1:
        return own or (running[-1] if running else None)
    node = _torch.current_node()
    if node is None:
        return None
    return next((one for one in reversed(running) if _torch.is_behind(node, read_backward(one).roots)), None)


def read_backward(entry: RawBackward) -> BackwardRecord:
    """Convert an entry of ``core.running`` to a record."""
    clock, stack, thread, outputs, retain, accumulate = entry
    roots = tuple(root for root in map(_root_node, outputs) if root is not None)
    return BackwardRecord(clock, stack, thread, "backward" if accumulate else "grad", bool(retain), roots, outputs)


def _still_runs(stack: RawStack) -> bool:
    """Whether the call in progress at ``stack`` still is, in any thread; its innermost frame may have moved on."""
    # The hook that took the stack has returned since.
    own = int(_torch.is_untraced_call(stack.codes[0])) if stack.codes else 0
    codes, offsets = stack.codes[own:], stack.lastis[own:]
    for frame in _torch.frames_of_threads().values():
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is codes[0] and _calls_agree(at.f_back, codes[1:], offsets[1:]):
                return True
            at = at.f_back
    return False


def _calls_agree(frame: FrameType | None, codes: tuple[CodeType, ...], offsets: tuple[int, ...]) -> bool:
    for code, offset in zip(codes, offsets, strict=True):
        if frame is None or frame.f_code is not code or frame.f_lasti != offset:
            return False
        frame = frame.f_back
    return True


def _numbers(data: bytes) -> array[int]:
    numbers = array("q")
    numbers.frombytes(data)
    return numbers


def _root_node(output: Any) -> Any:
    """Return the Node at which a backward starts: the grad_fn of a tensor, the node of a GradientEdge."""
    return output.node if hasattr(output, "node") else output.grad_fn


class Settling:
    """Calls ``first`` once for each optimizer, ``later`` now and then, ``fused`` after each step of a fused one."""

    def __init__(
        self,
        core: Core,
        first: Callable[[Any, Any], None],
        later: Callable[[Any, Any], None],
        fused: Callable[[Any], None],
    ) -> None:
        """Register with ``core``. ``first`` and ``later`` get the optimizer and a frame to search variables from."""
        self._core, self._first, self._later, self._fused = core, first, later, fused
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._looked_at: weakref.WeakSet[Any] = weakref.WeakSet()
        self._due: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiting: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self.on_first: Callable[[Any], None] = lambda optimizer: None
        """Called after the first step of each optimizer, while its gradients exist."""
        self.on_later: Callable[[Any], None] = lambda optimizer: None
        """Called now and then after a later step."""
        core.on_step_begin, core.on_step_end = self.before_step, self.after_step

    def look_again(self) -> None:
        """Call ``later`` at the next step of each optimizer that has parameters without a gradient then.

        Between such calls the core skips its steps, which then cost nothing here.
        """
        self._due.update(self._looked_at)
        for optimizer in self._looked_at:
            self._core.settled.discard(id(optimizer))

    def look_at(self, optimizer: Optimizer) -> None:
        """Call ``on_later`` after the next step of an optimizer that has stepped before."""
        if optimizer in self._looked_at:
            self._due.add(optimizer)
            self._core.settled.discard(id(optimizer))

    @property
    def optimizers(self) -> list[Any]:
        """The live optimizers that have made a step with gradients."""
        return list(self._seen)

    def before_step(self, optimizer: Optimizer) -> None:
        """Check whether a backward has made gradients for this step, and whether some are missing."""
        if self._core.backwards and optimizer not in self._seen:
            missing = _without_gradient(optimizer)
            if missing:
                # ``step(closure)`` computes its gradients itself: missing ones are only known at its end.
                self._waiting[optimizer] = self._core.backwards, missing
            else:
                self._seen.add(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Call ``first`` and ``fused`` if due; else ask the core to skip this optimizer from now on."""
        waited = self._waiting.pop(optimizer, None)
        if waited is not None:
            self._seen.add(optimizer)
            backwards, missing = waited
            # More missing without a backward in between: the step itself has cleared gradients, which proves nothing.
            if self._core.backwards > backwards or _without_gradient(optimizer) == missing:
                with _torch.hushed():
                    self._first(optimizer, sys._getframe(1))
        if optimizer in self._due:
            self._due.discard(optimizer)
            self.on_later(optimizer)
            if _without_gradient(optimizer):
                with _torch.hushed():
                    self._later(optimizer, sys._getframe(1))
        if any(group.get("fused") for group in optimizer.param_groups):
            with _torch.hushed():
                self._fused(optimizer)
        elif optimizer in self._seen:
            self._core.settled.add(id(optimizer))
        if optimizer in self._seen and optimizer not in self._looked_at:
            self.on_first(optimizer)
            self._looked_at.add(optimizer)
            weakref.finalize(optimizer, self._core.settled.discard, id(optimizer)).atexit = False


def _without_gradient(optimizer: Optimizer) -> int:
    with _torch.hushed():
        return sum(one.grad is None for one in _torch.parameters_of(optimizer))


def moments(steps: Steps, backwards: Backwards, since: int, until: int) -> tuple[Moment, ...]:
    """Return every step and backward call in the logs that began after ``since`` and before ``until``, by clock.

    A step counts at its end, like its writes; a backward call at its beginning.
    """
    found = [
        Moment(
            kind="step",
            clock=record.clock if record.end is None else record.end,
            step=record.number,
            op=f"{record.optimizer}.step",
            site=symbolise(record.stack),
        )
        for record in steps.steps
        if record.clock > since
    ]
    found += [
        Moment(kind="backward", clock=call.clock, step=call.step, op=call.via, site=symbolise(call.stack))
        for call in backwards.before(until)
        if call.clock > since
    ]
    return tuple(sorted(found, key=lambda moment: moment.clock))
