"""A tensor at a moment, without keeping it alive, and how it has been written since."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from gradsan.capture import _torch, conflicts, ledger
from gradsan.capture.exports import Exports
from gradsan.capture.stacks import symbolise
from gradsan.capture.uncounted import Uncounted
from gradsan.model import Conflict, Site, TensorInfo, Write
from gradsan.overlap import overlap


class Noted(NamedTuple):
    """A tensor as it was: version, storage, the clock, and its bytes where its memory had been handed out."""

    weak: Any
    version: int
    storage: int
    clock: int
    copy: Any


class Overwritten(NamedTuple):
    """What has happened to a noted tensor: ``writes`` that overlap it, in order; ``door`` is where a way past the
    counter was opened, None where the counter moved; ``unexplained`` as in the Conflict."""

    info: TensorInfo
    writes: tuple[Write, ...]
    version: int
    door: Site | None
    unexplained: int


class Notes:
    """Takes notes of tensors and looks them up again."""

    def __init__(self, core: Any, steps: Any, uncounted: Uncounted, exports: Exports) -> None:
        """The logs that tell who wrote."""
        self._core, self._steps, self._uncounted, self._exports = core, steps, uncounted, exports
        self.lasting: Callable[[Any], Any] = lambda tensor: tensor
        """What stays of a tensor that comes and goes (a whole parameter of ``fully_shard``); of others themselves."""

    @property
    def is_quiet(self) -> bool:
        """Whether there is no way by which memory could be written past the counter."""
        return not (self._uncounted.doors or self._uncounted.replaced or self._exports.any)

    def copy_of(self, tensor: Any) -> Any:
        """The bytes of a tensor whose memory has been handed out, else None."""
        return self._exports.copy_of(tensor)

    def note(self, tensor: Any) -> Noted | None:
        """The tensor as it is now; None where it counts no versions (inference tensors)."""
        try:
            version = int(tensor._version)
            weak = weakref.ref(tensor)
        except (RuntimeError, TypeError):
            return None
        storage = _torch.storage_or_none(tensor)
        return Noted(weak, version, storage, self._core.clock, self._exports.copy_of(tensor))

    def changed(self, noted: Noted, tensor: Any) -> Overwritten | None:
        """How ``tensor``, which shares memory with what was noted, has been written since; None where it has not."""
        version = int(tensor._version)
        if version == noted.version and self.is_quiet:
            return None
        storage = _torch.storage_or_none(tensor)
        replaced = self._uncounted.replaced.get(id(tensor))
        if replaced is not None and replaced.clock > noted.clock and replaced.tensor() is tensor:
            info = conflicts.tensor_info(tensor, was_leaf=tensor.is_leaf)
            write = Write(
                clock=replaced.clock,
                site=symbolise(replaced.stack),
                op="data =",
                kind="op",
                version=None,
                region=info.region,
                sequence=replaced.sequence,
            )
            return Overwritten(info, (write,), version, write.site, 0)
        if version != noted.version:
            return self._counted(noted, tensor, version, storage)
        return self._past_counter(noted, tensor, version, storage)

    def _counted(self, noted: Noted, tensor: Any, version: int, storage: int) -> Overwritten | None:
        core, steps = self._core, self._steps
        info = conflicts.tensor_info(tensor, was_leaf=tensor.is_leaf)
        writes = ledger.writes_since(core, steps, info.storage, noted.clock, noted.version)
        unexplained = ledger.unexplained_moves(writes, noted.version, version)
        touching = tuple(write for write in writes if _touches(info, write))
        if writes and not touching and not unexplained:
            return None
        return Overwritten(info, touching, version, None, unexplained)

    def _past_counter(self, noted: Noted, tensor: Any, version: int, storage: int) -> Overwritten | None:
        uncounted = self._uncounted
        if storage in uncounted.doors:
            uncounted.prune()
            info = conflicts.tensor_info(tensor, was_leaf=tensor.is_leaf)
            raws = [raw for raw in uncounted.writes().get(storage, ()) if raw.clock > noted.clock]
            writes = tuple(write for write in map(ledger.as_write, raws) if _touches(info, write))
            if writes:
                door = uncounted.door_of(storage, writes[0].clock)
                return Overwritten(info, writes, version, symbolise(door.stack) if door else None, 0)
        export = self._exports.changed_since(tensor, noted.clock, noted.copy)
        if export is None:
            return None
        info = conflicts.tensor_info(tensor, was_leaf=tensor.is_leaf)
        site = symbolise(export.stack)
        write = Write(clock=export.clock, site=site, op=export.op, kind="outside", version=None, region=None)
        return Overwritten(info, (write,), version, site, 0)


class Findings:
    """The conflicts of the run; one that is met again is counted."""

    def __init__(self, found: list[Conflict], most: int) -> None:
        """New ones go to ``found``, up to ``most`` of them there."""
        self._found, self._most = found, most
        self._known: dict[Any, int] = {}

    def forget(self) -> None:
        """Begin anew: what an earlier stretch of watching has found does not count for this one."""
        self._known.clear()

    def add(self, key: Any, make: Callable[[], Conflict]) -> None:
        """Count the conflict known by ``key``, or have it made."""
        at = self._known.get(key)
        if at is not None and at < len(self._found):
            self._found[at] = replace(self._found[at], count=self._found[at].count + 1)
        elif len(self._found) < self._most:
            made = make()
            self._known[key] = len(self._found)
            self._found.append(made)


def _touches(info: TensorInfo, write: Write) -> bool:
    return write.kind != "metadata" and (write.region is None or overlap(info.region, write.region))
