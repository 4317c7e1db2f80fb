"""Values changed without autograd's knowledge before they were used, where no saved value is stale.

Two kinds. A value that autograd has computed is written without autograd recording it (under ``no_grad``, through
``.data`` or a detached alias) and then used: backward differentiates as if nothing had been written. And a tensor of
the caller's is written by a module's ``forward``, or by a function whose result the caller takes, and then used by the
caller, who expects the old value.

They are found in the graph of a backward, by the operations that saved such a value after the write: in watch mode
at the 1st, 2nd, 4th, 8th … backward of a line, in deep mode at each. The writes may have left the values as they were:
what was not copied before them is compared in the line's next round.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.graph import Node

from gradsan import _torch, source
from gradsan.detect.functions import Functions
from gradsan.detect.meaning.callers_values import WritesToCallers, is_of_own_value
from gradsan.detect.memory import Uncounted
from gradsan.graph import conflicts, naming, walk
from gradsan.graph.arriving import Arrival, part
from gradsan.model import Conflict, Deviation, Save, Site, Write
from gradsan.originals.deep import Deep
from gradsan.originals.meant import Meant, Sums, Value, place_of
from gradsan.originals.originals import Kept
from gradsan.overlap import overlap
from gradsan.record import ledger
from gradsan.record.backwards import run_in_threads
from gradsan.record.detector import Detector, KnownConflicts, Run, is_written_at
from gradsan.record.ledger import RecentWrites, call_that_made
from gradsan.record.log import Log, RawCall, RawStack, RawWrite
from gradsan.record.stacks import begin_elsewhere, is_around, symbolise, within_torch
from gradsan.record.steps import RawBackward, read_backward
from gradsan.record.user_hooks import has_tensor_hooks

UNRECORDED, CALLERS = "no_grad_write", "forward_alias"

_REPLACES = frozenset({"copy_", "data ="})
_BOUNDS = ("clamp", "clip", "nan_to_num", "renorm")
_BACKWARDS_AWAITED = 16
_LOGGED_TOGETHER = 2  # how far one thread moves the clock from the log entry of an operation's Node to its write's


class Read(NamedTuple):
    """A value that a Node has saved, or (without a ``slot``) read: an alias, and the Node that made it, if any."""

    node: Node
    number: int
    slot: str
    alias: torch.Tensor
    maker: int | None


class _Pending(NamedTuple):
    """A conflict to be reported unless the gradient of the backward at ``clock`` does not reach written elements."""

    clock: int
    key: Any
    conflict: Conflict
    arrival: Arrival

    def made(self) -> Conflict:
        """Return the conflict, as ``Findings.add`` takes it."""
        return self.conflict


class ChangedValues(Detector):
    """Scans the graph of a backward for such reads; conflicts go to ``findings``."""

    def __init__(self, run: Run) -> None:
        uncounted, deep = run.get(Uncounted), run.get(Deep)
        self.meant, self.sums, self._keeps = Meant(deep), Sums(), deep.live.may_lie_in
        self._listeners, self._pending = run.listeners, list[_Pending]()
        self._uncounted, self._bypasses = uncounted, uncounted.bypasses
        self._again, self._awaited = dict[Any, int](), 0
        self._core, self._steps, self._findings = run.core, run.steps, run.get(KnownConflicts)
        self._recent, self.looks_always = RecentWrites(run.core), False
        self._to_callers, self._functions = WritesToCallers(), run.get(Functions)

    def forget(self) -> None:
        self._pending.clear()
        self._to_callers.forget()
        self._wait(False)

    def settle(self) -> None:
        """Report the conflicts that wait for the end of a backward that has failed."""
        self._report(self._pending, has_ended=False)
        self._pending.clear()

    def before_round(self, entry: RawBackward, rounds: int) -> None:
        if not self.looks_always:
            self._look(entry, ())

    def before_backward(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Scan every backward that may read a written value, as ``listeners.BeforeBackward``."""
        inputs = tuple(args[3]) if len(args) > 3 and args[3] else ()
        if self._keeps(self._recent.by_storage(), walk.oldest_of(inputs) > 0):
            self._look(entry, inputs)

    def _look(self, entry: RawBackward, inputs: tuple[Any, ...]) -> None:
        writes = self._recent.by_storage()
        if not writes:
            return
        backward = read_backward(entry)
        order = walk.engine_order(backward.roots, inputs, backward.via == "backward", walk.oldest_of(inputs))
        by_number = {number: node for node in order if (number := _torch.node_sequence(node)) is not None}
        for number, node in by_number.items():
            for slot, saved in _torch.saved_slots(node):
                # A value saved before a write is stale, and reported elsewhere.
                raws = [raw for raw in writes.get(storage_of(saved), ()) if raw.sequence <= number]
                read = read_of(node, number, slot, saved) if raws else None
                if read is not None:
                    self.judge(backward, read, raws, by_number)

    def judge(self, backward: Any, read: Read, raws: list[RawWrite], by_number: dict[int, Any]) -> None:
        """Report a read if one of the writes ``raws`` has changed what it reads."""
        made = self.made(read.number, backward.thread)
        if read.maker is None:
            alive = _of_this_life(raws, int(read.alias._version))
            # What moved no counter is in no order with it. All else was written to an earlier tensor at its address.
            is_bypassed = _torch.storage_or_none(read.alias) in self._bypasses
            last = {raw.stack: raw for raw in sorted(raws, key=lambda raw: raw.clock)}
            raws = alive or (list(last.values()) if is_bypassed else [])
        logged = raws
        # An operation that has left a counter at 0 has not written: ``dropout_`` in eval mode.
        raws = [raw for raw in raws if raw.version != 0]
        raws = [
            raw for raw in raws if made is not None and not self.is_recorded(raw, made, backward.thread, read.maker)
        ]
        if not raws:
            return
        info = conflicts.tensor_info(read.alias, was_leaf=read.maker is None)
        touching = [
            (raw, write)
            for raw in sorted(raws, key=lambda raw: raw.clock)
            if raw.clock < made.clock
            and ((write := ledger.as_write(raw)).region is None or overlap(info.region, write.region))
        ]
        bypass, alias_site = CALLERS, None
        if read.maker is None:
            site = symbolise(made.stack)
            touching = [one for one in touching if self._to_callers.has(*one, made.stack, site)]
        else:
            bypass = UNRECORDED
            touching, alias_site = self._unrecorded(read, touching, logged, by_number, backward.thread)
        if not touching:
            return
        # Recorded writes count, too: a copy made before them is no evidence about the others.
        compared = self._compared(read.alias, touching[0][0].clock, logged) if bypass == UNRECORDED else None
        if compared == "same" or (compared is None and bypass == UNRECORDED and self._is_undecided(backward, touching)):
            return
        key = (bypass, touching[0][0].stack, made.stack, read.slot)
        written = tuple(write for _, write in touching)
        conflict = functools.partial(
            self._conflict, backward, read, written, made, info, bypass, alias_site, sys._getframe(1), compared
        )
        if read.maker is None or self._findings.has(key):
            self._findings.add(key, conflict)
            return
        if (maker := by_number.get(read.maker)) is not None:
            clocks = [raw.clock for raw in logged]
            with _torch.hushed():
                changed = self._uncounted.snapshots.changed(read.alias, touching[0][0].clock - 1, clocks)
            parts = [part(read.alias, info.region, write.op, write.region, changed) for write in written]
            found = replace(conflict(), if_meant=self._if_meant(backward, read, maker))
            self._pending.append(_Pending(backward.clock, key, found, Arrival(maker, parts, self._listeners.guard)))
            self._listeners.call_after_backward(self.after_backward)

    def _is_undecided(self, backward: Any, touching: list[tuple[RawWrite, Write]]) -> bool:
        """Whether uncompared writes may have left the values as they were; the line's next backward is scanned then."""
        since = self._uncounted.copied_since
        if since is not None and since < touching[0][0].clock:
            return all(is_bound(raw.op) for raw, _ in touching)
        self._again[backward.stack], self._awaited = backward.clock, 0
        self._wait(True)
        return True

    @_torch.hushed()
    def _look_again(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Scan a backward before which written memory was copied; as ``listeners.BeforeBackward``."""
        if self._again.get(entry.stack, entry.clock) != entry.clock:
            del self._again[entry.stack]
            self._look(entry, tuple(args[3]) if len(args) > 3 and args[3] else ())
        self._awaited += 1
        if not self._again or self._awaited > _BACKWARDS_AWAITED:
            self._wait(False)

    def _wait(self, wanted: bool) -> None:
        if not wanted:
            self._again.clear()
        self._uncounted.copy_written("again", wanted)
        self._listeners.call_before_backward(self._look_again, wanted)

    def _if_meant(self, backward: Any, read: Read, maker: Any) -> Deviation | None:
        if _torch.count_of_outputs(maker) != 1:
            return None
        storage = _torch.storage_or_none(read.alias)
        raws = [raw for raw in self._recent.by_storage().get(storage, ()) if raw.sequence > (read.maker or 0)]
        return self.meant.deviation(Value(storage, place_of(read.alias), maker, 0), raws, backward.outputs)

    def _unrecorded(
        self,
        read: Read,
        touching: list[tuple[RawWrite, Write]],
        logged: Sequence[RawWrite],
        by_number: dict[int, Any],
        thread: int,
    ) -> tuple[list[tuple[RawWrite, Write]], Site | None]:
        """Return the writes to a value after autograd computed it, and the site of that computation."""
        origin = _origin(read.maker or 0, max((raw.sequence for raw, _ in touching), default=0), by_number)
        if origin is None:
            return [], None
        touching = [(raw, write) for raw, write in touching if origin < raw.sequence]
        if _torch.storage_or_none(read.alias) not in self._bypasses:
            # In a graph built by a device's thread, numbers do not tell the order.
            alive = _of_this_life(logged, int(read.alias._version))
            touching = [(raw, write) for raw, write in touching if raw in alive and _has_moved(raw, logged, origin)]
        computed = self.made(origin, thread)
        if computed is not None:
            # An ended thread may have had the same numbers, and another tensor the address.
            touching = [
                (raw, write)
                for raw, write in touching
                if raw.clock > computed.clock and not within_torch(raw.stack, computed.stack)
            ]
        if self.keeps_gradient(by_number.get(origin), [raw for raw, _ in touching]):
            return [], None
        return touching, None if computed is None else symbolise(computed.stack)

    @_torch.hushed()
    def after_backward(self, entry: RawBackward) -> None:
        """Report the conflicts whose writes a gradient has reached; as ``listeners.AfterBackward``."""
        due = [one for one in self._pending if one.clock == entry.clock]
        self._pending = [one for one in self._pending if one.clock != entry.clock]
        self._listeners.call_after_backward(self.after_backward, bool(self._pending))
        self._report(due, has_ended=True)

    def _report(self, due: Iterable[_Pending], has_ended: bool) -> None:
        for one in due:
            if not one.arrival.is_harmless(has_ended):
                self._findings.add(one.key, one.made)

    def _compared(
        self, alias: torch.Tensor, clock: int, logged: Sequence[RawWrite]
    ) -> Literal["same", "near", "different"] | None:
        """Compare a value with that before the write at ``clock``: ``clamp_`` may have had nothing to clamp."""
        with _torch.hushed():
            return self._uncounted.snapshots.compared(alias, clock - 1, [raw.clock for raw in logged], is_counted=True)

    def _conflict(
        self,
        backward: Any,
        read: Read,
        written: tuple[Write, ...],
        made: Any,
        info: Any,
        bypass: str,
        alias: Site | None,
        frame: FrameType,
        compared: Literal["same", "near", "different"] | None,
    ) -> Conflict:
        core, steps = self._core, self._steps
        return Conflict(
            save=Save(
                clock=made.clock,
                site=symbolise(made.stack),
                tensor=info,
                version=int(read.alias._version),
                node=read.node.name(),
                slot=read.slot,
                sequence=read.number,
                step=conflicts.steps_before(steps, made.clock, core.steps),
            ),
            writes=written,
            use=conflicts.use_of(core, backward, int(read.alias._version)),
            names=naming.names_of(read.alias, frame),
            root_sequence=backward.root_sequence,
            raised=False,
            bypass=bypass,
            alias_site=alias,
            certain=bypass == UNRECORDED,
            compared=compared,
        )

    def is_recorded(self, raw: RawWrite, reader: Any, thread: int, maker: int | None) -> bool:
        """Whether autograd has recorded a write, or it is not of the reading call's own thread.

        A recorded write has made a Node, the last one before the sequence number of the write's log entry. The call at
        the same place has made it, or one around it: ``torch.nn.functional.elu`` around ``elu_``. A value that still
        has an older Node, ``maker``, did not get that one: ``loss.data += penalty`` gives it to ``loss.data``.
        """
        # Writes in the forward of a custom Function are checked in functions.py, those of a recomputation in hooked.py.
        is_checked = self._functions.is_in_forward(raw.stack) or _torch.is_recomputed(raw.stack.codes)
        if is_checked or begin_elsewhere(raw.stack, reader.stack):
            return True
        if not raw.grad_enabled:
            return False
        made = self.made(raw.sequence - 1, thread)
        if made is None or (maker is not None and maker < made.first):
            return False
        return has_made(made, raw, self._core)

    def has_found(self, stack: RawStack) -> bool:
        """Whether a write at ``stack`` belongs to a known conflict, or to one that waits for a gradient."""
        return self._findings.knows(stack) or any(is_written_at(one.conflict, stack) for one in self._pending)

    def keeps_gradient(self, maker: Any, raws: Sequence[RawWrite], others: Sequence[tuple[Any, str]] = ()) -> bool:
        """Whether the gradient without ``raws``, and ``others``, is meant: (stack, operation) of writes not logged."""
        if passes_straight(maker, [*((raw.stack, raw.op) for raw in raws), *others]):
            return True
        is_own = all(self.sums.is_of_constant(one) and is_of_own_value(one.stack, one.op) for one in raws)
        return bool(raws) and not others and is_own

    def made(self, number: int, thread: int) -> Any:
        """Return the log entry of the call that made a Node; None where it is unknown."""
        return call_that_made(self._core, number, thread)


def has_made(made: RawCall, raw: RawWrite, core: Log) -> bool:
    """Whether the call that wrote is the one that made the last Nodes before the write, a log entry."""
    if made.stack is raw.stack:
        is_next = raw.kind == "foreach" or raw.clock <= made.clock + _LOGGED_TOGETHER or run_in_threads(core)
        return is_next and bool(made.clock <= raw.clock)
    # The write of an operator called directly is logged last, and further in.
    return (raw.kind == "op" or made.clock > raw.clock) and is_around(made.stack, raw.stack)


def is_bound(op: str) -> bool:
    """Whether an operation may have had no effect: reported only where values were compared."""
    return op.strip("_").startswith(_BOUNDS)


def passes_straight(maker: Any, writes: Sequence[tuple[Any, str]]) -> bool:
    """Whether writes make a straight-through estimate, whose gradient is meant to be that of the value before them.

    They round it or take signs, which has no derivative; or a copy is replaced as a whole; or the program has a hook
    for the gradient of the value. ``writes`` are (stack, name of the operation).
    """
    if maker is not None and has_tensor_hooks(maker):
        return True
    if maker is not None and maker.name() == "CloneBackward0" and all(op in _REPLACES for _, op in writes):
        return bool(writes)
    frames = [symbolise(stack).user_frame for stack, _ in writes]
    return any(source.makes_discrete(frame) for frame in frames if frame is not None)


def storage_of(saved: Any) -> int:
    """Return the memory of a saved tensor, in deep mode of the alias that is kept; 0 where it is unknown."""
    packed = _torch.packed_object(saved)
    held = packed.alias if isinstance(packed, Kept) else packed
    return _torch.storage_or_none(held) if _torch.is_tensor(held) else 0


def read_of(node: Node, number: int, slot: str, saved: Any) -> Read | None:
    """Return the value of a slot, with its Node; None where it is the Node's own result, or cannot be read."""
    if slot.startswith("result"):
        return None
    packed = _torch.packed_object(saved)
    if isinstance(packed, Kept):
        return Read(node, number, slot, packed.alias, packed.maker)
    if not _torch.is_tensor(packed) or _torch.is_hooked(saved):
        return None
    name, _, position = slot.partition("[")
    try:
        value = _torch.read_slot(node, name)
        tensor = value[int(position.rstrip("]"))] if position else value
    except (RuntimeError, IndexError, TypeError):
        return None
    if not _torch.is_tensor(tensor):
        return None
    maker = _torch.node_sequence(tensor.grad_fn)
    if maker is None and tensor.requires_grad:
        return None
    return Read(node, number, slot, packed, maker)


def _of_this_life(raws: Sequence[RawWrite], version: int) -> list[RawWrite]:
    """Return the writes to a tensor that is at ``version`` now, without those to an earlier one at its address.

    Backwards in time the versions of one tensor fall. A write that does not count for it (``.data``) has no place in
    that order, and ends it.
    """
    found: list[RawWrite] = []
    at = version + 1
    for raw in sorted(raws, key=lambda raw: raw.clock, reverse=True):
        if raw.version is None or raw.version >= at:
            break
        found.append(raw)
        at = raw.version
    return found


def _has_moved(raw: RawWrite, logged: Sequence[RawWrite], origin: int) -> bool:
    """Whether a write has moved the counter of its memory from where an earlier one since ``origin`` left it."""
    return not any(
        one.version == raw.version and one.clock < raw.clock and one.sequence > origin and one.kind != "metadata"
        for one in logged
    )


def _origin(maker: int, before: int, by_number: dict[int, Any]) -> int | None:
    """Return the Node that computed a value, below Nodes of views; None where it is not older than ``before``."""
    while maker >= before:
        node = by_number.get(maker)
        if node is None or not _torch.makes_view(node):
            return None
        below = [number for child, _ in node.next_functions if (number := _torch.node_sequence(child)) is not None]
        if len(below) != 1:
            return None
        maker = below[0]
    return maker
