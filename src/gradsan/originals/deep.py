"""Deep and heal mode: every saved tensor's original is kept, and compared when backward asks for it.

In *deep* mode backward gets the same as from PyTorch, errors included; in *heal* mode it gets the original. Under
saved-tensor hooks PyTorch checks no versions, so its check is done here, with its message.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.graph import naming, walk
from gradsan.model import Conflict, Deviation, Message
from gradsan.originals import comparing, side_backward
from gradsan.originals.comparing import Comparing, LiveValues, kept_in, saved_values
from gradsan.originals.default_hooks import DefaultHooks, HandedOut, relays
from gradsan.originals.emptied import Emptied, freed
from gradsan.originals.originals import Kept, KnownOutside, Storages, cloned
from gradsan.record.log import Core, RawStack
from gradsan.record.patches import Patches
from gradsan.record.steps import RawBackward, running_here
from gradsan.record.user_hooks import TensorHooks

if TYPE_CHECKING:
    from gradsan.originals.held_memory import DeviceCopies, Holdings

Mode = Literal["deep", "heal"]
_LEAVES_MEASURED = 1_000


class Deep:
    """The saved-tensor hooks of a run.

    ``describe(kept, counted, raised, changed, deviation, healed)`` makes the conflict of a changed value, ``keep``
    takes a function that makes one. ``is_healed`` takes such a function and says whether that conflict is to be healed.
    """

    measures: ClassVar[bool] = True
    """Whether the effect of a changed value on the gradients is measured in this process, by two more backwards."""

    def __init__(
        self,
        core: Core,
        describe: Callable[..., Conflict],
        keep: Callable[[Callable[[], Conflict]], None],
        is_healed: Callable[[Callable[[], Conflict]], bool],
        emptied: Emptied,
        note: Callable[[Message], None],
        left_alone: Storages,
    ) -> None:
        """Prepare; nothing is installed yet. ``emptied`` has the memory that was taken away.

        No originals are kept of values in ``left_alone``.
        """
        self.mode: Mode = "deep"
        self.is_on = False
        self._holdings: Holdings | None = None
        self.copies: DeviceCopies | None = None
        self._core, self.left_alone = core, left_alone
        self.describe, self._keep, self._is_healed, self._emptied, self._note = describe, keep, is_healed, emptied, note
        self._reading: Literal["", "original", "current"] = ""
        self._node_aside: Any = None
        self._deviation: Deviation | None = None
        self._changed_before, self._measured_with = set[int](), set[int]()
        self._known_outside = KnownOutside(core)
        self._tensor_hooks, self._handed_out = TensorHooks(core), HandedOut(core)
        pack, unpack = relays(core, self._pack, self._unpack)
        exempt = (self._known_outside.storages, left_alone.storages)
        self._values = saved_values(core, pack, unpack, exempt, self._handed_out.readers)
        self._comparing, self.live = Comparing(core, self._known_outside), LiveValues(self._values)
        shown = _torch.shown_when_read(unpack)
        self._hooks = DefaultHooks(core, self._values.pack, self._values.unpack if shown is unpack else shown, note)

    @property
    def holdings(self) -> Holdings | None:
        """The record of the originals' memory, if a stretch demands it; else None."""
        return self._holdings

    @holdings.setter
    def holdings(self, holdings: Holdings | None) -> None:
        self._holdings = holdings
        self._values.on_kept = None if holdings is None else holdings.add

    @property
    def is_measuring(self) -> bool:
        """Whether a backward on the side is running."""
        return bool(self._reading)

    def start(self, patches: Patches) -> None:
        """Install the hooks in this thread and in those that start from now on."""
        from gradsan.originals.held_memory import DeviceCopies

        self.is_on = True
        self.copies = DeviceCopies()
        patches.on_undo(self._stopped)
        _torch.learn_words()
        self._hooks.install(patches)
        self._known_outside.install(patches)
        self._tensor_hooks.install(patches)
        self._handed_out.install(patches)

    def _stopped(self) -> None:
        self.is_on = False

    def before_backward(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the graph before the engine runs; where a saved value has changed, measure the effect."""
        if self._reading:
            return
        with _torch.hushed() if _torch.has_modes() else nullcontext():
            self._look_at_graph(entry, args)

    def _look_at_graph(self, entry: RawBackward, args: tuple[Any, ...]) -> None:
        if self.holdings is not None and self.holdings.max_bytes is not None:
            self.holdings.look_at_all()
        self._deviation, self._changed_before = None, set()
        inputs = tuple(args[3]) if len(args) > 3 and args[3] else ()
        since = walk.oldest_of(inputs)
        if self._comparing.are_as_saved(self.live, since > 0):
            return
        outputs = entry.outputs
        roots = [node for one in outputs if (node := getattr(one, "grad_fn", None)) is not None]
        order = walk.engine_order(roots, since=since)
        reached = list(kept_in(order))
        self.live.walked(len(reached), since > 0)
        suspects = {
            id(kept): kept
            for node, slot, kept in reached
            # A change by its own kernel, of a value that backward does not read, is no reason to run anything.
            if not kept.is_as_saved and (kept.moved or _torch.is_read_by_backward(node, slot))
        }
        changed = {id(kept): kept for kept in self._comparing.changed_among(suspects.values())}
        self._changed_before = set(changed)
        # Parts of a wrapper subclass are compared, but the wrapper is not rebuilt: there is nothing to measure with.
        if self.measures and changed and all(kept.original is not None for kept in changed.values()):
            asked_for = list(inputs or walk.leaves_of(order))
            order = walk.engine_order(roots, inputs, accumulates=False) if inputs else order
            keeps = bool(args[1]) if len(args) > 1 else False
            self._deviation = self._measured(outputs, args[0] if args else None, asked_for, order, keeps)
            self._measured_with = set(changed)

    def _measured(
        self, outputs: Any, gradients: Any, leaves: list[Any], order: list[Node], keeps_graph: bool
    ) -> Deviation | None:
        """Run the backward twice on the side, with the originals and with the current values.

        ``leaves`` are the tensors whose gradients are wanted; ``torch.autograd.grad`` may want those of any tensor or
        edge. Of the program's own code only pure computation is run for it; beyond other code the effect is unknown.
        """
        if _torch.may_communicate(order):
            self._note(Message("blind.not_measured_among_ranks"))
            return None
        if not leaves or len(leaves) > _LEAVES_MEASURED:
            return None
        passed_over: set[str] = set()
        found = self._both(outputs, gradients, leaves, order, passed_over.add, keeps_graph)
        if found is None:
            return None
        errors = []
        for leaf, right, wrong in zip(leaves, *found, strict=True):
            if any(one is None or one is side_backward.UNKNOWN for one in (right, wrong)):
                continue
            error = comparing.relative_error(right, wrong)
            if not comparing.is_rounding(error, right):
                name = naming.name_of(leaf, sys._getframe(1)) if torch.is_tensor(leaf) else None
                errors.append((name or str(tuple(right.shape)), error))
        for what in sorted(passed_over):
            self._note(Message("blind.not_measured_past_own_code", {"what": what}))
        # Gradients beyond code that was passed over are unknown, and so is the effect if all others are right.
        return Deviation(tuple(sorted(errors, key=lambda one: -one[1]))) if errors or not passed_over else None

    def _both(
        self,
        outputs: Any,
        gradients: Any,
        leaves: list[torch.Tensor],
        order: list[Node],
        passed_over: Callable[[str], None],
        keeps_graph: bool,
    ) -> list[list[Any]] | None:
        """Return the gradients with the originals and with the current values; None where a Node fails.

        Where a hook of the program's that is not called would get another gradient, its result counts as unknown.
        """
        closed: frozenset[tuple[Any, int]] = frozenset()
        while True:
            found, reached = [], []
            for reading in ("original", "current"):
                hooks = side_backward.HooksOnTheWay(self._tensor_hooks.at, closed)
                with self._giving(reading), torch.random.fork_rng(devices=[]), _torch.without_dispatch_modes():
                    try:
                        found.append(
                            side_backward.gradients(
                                outputs,
                                gradients,
                                leaves,
                                order,
                                self._runs_aside,
                                passed_over,
                                hooks,
                                keeps_graph=keeps_graph,
                            )
                        )
                    except RuntimeError:
                        return None
                reached.append(hooks.reached)
            others = frozenset(
                place for place, one in reached[0].items() if not comparing.is_same(one, reached[1].get(place))
            )
            if not others:
                return found
            closed |= others

    def hooks_on_the_way(self) -> Callable[[Any], list[tuple[int, list[Any]]]]:
        """Return the function that returns the program's gradient hooks at a Node."""
        return self._tensor_hooks.at

    def gradients_aside(
        self, output: object, given: Any, leaves: list[Any], order: list[Node], hooks: side_backward.HooksOnTheWay
    ) -> list[Any] | None:
        """Return the gradients of ``leaves`` by a backward on the side; None where that is not possible."""
        passed_over: list[str] = []
        with self._giving("current"), torch.random.fork_rng(devices=[]), _torch.without_dispatch_modes():
            try:
                found = side_backward.gradients(
                    [output], given, leaves, order, self._runs_aside, passed_over.append, hooks, keeps_graph=True
                )
            except RuntimeError:
                return None
        return None if passed_over else found

    def _runs_aside(self, node: torch.autograd.graph.Node) -> None:
        self._node_aside = node

    def _running_node(self) -> Any:
        return self._node_aside if self._reading else _torch.current_node()

    @contextmanager
    def _giving(self, reading: Any) -> Iterator[None]:
        """A block in which backward gets the values chosen by ``reading``; it reports nothing and logs no event."""
        core, values = self._core, self._values
        was = core.active, values.is_off
        core.active, values.is_off, self._reading = False, True, reading
        try:
            yield
        finally:
            (core.active, values.is_off), self._reading, self._node_aside = was, "", None

    def _pack(self, tensor: torch.Tensor) -> tuple[Kept]:
        with _torch.hushed() if _torch.has_modes() else nullcontext():
            return (self._kept(tensor),)

    def _kept(self, tensor: torch.Tensor) -> Kept:
        core = self._core
        if self._reading or not core.active:
            kept = Kept(tensor, False, core.clock, core.stack(2), threading.get_ident())
            if not self._reading:
                self._values.add(kept)
            return kept
        core.clock += 1
        stack = core.stack(2)
        if not stack.codes and (running := running_here(core)) is not None:
            stack = running[1]  # a thread of the engine makes Nodes for the call that is waiting
        return self.keep_original(tensor, core.clock, stack)

    def keep_original(self, tensor: torch.Tensor, clock: int, stack: RawStack) -> Kept:
        """Return a value that was saved just now, with its original. Raises as :meth:`Holdings.add`."""
        shared = _torch.shared_of(tensor)
        storage = _torch.storage_or_none(tensor if shared is None else shared)
        known, keeps = self._known_outside.holds(storage), not self.left_alone.holds(storage)
        copied = cloned if self.copies is None else self.copies.copied
        thread = threading.get_ident()
        kept = Kept(tensor, known, clock, stack, thread, keeps_original=keeps, shared=shared, copied=copied)
        if kept.original is None and keeps:
            self._look_inside(kept)
        self._values.add(kept)
        if self.holdings is not None:
            self.holdings.add(kept)
        return kept

    def _look_inside(self, kept: Kept) -> None:
        """Keep the inner tensors of a wrapper; for any other value without an original, note why."""
        if _torch.has_elements(kept.alias):
            self._note(Message("blind.no_memory_for_originals", {"device": str(kept.alias.device)}))
            return
        inner = _torch.inner_tensors(kept.alias)
        kept.parts = tuple(self.keep_original(one, kept.clock, kept.stack) for _, one in inner)
        if not inner and _torch.has_values(kept.alias):
            self._note(Message("blind.kind_not_kept", {"kind": _torch.kind_of(kept.alias)}))

    def given_aside(self, kept: Kept) -> Any:
        """Return the value for a backward on the side."""
        is_given = self._reading == "original" and kept.original is not None
        return kept.original if is_given and not (kept.changed and self._is_filled_after_save(kept)) else kept.current

    def deviation_of(self, kept: Kept) -> Deviation | None:
        """Return the effect of a changed value, if measured: not after a write by a hook in the same backward."""
        return self._deviation if id(kept) in self._measured_with else None

    def _unpack(self, kept: Kept) -> tuple[Any] | None:
        self._handed_out.unpacks(kept)
        if kept.hooks is not None:
            if self._reading:
                raise side_backward.NotOnTheSideError(side_backward.name_of(kept.hooks[1]))
            return None
        if _torch.has_modes():
            with _torch.hushed():
                return (self._handed(kept),)
        return (self._handed(kept),)

    def _handed(self, kept: Kept) -> Any:
        """Return a value for its reader: Python code gets the very tensor, a kernel memory that is no lazy clone."""
        is_as_saved = kept.is_as_saved
        if is_as_saved and not self._reading and self._is_refused(kept):
            raise RuntimeError(_torch.DETACHED)
        value = kept.alias if is_as_saved else self._given(kept)
        if self._is_kernel():
            if is_as_saved:
                return _torch.lent(value, kept.original)
            # Only the original itself is sure to keep its memory.
            return _torch.without_sharing(value, value if value is kept.original else None)
        if kept.original is not None and value is kept.original:
            return kept.original.clone()  # the reader may write to it, and must not write to the original
        very = None if kept.requires_grad or value is not kept.alias else kept.very_tensor
        return value if very is None else very

    def _is_refused(self, kept: Kept) -> bool:
        """Whether PyTorch would refuse the value because it was detached; custom Functions get it nevertheless."""
        return kept.is_detached and not self._handed_out.is_asked_by_function()

    def _is_kernel(self) -> bool:
        """Whether a slot is being read by a kernel, not by Python code."""
        if not (self._core.running or self._reading):
            return False
        out = self._handed_out
        if not out.knows_readers:
            return _torch.function_class(self._running_node()) is None
        return not out.is_asked_by_function()

    def _given(self, kept: Kept) -> Any:
        if self._emptied.since(kept.alias, kept.clock) is not None and kept.is_emptied:
            return self._of_emptied(kept)
        if self._reading:
            return self.given_aside(kept)
        if self._is_refused(kept):
            raise RuntimeError(_torch.DETACHED)
        moved, changed = kept.moved, self._comparing.has_changed(kept)
        if not (moved or changed):
            return kept.alias
        if not moved:
            node = _torch.current_node()
            if node is None:  # a compiler of backwards reads all slots of the graph before any Node runs
                is_meant = id(kept) in self._changed_before
            else:
                slot = _torch.slot_of(node, kept)
                is_meant = _torch.is_read_by_backward(node, slot) and not _torch.is_filled_after_save(node, slot)
            if not is_meant:
                return kept.current
        heals = self.heals(kept, lambda: self.describe(kept, moved, moved, changed, None, None))
        deviation = self.deviation_of(kept) if changed else self._deviation
        worth = comparing.rank_of_found(moved and not heals, changed, deviation)
        if worth > kept.reported:
            healed = kept.nbytes if heals and changed else None
            kept.reported = worth
            self._keep(lambda: self.describe(kept, moved, moved and not heals, changed, deviation, healed))
        if heals:
            return kept.original
        if moved:
            error = RuntimeError(kept.version_error(_torch.current_node()))
            error._gradsan_seen = True  # type: ignore[attr-defined]
            raise error
        return kept.current

    def handed_by_hooks(self, result: Any) -> Any:
        """Return the result of the program's unpack hook in the form for the running Node."""
        if not self.is_on or not torch.is_tensor(result) or not self._is_kernel():
            return result
        with _torch.hushed() if _torch.has_modes() else nullcontext():
            return _torch.without_sharing(result, None)

    def _of_emptied(self, kept: Kept) -> Any:
        """Return the value for backward where its memory has been taken away."""
        node = self._running_node()
        if node is not None and _torch.function_class(node) is not None:
            return kept.alias  # its own code may be about to restore the memory
        slot = _torch.slot_of(node, kept)

        def describe(healed: int | None = None) -> Conflict:
            return self._emptied.conflict(node, slot, kept.alias, kept.clock, kept.stack, frame, healed)

        frame = sys._getframe(1)
        if self._reading:
            heals = self._reading == "original" and kept.original is not None
        else:
            heals = self.heals(kept, describe)
            if not kept.reported:
                kept.reported = comparing.WORTH_MOST
                self._keep(lambda: describe(kept.nbytes if heals else None))
        if heals:
            return kept.original
        raise freed(kept.alias)

    def _is_filled_after_save(self, kept: Kept) -> bool:
        node = self._running_node()
        return _torch.is_filled_after_save(node, _torch.slot_of(node, kept))

    def heals(self, kept: Kept, describe: Callable[[], Conflict]) -> bool:
        """Whether backward gets the original."""
        if self.mode != "heal" or kept.original is None:
            return False
        if kept.heals is None:
            kept.heals = self._is_healed(describe)
        return kept.heals
