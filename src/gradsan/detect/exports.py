"""Exported memory, handed out of PyTorch or aliased by ``.data``, compared byte by byte before a backward.

The holder of a NumPy array, a DLPack capsule or a pointer writes without a trace. While a storage is exported, the
values that new Nodes save in it are copied; where it is exported after a save, the storage is copied at that time.

Memory of which only temporary arrays were made is exported no longer when they are gone: nobody can write it.

A fault of this kind is in every round of a training, and a data set may be exported as long as the program runs: what a
line exports is compared in its first rounds, and again after 32, 64, 128 … of them.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils.dlpack

from gradsan import _torch
from gradsan.model import Message
from gradsan.record._writer_pure import is_called_from
from gradsan.record.detector import Detector, Run, Sweep
from gradsan.record.log import RawStack
from gradsan.record.patches import Patches, standing
from gradsan.record.steps import RawBackward

BYTES_KEPT = 256 * 2**20
BYTES_OF_A_NOTE = 16 * 2**20
_FEW, _HOLDERS, _ARRAYS, _LINES = 8, 3, 32, 1024
FIRST, _AGAIN = 16, 4
"""Rounds in which the memory that a line hands out is compared: its first, and some later ones."""
_GIVES_ARRAY = ("numpy", "__array__")


class Export(NamedTuple):
    """An export of memory: its site, clock, and the bytes at that moment (None: too large, or nothing to compare).

    ``arrays`` refers weakly to the NumPy arrays over it: the one that torch was given (``is_given``), or those that
    the program got; None where there may be other holders.
    """

    op: str
    clock: int
    stack: RawStack
    weak: Any
    snapshot: Any
    arrays: tuple[weakref.ref[Any], ...] | None = None
    is_given: bool = False
    taken: int = 0
    """The clock when the program last got such an array."""

    @property
    def is_over(self) -> bool:
        """Whether nobody is left who could write it from outside: a batch made of a temporary array is the tensor's."""
        if self.arrays is None or self.weak.expired():
            return bool(self.weak.expired())
        return all(_is_alone(one) if self.is_given else one() is None for one in self.arrays)


class Schedule:
    """When to compare what a line exports: in its first rounds, and in each of them at the first backward calls.

    A round of a line begins where it is called after a backward. Both counts go on at 32, 64, 128 … for some more.
    """

    __slots__ = ("_backwards", "_begun", "_rounds")

    def __init__(self) -> None:
        self._rounds, self._backwards, self._begun = 0, -1, 0

    def call(self, backwards: int) -> None:
        """Count a call of the line when there have been so many backward calls."""
        if backwards != self._backwards:
            self._rounds += 1
            self._backwards = self._begun = backwards

    def is_due(self, backwards: int) -> bool:
        """Whether to compare until the backward call after so many."""
        return _is_early(self._rounds - 1) and (backwards - self._begun < FIRST or _is_early(backwards))


def _is_early(number: int) -> bool:
    """Whether ``number``, counted from 0, is one of the first, or among the first from a power of two on."""
    return number < FIRST or number - (1 << (number.bit_length() - 1)) < _AGAIN


class Exports(Detector):
    """The live exported storages, and copies of the values saved in them."""

    part = "bypasses"

    def __init__(self, run: Run) -> None:
        self._core, self._note, self._listeners = run.core, run.guard.note, run.listeners
        self.on_export: Callable[[], None] = lambda: None
        """Called when memory is handed out while none was before."""
        self.on_hand_out: Callable[[int], None] | None = None
        """Called with a storage that is handed out while a backward runs."""
        self.on_taken: list[Callable[[Any, RawStack], None]] = []
        """Called with a tensor whose memory the program asks for, and the stack."""
        self.on_lent: Callable[[Any, Any, Any], None] = lambda array, tensor, stack: None
        """Called with foreign memory that torch was given, the tensor made of it, and the stack."""
        self._exports: dict[int, Export] = {}
        self._saved: OrderedDict[tuple[int, int, str], tuple[int, Any]] = OrderedDict()
        self._copied = set[int]()
        """The storages of which there are such copies."""
        self._over: list[tuple[int, Export]] = []
        self._resting: dict[int, Export] = {}
        """The exports that are not compared at present."""
        self._schedules: dict[RawStack, Schedule] = {}
        self._line_begun = 0
        """How many backward calls there were when a line first called backward: a program's new phase."""
        self.compares_always = False
        """Whether all rounds are compared, for deep mode, which says how a value has changed."""
        self._bytes, self._sweep = 0, Sweep()

    @property
    def any(self) -> bool:
        """Whether exported memory is alive and compared."""
        return bool(self._exports)

    def hand_out(self, tensor: torch.Tensor, op: str, stack: RawStack, fresh: bool = False, array: Any = None) -> None:
        """Note that ``tensor``'s memory is accessible to others; ``fresh``: nothing can have saved it before.

        ``array`` is the NumPy array that torch was given.

        Memory of a device is not copied and compared: reading the result would synchronise.
        """
        if not torch.is_tensor(tensor) or not _torch.storage_or_none(tensor) or tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        known = self._exports.get(key)
        if known is not None and not known.weak.expired():
            if op not in _GIVES_ARRAY or array is not None:
                self._exports[key] = known._replace(arrays=None)
            elif known.stack is not stack and known.is_over and _is_unwritten(known, storage):
                # The arrays before are gone, and have written nothing: what is written from now on is this line's.
                self._exports[key] = known._replace(op=op, clock=self._core.tick(), stack=stack)
            return
        self._schedule(stack).call(self._core.backwards)
        if not self._is_due(stack):
            return
        self.forget_dead()
        snapshot, size = None, int(storage.nbytes())
        if not fresh and self._fits(size):
            snapshot = storage.clone()
            self._bytes += size
        core = self._core
        weak = _torch.weak_storage(storage)
        arrays = (weakref.ref(array),) if array is not None else () if op in _GIVES_ARRAY else None
        self._add(key, Export(op, core.tick(), stack, weak, snapshot, arrays, array is not None))
        if core.running and self.on_hand_out is not None:
            self.on_hand_out(key)

    def _add(self, key: int, export: Export) -> None:
        if not self._exports:
            self.on_export()
            self._listeners.call_after_nodes(self.after_nodes)
        self._exports[key] = export

    def forget(self) -> None:
        """Compare everything that is exported, in a stretch of watching whose backward calls are counted anew."""
        self._schedules.clear()
        self._line_begun = self._core.backwards
        self._wake()

    def before_round(self, entry: RawBackward, rounds: int) -> None:
        """Compare everything again for some backward calls once another line calls backward."""
        if rounds == 1:
            self._line_begun = self._core.backwards
            self._wake()

    def _schedule(self, stack: RawStack) -> Schedule:
        if len(self._schedules) >= _LINES:
            self._schedules.clear()
        return self._schedules.setdefault(stack, Schedule())

    def _is_due(self, stack: RawStack) -> bool:
        backwards = self._core.backwards
        is_new = self.compares_always or backwards - self._line_begun < FIRST
        return is_new or self._schedule(stack).is_due(backwards)

    def _got(self, tensor: torch.Tensor, array: Any) -> None:
        """Note an array that the program got over exported memory."""
        key = _torch.storage_or_none(tensor)
        export = self._exports.get(key)
        if export is not None and export.arrays is not None:
            arrays = (*(one for one in export.arrays if one() is not None), weakref.ref(array))
            # A program may keep one array for each round.
            held = arrays if len(arrays) <= _ARRAYS else None
            self._exports[key] = export._replace(arrays=held, taken=self._core.clock)

    def after_nodes(self, holder: Any, first: int, end: int) -> None:
        """Copy the values that the Nodes numbered ``first <= n < end`` saved in exported memory."""
        self.forget_few()
        thread, holders = threading.get_ident(), holder if isinstance(holder, (tuple, list)) else (holder,)
        # Attributes of a tensor whose class dispatches, such as a compiler's, call an operator.
        tensors = [one for one in holders if torch.is_tensor(one) and not _torch.dispatches(type(one))]
        waiting = [one.grad_fn for one in tensors if one.grad_fn is not None] if self._exports else []
        seen = set()
        while waiting:
            node = waiting.pop()
            number = _torch.node_sequence(node)
            if number is None or number < first or node in seen:
                continue
            seen.add(node)
            waiting += [child for child, _ in node.next_functions if child is not None]
            for slot, saved in _torch.saved_slots(node):
                tensor = _torch.packed_object(saved)
                storage = _torch.storage_or_none(tensor) if torch.is_tensor(tensor) else None
                if storage not in self._exports or not _torch.has_elements(tensor):
                    continue
                size = tensor.numel() * tensor.element_size()
                if self._fits(size):
                    self._saved[thread, number, slot] = (storage, _torch.bytes_of(tensor))
                    self._copied.add(storage)
                    self._bytes += size

    def changed(
        self, storage: int, number: int, thread: int, slot: str, tensor: torch.Tensor, made: Any
    ) -> Export | None:
        """Return the export through which the bytes of a saved value have changed; None where they are unchanged."""
        before = self.before(storage, number, thread, slot, tensor, made)
        return None if before is None or torch.equal(before, _torch.own_bytes(tensor)) else self._exports[storage]

    def is_as_saved(self, storage: int, number: int, thread: int, slot: str, tensor: torch.Tensor) -> bool:
        """Whether a saved value has the bytes that were copied at its save, or its memory was not exported."""
        if storage not in self._exports:
            return True
        copied = self._saved.get((thread, number, slot))
        return copied is not None and copied[0] == storage and torch.equal(copied[1], _torch.own_bytes(tensor))

    def before(self, storage: int, number: int, thread: int, slot: str, tensor: torch.Tensor, made: Any) -> Any:
        """The bytes of a saved value at the save; None where its memory was not exported, or they are unknown."""
        export = self._exports.get(storage)
        if export is None or export.weak.expired():
            return None
        copied = self._saved.get((thread, number, slot))
        if copied is not None and copied[0] == storage:
            return copied[1]
        if export.snapshot is not None and made is not None and made.clock < export.clock:
            return _bytes_then(export.snapshot, tensor)
        return None

    def of(self, storage: int) -> Export | None:
        """Return the export of a storage; None where there is none."""
        export = self._exports.get(storage)
        return None if export is None or export.weak.expired() else export

    def copy_of(self, tensor: torch.Tensor) -> Any:
        """Return the bytes of a tensor in exported memory; None where it is not exported, or too large."""
        export = self._exports.get(_torch.storage_or_none(tensor)) if self._exports else None
        if export is None or export.weak.expired():
            return None
        size = tensor.numel() * tensor.element_size()
        if size > BYTES_OF_A_NOTE:
            self._note(Message("blind.export_too_large", {"bytes": size}))
            return None
        return _torch.bytes_of(tensor)

    def changed_since(self, tensor: torch.Tensor, clock: int, copy: Any, storage: int = 0) -> Export | None:
        """Return the export through which the bytes of a tensor have changed since ``clock``, when they were ``copy``.

        Where memory was exported later, ``copy`` is None, and the bytes are those of that moment. ``storage`` is the
        exported one, where ``tensor`` has the memory by another (an array that was converted back).
        """
        export = self._exports.get(storage or _torch.storage_or_none(tensor)) if self._exports else None
        if export is None or export.weak.expired():
            return None
        before = copy
        if before is None and export.snapshot is not None and export.clock > clock:
            before = _bytes_then(export.snapshot, tensor)
        if before is None or (storage and before.numel() != tensor.numel() * tensor.element_size()):
            return None
        return None if torch.equal(before, _torch.own_bytes(tensor)) else export

    def install(self, patches: Patches, guard: Callable[[Callable[[], object]], None]) -> None:
        """Watch the functions by which memory leaves and enters torch, until ``patches`` is undone."""
        for name in ("numpy", "__array__", "__dlpack__", "data_ptr", "share_memory_"):
            self._watch(patches, guard, torch.Tensor, name, given=True)
        for owner in (torch, torch.utils.dlpack):
            self._watch(patches, guard, owner, "to_dlpack", given=True)
            self._watch(patches, guard, owner, "from_dlpack", given=False)
        for name in ("from_numpy", "frombuffer", "as_tensor", "asarray"):
            self._watch(patches, guard, torch, name, given=False)

    def _watch(self, patches: Patches, guard: Any, owner: Any, name: str, *, given: bool) -> None:
        original, core, folder = standing(owner, name), self._core, _torch.package_folder()
        if original is None:
            return

        def before(args: tuple[Any, ...], _: dict[str, Any]) -> bool | None:
            inner = name == "data_ptr" and is_called_from(folder, 1)
            if not args or inner or _torch.is_compiling():
                return None
            stack = core.stack(1)
            guard(lambda: self._asked(args[0], name, stack))
            return True

        def got(_: bool, args: tuple[Any, ...], __: dict[str, Any], result: Any) -> None:
            if type(result).__module__ == "numpy":
                guard(lambda: self._got(args[0], result))

        def after(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            given = args[0] if args and not torch.is_tensor(args[0]) else None
            is_shared = hasattr(given, "__array_interface__") or isinstance(given, (bytearray, memoryview))
            if is_shared or (args and name == "frombuffer"):
                stack = core.stack(1)
                if is_shared:
                    guard(lambda: self.on_lent(args[0], result, stack))
                array = args[0] if is_shared and type(args[0]).__module__ == "numpy" else None
                # ``as_tensor`` copies where there is something to convert.
                if array is None or array.__array_interface__["data"][0] == _torch.memory_of(result)[0]:
                    guard(lambda: self.hand_out(result, name, stack, fresh=True, array=array))

        later = got if name in _GIVES_ARRAY else None
        listener = core.listener(original, before, later) if given else core.listener(original, None, after)
        patches.set(owner, name, listener)

    def _asked(self, tensor: torch.Tensor, name: str, stack: RawStack) -> None:
        self.hand_out(tensor, name, stack)
        for taken in self.on_taken:
            taken(tensor, stack)

    def _fits(self, size: int) -> bool:
        while self._saved and self._bytes + size > BYTES_KEPT:
            _, (_, copy) = self._saved.popitem(last=False)
            self._bytes -= copy.numel()
        if self._bytes + size > BYTES_KEPT:
            self._note(Message("blind.export_too_large", {"bytes": size}))
            return False
        return True

    def forget_few(self) -> None:
        """Where only a few are exported, forget those that nobody can write any more and no saved value is in."""
        if len(self._exports) <= _FEW:
            for key, one in list(self._exports.items()):
                if one.snapshot is None and key not in self._copied and one.is_over:
                    self._drop(key)

    def end_round(self) -> None:
        """Forget those that nobody could write any more at the last call, at a backward, which has compared them."""
        for key, one in self._over:
            if self._exports.get(key) is one:
                self._drop(key)
        few = self._exports.items() if len(self._exports) <= _FEW else ()
        self._over = [(key, one) for key, one in few if one.is_over]

    def rest(self) -> None:
        """At a backward, after the comparisons: choose the exports that the next one compares."""
        backwards, is_due = self._core.backwards, functools.cache(self._is_due)
        # Another thread may hand memory out meanwhile.
        resting = [key for key, one in list(self._exports.items()) if not is_due(one.stack)]
        for key in resting:
            self._resting[key] = self._exports[key]._replace(snapshot=None)
            self._drop(key)
        if resting:
            self._forget_copies()
        elif backwards & (backwards - 1) == 0:
            self._wake()

    def _wake(self) -> None:
        for key, one in list(self._resting.items()):
            if one.weak.expired() or self._is_due(one.stack):
                del self._resting[key]
                if not one.weak.expired() and key not in self._exports:
                    self._add(key, one)

    def _drop(self, key: int) -> None:
        self._copied.discard(key)
        snapshot = self._exports.pop(key).snapshot
        self._bytes -= 0 if snapshot is None else snapshot.nbytes()
        if not self._exports:
            self._listeners.call_after_nodes(self.after_nodes, False)

    def forget_dead(self) -> None:
        """Forget storages that died, and copies of their values."""
        if not self._sweep.is_due(len(self._exports) + len(self._saved)):
            return
        for key in [key for key, one in list(self._exports.items()) if one.weak.expired()]:
            self._drop(key)
        self._forget_copies()

    def _forget_copies(self) -> None:
        for place in [place for place, (storage, _) in list(self._saved.items()) if storage not in self._exports]:
            self._bytes -= self._saved.pop(place)[1].numel()


def _is_alone(array: weakref.ref[Any] | None) -> bool:
    """Whether a tensor is the only holder of the array that it was made of, and of those that this is a view of."""
    held = None if array is None else array()
    # The variable, the argument of the call, and the tensor.
    if held is None or sys.getrefcount(held) > _HOLDERS:
        return False
    while held.base is not None:
        if type(held.base) is not type(held) or sys.getrefcount(held.base) > _HOLDERS - 1:
            return False
        held = held.base
    return True


def _bytes_then(snapshot: Any, tensor: torch.Tensor) -> Any:
    whole = torch.empty(0, dtype=tensor.dtype).set_(snapshot)
    return _torch.bytes_of(whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))


def _is_unwritten(export: Export, storage: Any) -> bool:
    if export.snapshot is None:
        return False
    before, now = (torch.empty(0, dtype=torch.uint8).set_(one) for one in (export.snapshot, storage))
    return torch.equal(before, now)
