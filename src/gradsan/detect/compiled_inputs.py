"""Arguments of compiled graphs that were overwritten before backward, unknown to PyTorch's check.

Inductor saves many arguments as views that it makes itself, which have version counters of their own (pytorch issue
197887): the write moves the argument's counter, which nobody checks. The log has the write. Graphs are
scanned before each backward once something was compiled; larger ones at the 1st, 2nd, 4th, 8th … backward.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.detect.memory import Uncounted
from gradsan.graph import compiled, conflicts, naming, walk
from gradsan.model import Conflict, Write
from gradsan.overlap import overlap
from gradsan.record import ledger
from gradsan.record.detector import Detector, KnownConflicts, Run
from gradsan.record.ledger import call_that_made
from gradsan.record.log import logged_writes
from gradsan.record.steps import BackwardRecord, RawBackward, read_backward

BYPASS = "compiled_input"
_MOST_NODES = 1_000


class _Kept(NamedTuple):
    """A tensor saved by a compiled Node, and the log's entry for that Node."""

    node: Node
    slot: str
    tensor: torch.Tensor
    made: Any


class CompiledInputs(Detector):
    """Scans the graph of a backward for such arguments; conflicts go to ``findings``."""

    def __init__(self, run: Run) -> None:
        self._core, self._steps = run.core, run.steps
        self._uncounted, self._findings = run.get(Uncounted), run.get(KnownConflicts)
        self._calls = 0

    def before_backward(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        backward = read_backward(entry)
        self._calls += 1
        nodes = walk.nodes_behind(backward.roots, _MOST_NODES)
        if nodes is None:
            if self._calls & (self._calls - 1):
                return
            nodes = walk.engine_order(backward.roots)
        nodes = [one for one in nodes if _torch.is_compiled_node(one)]
        if not nodes:
            return
        with _torch.hushed():
            inputs = tuple(args[3]) if len(args) > 3 and args[3] else ()
            if inputs:
                running = set(walk.engine_order(backward.roots, inputs, backward.via == "backward"))
                nodes = [one for one in nodes if one in running]
            kept = [one for node in nodes for one in self._kept_by(node, backward.thread)]
            written = self._written_since(min(one.made.clock for one in kept)) if kept else frozenset()
            for one in kept:
                if _torch.storage_or_none(one.tensor) in written:
                    self._judge(backward, one, sys._getframe(1))

    def _kept_by(self, node: Node, thread: int) -> list[_Kept]:
        made = call_that_made(self._core, _torch.node_sequence(node), thread)
        if made is None:
            return []
        found = []
        for slot, saved in _torch.saved_slots(node):
            tensor = _torch.packed_object(saved)
            if _torch.is_tensor(tensor) and type(tensor) in _torch.PLAIN_TENSORS and not _torch.is_hooked(saved):
                found.append(_Kept(node, slot, tensor, made))
        return found

    def _written_since(self, clock: int) -> frozenset[int]:
        stepped = (one.storages for one in self._steps.steps if one.end is None or one.end > clock)
        written = {raw.storage for raw in logged_writes(self._core, clock)}
        return frozenset(written.union(*stepped) - set(self._uncounted.bypasses))

    def _judge(self, backward: BackwardRecord, one: _Kept, frame: FrameType) -> None:
        info = conflicts.tensor_info(one.tensor, was_leaf=one.tensor.is_leaf)
        logged = ledger.writes_since(self._core, self._steps, info.storage, one.made.clock, -1)
        writes = tuple(
            one
            for one in logged
            if one.kind != "metadata" and one.version is not None and overlap(info.region, one.region or info.region)
        )
        if not writes or not _reads(one):
            return
        conflict = self._conflict(backward, one, info, writes, frame)
        if conflict is not None:
            key = (BYPASS, one.made.stack, one.slot, writes[0].op, str(writes[0].site.user_frame))
            self._findings.add(key, functools.partial(lambda found: found, conflict))

    def _conflict(
        self, backward: BackwardRecord, one: _Kept, info: Any, writes: tuple[Write, ...], frame: FrameType
    ) -> Conflict | None:
        core, version = self._core, int(one.tensor._version)
        conflict = Conflict(
            save=conflicts.save_of(
                core, self._steps, one.made.clock, one.made.stack, info, version, one.node, one.slot
            ),
            writes=writes,
            use=conflicts.use_of(core, backward, version),
            names=naming.names_of(one.tensor, frame),
            root_sequence=backward.root_sequence,
            raised=False,
            bypass=BYPASS,
        )
        # The graph's own writes are a part of its computation.
        outside = tuple(write for write in writes if not compiled.is_of_graph(write.site, one.node))
        if not outside:
            return None
        found = compiled.as_uncompiled(conflict, one.node, one.slot, one.tensor, backward)
        # A value that is not known to be read may be irrelevant.
        return found if found.save.compiled in ("inside", "again") else None


def _reads(one: _Kept) -> bool:
    """Whether PyTorch would hand the slot out; where it would not, it raises an error itself."""
    try:
        _torch.read_slot(one.node, one.slot.partition("[")[0])
    except RuntimeError:
        return False
    return True
