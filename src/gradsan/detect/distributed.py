"""Parameters of ``fully_shard`` (FSDP2), buffers of DistributedDataParallel, and what collectives write.

The forward saves the whole parameter, whose memory is freed after it. Before backward the same memory is filled again
from the shards, past the version counter: where an optimizer's step lies in between, backward computes with the new
values, and PyTorch cannot report it. The state of the shards is noted at each gathering, and compared when a backward
reaches the results of a forward.

Buffer syncs mostly write the same values. So the bytes are compared, and only changed buffers are logged as written.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan._imports import call_after_import
from gradsan.detect.memory import Noted, Notes, Overwritten, Uncounted
from gradsan.graph import conflicts, naming, walk
from gradsan.model import Conflict, Message, Name
from gradsan.record.detector import Detector, KnownConflicts, Run
from gradsan.record.ledger import call_that_made
from gradsan.record.listeners import watch_after
from gradsan.record.log import RawStack
from gradsan.record.patches import Patches
from gradsan.record.stacks import symbolise
from gradsan.record.steps import BackwardRecord

BYPASS = "gathered_anew"
"""The slug of the cause, GS217."""
_GATHERINGS_KEPT = 16
"""Per group; a forward that is older than these is no longer told from the next one."""

Guard = Callable[[Callable[[], object]], None]


class Gathering(NamedTuple):
    """One filling of a group's whole parameters.

    Nodes from ``sequence`` on were made with it; ``noted`` are the shards at that time, by parameter.
    """

    sequence: int
    clock: int
    stack: RawStack
    noted: tuple[Noted | None, ...]


class Stale(NamedTuple):
    """A parameter that a Node saved, and whose shard was written since."""

    parameter: Any
    written: Overwritten
    node: Node
    slot: str
    saved: Any


class Sharded(Detector):
    """The live groups of sharded parameters of this process; conflicts go to ``findings``."""

    part = "parallel"

    def __init__(self, run: Run) -> None:
        notes = run.get(Notes)
        self._core, self._steps, self._notes, self._findings = run.core, run.steps, notes, run.get(KnownConflicts)
        notes.lasting = self.shard_of
        self.storages: dict[int, tuple[Any, Any]] = {}
        """The storages of whole parameters by ``_cdata``, with their parameter; they may have died since."""
        self._gathered: weakref.WeakKeyDictionary[Any, deque[Gathering]] = weakref.WeakKeyDictionary()

    def holds(self, storage: int) -> bool:
        """Whether a storage is that of a whole parameter, which is filled at each gathering and freed after use."""
        known = self.storages.get(storage)
        if known is not None and known[0].expired():
            del self.storages[storage]
            return False
        return known is not None

    def shard_of(self, tensor: torch.Tensor) -> Any:
        """Return the shard that replaces a whole parameter while its module does not run; other tensors unchanged."""
        storage = _torch.storage_or_none(tensor) if self.storages else 0
        parameter = self.storages[storage][1]() if storage and self.holds(storage) else None
        return parameter.sharded_param if parameter is not None and parameter.unsharded_param is tensor else tensor

    def install(self, patches: Patches, guard: Guard) -> None:
        """Watch until ``patches`` is undone: now, or as soon as the program has imported FSDP."""

        def watch() -> None:
            group = _torch.sharded_group()
            if group is not None:
                guard(lambda: self._watch(group, patches, guard))

        patches.on_undo(call_after_import(_torch.SHARDED_MODULE, watch))

    def _watch(self, kind: Any, patches: Patches, guard: Guard) -> None:
        core, fill, begin = self._core, kind.wait_for_unshard, kind.pre_backward

        @functools.wraps(fill)
        def wait_for_unshard(group: Any, *args: Any, **kwargs: Any) -> Any:
            is_pending = core.active and group._all_gather_result is not None and not _torch.is_compiling()
            result = fill(group, *args, **kwargs)
            if is_pending:
                stack = core.stack(1)
                guard(lambda: self._note(group, stack))
            return result

        @functools.wraps(begin)
        def pre_backward(group: Any, *args: Any, **kwargs: Any) -> Any:
            has_begun = getattr(group._training_state, "name", "") == "PRE_BACKWARD"
            if core.active and not has_begun and not _torch.is_compiling():
                guard(lambda: self._compare(group))
            return begin(group, *args, **kwargs)

        patches.set(kind, "wait_for_unshard", wait_for_unshard)
        patches.set(kind, "pre_backward", pre_backward)

    def _note(self, group: Any, stack: RawStack) -> None:
        backward = self._steps.current_backward()
        # On a GPU, backward runs in a thread that numbers no Nodes; Nodes made after it are younger than its root.
        root = None if backward is None else backward.root_sequence
        sequence = _torch.sequence_number() if root is None else root + 1
        noted = tuple(self._notes.note(one.sharded_param) for one in group.fsdp_params)
        for one in group.fsdp_params:
            whole: Any = one.unsharded_param
            storage = _torch.storage_or_none(whole)
            if storage and not self.holds(storage):
                self.storages[storage] = _torch.weak_storage(whole.untyped_storage()), _torch.weak_tensor(one)
        kept = self._gathered.setdefault(group, deque(maxlen=_GATHERINGS_KEPT))
        kept.append(Gathering(sequence, self._core.tick(), stack, noted))

    def _compare(self, group: Any) -> None:
        """Compare the shards with those of the forward, when a backward has reached an output of ``group``'s module."""
        gathered, node = self._gathered.get(group), _torch.current_node()
        number = _torch.node_sequence(node)
        backward = self._steps.current_backward()
        if not gathered or number is None or backward is None:
            return
        used, following = _used(gathered, number)
        present = gathered[-1] if group.is_unsharded else None
        if used is None or present is used:
            return
        changed: dict[int, tuple[Any, Overwritten]] = {}
        for position, one in enumerate(group.fsdp_params):
            before = used.noted[position] if position < len(used.noted) else None
            shard = one.sharded_param
            if before is None or before.weak() is not shard:
                continue
            now = None if present is None else present.noted[position]
            if now is not None and now.version == before.version and self._notes.is_quiet:
                continue
            written = self._notes.changed(before, shard)
            if written is not None:
                changed[_torch.storage_or_none(one.unsharded_param)] = (one, written)
        if changed:
            for stale in _saved(backward, changed, used.sequence, following):
                self._report(used, stale, backward)

    def _report(self, used: Gathering, stale: Stale, backward: BackwardRecord) -> None:
        writes = stale.written.writes
        key = (used.stack, stale.parameter._param_fqn, stale.slot, writes[0].site if writes else None)
        frame = sys._getframe(1)
        self._findings.add(key, lambda: self._conflict(used, stale, backward, frame))

    def _conflict(self, used: Gathering, stale: Stale, backward: BackwardRecord, frame: FrameType) -> Conflict:
        core, info = self._core, conflicts.tensor_info(stale.saved, was_leaf=True)
        made = call_that_made(core, _torch.node_sequence(stale.node) or 0, backward.thread)
        clock, stack = (made.clock, made.stack) if made is not None else (used.clock, used.stack)
        names = naming.names_of(stale.parameter.sharded_param, frame)
        # The writes are those of the shard, whose memory is not that of the whole parameter.
        writes = tuple(dataclasses.replace(one, region=None) for one in stale.written.writes)
        return Conflict(
            save=conflicts.save_of(core, self._steps, clock, stack, info, 0, stale.node, stale.slot),
            writes=writes,
            use=conflicts.use_of(core, backward, stale.written.version),
            names=names or (Name(str(stale.parameter._param_fqn), "module", "parameter"),),
            unexplained=stale.written.unexplained,
            root_sequence=backward.root_sequence,
            raised=False,
            bypass=BYPASS,
            alias_site=symbolise(used.stack),
        )


def _used(gathered: deque[Gathering], number: int) -> tuple[Gathering | None, int | None]:
    """Return the gathering that the Node ``number`` was made with, and the number at which the next one began."""
    following: int | None = None
    for one in reversed(gathered):
        if one.sequence <= number:
            return one, following
        following = one.sequence
    return None, None


def _saved(
    backward: BackwardRecord, changed: dict[int, tuple[Any, Overwritten]], first: int, end: int | None
) -> Iterator[Stale]:
    """Yield the saves of ``changed`` parameters by the Nodes from ``first`` to ``end`` of this backward's graph."""
    for node in walk.engine_order(backward.roots):
        number = _torch.node_sequence(node)
        if number is None or number < first or (end is not None and number >= end):
            continue
        for slot, saved in _torch.saved_slots(node):
            kept = _torch.packed_object(saved)
            tensor = getattr(kept, "alias", kept)
            known = changed.get(_torch.storage_or_none(tensor)) if _torch.is_tensor(tensor) else None
            if known is not None:
                yield Stale(*known, node, slot, tensor)


OP = "DistributedDataParallel.forward"
"""The name of the writer in the log."""
_MOST_BYTES = 64 * 2**20


class BufferSync(Detector):
    """Watches every buffer sync of this process."""

    part = "parallel"

    def __init__(self, run: Run) -> None:
        """Writes go to the log of writes past the counter; buffers too large to compare are a blind spot."""
        self._core, self._uncounted, self._note = run.core, run.get(Uncounted), run.guard.note

    def install(self, patches: Patches, guard: Callable[[Callable[[], object]], None]) -> None:
        owner, name = _torch.buffer_sync()
        if owner is None:
            return
        core, original = self._core, getattr(owner, name)

        def syncs(args: tuple[Any, ...], _: dict[str, Any]) -> Any:
            before: list[tuple[Any, Any]] = []
            if not _torch.is_compiling():
                guard(lambda: before.extend(self._copies(args[0])))
            return before or None

        def synced(before: Any, *_: Any) -> None:
            stack = core.stack(1)
            guard(lambda: self._log(before, stack))

        patches.set(owner, name, core.listener(original, syncs, synced))

    def _copies(self, parallel: Any) -> list[tuple[Any, Any]]:
        buffers = [one for one in parallel.module.buffers() if one.layout is torch.strided]
        size = sum(one.numel() * one.element_size() for one in buffers)
        if size > _MOST_BYTES:
            self._note(Message("blind.buffers_too_large", {"bytes": size}))
            return []
        return [(one, one.detach().clone()) for one in buffers]

    def _log(self, before: list[tuple[Any, Any]], stack: RawStack) -> None:
        with torch.no_grad():
            differ = [((one != copy) & ~((one != one) & (copy != copy))).any() for one, copy in before]
            changed = [one for (one, _), flag in zip(before, _torch.numbers_of(differ), strict=True) if flag]
        self._uncounted.log(changed, "collective", OP, "collective", stack)


_COLLECTIVES = {"all_reduce": 0, "broadcast": 0, "reduce": 0, "scatter": 0, "all_to_all_single": 0, "recv": 0}


class Collectives(Detector):
    """Logs what collectives write in this process: their kernels move no counter."""

    part = "parallel"

    def __init__(self, run: Run) -> None:
        """Writes go to the log of writes past the counter."""
        self._core, self._uncounted = run.core, run.get(Uncounted)

    def install(self, patches: Patches, guard: Callable[[Callable[[], object]], None]) -> None:
        for name, position in _COLLECTIVES.items() if torch.distributed.is_available() else ():
            note = functools.partial(self._communicated, name, position)
            watch_after(self._core, patches, guard, torch.distributed, name, note)

    def _communicated(self, name: str, position: int, _: Any, args: Any, kwargs: Any, stack: RawStack) -> None:
        if name in ("broadcast", "reduce"):
            root = kwargs.get("src" if name == "broadcast" else "dst", args[1] if len(args) > 1 else None)
            writes_here = (torch.distributed.get_rank() == root) != (name == "broadcast")
            # Gloo reduces in the memory of all ranks, whichever gets the result.
            in_all = name == "reduce" and torch.distributed.get_backend(kwargs.get("group")) == "gloo"
            if root is not None and not writes_here and not in_all:
                return
        target = args[position] if len(args) > position else next(iter(kwargs.values()), None)
        self._uncounted.log(target, "collective", name, "collective", stack)
