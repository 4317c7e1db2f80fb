"""Values saved as a wrapper subclass: writes to the inner tensors, which do not move the wrapper's counter.

A write through the wrapper moves its counter, and PyTorch raises. A write to an inner tensor past the
wrapper is in the log under the inner storage only. Where the program has such a class, graphs are walked for it at
the 1st, 2nd, 4th, 8th … backward of a line.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.graph import conflicts, naming, walk
from gradsan.model import Conflict
from gradsan.overlap import overlap
from gradsan.record import ledger
from gradsan.record.detector import Detector, KnownConflicts, Run
from gradsan.record.ledger import call_that_made
from gradsan.record.log import RawWrite, logged_writes
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward, read_backward

BYPASS = "storage_alias"
_DEEPEST = 4


class _Inside(NamedTuple):
    """An inner tensor of a wrapper that a Node has saved, and the log's entry for that Node."""

    node: Node
    slot: str
    outer: Any
    inner: Any
    made: Any


class Wrapped(Detector):
    """Scans the graph of a backward for such writes; conflicts go to ``findings``."""

    def __init__(self, run: Run) -> None:
        """Share the logs of writes."""
        self._core, self._steps, self._findings = run.core, run.steps, run.get(KnownConflicts)

    def before_round(self, entry: RawBackward, rounds: int) -> None:
        if not _torch.has_wrapper_classes():
            return
        backward = read_backward(entry)
        with _torch.hushed():
            inside = self._inside(walk.engine_order(backward.roots, (), backward.via == "backward"), backward)
            if not inside:
                return
            since = min(one.made.clock for ones in inside.values() for one in ones)
            for raw in logged_writes(self._core, since):
                for one in inside.get(raw.storage, ()):
                    self._judge(backward, one, raw)

    def _inside(self, order: list[Node], backward: Any) -> dict[int, list[_Inside]]:
        found: dict[int, list[_Inside]] = {}
        for node in order:
            for slot, saved in _torch.saved_slots(node):
                outer = _torch.packed_object(saved)
                if not _torch.is_tensor(outer) or type(outer) in _torch.PLAIN_TENSORS or _torch.is_hooked(saved):
                    continue
                made = call_that_made(self._core, _torch.node_sequence(node), backward.thread)
                for inner in _plain(outer) if made is not None else ():
                    found.setdefault(_torch.storage_or_none(inner), []).append(_Inside(node, slot, outer, inner, made))
        found.pop(0, None)
        return found

    def _judge(self, backward: Any, one: _Inside, raw: RawWrite) -> None:
        if raw.clock <= one.made.clock or raw.kind == "metadata" or not _reads(one):
            return
        info = conflicts.tensor_info(one.inner, was_leaf=one.inner.is_leaf)
        write = ledger.as_write(raw)
        if write.region is not None and not overlap(info.region, write.region):
            return
        self._findings.add(
            (BYPASS, raw.stack, one.made.stack, one.slot),
            functools.partial(self._conflict, backward, one, info, write, raw, sys._getframe(1)),
        )

    def _conflict(
        self, backward: Any, one: _Inside, info: Any, write: Any, raw: RawWrite, frame: FrameType
    ) -> Conflict:
        core = self._core
        outer = conflicts.tensor_info(one.outer, was_leaf=one.outer.is_leaf)
        outer = replace(outer, storage=info.storage, region=info.region)
        version = int(one.outer._version)
        return Conflict(
            save=conflicts.save_of(
                core, self._steps, one.made.clock, one.made.stack, outer, version, one.node, one.slot
            ),
            writes=(write,),
            use=conflicts.use_of(core, backward, version),
            names=naming.names_of(one.outer, frame),
            root_sequence=backward.root_sequence,
            raised=False,
            bypass=BYPASS,
            alias_site=symbolise(raw.stack),
        )


def _plain(outer: Any, depth: int = _DEEPEST) -> list[Any]:
    """Return the ordinary tensors in a wrapper, and in wrappers within it."""
    found: list[Any] = []
    for _, inner in _torch.inner_tensors(outer):
        found += [inner] if type(inner) in _torch.PLAIN_TENSORS else _plain(inner, depth - 1) if depth else []
    return found


def _reads(one: _Inside) -> bool:
    """Whether PyTorch would hand the slot out; where it would not, it raises an error itself."""
    try:
        _torch.read_slot(one.node, one.slot.partition("[")[0])
    except RuntimeError:
        return False
    return _torch.is_read_by_backward(one.node, one.slot)
