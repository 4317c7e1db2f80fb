"""Values under the program's own saved-tensor hooks: the unpacked values, compared with the saved memory.

A copy made by the pack hook is safe. Where the hook keeps the memory itself, in whatever
wrapper, a write to it is found by the version counter, by the log of writes past it, by the bytes of exported
memory, and in deep mode by the original, which is only kept where the hook's result keeps the memory alive
anyway. A copy that another save has overwritten, in one buffer for all of them, is found by the log alone.
"""

from __future__ import annotations

import collections
import math
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.detect.exports import Exports
from gradsan.detect.memory import Uncounted
from gradsan.detect.prescan import bypass_of
from gradsan.graph import conflicts, naming
from gradsan.model import Conflict, Deviation, Region, Site, TensorInfo, Write
from gradsan.originals import kept_conflicts
from gradsan.originals.deep import Deep
from gradsan.originals.originals import have_same_bytes
from gradsan.originals.side_backward import NotOnTheSideError
from gradsan.overlap import overlap
from gradsan.record import ledger
from gradsan.record.detector import Run
from gradsan.record.log import logged_writes
from gradsan.record.stacks import symbolise
from gradsan.record.user_hooks import HookedSave, RecomputedSaves

IN_ONE_BUFFER, RECOMPUTED = "kept_in_one_buffer", "recomputed_and_overwritten"
_PACKED_KEPT, _COPIES_JUDGED = 4_096, 256


class Memory(NamedTuple):
    """The memory of a tensor at its save, without keeping it, and its bytes if it was exported.

    ``tensor`` is a weak reference to the saved tensor.
    """

    tensor: _torch.weak_tensor
    storage: int
    weak: Any
    region: Region
    version: int
    place: tuple[int, int]
    copy: Any


class _Packed(NamedTuple):
    """A save of which hooks made a copy: its clock, and the saved tensor by memory, version and place."""

    clock: int
    source: tuple[Any, ...]


class _Written(NamedTuple):
    """Writes past the counter, how they passed it, and the site where that became possible."""

    writes: tuple[Write, ...]
    bypass: str | None
    began: Site | None
    unchanged: bool = False


class HookedValues:
    """Checks the values that hooks pack and unpack."""

    def __init__(self, run: Run) -> None:
        self._core, self._steps, self._uncounted, self._exports = (
            run.core,
            run.steps,
            run.get(Uncounted),
            run.get(Exports),
        )
        self._deep, self._keep, self._recomputed = run.get(Deep), run.keep, run.get(RecomputedSaves)
        self._packed: collections.deque[_Packed] = collections.deque(maxlen=_PACKED_KEPT)
        self._copies_judged = 0

    @property
    def is_measuring(self) -> bool:
        """Whether a backward on the side is running."""
        return self._deep.is_measuring

    def must_look(self, save: HookedSave) -> bool:
        """Whether :meth:`look` has something to note of a save."""
        return not save.aliases or self._deep.is_on or self._exports.any

    def must_judge(self, save: HookedSave) -> bool:
        """Whether a value whose version has not moved may have been written nevertheless."""
        uncounted = self._uncounted
        if save.memory is not None or save.kept is not None:
            return True
        return bool(uncounted.bypasses or uncounted.replaced or self._exports.any)

    def look(self, save: HookedSave, tensor: torch.Tensor) -> None:
        """Note the memory of a tensor that a pack hook has just packed."""
        # Tensors that the hook visibly keeps alive can be read later, except for bytes that others may write.
        if not save.aliases or self._exports.any:
            save.memory = _memory(tensor, None if tensor.is_inference() else self._exports.copy_of(tensor))
        if save.copies and save.memory is not None:
            memory = save.memory
            self._packed.append(_Packed(save.clock, (memory.storage, memory.version, memory.place, memory.region)))
        if save.aliases and self._deep.is_on:
            save.kept = self._deep.keep_original(tensor, save.clock, save.stack)
            if all(alias is not tensor for alias, _ in save.aliases):
                # Tensors that hooks keep beside the tensor stay unchanged when the tensor is given other memory.
                save.kept.forget_source()

    def handed(self, result: Any) -> Any:
        """Return the result of an unpack hook for backward: in deep mode, memory that is no lazy clone."""
        return self._deep.handed_by_hooks(result)

    def aside(self, save: HookedSave) -> Any:
        """Return the value for a backward on the side, without calling the program's unpack hook.

        Raises:
            NotOnTheSideError: if only that hook has it.
        """
        if save.kept is None:
            name = getattr(save.unpack, "__qualname__", type(save.unpack).__qualname__)
            raise NotOnTheSideError(str(name).rpartition(".")[2])
        return self._deep.given_aside(save.kept)

    def note_recomputed(self, save: HookedSave, tensor: torch.Tensor) -> None:
        """Note a value that a recomputation has saved, with its version."""
        self._recomputed.add(save, tensor)

    def judge_recomputed(self, save: HookedSave, result: Any) -> Any:
        """The value that backward gets for a value of a forward under checkpoint, as :meth:`judge` has it."""
        known = self._recomputed.of(result)
        if known is None or (known.version == result._version and known.kept is None):
            return result
        again = HookedSave(result, save.unpack, ((result, known.version),), known.clock, save.stack)
        again.forward, again.kept = save, known.kept
        return self.judge(again, result if known.version != result._version else None, result)

    def judge(self, save: HookedSave, stale: Any, result: Any) -> Any:
        """The value that backward gets instead of the unpack hook's ``result``; reports a conflict if there is one.

        ``stale`` is the tensor in the packed object whose version has moved, or None.
        """
        alias = stale if stale is not None else _alias(save, result)
        if alias is None or _is_of_its_own(save, result):
            return result
        node = _torch.current_node()
        slot = _torch.slot_of(node, save.in_slot)
        if not _torch.is_read_by_backward(node, slot) or (stale is None and _torch.is_filled_after_save(node, slot)):
            return result
        if save.kept is not None and save.kept.original is not None:
            return self._by_original(save, stale is not None, node, slot, result)
        if stale is None and self._has_moved(save, alias):
            save.aliases = ((alias, save.memory.version),)
            stale = alias
        if stale is not None:
            self._keep(lambda: _as_recomputed(conflicts.under_hooks(self._core, self._steps, save, stale), save))
            return result
        memory = save.memory if save.memory is not None else _memory(alias, None)
        written = None if memory is None else self._written(save, memory, alias)
        if written is not None:
            self._keep(lambda: self._conflict(save, memory, alias, written, node, slot))
        return result

    def judge_copy(self, save: HookedSave, copy: Any, result: Any) -> None:
        """Report a copy overwritten between save and use; ``copy`` is a tensor in the packed object."""
        is_result = torch.is_tensor(result) and _torch.storage_identity(result) == _torch.storage_identity(copy)
        node = _torch.current_node()
        slot = _torch.slot_of(node, save.in_slot)
        # Beside the values there may be a scale of them, such as a running maximum.
        is_value = len(save.copies) == 1 or (
            save.memory is not None and copy.numel() == math.prod(save.memory.region.shape)
        )
        if not (is_result or is_value) or not _torch.is_read_by_backward(node, slot):
            return
        self._copies_judged += 1
        source = None if save.memory is None else save.memory.tensor()
        if self._copies_judged > _COPIES_JUDGED or (source is not None and _is_still(source, save.memory, result)):
            return
        memory = _memory(copy, None)
        writes = () if memory is None else self._overwriting(save, memory)
        if memory is not None and writes:
            version = next(version for one, version in save.copies if one is copy)
            kept = memory._replace(version=version)
            self._keep(
                lambda: replace(
                    self._conflict(save, kept, copy, _Written(writes, IN_ONE_BUFFER, None), node, slot),
                    under_user_hooks=True,
                )
            )

    def _overwriting(self, save: HookedSave, memory: Memory) -> tuple[Write, ...]:
        """Return the writes, by other saves or the program, over the copy that was made at ``save``."""
        earlier = max((one.clock for one in self._packed if one.clock < save.clock), default=0)
        raws = [raw for raw in logged_writes(self._core, earlier) if raw.storage == memory.storage]
        own = [ledger.as_write(raw).region for raw in raws if raw.clock <= save.clock]
        region = memory.region if not own or own[-1] is None else own[-1]
        mine = next((one.source for one in self._packed if one.clock == save.clock), None)
        later = []
        for raw in raws:
            by = next((one.source for one in self._packed if one.clock >= raw.clock), None)
            if raw.clock > save.clock and (by is None or by != mine):
                later.append(ledger.as_write(raw))
        return _touching(region, later)

    def _has_moved(self, save: HookedSave, alias: torch.Tensor) -> bool:
        """Whether a tensor that the hook kept elsewhere, with its counter at the save, has been written."""
        memory = save.memory
        if save.aliases or memory is None or not _shares_storage(alias, memory):
            return False
        return bool(alias._version > memory.version)

    def _by_original(self, of: HookedSave, moved: bool, node: Node, slot: str | None, result: Any) -> Any:
        kept = of.kept
        changed = kept.changed
        if not (moved or changed):
            return result
        if not _is_at(result, kept.alias) and torch.is_tensor(result) and have_same_bytes(result, kept.original):
            return result
        deviation = self._deep.deviation_of(kept) if changed else None

        def describe(healed: int | None = None) -> Conflict:
            return _as_recomputed(self._of_original(kept, moved, changed, deviation, healed, node, slot), of)

        is_itself = _is_at(result, kept.alias) or _is_at(result, kept.current)
        heals = changed and is_itself and self._deep.heals(kept, describe)
        self._keep(lambda: describe(kept.nbytes if heals else None))
        return kept.original if heals else result

    def _of_original(
        self,
        kept: Any,
        moved: bool,
        changed: bool,
        deviation: Deviation | None,
        healed: int | None,
        node: Node,
        slot: str | None,
    ) -> Conflict:
        found = kept_conflicts.of_kept(
            self._core,
            self._steps,
            kept,
            counted=moved,
            raised=False,
            changed=changed,
            deviation=deviation,
            healed=healed,
            bypass=bypass_of(self._uncounted, self._exports, kept),
            node=node,
        )
        save = replace(found.save, slot=slot, is_output=bool(slot and slot.startswith("result")))
        return replace(found, save=save, under_user_hooks=moved or found.bypass is None)

    def _written(self, save: HookedSave, memory: Memory, alias: torch.Tensor) -> _Written | None:
        """Return the writes to the memory since the save that no counter shows; None where there are none."""
        uncounted = self._uncounted
        replaced = uncounted.replaced_since(alias, save.clock)
        if replaced is not None:
            site = symbolise(replaced.stack)
            return _Written((_outside(replaced.clock, site, "data =", "op"),), "data_attribute", site)
        if memory.storage in uncounted.bypasses:
            raws = [
                raw
                for raw in uncounted.writes().get(memory.storage, ())
                if raw.clock > save.clock and raw.stack is not save.stack
            ]
            writes = _touching(memory.region, map(ledger.as_write, raws))
            bypass = uncounted.bypass_before(memory.storage, writes[0].clock) if writes else None
            if bypass is not None:
                compared = uncounted.snapshots.compared(alias, save.clock, [raw.clock for raw in raws])
                same = _shares_storage(alias, memory) and compared == "same"
                return _Written(writes, bypass.kind, symbolise(bypass.stack), same)
        export = self._exports.changed_since(alias, save.clock, memory.copy, memory.storage)
        if export is None:
            return None
        logged = ledger.writes_since(self._core, self._steps, memory.storage, save.clock, memory.version)
        counted = _touching(memory.region, logged)
        if counted:
            return _Written(counted, None, None)
        site = symbolise(export.stack)
        return _Written((_outside(export.clock, site, export.op, "outside"),), "memory_alias", site)

    def _conflict(
        self, save: HookedSave, memory: Any, alias: torch.Tensor, written: _Written, node: Node, slot: str | None
    ) -> Conflict:
        core, steps = self._core, self._steps
        backward = steps.current_backward()
        version = int(alias._version)
        return Conflict(
            save=conflicts.save_of(
                core, steps, save.clock, save.stack, _info(alias, memory), memory.version, node, slot
            ),
            writes=written.writes,
            use=conflicts.use_of(core, backward, version),
            names=naming.names_of(alias, sys._getframe(1)),
            root_sequence=backward.root_sequence if backward else None,
            raised=False,
            under_user_hooks=written.bypass is None,
            log_was_cut=core.lost_writes_after(save.clock),
            bypass=written.bypass,
            alias_site=written.began,
            unchanged=written.unchanged,
        )


def _as_recomputed(conflict: Conflict, save: HookedSave) -> Conflict:
    """A conflict, called one of a recomputation if ``save`` is of one and nothing else explains its silence."""
    is_own = save.forward is not None and conflict.bypass is None
    return replace(conflict, bypass=RECOMPUTED) if is_own else conflict


def _memory(tensor: torch.Tensor, copy: Any) -> Memory | None:
    storage = _torch.storage_or_none(tensor)
    if not storage or tensor.is_inference():
        return None
    _, version, (offset, shape, strides, itemsize) = _torch.weak_identity(tensor)
    return Memory(
        _torch.weak_tensor(tensor),
        storage,
        _torch.weak_storage(tensor.untyped_storage()),
        Region(offset, shape, strides if strides is not None else (), itemsize),
        version or 0,
        _torch.memory_of(tensor),
        copy,
    )


def _is_still(source: Any, memory: Memory, result: Any) -> bool:
    """Whether the saved tensor is still alive, and is the value that backward gets."""
    if source._version != memory.version or not torch.is_tensor(result) or result.shape != source.shape:
        return False
    return result.dtype == source.dtype and have_same_bytes(result, source)


def _alias(save: HookedSave, result: Any) -> Any:
    """Return a tensor in the saved memory through which backward gets its value; None where that is a copy."""
    if save.aliases:
        return save.aliases[0][0]
    memory = save.memory
    if memory is None or not torch.is_tensor(result):
        return None
    if memory.tensor() is result:
        return result  # it may have been given other memory
    if memory.weak.expired():
        return None
    if _shares_storage(result, memory):
        return result
    if result.device.type != "cpu" or not _torch.storage_or_none(result):
        return None
    # An array has a storage of its own for the same memory.
    start, size = memory.place
    return result if start <= _torch.memory_of(result)[0] < start + size else None


def _shares_storage(tensor: torch.Tensor, memory: Memory) -> bool:
    return _torch.storage_or_none(tensor) == memory.storage


def _is_of_its_own(save: HookedSave, result: Any) -> bool:
    """Whether the unpacked value is a copy that the pack hook has kept beside the tensor."""
    if not save.aliases or not torch.is_tensor(result):
        return False
    shared = {_torch.storage_identity(alias) for alias, _ in save.aliases}
    kept = {_torch.storage_identity(one) for one in _torch.tensors_in(save.packed, in_objects=True)}
    return _torch.storage_identity(result) in kept - shared


def _is_at(result: Any, alias: torch.Tensor) -> bool:
    """Whether a tensor is the very elements of another."""
    if not torch.is_tensor(result) or result.dtype != alias.dtype:
        return False
    return bool(_torch.weak_identity(result)[::2] == _torch.weak_identity(alias)[::2])


def _info(alias: torch.Tensor, memory: Memory) -> TensorInfo:
    info = conflicts.tensor_info(alias, was_leaf=alias.is_leaf and alias.requires_grad)
    return replace(info, storage=memory.storage, region=memory.region, shape=memory.region.shape)


def _touching(region: Region, writes: Any) -> tuple[Write, ...]:
    return tuple(
        write
        for write in writes
        if write.kind != "metadata" and (write.region is None or overlap(region, write.region))
    )


def _outside(clock: int, site: Site, op: str, kind: Any) -> Write:
    return Write(clock=clock, site=site, op=op, kind=kind, version=None, region=None)
