"""Losses whose value is changed past autograd before their backward: ``loss.data += penalty``.

The backward begins at the Node that computed the loss, whatever its current value. Checked at the 1st, 2nd, 4th,
8th … backward of a line, in the writes that were logged since the loss was computed.

Row: ``loss_changed``. Roles: ``computed`` (its site; ``name`` is the loss; ``values``: ``shape``, ``dtype``,
``device``), ``written`` (the write; ``op``).
"""

from __future__ import annotations

import sys
from typing import Any

from gradsan import _torch
from gradsan.detect.changed_values import ChangedValues
from gradsan.detect.memory import Uncounted
from gradsan.graph import naming
from gradsan.model import Clue
from gradsan.originals.meant import Value, place_of
from gradsan.record.detector import Finder, Run
from gradsan.record.ledger import QUIET_KINDS, call_that_made
from gradsan.record.log import logged_writes
from gradsan.record.stacks import is_of_program, symbolise
from gradsan.record.steps import RawBackward

ROW = "loss_changed"


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
        given = self._uncounted.replacement_of(loss)
        if given is not None and given.clock > made.clock:
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
        self._report_at(ROW, entry.stack, *clues, if_meant=meant)
