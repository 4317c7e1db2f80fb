"""Writes from the log of a run, to one storage or the youngest, and the calls that made Nodes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.model import Region, Site, Write
from gradsan.record.log import Log, RawCall, RawWrite, backward_calls, calls_near, logged_writes
from gradsan.record.stacks import symbolise
from gradsan.record.steps import StepLog, StepRecord, moved_storages

_SAMPLED, _ELEMENTS = 8, 256


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has floating-point elements of its own in ordinary memory."""
    return (
        type(tensor) in _torch.PLAIN_TENSORS
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.numel() > 0
        and tensor.device.type != "meta"
    )


def some_elements(tensor: torch.Tensor) -> Any:
    """Return some 256 elements at even distances, without copying the rest of contiguous memory."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // _ELEMENTS))].to(torch.float64, copy=True)


class Noted:
    """Parameters as they were at a moment, held weakly."""

    @_torch.hushed()
    def __init__(self, core: Log, parameters: Iterable[torch.Tensor]) -> None:
        """Note the version and the memory of each, and some elements of a few."""
        held = list(parameters)
        self._clock = core.clock
        self._held = [(_torch.weak_tensor(one), one._version, _torch.storage_or_none(one)) for one in held]
        self._elements = [(_torch.weak_tensor(one), some_elements(one)) for one in held[:_SAMPLED] if is_plain(one)]

    @_torch.hushed()
    def was_written(self) -> bool:
        """Whether one that is alive was written since: by its counter, its memory, or its elements, as NumPy writes."""
        alive = ((leaf, version, storage) for weak, version, storage in self._held if (leaf := weak()) is not None)
        if any(leaf._version > version or _torch.storage_or_none(leaf) != storage for leaf, version, storage in alive):
            return True
        sampled = ((leaf, some) for weak, some in self._elements if (leaf := weak()) is not None)
        return any(not is_plain(leaf) or not torch.equal(some_elements(leaf), some) for leaf, some in sampled)

    def was_logged(self, core: Log, steps: StepLog, since: int) -> bool:
        """Whether the logs have a write to one of them: a step after ``since``, or one past the counter of a tensor."""
        storages = {storage for _, _, storage in self._held}
        writes = logged_writes(core, self._clock)
        return any(one.storage in storages for one in writes) or not storages.isdisjoint(moved_storages(steps, since))


def call_that_made(core: Log, number: int | None, thread: int) -> RawCall | None:
    """Return the call that made the Node of that number in ``thread``; None where no watched call did."""
    near = () if number is None else calls_near(core, number, thread)
    return next((one for one in near if number is not None and one.first <= number < one.end), None)


def site_that_made(core: Log, node: Node | None, thread: int) -> Site | None:
    """Return where ``node`` was made in ``thread``; None without one, or where no watched call made it."""
    made = None if node is None else call_that_made(core, _torch.node_sequence(node), thread)
    return None if made is None else symbolise(made.stack)


def writes_since(
    core: Log, steps: StepLog, storage: int, start: int, saved_version: int, now: int | None = None
) -> tuple[Write, ...]:
    """Return every logged write to ``storage`` after the clock ``start``, in order.

    A write that left the counter where the save found it, or lower, came before the save: among them the saving
    operation's own (``relu_`` saves its result before it returns). After one that moved the counter, it has a counter
    of its own, as ``p.data.clamp_()`` has.

    Writes of a step's own code in the user's files count as that step: its line is the ``step()`` call. Writes of
    the closure of ``step(closure)`` are the program's. ``now`` is the version found at the use.
    """
    found: list[Write] = []
    others: list[Write] = []
    with_it = [record for record in steps.steps if storage in record.storages]
    for raw in logged_writes(core):
        if raw.storage != storage or raw.clock <= start:
            continue
        if any(_is_within(raw.clock, record) and not _was_in_closure(core, raw, record) for record in with_it):
            continue
        has_moved = raw.version is None or raw.version > saved_version
        (found if has_moved else others).append(as_write(raw))
    for record in with_it:
        if record.end is None and now is not None and _has_not_written(record, storage, found, now):
            continue
        version = _version_after(record, storage)
        if version is not None and (record.end is None or record.end > start):
            found.append(_step_write(record, version))
    first = min((write.clock for write in found), default=None)
    found += [] if first is None else [write for write in others if write.clock > first]
    return tuple(sorted(found, key=lambda write: write.clock))


def uncounted_since(core: Log, steps: StepLog, storage: int, start: int, saved_at: Any) -> tuple[Write, ...]:
    """Return every logged write and step of ``storage`` after the clock ``start``, whatever the counter says.

    For values that changed although their counter did not: ``.data`` has a counter of its own, fused optimizers
    move none. A write that the operation at the stack ``saved_at`` logs as it returns is its own result.
    """
    found = [
        as_write(raw)
        for raw in logged_writes(core)
        if raw.storage == storage and raw.clock > start and raw.stack is not saved_at
    ]
    if not found:
        found = [
            _step_write(record, -1)
            for record in steps.steps
            if storage in record.storages and (record.end is None or record.end > start)
        ]
    return tuple(sorted(found, key=lambda write: write.clock))


def first_move(core: Log, steps: StepLog, storage: int, saved_version: int, version: int) -> int:
    """Return the clock of the first write or step that moved ``storage`` on from ``saved_version``; now, if none.

    Backwards through the logs, versions of one storage fall. Where they do not, another storage had its address.
    """
    clock: int = core.clock
    at = version + 1
    for raw in reversed(logged_writes(core)):
        if raw.storage != storage or raw.version is None:
            continue
        if not saved_version < raw.version < at:
            break
        clock, at = raw.clock, raw.version
    at = version
    for record in reversed(steps.steps):
        # A running step may be in its closure, before its own writes.
        if record.end is None or storage not in record.storages:
            continue
        position = record.storages.index(storage)
        after = record.after[position] if position < len(record.after) else record.before[position]
        if not saved_version < after <= at:
            break
        clock, at = min(clock, record.end), record.before[position]
    return clock


def version_since(core: Log, steps: StepLog, storage: int, version: int) -> int:
    """Return the clock of the last write or step after which ``storage`` had at most ``version``; 0 if none."""
    clock: int = 0
    for raw in reversed(logged_writes(core)):
        if raw.storage == storage and raw.version is not None and raw.version <= version:
            clock = raw.clock
            break
    for record in reversed(steps.steps):
        position = record.storages.index(storage) if storage in record.storages else -1
        if record.end is not None and 0 <= position < len(record.after) and record.after[position] <= version:
            clock = max(clock, record.end)
            break
    return clock


def unexplained_moves(writes: tuple[Write, ...], saved: int, now: int) -> int:
    """Return how many moves of the version counter from ``saved`` to ``now`` no logged write explains."""
    if any(write.kind == "step" and write.version is None for write in writes):
        return 0  # a step still running may have written any number of times
    at, missing = saved, 0
    for write in writes:
        if write.version is None or write.version <= at:
            continue
        # A step may move the counter any number of times; an operation moves it once.
        missing += 0 if write.kind in ("step", "foreach") else write.version - at - 1
        at = write.version
    return missing + max(0, now - at)


def _is_within(clock: int, record: StepRecord) -> bool:
    return record.clock < clock and (record.end is None or clock < record.end)


def _was_in_closure(core: Log, raw: RawWrite, record: StepRecord) -> bool:
    """Whether a backward began between the write and the end of the step: the step's own update comes after it."""
    return any(raw.clock <= one.clock and _is_within(one.clock, record) for one in backward_calls(core))


def _has_not_written(record: StepRecord, storage: int, found: list[Write], now: int) -> bool:
    """Whether the writes ``found`` explain all moves of the counter to ``now`` since a step began that still runs."""
    before = record.before[record.storages.index(storage)]
    return now - before == sum(write.clock > record.clock for write in found)


def _version_after(record: StepRecord, storage: int) -> int | None:
    """The parameter's version when the step ended; -1 while it runs; None if the step did not write it."""
    for position, candidate in enumerate(record.storages):
        if candidate == storage:
            if record.end is None or position >= len(record.after):
                return -1
            if record.after[position] != record.before[position]:
                return int(record.after[position])
    return None


def as_write(raw: RawWrite) -> Write:
    """Convert one entry of the log to a Write."""
    region = None
    if raw.strides is not None:
        region = Region(raw.offset, raw.shape, raw.strides, raw.itemsize, raw.item)
    return Write(
        clock=raw.clock,
        site=symbolise(raw.stack),
        op=raw.op,
        kind=raw.kind,
        version=raw.version,
        region=region,
        sequence=raw.sequence,
        step=raw.step,
        grad_enabled=raw.grad_enabled,
        is_parameter=raw.is_parameter,
        # A fused step is logged as a write of its own.
        optimizer=raw.op.removesuffix(".step") if raw.kind == "step" else None,
    )


def _step_write(record: StepRecord, version: int) -> Write:
    return Write(
        clock=record.clock if record.end is None else record.end,
        site=symbolise(record.stack),
        op=f"{record.optimizer}.step",
        kind="step",
        version=None if version < 0 else version,
        region=None,
        sequence=record.sequence,
        step=record.number,
        grad_enabled=False,
        is_parameter=True,
        optimizer=record.optimizer,
    )


_KEPT, _KEPT_OF_A_STORAGE = 4_096, 16
QUIET_KINDS = ("step", "metadata", "statistics", "collective", "outside")
GIVES_MEMORY = "set_"
"""Gives its tensor the memory of another one, and writes to none: fake tensors are made so, from a cache of shapes."""

# Positions of these fields in an entry of the log.
_OP, _STORAGE, _IS_PARAMETER, _KIND = map(RawWrite._fields.index, ("op", "storage", "is_parameter", "kind"))


class RecentWrites:
    """Recent writes by storage, read from the log on demand; forgotten when the log is cleared."""

    def __init__(self, core: Log) -> None:
        """Read from the log of ``core``."""
        self._core = core
        # Several threads may call backward; so may a finalizer that runs meanwhile.
        self._lock = threading.RLock()
        self._read_to, self._counted = -1, 0
        self._order: deque[RawWrite] = deque()
        self._found: dict[int, deque[RawWrite]] = {}

    def by_storage(self) -> Mapping[int, Sequence[RawWrite]]:
        """Return the writes until now by storage, the oldest first."""
        with self._lock:
            entries, count = self._core.writes_after(self._read_to), self._core.write_count
            # More entries than writes since the last time, or fewer writes: the log was cleared in between.
            if len(entries) > count - self._counted:
                entries = self._core.writes_after(-1)
                self._order.clear()
                self._found.clear()
            self._counted = count
            for entry in entries:
                self._read_to = entry[0]
                is_write = entry[_KIND] not in QUIET_KINDS and entry[_OP] != GIVES_MEMORY
                if is_write and entry[_STORAGE] and not entry[_IS_PARAMETER]:
                    self._add(RawWrite(*entry))
            return self._found

    def _add(self, raw: RawWrite) -> None:
        self._order.append(raw)
        self._found.setdefault(raw.storage, deque(maxlen=_KEPT_OF_A_STORAGE)).append(raw)
        if len(self._order) > _KEPT:
            oldest = self._order.popleft()
            same = self._found.get(oldest.storage)
            # For a storage that is written often, it has been pushed out before.
            if same and same[0] is oldest:
                same.popleft()
            if not same:
                self._found.pop(oldest.storage, None)
