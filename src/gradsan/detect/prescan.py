"""Scan of a graph's saved values before its backward, for writes past the version counter.

A slot that reads without the version error has had no counted write since its save. If the log has a younger write
to its bytes nevertheless, that write went past the counter, however the alias was made. Graphs are only walked while
there are bypassed storages (``memory.py``) that were written, or exported memory (``exports.py``).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.detect.exports import Exports
from gradsan.detect.memory import Uncounted
from gradsan.graph import conflicts, naming, walk
from gradsan.graph.conflicts import passed
from gradsan.model import Conflict, Deviation, Region, Save, Site, Write
from gradsan.originals.kept_conflicts import PastCounter
from gradsan.originals.originals import Kept
from gradsan.overlap import overlap
from gradsan.record import ledger
from gradsan.record.detector import Detector, KnownConflicts, Run
from gradsan.record.ledger import call_that_made
from gradsan.record.log import RawCall, RawStack
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward, read_backward

if TYPE_CHECKING:
    from gradsan.originals.stale_effects import Trial


class _Pending(NamedTuple):
    """A conflict to be reported unless its trial in the backward at ``clock`` shows that no gradient changes."""

    clock: int
    key: tuple[Any, ...]
    conflict: Conflict
    trial: Trial


class Prescan(Detector):
    """Listener before and after each backward that scans its graph."""

    def __init__(self, run: Run) -> None:
        """Look through graphs once something can be written past the version counter."""
        self._core, self._guard, self._steps = run.core, run.guard, run.steps
        self._findings = KnownConflicts(run)
        self._uncounted, self._exports, self._listeners = run.get(Uncounted), run.get(Exports), run.listeners
        self._uncounted.on_bypass = self._exports.on_export = self._begin
        self._pending: list[_Pending] = []
        self._harmless = collections.Counter[tuple[Any, ...]]()
        self._told_at = -1

    def forget(self) -> None:
        self._findings.forget()
        self._pending.clear()
        self._harmless.clear()
        # Between two stretches of watching nothing is logged.
        self._uncounted.kept_snapshots = None

    def _begin(self) -> None:
        """Look through graphs from now on: something can be written past the version counter."""
        self._listeners.call_before_backward(self.before_backward)
        # Before those that ask what has been found by then.
        self._listeners.call_after_backward(self.after_backward)

    def settle(self) -> None:
        """Report the conflicts whose trials wait for the end of a backward that has failed."""
        self._report(self._pending, has_ended=False)
        self._pending.clear()

    @_torch.hushed()
    def after_backward(self, entry: RawBackward) -> None:
        """Report the conflicts tried in a backward; as ``listeners.AfterBackward``."""
        if self._pending:
            due = [one for one in self._pending if one.clock == entry.clock]
            self._pending = [one for one in self._pending if one.clock != entry.clock]
            self._report(due, has_ended=True)

    def _report(self, due: Iterable[_Pending], has_ended: bool) -> None:
        for one in due:
            outcome = one.trial.outcome(has_ended)
            # A wrong gradient of one Node spreads to the others: nothing is known of them then.
            if outcome == "unknown" or (outcome == "harmless" and one.clock == self._told_at):
                self._add(one.key, one.conflict)
            elif outcome == "harmless":
                self._harmless[one.key] += 1
                self._add((*one.key, "harmless"), dataclasses.replace(one.conflict, deviation=Deviation()))

    def _tell(self, key: tuple[Any, ...], conflict: Conflict, clock: int) -> None:
        """Report a conflict of the backward at ``clock`` that changes a gradient, or may."""
        self._told_at = clock
        self._add(key, conflict)

    def _add(self, key: tuple[Any, ...], conflict: Conflict) -> None:
        self._findings.add(key, lambda: conflict)

    def before_backward(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        uncounted = self._uncounted
        if uncounted.bypasses or uncounted.replaced or self._exports.any:
            uncounted.prune()
            self._exports.forget_dead()
            self._exports.end_round()
            if uncounted.writes() or uncounted.replaced or self._exports.any:
                with _torch.hushed():
                    self._look_through(entry, args)
        self._exports.rest()

    def is_changed_outside(self, node: Node, slot: str, tensor: torch.Tensor, thread: int) -> bool:
        """Whether exported memory has other bytes than a Node of ``thread`` saved."""
        number = _torch.node_sequence(node) or 0
        made = call_that_made(self._core, number, thread)
        storage = _torch.storage_or_none(tensor)
        return self._exports.changed(storage, number, thread, slot, tensor, made) is not None

    def look_again(self, entry: RawBackward, nodes: Iterable[Node], storage: int) -> None:
        """Check Nodes of a running backward: the values that they saved in ``storage``, which was just written."""
        backward = read_backward(entry)
        for node in nodes:
            for slot, saved in _torch.saved_slots(node):
                tensor = _torch.packed_object(saved)
                is_there = _torch.is_tensor(tensor) and _torch.storage_or_none(tensor) == storage
                if is_there and not _torch.is_hooked(saved):
                    self._look_at(backward, node, _torch.node_sequence(node) or 0, slot, tensor, is_running=True)

    def _look_through(self, entry: RawBackward, args: tuple[Any, ...]) -> None:
        youngest = self._uncounted.youngest
        backward = read_backward(entry)
        if not self._exports.any and not walk.has_older(backward.roots, youngest):
            return
        inputs = tuple(args[3]) if len(args) > 3 and args[3] else ()
        for node in walk.engine_order(backward.roots, inputs, backward.via == "backward"):
            number = _torch.node_sequence(node)
            if number is None or (number >= youngest and not self._exports.any):
                continue
            for slot, saved in _torch.saved_slots(node):
                tensor = _torch.packed_object(saved)
                if _torch.is_tensor(tensor) and not _torch.is_hooked(saved):
                    self._look_at(backward, node, number, slot, tensor)

    def _look_at(
        self, backward: Any, node: Node, number: int, slot: str, tensor: torch.Tensor, *, is_running: bool = False
    ) -> None:
        if not _torch.is_read_by_backward(node, slot):
            return
        storage, thread = _torch.storage_or_none(tensor), backward.thread
        is_bypassed = storage in self._uncounted.bypasses or self._uncounted.replacement_of(tensor) is not None
        # Most are not; what follows costs ten times as much.
        if not is_bypassed and self._exports.is_as_saved(storage, number, thread, slot, tensor):
            return
        made = call_that_made(self._core, number, thread)
        writes: tuple[Write, ...] = ()
        bypass_kind, bypass_stack = "data_attribute", None
        replaced = self._uncounted.replaced_since(tensor, lambda one: _younger(one, number, made))
        if replaced is not None:
            info = conflicts.tensor_info(tensor, was_leaf=tensor.is_leaf)
            writes = (_write(replaced.clock, replaced.stack, "data =", "op", info.region, replaced.sequence),)
            bypass_stack = replaced.stack
        elif storage in self._uncounted.bypasses:
            info = conflicts.tensor_info(tensor, was_leaf=tensor.is_leaf)
            raws = [
                raw
                for raw in self._uncounted.writes().get(storage, ())
                if _younger(raw, number, made) and not _own(raw, made, tensor)
            ]
            writes = tuple(
                write
                for write in map(ledger.as_write, raws)
                if write.kind != "metadata" and (write.region is None or overlap(info.region, write.region))
            )
            bypass = self._uncounted.bypass_before(storage, writes[0].clock) if writes else None
            if bypass is not None:
                bypass_kind, bypass_stack = bypass.kind, bypass.stack
        compared = self._compared(storage, tensor, made) if writes and bypass_stack is not None else None
        if not writes:
            outside = self._exports.changed(storage, number, backward.thread, slot, tensor, made)
            if outside is None:
                return
            info = conflicts.tensor_info(tensor, was_leaf=tensor.is_leaf)
            bypass_kind, bypass_stack = "memory_alias", outside.stack
            writes = (_write(outside.clock, outside.stack, outside.op, "outside", None, number),)
        if not _reads(node, slot):
            return
        key = (made and made.stack, slot, bypass_kind, writes[0].op, bypass_stack, node.name(), compared)
        if self._findings.count(key):
            self._told_at = backward.clock
        if self._findings.has(key) or self._findings.is_full:
            return
        times = self._harmless[key]
        if times & (times - 1):
            # A conflict that has been harmless is tried again at its 2nd, 4th, 8th … time.
            self._harmless[key] += 1
            return
        from gradsan.graph import compiled
        from gradsan.originals.stale_effects import Trial, can_be_tried

        clock = made.clock if made else 0
        is_output = slot.startswith("result") or (not tensor.requires_grad and getattr(tensor, "grad_fn", None) is None)
        conflict = compiled.as_uncompiled(
            Conflict(
                save=Save(
                    clock=clock,
                    site=symbolise(made.stack) if made else Site(),
                    tensor=info,
                    version=tensor._version,
                    node=node.name(),
                    slot=slot,
                    is_output=is_output and slot.startswith("result"),
                    sequence=number,
                    step=conflicts.steps_before(self._steps, clock, self._core.steps),
                ),
                writes=writes,
                use=conflicts.use_of(self._core, backward, tensor._version),
                names=naming.names_of(tensor, sys._getframe(1)),
                root_sequence=backward.root_sequence,
                raised=False,
                bypass=bypass_kind,
                alias_site=symbolise(bypass_stack) if bypass_stack is not None else None,
                unchanged=compared == "same",
                compared=compared,
                passed=passed(self._core, backward.roots, node, conflicts.moment_of(writes)),
            ),
            node,
            slot,
            tensor,
            backward,
        )
        before = None if is_running or not can_be_tried(node, tensor) else self._before(number, slot, tensor, made)
        if before is None:
            self._tell(key, conflict, backward.clock)
        else:
            tell = functools.partial(self._tell, key, conflict, backward.clock)
            trial = Trial(self._core, node, tensor, before, self._guard, tell)
            self._pending.append(_Pending(backward.clock, key, conflict, trial))

    def _compared(self, storage: int, tensor: torch.Tensor, made: Any) -> Literal["same", "near", "different"] | None:
        """Compare a value with its bytes at the save; None where no copy is left to compare it with."""
        if made is None or self._exports.of(storage) is not None:
            return None
        return self._uncounted.snapshots.compared(tensor, made.clock, self._changes(storage, tensor, made))

    def _changes(self, storage: int | None, tensor: torch.Tensor, made: Any) -> list[int]:
        """When what ``tensor`` holds changed: by writes, and where it was given its present memory after the save."""
        clocks = [raw.clock for raw in self._uncounted.writes().get(storage or 0, ())]
        replaced = self._uncounted.replaced_since(tensor, made.clock)
        return clocks if replaced is None else [*clocks, replaced.clock]

    def _before(self, number: int, slot: str, tensor: torch.Tensor, made: Any) -> Any:
        """The bytes of a saved value at its save, where a copy is left; None otherwise."""
        storage = _torch.storage_or_none(tensor)
        found = self._exports.before(storage, number, threading.get_ident(), slot, tensor, made)
        if found is None and made is not None and self._exports.of(storage) is None:
            found = self._uncounted.snapshots.before(tensor, made.clock, self._changes(storage, tensor, made))
        return None if found is None else found.view(tensor.dtype).reshape(tensor.shape)


def bypass_of(uncounted: Uncounted, exports: Exports, kept: Kept) -> PastCounter | None:
    """How a kept value has been overwritten past the counter; None where that was not seen."""
    replaced = uncounted.replaced_since(kept.source() if kept.source is not None else None, kept.clock)
    if replaced is not None and kept.current is not kept.alias:
        write = _write(replaced.clock, replaced.stack, "data =", "op", None, replaced.sequence)
        return PastCounter("data_attribute", write.site, write)
    storage = _torch.storage_or_none(kept.alias)
    raw = next((one for one in uncounted.writes().get(storage, ()) if one.clock > kept.clock), None)
    export = exports.of(storage)
    if raw is None and export is not None:
        write = _write(export.clock, export.stack, export.op, "outside", None, 0)
        return PastCounter("memory_alias", write.site, write)
    bypass = uncounted.bypass_before(storage, raw.clock if raw is not None else sys.maxsize)
    return None if bypass is None else PastCounter(bypass.kind, symbolise(bypass.stack))


def _younger(event: Any, number: int, made: Any) -> bool:
    return bool(event.clock > made.clock if made is not None else event.sequence > number)


def _own(raw: Any, made: RawCall | None, tensor: torch.Tensor) -> bool:
    """Whether a write is the saving operation's own (``relu_``): logged right after its Node, and counted."""
    return (
        made is not None and raw.stack is made.stack and raw.clock <= made.clock + 1 and raw.version == tensor._version
    )


def _reads(node: Node, slot: str) -> bool:
    """Whether PyTorch would hand the slot out; where it would not, it raises an error itself."""
    try:
        _torch.read_slot(node, slot.partition("[")[0])
    except RuntimeError:
        return False
    return True


def _write(clock: int, stack: RawStack, op: str, kind: Any, region: Region | None, sequence: int) -> Write:
    return Write(clock=clock, site=symbolise(stack), op=op, kind=kind, version=None, region=region, sequence=sequence)
