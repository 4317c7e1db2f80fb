"""Recording core in pure Python; ``_native.c`` is the same in C, and is tested against this file.

Everything here is hot: it runs once per operation, optimizer step or backward of the program. It
records a few integers and references and leaves all analysis to the moment a report is made.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from gradsan import _torch
from gradsan.record import _writer_pure
from gradsan.record._writer_pure import call_own
from gradsan.record.raw_stacks import (
    BACKWARDS_KEPT,
    DEPTH_KEPT,
    NODES_KEPT,
    QUIET_NODES,
    STACKS_KEPT,
    STEPS_KEPT,
    WRITES_KEPT,
)
from gradsan.record.raw_stacks import RawStack as Stack


class Core:
    """Counters, logs and the functions that fill them. One per process; see :mod:`gradsan.record.recorder`."""

    is_native = False

    def __init__(self) -> None:
        """Start with empty logs, inactive."""
        self.active = False
        self.clock = 0
        self.saves = 0
        self.write_count = 0
        self.steps = 0
        self.open_steps = self.step_changes = 0
        self._open: dict[int, int] = {}
        self.log_errors = 0
        self.backwards = 0
        self.backward_end = 0
        self._running: list[tuple[Any, ...]] = []
        self.settled: set[int] = set()
        self.quiet_operators: set[int] = set()
        self.optimizer_folder = _torch.optimizer_folder()
        self._stacks: dict[tuple[int, ...], Stack] = {}
        self.on_failure: Callable[[Any, BaseException], None] | None = None
        self.on_nonfinite: Callable[[Any], None] | None = None
        self.on_enter: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None
        self.on_leave: Callable[[Any], None] | None = None
        self.on_operator: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
        self.on_round: Callable[[Any, int], None] | None = None
        self.on_differentiable: Callable[[Any, Any, Any], None] | None = None
        self.on_gradients: Callable[[Any, Any, Any], None] | None = None
        self.on_step_begin: Callable[[Any], None] | None = None
        self.on_step_end: Callable[[Any], None] | None = None
        self.on_result: Callable[[str, tuple[Any, ...], dict[str, Any], Any], None] | None = None
        self.on_nodes: Callable[[Any, int, int], None] | None = None
        self.quiet_nodes = QUIET_NODES
        self.quiet_from = 0
        self.on_quiet: Callable[[int], None] | None = None
        self.tells_all_writes = False
        self.lets_pass: type[BaseException] | None = None
        self.on_write: Callable[[Any, str, Stack], None] | None = None
        self.before_write: Callable[[Any], None] | None = None
        self._local = threading.local()
        self._lives = itertools.count(1)
        self._nodes: deque[list[Any]] = deque(maxlen=NODES_KEPT)
        self._writes: deque[tuple[Any, ...]] = deque(maxlen=WRITES_KEPT)
        self._step_log: deque[tuple[Any, ...]] = deque(maxlen=STEPS_KEPT)
        self._backward_log: deque[list[Any]] = deque(maxlen=BACKWARDS_KEPT)

    @property
    def running(self) -> list[tuple[Any, ...]]:
        """The running backward calls, outermost first; see :meth:`engine`."""
        return self._running

    @property
    def step_log(self) -> list[tuple[Any, ...]]:
        """The logged steps, oldest first; see :meth:`step_begin` and :meth:`step_end`."""
        return list(self._step_log)

    @property
    def backward_log(self) -> list[tuple[Any, ...]]:
        """The logged calls into the engine, oldest first; see :meth:`engine`."""
        return [tuple(entry) for entry in list(self._backward_log)]

    def tick(self) -> int:
        """Advance the clock that orders all events and return its new value."""
        self.clock += 1
        return self.clock

    def forgive(self, failure: Exception) -> None:
        """Count a failure of gradsan's own work; raises it if it is the program's, or of ``lets_pass``."""
        if isinstance(failure, self.lets_pass or ()) or _writer_pure.is_of_signal(failure):
            raise failure
        self.log_errors += 1

    def clear(self) -> None:
        """Forget everything logged; the clock goes on."""
        self._stacks.clear()
        self._nodes.clear()
        self._writes.clear()
        self._step_log.clear()
        self.step_changes += 1
        self._backward_log.clear()
        self.saves = self.write_count = self.steps = self.log_errors = self.backwards = 0

    def stack(self, skip: int = 0) -> Stack:
        """Return the stack of the caller (``skip`` frames further out); equal stacks are one object.

        It is empty where no Python frame is left: in a hook called in a thread of the engine.
        """
        return self.stack_from(_writer_pure.caller(skip + 1))

    def stack_from(self, frame: FrameType | None) -> Stack:
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

    def log_nodes(self, first: int, end: int, caller: Any) -> None:
        """Log that the call at the frame ``caller`` has made the Nodes with sequence numbers ``first <= n < end``."""
        thread = threading.get_ident()
        last = self._nodes[-1] if self._nodes else None
        if last is not None and last[3] == thread and last[0] == first and last[1] == end and last[2] == self.clock:
            return  # a call within this one has logged them
        stack = self.stack_from(caller)
        self.saves += 1
        # The same line again and nothing logged in between: one entry serves a whole loop.
        if last is not None and last[3] == thread and last[4] is stack and last[1] == first and last[2] == self.clock:
            last[1] = end
            return
        self._nodes.append([first, end, self.tick(), thread, stack])

    def nodes_near(self, sequence: int, thread: int) -> list[tuple[int, int, int, Stack]]:
        """Return the call that made the Node with this sequence number, else the calls just before and after it.

        Each is (first number, end of its numbers, clock, stack); of nested calls the innermost made the Node. The ident
        of a thread that has ended is reused by another, whose numbers restart: numbers that the calling thread has not
        reached yet are not its own.
        """
        exact = before = after = None
        made = _torch.sequence_number() if thread == threading.get_ident() else sys.maxsize
        # Newest first. In the calling thread ends only rise: entries before the first one that ends earlier are older.
        for entry in reversed(list(self._nodes)):  # other threads go on meanwhile
            first, end, _, owner, _ = entry
            if owner != thread or end > made:
                continue
            if first <= sequence < end:
                exact = entry if exact is None or end - first < exact[1] - exact[0] else exact
            elif end <= sequence:
                before = entry if before is None or end > before[1] else before
                if made != sys.maxsize:
                    break
            elif after is None or first <= after[0]:
                after = entry
        found = [exact] if exact is not None else [before, after]
        return [(entry[0], entry[1], entry[2], entry[4]) for entry in found if entry is not None]

    def ran_since(self, stack: Stack, sequence: int, thread: int) -> bool:
        """Whether the call at ``stack`` made Nodes again, numbered ``sequence`` or later."""
        return any(entry[4] is stack and entry[1] > sequence and entry[3] == thread for entry in list(self._nodes))

    def writes(self) -> list[tuple[Any, ...]]:
        """The logged writes, oldest first, as the fields of :class:`gradsan.record.ledger.RawWrite`."""
        return list(self._writes)

    def writes_after(self, clock: int) -> list[tuple[Any, ...]]:
        """Return the logged writes that are younger than ``clock``, oldest first."""
        younger = itertools.takewhile(lambda entry: entry[0] > clock, reversed(list(self._writes)))
        return list(younger)[::-1]

    def lost_writes_after(self, clock: int) -> bool:
        """Whether the bounded log may have dropped a write younger than ``clock``."""
        writes = self._writes
        return self.write_count > len(writes) and (not writes or bool(writes[0][0] > clock))

    def log_write(self, tensor: Any, op: str, kind: str, index: Any, stack: Stack) -> None:
        """Log one in-place change of ``tensor``, without calling the program's own ``__torch_function__``.

        While a backward runs, and with ``tells_all_writes`` at any time, ``on_write`` is then called with the tensor,
        ``op`` and ``stack``; its exceptions reach the caller.
        """
        if type(tensor) not in _torch.PLAIN_TENSORS or _torch.has_function_modes():
            before = _torch.hush()
            try:
                self._log_write(tensor, op, kind, index, stack)
            finally:
                _torch.unhush(before)
        else:
            self._log_write(tensor, op, kind, index, stack)
        if (self._running or self.tells_all_writes) and self.on_write is not None:
            call_own(self.on_write, tensor, op, stack)

    def _log_write(self, tensor: Any, op: str, kind: str, index: Any, stack: Stack) -> None:
        storage, version, geometry = _torch.weak_identity(tensor)
        sequence, grad_enabled = _torch.sequence_number(), _torch.is_grad_enabled()
        try:
            is_parameter = _torch.is_trainable_leaf(tensor)
        except RuntimeError:
            # A view made under no_grad whose base was then written refuses to return its grad_fn; it is no leaf.
            is_parameter = False
        self.clock += 1
        self.write_count += 1
        moment, steps = self.clock, self.steps
        self._writes.append(
            (moment, storage, version, op, kind, *geometry, index, stack, sequence, grad_enabled, is_parameter, steps)
        )

    def writer(self, original: Any, op: str, kind: str, position: int, keyword: str | None) -> Callable[..., Any]:
        """Wrap ``original`` so that its writes are logged after it has returned.

        ``position`` is the written positional argument (-1: none), ``keyword`` the keyword of written tensors
        (``out``). Failures of logging never reach the caller; ``log_errors`` counts them. The wrapper becomes a method
        in a class if ``original`` does. The kind ``plain`` writes nothing; nor does ``operator``, as far as the core
        knows: ``on_operator`` is called with the arguments, the first of which is the operator, unless its id is in
        ``quiet_operators``.
        """
        return _writer_pure.wrap(self, original, op, kind, position, keyword)

    def listener(self, original: Any, before: Callable[..., Any] | None, after: Callable[..., Any] | None) -> Any:
        """Wrap ``original`` by :func:`gradsan.record._writer_pure.listen`; nothing is called while inactive."""
        return _writer_pure.listen(self, original, before, after)

    def relay(self, original: Any, before: Any, after: Any) -> Any:
        """Make a :class:`gradsan.record._writer_pure.Relay`."""
        return _writer_pure.Relay(self, original, before, after)

    def watch_indexing(self, wanted: bool) -> None:
        """Do nothing: Python could only set ``__getitem__``, which would make every tensor a sequence.

        A Node made by ``tensor[index]`` is located between the logged calls before and after it.
        """

    def step_begin(self, optimizer: Any, *_: Any) -> None:
        """Log that a step begins: an optimizer's pre-hook.

        The entry is ("begin", clock, steps before, id of the optimizer, its class, stack, sequence number, storages of
        its parameters and their versions, both as bytes of 8-byte integers). ``on_step_begin`` is called with
        optimizers that are not in ``settled``.
        """
        self.clock += 1
        # No counter, because a step that raised has no end; its optimizer begins another one later.
        self._open[id(optimizer)] = threading.get_ident()
        self.step_changes += 1
        self.open_steps = len(self._open)
        try:
            before = _torch.hush() if _torch.has_function_modes() else None
            try:
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                storages = array("q", map(_torch.storage_or_none, parameters)).tobytes()
                versions = array("q", [p._version for p in parameters]).tobytes()
            finally:
                _torch.unhush(before)
            stack = self.stack_from(sys._getframe().f_back)
            name, sequence = type(optimizer).__name__, _torch.sequence_number()
            entry = ("begin", self.clock, self.steps, id(optimizer), name, stack, sequence, storages, versions)
            self._step_log.append(entry)
        except Exception as failure:
            self.forgive(failure)
        if self.on_step_begin is not None and id(optimizer) not in self.settled:
            call_own(self.on_step_begin, optimizer)

    def step_end(self, optimizer: Any, *_: Any) -> None:
        """Log that a step has ended: an optimizer's post-hook.

        The entry is ("end", clock, id of the optimizer, versions of its parameters as bytes, sequence number).
        ``on_step_end`` is called with optimizers that are not in ``settled``.
        """
        self._open.pop(id(optimizer), None)
        self.step_changes += 1
        self.open_steps = len(self._open)
        self.steps += 1
        self.clock += 1
        try:
            before = _torch.hush() if _torch.has_function_modes() else None
            try:
                versions = array("q", [p._version for group in optimizer.param_groups for p in group["params"]])
            finally:
                _torch.unhush(before)
            entry = ("end", self.clock, id(optimizer), versions.tobytes(), _torch.sequence_number())
            self._step_log.append(entry)
        except Exception as failure:
            self.forgive(failure)
        if self.on_step_end is not None and id(optimizer) not in self.settled:
            call_own(self.on_step_end, optimizer)

    def engine(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the engine's entry point so that every backward call is known while it runs.

        ``running`` then holds (clock, stack, thread, outputs, retain_graph, accumulate_grad) for it. ``on_enter`` is
        called before the engine runs, with that entry and the engine's arguments after the outputs, ``on_leave`` after
        it has succeeded; ``on_nonfinite`` before, where the C core does not find the outputs finite (this one does not
        check, and always calls it); ``on_round`` before, at the 1st, 2nd, 4th, 8th … call of one line, with that
        number; ``on_differentiable`` after a call with ``create_graph=True``, with its ``inputs`` and its result;
        ``on_gradients`` likewise after a call without it that fills no ``.grad``. Their exceptions replace the
        backward. ``on_failure`` is called with the exception of a failed one.

        ``backward_end`` is the number of the next Node when a backward last succeeded, 0 before; ``quiet_from`` is the
        same, and may be set. ``on_quiet`` is called after a call by which ``quiet_nodes`` or more Nodes have been made
        since then, with the number of the next Node; also for a thread that has not reached that number yet.

        ``backward_log`` gets a tuple for each call: clock, stack, thread, retain_graph, accumulate_grad, the number of
        the next Node when it began, the same when it ended (or again when it began), the steps before, a number for
        this thread's life (thread idents are reused), weak references to the outputs (None: has none).
        """
        core = self

        def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not core.active:
                return original(t_outputs, *args, **kwargs)
            core.clock += 1
            core.backwards += 1
            retain = args[1] if len(args) > 1 else None
            accumulate = kwargs.get("accumulate_grad", True)
            stack = core.stack_from(sys._getframe().f_back)
            record = (core.clock, stack, threading.get_ident(), t_outputs, retain, accumulate)
            core.running.append(record)
            try:
                if core.open_steps:
                    core._close_raised_steps(stack)
                remembered = core._remember_backward(record)
                core._count_round(record)
                if core.on_nonfinite is not None:
                    call_own(core.on_nonfinite, record)
                if core.on_enter is not None:
                    call_own(core.on_enter, record, args, kwargs)
                first = _torch.sequence_number()
                try:
                    result = original(t_outputs, *args, **kwargs)
                except BaseException as failure:
                    if core.on_failure is not None:
                        try:
                            call_own(core.on_failure, record, failure)
                        except Exception as failure:
                            core.forgive(failure)
                    raise
                # Nodes made by a backward that is itself differentiable.
                if (end := _torch.sequence_number()) != first:
                    core.log_nodes(first, end, sys._getframe().f_back)
                self.quiet_from = self.backward_end = end
                if remembered is not None:
                    remembered[6] = end
                has_graph = len(args) > 2 and args[2] is True
                listener = core.on_differentiable if has_graph else core.on_gradients
                if listener is not None and (has_graph or not accumulate):
                    call_own(listener, record, args[3] if len(args) > 3 else (), result)
                if core.on_leave is not None:
                    call_own(core.on_leave, record)
                return result
            finally:
                core.running[:] = [other for other in core.running if other is not record]

        return _torch.dress(run_backward, original)

    def _close_raised_steps(self, called_from: Stack) -> None:
        """Close the steps of this thread that have raised: all open ones, if no step is on the stack of a backward."""
        codes = called_from.codes
        if len(codes) < DEPTH_KEPT and not any(code.co_filename.startswith(self.optimizer_folder) for code in codes):
            here = threading.get_ident()
            self._open = {number: thread for number, thread in self._open.items() if thread != here}
            self.open_steps = len(self._open)

    def _remember_backward(self, record: tuple[Any, ...]) -> list[Any] | None:
        clock, stack, thread, outputs, retain, accumulate = record
        try:
            number = _torch.sequence_number()
            if not hasattr(self._local, "life"):
                self._local.life = next(self._lives)
            weak = tuple(map(_weakly, outputs))
            remembered = [clock, stack, thread, retain, accumulate, number, number, self.steps, self._local.life, weak]
            self._backward_log.append(remembered)
        except Exception as failure:
            self.forgive(failure)
            return None
        return remembered

    def _count_round(self, record: tuple[Any, ...]) -> None:
        stack: Stack = record[1]
        stack._rounds += 1
        if stack._rounds & (stack._rounds - 1) == 0 and self.on_round is not None:
            call_own(self.on_round, record, stack._rounds)


def _weakly(output: Any) -> Any:
    try:
        return weakref.ref(output)
    except TypeError:  # a GradientEdge
        return None
