"""Memory taken away from under a saved value: ``untyped_storage().resize_(0)`` between save and backward.

PyTorch does not check: its kernels read missing memory, and the process crashes. Whether the memory is back is checked
right before the Node that needs it runs, because sharded training restores it in hooks while backward runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan._errors import MemoryFreedError
from gradsan.graph import conflicts, naming, walk
from gradsan.model import Conflict, Message, Write
from gradsan.originals.kept_conflicts import PastCounter
from gradsan.originals.originals import fits_its_memory
from gradsan.record.detector import Detector, Run, Sweep
from gradsan.record.guarding import before_node
from gradsan.record.ledger import call_that_made
from gradsan.record.log import RawStack
from gradsan.record.patches import Patches, standing
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward, read_backward

BYPASS = "storage_emptied"
"""The slug of the cause GS209."""


class Shrunk(NamedTuple):
    """A storage that was made smaller, when and where; ``weak`` tells whether it lives."""

    weak: Any
    clock: int
    stack: RawStack
    sequence: int
    step: int


class Emptied(Detector):
    """The live storages of this process that were made smaller."""

    part = "bypasses"

    def __init__(self, run: Run) -> None:
        self._core, self._steps, self._listeners, self._keep = run.core, run.steps, run.listeners, run.keep
        self._shrunk: dict[int, Shrunk] = {}
        self._sweep = Sweep()

    def install(self, patches: Patches, guard: Callable[[Callable[[], object]], None]) -> None:
        """Watch ``UntypedStorage.resize_`` until ``patches`` is undone."""
        core, resize = self._core, standing(torch.UntypedStorage, "resize_")
        if resize is None:
            return

        def resizes(args: tuple[Any, ...], _: dict[str, Any]) -> Any:
            return None if _torch.is_compiling() else args[0].nbytes()

        def resized(before: int, args: tuple[Any, ...], _: dict[str, Any], __: Any) -> None:
            if args[0].nbytes() < before:
                stack = core.stack(1)
                guard(lambda: self._note(args[0], stack))

        patches.set(torch.UntypedStorage, "resize_", core.listener(resize, resizes, resized))

    def _note(self, storage: Any, stack: RawStack) -> None:
        core = self._core
        self._forget_dead()
        self._shrunk[int(storage._cdata)] = Shrunk(
            _torch.weak_storage(storage), core.tick(), stack, _torch.sequence_number(), core.steps
        )
        self._listeners.call_before_backward(self.before_backward)

    def since(self, tensor: torch.Tensor, clock: int) -> Shrunk | None:
        """Return the shrinking of ``tensor``'s storage after ``clock``, even if the memory is back; else None."""
        found = self._shrunk.get(_torch.storage_or_none(tensor)) if self._shrunk else None
        return found if found is not None and found.clock > clock and not found.weak.expired() else None

    def bypass(self, tensor: torch.Tensor, clock: int) -> PastCounter | None:
        """Return the same as a write past the counter."""
        found = self.since(tensor, clock)
        return None if found is None else PastCounter(BYPASS, symbolise(found.stack))

    def before_backward(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Register hooks on Nodes that saved such a value, to check it right before they run.

        The arguments are those of ``listeners.BeforeBackward``. The code of a custom Function may restore the memory
        itself, and is left alone; deep mode checks its kept values on unpacking.
        """
        self._forget_dead()
        if not self._shrunk:
            return
        backward = read_backward(entry)
        inputs = tuple(args[3]) if len(args) > 3 and args[3] else ()
        for node in walk.engine_order(backward.roots, inputs, backward.via == "backward"):
            if _torch.function_class(node) is not None:
                continue
            for slot, saved in _torch.saved_slots(node):
                tensor = _torch.packed_object(saved)
                if torch.is_tensor(tensor) and not _torch.is_hooked(saved) and not fits_its_memory(tensor):
                    self._look_when_it_runs(node, slot, backward.thread)

    def _look_when_it_runs(self, node: Node, slot: str, thread: int) -> None:
        # The hook belongs to the Node; holding the Node would keep it alive for good.
        def look(_: Any) -> None:
            handle.remove()
            running = _torch.current_node()
            saved = None if running is None else dict(_torch.saved_slots(running)).get(slot)
            tensor = None if saved is None else _torch.packed_object(saved)
            if not self._core.active or not torch.is_tensor(tensor) or fits_its_memory(tensor):
                return
            try:
                _torch.read_slot(running, slot.partition("[")[0])
            except RuntimeError:
                return  # PyTorch's own check raises before it reads the memory, and names the cause
            self._stop(running, slot, tensor, thread)

        handle = before_node(node, look)

    def _stop(self, node: Node, slot: str, tensor: torch.Tensor, thread: int) -> None:
        made = call_that_made(self._core, _torch.node_sequence(node), thread)
        clock, stack = (made.clock, made.stack) if made is not None else (0, None)
        frame = sys._getframe(1)
        self._keep(lambda: self.conflict(node, slot, tensor, clock, stack, frame))
        raise freed(tensor)

    def conflict(
        self,
        node: Node,
        slot: str | None,
        tensor: torch.Tensor,
        clock: int,
        stack: RawStack | None,
        frame: FrameType,
        healed: int | None = None,
    ) -> Conflict:
        """Return the conflict of a value saved at ``clock`` and ``stack`` that backward asks for now.

        ``healed`` as in the Conflict; variables are searched from ``frame``.
        """
        core, steps = self._core, self._steps
        backward = steps.current_backward()
        version = 0 if tensor.is_inference() else int(tensor._version)
        found = self.since(tensor, clock)
        writes = () if found is None else (_write(found),)
        info = conflicts.tensor_info(tensor, was_leaf=tensor.is_leaf and tensor.requires_grad)
        return Conflict(
            save=conflicts.save_of(core, steps, clock, stack, info, version, node, slot),
            writes=writes,
            use=conflicts.use_of(core, backward, version),
            names=naming.names_of(tensor, frame),
            root_sequence=backward.root_sequence if backward else None,
            raised=healed is None,
            bypass=BYPASS,
            alias_site=writes[0].site if writes else None,
            healed_bytes=healed,
        )

    def _forget_dead(self) -> None:
        if self._sweep.is_due(len(self._shrunk)):
            for key in [key for key, one in self._shrunk.items() if one.weak.expired()]:
                del self._shrunk[key]


def freed(tensor: torch.Tensor) -> MemoryFreedError:
    """Return the error for a value whose memory is gone."""
    values = {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "bytes": tensor.untyped_storage().nbytes()}
    error = MemoryFreedError(Message("error.memory_freed", values))
    error._gradsan_seen = True  # type: ignore[attr-defined]
    return error


def _write(found: Shrunk) -> Write:
    return Write(
        clock=found.clock,
        site=symbolise(found.stack),
        op="resize_",
        kind="op",
        version=None,
        region=None,
        sequence=found.sequence,
        step=found.step,
    )
