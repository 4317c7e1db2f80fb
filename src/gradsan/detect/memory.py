"""Memory past the version counter: storages that can be written without it, and tensors noted at some moment.

A bypass is common and proves nothing. ``prescan.py`` checks the writes that were logged after it, ``exports.py``
the bytes of exported memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from gradsan import _torch
from gradsan.detect.exports import Exports
from gradsan.graph import conflicts
from gradsan.model import Site, TensorInfo, Write
from gradsan.overlap import overlap
from gradsan.record import ledger
from gradsan.record.detector import Detector, Run, Sweep
from gradsan.record.ledger import GIVES_MEMORY
from gradsan.record.listeners import watch_after
from gradsan.record.log import Core, RawStack, RawWrite, logged_writes
from gradsan.record.patches import Patches, standing
from gradsan.record.stacks import symbolise

if TYPE_CHECKING:
    from gradsan.detect.snapshots import Snapshots

_WRITES_OF_A_STORAGE = 64
_REPLACEMENTS_KEPT = 8


class Bypass(NamedTuple):
    """How memory can be written past the counter (``kind``: the slug of a GS2xx cause), its clock and stack."""

    kind: str
    clock: int
    stack: RawStack


class Earlier(NamedTuple):
    """The memory that a tensor had until it was given other at ``clock``, as ``_memory`` has it, and its storage."""

    clock: int
    sequence: int
    memory: Any
    storage: Any
    is_copy: bool


class Replaced(NamedTuple):
    """A tensor that was given other memory (``tensor.data = other``), and what it had before each time, last ones."""

    tensor: _torch.weak_tensor
    clock: int
    stack: RawStack
    sequence: int
    earlier: tuple[Earlier, ...] = ()

    def is_given_back(self, tensor: torch.Tensor, is_since: Callable[[Any], bool], core: Core) -> bool:
        """Whether the tensor has the memory that it had before the first replacement since then, or a copy of it."""
        given, now = [one for one in self.earlier if is_since(one)], _memory(tensor)
        if now is not None and all(one.is_copy for one in given):
            return not any(raw.storage == now[0] and is_since(raw) for raw in logged_writes(core))
        first = next((at for at, one in enumerate(self.earlier) if is_since(one)), None)
        if first is None or (first == 0 and len(self.earlier) == _REPLACEMENTS_KEPT):
            return False
        before = self.earlier[first]
        if before.memory is None or before.storage.expired() or before.memory == _memory(tensor):
            return before.memory is not None and not before.storage.expired()
        is_written = any(raw.storage == before.memory[0] and is_since(raw) for raw in logged_writes(core))
        return not is_written and before.storage.has_bytes_of(tensor, before.memory[1])


class Uncounted(Detector):
    """Bypasses of the version counter in this process, by storage; dead storages are dropped."""

    part = "bypasses"

    def __init__(self, run: Run) -> None:
        self._core, self._guard = run.core, run.guard
        self._copying, self._sweep = set[str](), Sweep()
        self.copied_since: int | None = None
        """The clock from which memory is copied before each write; None while it is not."""
        self.on_bypass: Callable[[], None] = lambda: None
        """Called for the first bypass of each storage."""
        self.kept_snapshots: Snapshots | None = None
        self.bypasses: dict[int, list[Bypass]] = {}
        self.replaced: dict[int, Replaced] = {}
        self._alive, self._writes = dict[int, Any](), dict[int, list[RawWrite]]()
        self._evaluated, self._read_up_to = set[int](), 0
        self.youngest = 0  # a Node numbered from here on is younger than all writes and replacements so far
        self.on_replaced: list[Callable[[Any, Any, Any, Any], None]] = []
        """Called with a tensor that gets other memory, the value given, what it had before, and the stack."""
        self.on_given_again: Callable[[Any, Any, Any], None] = lambda tensor, given, stack: None
        """Called with a tensor that gets the same memory again, the value given, and the stack."""
        self.on_data_read: list[Callable[[Any], None]] = []
        """Called with a tensor whose ``.data`` is read."""

    def open(self, holder: Any, kind: str, stack: RawStack) -> int:
        """Note that the memory of ``holder`` (a tensor or a storage) can be written past the counter from now on."""
        try:
            storage = holder.untyped_storage() if torch.is_tensor(holder) else holder
            key = int(storage._cdata)
        except (RuntimeError, ValueError, AttributeError):
            return 0  # sparse, lazy, traced: no memory of its own
        known = self.bypasses.get(key)
        if known is None:
            self.prune()
            self._alive[key] = _torch.weak_storage(storage)
            self.bypasses[key] = [Bypass(kind, self._core.tick(), stack)]  # other threads may read it at once
            self.on_bypass()
        elif known[0].kind != kind and all(bypass.kind != kind for bypass in known):
            known.append(Bypass(kind, self._core.tick(), stack))
        return key

    def copy_written(self, who: str, wanted: bool) -> None:
        """Copy memory before each write as long as somebody wants it; ``who`` names one of them."""
        (self._copying.add if wanted else self._copying.discard)(who)
        if not self._copying:
            self.copied_since = None
        elif self.copied_since is None:
            self.copied_since = self._core.clock
        self._core.before_write = self._before_write if self._copying else None

    def _before_write(self, target: Any) -> None:
        self._guard.run_hushed(lambda: self.snapshots.before_write(target))

    def prune(self) -> None:
        """Forget dead storages and tensors."""
        if self.kept_snapshots is not None:
            self.kept_snapshots.forget_dead()
        if not self._sweep.is_due(len(self._alive) + len(self.replaced)):
            return
        for key in [key for key, weak in self._alive.items() if weak.expired()]:
            self._evaluated.discard(key)
            for table in (self._alive, self.bypasses, self._writes):
                table.pop(key, None)
        for key in [key for key, one in self.replaced.items() if one.tensor() is None]:
            del self.replaced[key]

    def writes(self) -> dict[int, list[RawWrite]]:
        """Return the logged writes to bypassed storages, each younger than the first bypass."""
        last = self._read_up_to
        fresh = [
            raw for raw in logged_writes(self._core, last) if raw.storage in self.bypasses and raw.op != GIVES_MEMORY
        ]
        self._read_up_to = self._core.clock
        for raw in fresh:
            opened = self.bypasses.get(raw.storage)
            if opened and raw.clock > opened[0].clock and not _is_put_back(raw):
                kept = self._writes.setdefault(raw.storage, [])
                kept.append(raw)
                self.youngest = max(self.youngest, raw.sequence)
                del kept[:-_WRITES_OF_A_STORAGE]
        return self._writes

    def log(self, target: Any, bypass: str, op: str, kind: str, stack: RawStack) -> None:
        """Log a write that moved no counter and passed no wrapper."""
        for tensor in target if isinstance(target, (tuple, list)) else (target,):
            if torch.is_tensor(tensor):
                self.open(tensor, bypass, stack)
                self._core.log_write(tensor, op, kind, None, stack)

    @property
    def snapshots(self) -> Snapshots:
        """Copies of small memory that may be written past the counter."""
        if self.kept_snapshots is None:
            from gradsan.detect.snapshots import Snapshots

            self.kept_snapshots = Snapshots(self._core)
        return self.kept_snapshots

    def replacement_of(self, tensor: torch.Tensor | None) -> Replaced | None:
        """Return the last replacement of a tensor's memory; None where there was none."""
        found = self.replaced.get(id(tensor))
        return found if found is not None and found.tensor() is tensor and tensor is not None else None

    def replaced_since(self, tensor: torch.Tensor | None, is_since: int | Callable[[Any], bool]) -> Replaced | None:
        """Return the last replacement after a clock; None where there was none, or the tensor has its memory back."""
        clock, found = is_since, self.replacement_of(tensor)
        since = is_since if callable(is_since) else lambda one: one.clock > clock
        if found is None or tensor is None or not since(found):
            return None
        return None if found.is_given_back(tensor, since, self._core) else found

    def bypass_before(self, storage: int, clock: int) -> Bypass | None:
        """Return the last bypass of a storage before ``clock``; None where there was none."""
        return next((bypass for bypass in reversed(self.bypasses.get(storage, ())) if bypass.clock <= clock), None)

    def install(self, patches: Patches, guard: Callable[[Callable[[], object]], None]) -> None:
        """Watch for bypasses until ``patches`` is undone; ``guard`` runs gradsan's own work."""
        after = functools.partial(watch_after, self._core, patches, guard)
        self._watch_data(patches, guard)
        for name in ("unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes"):
            for owner in (torch, torch.Tensor):
                after(owner, name, lambda _r, args, _k, stack: self.open(args[0], "storage_alias", stack))
        after(torch, "_unsafe_view", lambda _r, args, _k, stack: self.open(args[0], "storage_alias", stack))
        after(torch.Tensor, "set_", lambda result, _a, _k, stack: self.open(result, "storage_alias", stack))
        after(torch.Tensor, "__reduce_ex__", lambda _r, args, _k, stack: self.open(args[0], "storage_alias", stack))
        for name in ("fill_", "copy_", "__setitem__"):
            after(torch.UntypedStorage, name, functools.partial(self._storage_written, name))
        for name in ("apply_", "map_", "map2_"):
            after(torch.Tensor, name, functools.partial(self._mapped, name))
        after(torch, "_amp_foreach_non_finite_check_and_unscale_", self._unscaled)
        after(torch.nn.functional, "batch_norm", self._normalised, self._is_normalising_due)

    def _watch_data(self, patches: Patches, guard: Callable[[Callable[[], object]], None]) -> None:
        core = self._core
        descriptor = standing(torch.Tensor, "data")

        def unseen(tensor: torch.Tensor, value: Any) -> Any:
            with _torch.hushed():
                memory = _memory(tensor)
                held = _torch.weak_storage(tensor.untyped_storage()) if memory else None
                # ``h.data = h.data.contiguous()`` changes no number. Parameters are not compared: they are large.
                is_result = type(tensor) is torch.Tensor is type(value) and tensor.requires_grad
                return memory, held, is_result and held is not None and held.has_bytes_of(value, memory[1])

        def asked(args: tuple[Any, ...], _: dict[str, Any]) -> None:
            if not _torch.is_compiling():
                stack = core.stack(1)
                guard(lambda: self._open_data(args[0], stack))

        def given(held: Any, args: tuple[Any, ...], _: dict[str, Any], __: Any) -> None:
            tensor, (before, storage, is_copy) = args[0], held or (None, None, False)
            with _torch.hushed():
                is_other = _memory(tensor) != before
            if is_other:
                stack = core.stack(1)
                had = Earlier(core.tick(), _torch.sequence_number(), before, storage, is_copy)
                guard(lambda: self._replace(tensor, stack, had))
                for note in self.on_replaced:
                    guard(functools.partial(note, tensor, args[1], before, stack))
            elif args[1] is not tensor:
                stack = core.stack(1)
                guard(lambda: self.on_given_again(tensor, args[1], stack))

        get = core.listener(descriptor.__get__, asked, None)
        put = core.listener(descriptor.__set__, lambda args, _: unseen(*args), given)
        patches.set(torch.Tensor, "data", property(get, put, descriptor.__delete__))

    def _open_data(self, tensor: torch.Tensor, stack: RawStack) -> None:
        if self.open(tensor, "data_attribute", stack):
            self.snapshots.take(tensor, stack)
        for note in self.on_data_read:
            note(tensor)

    def _replace(self, tensor: torch.Tensor, stack: RawStack, had: Earlier) -> None:
        # The memory may have another name with another counter: a flat buffer, for example.
        self.open(tensor, "data_attribute", stack)
        self.on_bypass()
        known = self.replacement_of(tensor)
        earlier = (*(known.earlier if known else ()), had)[-_REPLACEMENTS_KEPT:]
        self.replaced[id(tensor)] = Replaced(_torch.weak_tensor(tensor), had.clock, stack, had.sequence, earlier)
        self.youngest = max(self.youngest, had.sequence)

    def _storage_written(self, name: str, _: Any, args: tuple[Any, ...], __: Any, stack: RawStack) -> None:
        flat = torch.empty(0, dtype=torch.uint8, device=args[0].device).set_(args[0])
        self.log(flat, "storage_alias", name, "op", stack)

    def _unscaled(self, _: Any, args: tuple[Any, ...], __: Any, stack: RawStack) -> None:
        self.log(list(args[0]), "kernel_without_schema", "GradScaler.unscale_", "op", stack)

    def _mapped(self, name: str, _: Any, args: tuple[Any, ...], __: Any, stack: RawStack) -> None:
        self.log(args[0], "kernel_without_schema", name, "op", stack)

    def _is_normalising_due(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a batch_norm may save or write statistics that a gradient needs: not if all have been in training."""
        if (args[5] if len(args) > 5 else kwargs.get("training")) is True:
            return bool(self._evaluated)
        return _torch.is_grad_enabled()

    def _normalised(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stack: RawStack) -> None:
        given = dict(zip(("input", "running_mean", "running_var", "weight", "bias", "training"), args, strict=False))
        given.update(kwargs)
        statistics = [one for one in (given.get("running_mean"), given.get("running_var")) if torch.is_tensor(one)]
        keys = {key for one in statistics if (key := _torch.storage_or_none(one))}
        if not given.get("training", False):
            if _torch.is_grad_enabled():
                for one in statistics:
                    self._evaluated.add(self.open(one, "statistics", stack))
        elif keys & self._evaluated:  # only a forward in eval mode has saved them for a gradient
            self.log(statistics, "statistics", "batch_norm", "statistics", stack)

    def stepped(self, optimizer: Optimizer) -> None:
        """Log the writes of an optimizer's fused kernels in the step that has just ended."""
        core = self._core
        stack = core.stack()
        for group in optimizer.param_groups:
            if group.get("fused"):
                written: Iterable[Any] = [one for one in group["params"] if one.grad is not None]
                self.log(list(written), "fused_optimizer", f"{type(optimizer).__name__}.step", "step", stack)


def _is_put_back(raw: RawWrite) -> bool:
    codes = raw.stack.codes
    return bool(codes) and _torch.puts_back_what_it_writes(codes[0].co_filename)


def _memory(tensor: torch.Tensor) -> Any:
    """Return the identity and geometry of a tensor's memory; None where it has none (lazy, sparse, traced)."""
    try:
        identity = _torch.weak_identity(tensor)
    except (RuntimeError, ValueError, AttributeError, TypeError):
        return None
    return identity[0], identity[2]


class Noted(NamedTuple):
    """A tensor at some moment: version, storage, the clock, and its bytes if its memory was exported."""

    weak: Any
    version: int
    storage: int
    clock: int
    copy: Any


class Overwritten(NamedTuple):
    """Writes to a noted tensor since the note; ``unexplained`` as in the Conflict."""

    info: TensorInfo
    writes: tuple[Write, ...]  # those that overlap it, in order
    version: int
    bypass: Site | None  # where a write past the counter became possible; None where the counter moved
    unexplained: int


class Notes:
    """Notes tensors, and compares them with their notes later."""

    def __init__(self, run: Run) -> None:
        """Share the logs of writes."""
        self._core, self._steps = run.core, run.steps
        self._uncounted, self._exports = run.get(Uncounted), run.get(Exports)
        self.lasting: Callable[[Any], Any] = lambda tensor: tensor
        """Returns the lasting tensor for one that is freed and refilled (a ``fully_shard`` parameter), or the same."""

    @property
    def is_quiet(self) -> bool:
        """Whether no memory can have been written past the counter."""
        return not (self._uncounted.bypasses or self._uncounted.replaced or self._exports.any)

    def copy_of(self, tensor: torch.Tensor) -> Any:
        """Return the bytes of a tensor in exported memory, else None."""
        return self._exports.copy_of(tensor)

    def note(self, tensor: torch.Tensor) -> Noted | None:
        """Return a note of the tensor; None where it has no version (inference tensors), or no values.

        A reversible Function frees the memory of its input, which its backward computes anew.
        """
        try:
            version = int(tensor._version)
            weak = _torch.weak_tensor(tensor)
        except (RuntimeError, TypeError):
            return None
        storage = _torch.storage_or_none(tensor)
        is_own = storage and tensor.numel() and not _torch.dispatches(type(tensor))
        if is_own and not tensor.untyped_storage().nbytes():
            return None
        return Noted(weak, version, storage, self._core.clock, self._exports.copy_of(tensor))

    def changed(self, noted: Noted, tensor: torch.Tensor) -> Overwritten | None:
        """Return the writes to ``tensor``, which shares memory with the noted one, since the note; None where none."""
        version = int(tensor._version)
        if version == noted.version and self.is_quiet:
            return None
        storage = _torch.storage_or_none(tensor)
        replaced = self._uncounted.replaced_since(tensor, noted.clock)
        if replaced is not None:
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
            return self._counted(noted, tensor, version)
        return self._past_counter(noted, tensor, version, storage)

    def _counted(self, noted: Noted, tensor: torch.Tensor, version: int) -> Overwritten | None:
        core, steps = self._core, self._steps
        info = conflicts.tensor_info(tensor, was_leaf=tensor.is_leaf)
        writes = ledger.writes_since(core, steps, info.storage, noted.clock, noted.version)
        unexplained = ledger.unexplained_moves(writes, noted.version, version)
        touching = tuple(write for write in writes if _touches(info, write))
        is_elsewhere = bool(writes) and not touching and not unexplained
        return None if is_elsewhere else Overwritten(info, touching, version, None, unexplained)

    def _past_counter(self, noted: Noted, tensor: torch.Tensor, version: int, storage: int) -> Overwritten | None:
        uncounted = self._uncounted
        if storage in uncounted.bypasses:
            uncounted.prune()
            info = conflicts.tensor_info(tensor, was_leaf=tensor.is_leaf)
            raws = [raw for raw in uncounted.writes().get(storage, ()) if raw.clock > noted.clock]
            writes = tuple(write for write in map(ledger.as_write, raws) if _touches(info, write))
            if writes:
                bypass = uncounted.bypass_before(storage, writes[0].clock)
                return Overwritten(info, writes, version, symbolise(bypass.stack) if bypass else None, 0)
        export = self._exports.changed_since(tensor, noted.clock, noted.copy)
        if export is None:
            return None
        info = conflicts.tensor_info(tensor, was_leaf=tensor.is_leaf)
        site = symbolise(export.stack)
        write = Write(clock=export.clock, site=site, op=export.op, kind="outside", version=None, region=None)
        return Overwritten(info, (write,), version, site, 0)


def _touches(info: TensorInfo, write: Write) -> bool:
    return write.kind != "metadata" and (write.region is None or overlap(info.region, write.region))
