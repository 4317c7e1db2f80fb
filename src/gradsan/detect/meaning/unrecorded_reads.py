"""Values changed without autograd's knowledge, and then read by an operation that does not save its input.

``logits.data *= 2`` and then ``log_softmax(logits)``: an operation that saves its input is found in the graph
(``detect/changed_values.py``); one that saves only its result, or nothing, leaves no trace there. So the arguments of
calls are checked in some rounds: a value that is older than an unrecorded write to its memory, in a call whose Node
the backward runs. Memory exported to NumPy is compared with its earlier bytes: writes there are not logged.

Beside them, tensors without a graph that a function of the program has written for its caller, as in ``ChangedValues``.

Row: ``value_changed``. Roles: ``computed`` (its site; ``values``: ``shape``, ``dtype``, ``device``), ``written`` (the
write; ``op``), ``read`` (the call).

A loss may be changed, too, before its backward: ``loss.data += penalty``. The backward begins at the Node that computed
the loss, whatever its current value. Checked at the 1st, 2nd, 4th, 8th … backward of a line, in the writes that were
logged since the loss was computed.

Row: ``loss_changed``. Roles: ``computed`` (its site; ``name`` is the loss; ``values`` as above), ``written`` (the
write; ``op``).
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.detect.changed_values import ChangedValues, Read, is_bound, storage_of
from gradsan.detect.exports import Export, Exports
from gradsan.detect.meaning.rounds import RoundDetector
from gradsan.detect.memory import Uncounted
from gradsan.graph import conflicts, naming, walk
from gradsan.graph.arriving import Arrival, Part, part
from gradsan.model import Clue, Failure
from gradsan.originals.meant import Value, place_of
from gradsan.overlap import overlap
from gradsan.record import ledger
from gradsan.record.detector import Finder, Run
from gradsan.record.ledger import GIVES_MEMORY, QUIET_KINDS, call_that_made
from gradsan.record.log import RawStack, RawWrite, logged_writes
from gradsan.record.stacks import is_of_program, is_own_file, is_user_file, symbolise, within_torch
from gradsan.record.steps import RawBackward, read_backward

ROW, LOSS_CHANGED = "value_changed", "loss_changed"
_READS = 64
_HANDED_OUT = frozenset({"numpy", "__array__", "__dlpack__", "to_dlpack"})


class _Read(NamedTuple):
    """A read, after a write, of an output of the Node ``maker``, by the call that made the Node ``number``.

    ``at`` is the memory of the value, its part of it, and the output number.
    """

    number: int
    maker: int
    clock: int
    sequence: int
    op: str
    stack: RawStack
    raw: RawWrite | None
    facts: dict[str, Any]
    part: Part
    at: tuple[int, tuple[Any, ...], int]


class _Due(NamedTuple):
    stack: RawStack
    failure: Failure
    arrival: Arrival


class UnrecordedReads(RoundDetector):
    """Checks the arguments of calls in some rounds; findings go to ``found``."""

    from_start = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._uncounted, self._exports, self._values = run.get(Uncounted), run.get(Exports), run.get(ChangedValues)
        self._meant, self._sums = self._values.meant, self._values.sums
        self._written: dict[int, list[RawWrite]] = {}
        self._begun = self._read_to = self._count = 0
        self._reads: list[_Read] = []
        self._given: list[tuple[int, _torch.weak_tensor]] = []
        """Tensors without a graph, written in this round, by the numbers of the Nodes whose calls read them."""
        self._due: list[_Due] = []

    def forget(self) -> None:
        self._due.clear()
        self._meant.forget()
        super().forget()

    def settle(self) -> None:
        super().settle()
        self._meant.forget()

    def _listen(self, wanted: bool) -> None:
        super()._listen(wanted)
        self._uncounted.copy_written("round", wanted)

    def begins(self, entry: RawBackward) -> bool:
        """Note writes from now on."""
        self._written.clear()
        self._reads.clear()
        self._given.clear()
        self._meant.begin_round()
        self._sums.begin_round()
        self._begun = entry.clock
        self._read_to, self._count = self._core.clock, self._core.write_count
        return True

    def result(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Check whether a call has read a value that was written before."""
        self._meant.note(op, args, kwargs, self._uncounted.bypasses.__contains__)
        if self._core.write_count != self._count:
            self._count = self._core.write_count
            for raw in logged_writes(self._core, self._read_to):
                self._read_to = raw.clock
                is_write = raw.kind not in QUIET_KINDS and raw.op != GIVES_MEMORY and raw.version != 0
                if is_write and raw.storage and not raw.is_parameter:
                    self._written.setdefault(raw.storage, []).append(raw)
        is_quiet = not (self._written or self._uncounted.replaced or self._exports.any)
        if not _torch.is_grad_enabled():
            given = _torch.tensors_of_call(args, kwargs)
            self._sums.note(op, given, result, self._uncounted.bypasses)
        # While autograd does not record, nothing is read into a graph, and a view's grad_fn must not be asked for.
        if is_quiet or len(self._reads) >= _READS or not _torch.is_grad_enabled():
            return
        made = next((one for one in _torch.tensors_in(result) if one.requires_grad and one.grad_fn is not None), None)
        number = None if made is None else _torch.node_sequence(made.grad_fn)
        if made is None or number is None:
            return
        for tensor in _torch.tensors_of_call(args, kwargs):
            maker = _made_before(tensor.grad_fn, number)
            if maker is not None:
                # A view reads the elements of its base that it shows.
                is_view = _torch.storage_or_none(made) == _torch.storage_or_none(tensor)
                self._reads += self._changed(tensor, made if is_view else tensor, maker, number)
            elif not tensor.requires_grad and _torch.storage_or_none(tensor) in self._written:
                self._given.append((number, _torch.weak_tensor(tensor)))

    def _changed(self, tensor: torch.Tensor, shown: Any, maker: int, number: int) -> Iterator[_Read]:
        at = (_torch.storage_or_none(tensor), place_of(tensor), int(tensor.output_nr))
        facts, own = _torch.facts_of(tensor), conflicts.tensor_info(tensor, was_leaf=False).region
        given = self._uncounted.replaced_since(tensor, lambda one: bool(maker < one.sequence))
        # Of a copy of its own values the later write is told, below.
        is_new = given is not None and not all(one.is_copy for one in given.earlier if maker < one.sequence)
        if given is not None and is_new and given.sequence <= number and given.clock > self._begun:
            whole = Part(own, None, False)
            yield _Read(number, maker, given.clock, given.sequence, "data =", given.stack, None, facts, whole, at)
        export = self._written_outside(tensor, maker)
        if export is not None:
            whole = Part(own, None, False)
            yield _Read(number, maker, export.clock, number, export.op, export.stack, None, facts, whole, at)
        raws = self._written.get(_torch.storage_or_none(tensor), [])
        is_bypassed = _torch.storage_or_none(tensor) in self._uncounted.bypasses
        for raw in [one for one in raws if one.sequence <= number]:
            origin = maker if maker < raw.sequence else _made_before(tensor.grad_fn, raw.sequence)
            if origin is None:
                continue
            # In a graph built by a device's thread, numbers do not tell the order: another tensor may have had
            # this address.
            if not is_bypassed and (raw.version or 0) > tensor._version:
                continue
            region = ledger.as_write(raw).region
            if region is not None and not overlap(conflicts.tensor_info(shown, was_leaf=False).region, region):
                continue
            # Values that were written and restored are the same as before the first write.
            compared = self._compared(tensor, raw, raws)
            if compared == "same":
                return
            if compared == "different" or not is_bound(raw.op):
                changed = self._uncounted.snapshots.changed(tensor, raw.clock - 1, [one.clock for one in raws])
                written = part(tensor, own, raw.op, region, changed)
                # Effects on gradients are only known of a whole value, not of a part of one.
                own_at = at if origin == maker else (0, *at[1:])
                yield _Read(number, origin, raw.clock, raw.sequence, raw.op, raw.stack, raw, facts, written, own_at)

    def _written_outside(self, tensor: torch.Tensor, maker: int) -> Export | None:
        """Return the export of a value's memory if its bytes have changed, although no operation has written it."""
        export = self._exports.of(_torch.storage_or_none(tensor))
        made = None if export is None else self._values.made(maker, threading.get_ident())
        if (
            export is None
            or export.op not in _HANDED_OUT
            or made is None
            or export.clock < max(made.clock, self._begun)
        ):
            return None
        if self._exports.changed_since(tensor, made.clock, None) is None:
            return None
        storage = _torch.storage_or_none(tensor)
        return None if any(raw.storage == storage for raw in logged_writes(self._core, made.clock)) else export

    def _compared(self, tensor: torch.Tensor, raw: RawWrite, raws: list[RawWrite]) -> str | None:
        clocks = [one.clock for one in raws]
        return self._uncounted.snapshots.compared(tensor, raw.clock - 1, clocks, is_counted=True)

    def looks(self, entry: RawBackward, is_last: bool) -> None:
        """Find the reads whose calls belong to this backward."""
        waiting, self._reads = self._reads, []
        if not (waiting or self._given):
            return
        order = walk.engine_order(read_backward(entry).roots)
        ran = {number: node for node in order if (number := _torch.node_sequence(node)) is not None}
        self._look_at_given(entry, ran)
        judged = set()
        for one in sorted(waiting, key=lambda one: one.clock):
            maker = ran.get(one.maker)
            if one.number not in ran:
                self._reads.append(one)
            elif maker is not None and one.stack not in self._described and (one.stack, one.maker) not in judged:
                judged.add((one.stack, one.maker))
                self._judge(entry, one, maker, [each for each in waiting if each.maker == one.maker])

    def _look_at_given(self, entry: RawBackward, ran: dict[int, Any]) -> None:
        for number, weak in self._given[:_READS]:
            tensor, made = weak(), self._values.made(number, entry.thread)
            node = None if made is None else ran.get(made.first)
            if node is None or tensor is None:
                continue
            storage = _torch.storage_or_none(tensor)
            raws = [raw for raw in self._written.get(storage, ()) if raw.sequence <= number]
            is_saved = any(storage_of(saved) == storage for _, saved in _torch.saved_slots(node))
            if not is_saved and not any(self._values.has_found(raw.stack) for raw in raws):
                self._values.judge(read_backward(entry), Read(node, number, "", tensor, None), raws, ran)

    def _judge(self, entry: RawBackward, one: _Read, maker: Any, reads: list[_Read]) -> None:
        reader, made = self._values.made(one.number, entry.thread), self._values.made(one.maker, entry.thread)
        is_own = _is_of_program(one.stack, is_handed_out=one.op in _HANDED_OUT)
        if reader is None or made is None or not is_own or within_torch(one.stack, made.stack):
            return
        if one.raw is not None and self._values.is_recorded(one.raw, reader, entry.thread, one.maker):
            return
        logged = [each.raw for each in reads if each.raw is not None]
        if self._values.keeps_gradient(maker, logged, [(each.stack, each.op) for each in reads if each.raw is None]):
            return
        clues = (
            Clue("computed", symbolise(made.stack), values=one.facts),
            Clue("written", symbolise(one.stack), op=one.op),
            Clue("read", symbolise(reader.stack)),
        )
        storage, place, number = one.at
        raws = [raw for raw in self._written.get(storage, ()) if raw.sequence > one.maker]
        is_logged = one.raw is not None and storage not in self._uncounted.replaced
        value = Value(storage, place, maker, number)
        meant = self._meant.deviation(value, raws, entry.outputs) if is_logged else None
        failure = Failure(ROW, "", "", symbolise(entry.stack), clues, raised=False, if_meant=meant)
        self._due.append(_Due(one.stack, failure, Arrival(maker, [one.part], self._listeners.guard)))
        # A conflict with the same write is found while this backward runs, and has more detail.
        self._listeners.call_after_backward(self.after_backward)

    @_torch.hushed()
    def after_backward(self, entry: RawBackward) -> None:
        """Report reads that a gradient has reached and no conflict explains; as ``listeners.AfterBackward``."""
        due, self._due = self._due, []
        self._listeners.call_after_backward(self.after_backward, False)
        for one in due:
            if one.arrival.is_harmless() or one.stack in self._described:
                continue
            self._described.add(one.stack)
            if not self._values.has_found(one.stack):
                self._found(one.failure)


def _made_before(node: Node | None, sequence: int) -> int | None:
    """Return the number of the Node that made a value, if it is below ``sequence``; None where it is not.

    A view whose memory was written gets a new Node at its next read, which may be younger than the reader:
    then that of its base.
    """
    while node is not None:
        number = _torch.node_sequence(node)
        if number is not None and number < sequence:
            return number
        children = [child for child, _ in node.next_functions if child is not None]
        node = children[0] if _torch.makes_view(node) and len(children) == 1 else None
    return None


def _is_of_program(stack: RawStack, *, is_handed_out: bool) -> bool:
    """Whether the program's code is at the top of a stack; deep mode has a wrapper around export functions."""
    if not is_handed_out:
        return is_of_program(stack)
    file = next(itertools.dropwhile(is_own_file, (code.co_filename for code in stack.codes)), "")
    return bool(file) and is_user_file(file)


class ChangedLosses(Finder):
    """Checks the outputs of a backward; findings go to ``found``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._uncounted, self._meant = run.get(Uncounted), run.get(ChangedValues).meant

    @_torch.hushed()
    def before_round(self, entry: RawBackward, rounds: int) -> None:
        for loss in entry.outputs if entry.accumulates else ():
            if type(loss) in _torch.PLAIN_TENSORS and loss.grad_fn is not None:
                self._look(entry, loss)

    def _look(self, entry: RawBackward, loss: Any) -> None:
        made = call_that_made(self._core, _torch.node_sequence(loss.grad_fn), entry.thread)
        if made is None:
            return
        storage = _torch.storage_or_none(loss)
        raws = [
            raw
            for raw in logged_writes(self._core, made.clock)
            # A write that the operation logged as it returned is its own result.
            if raw.storage == storage and raw.kind not in QUIET_KINDS and raw.stack is not made.stack
        ]
        found = [(raw.clock, raw.stack, raw.op) for raw in raws]
        given = self._uncounted.replaced_since(loss, made.clock)
        if given is not None:
            found.append((given.clock, given.stack, "data ="))
        own = [one for one in found if is_of_program(one[1])]
        if not own or own[0][1] in self._described:
            return
        _, stack, op = min(own, key=lambda one: one[0])
        self._described.add(stack)
        name = naming.name_of(loss, sys._getframe(1))
        values = _torch.facts_of(loss)
        clues = (
            Clue("computed", symbolise(made.stack), name=name, values=values),
            Clue("written", symbolise(stack), op=op),
        )
        value = Value(storage, place_of(loss), loss.grad_fn, int(loss.output_nr))
        meant = self._meant.deviation(value, raws, entry.outputs) if given is None else None
        self._report_at(LOSS_CHANGED, entry.stack, *clues, if_meant=meant)
