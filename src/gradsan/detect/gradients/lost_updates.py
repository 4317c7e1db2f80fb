"""Updates meant to be differentiated that are not, and samples of the leaves and gradients involved.

Gradients are taken with ``create_graph=True``, the leaves are updated with them outside the graph, and a later
backward takes its gradients at the new values, as if these were inputs.

This is a fault if nobody has differentiated those gradients before their graph was freed, and the leaves have moved
against them. Strong evidence is that the leaves then got their old values back (the gradient belongs to those), or that
the same two lines did it again. Checked at the 1st, 2nd, 4th, 8th … call of a line, by a few elements of each leaf.

Row: ``update_not_differentiated``. Roles: ``asked`` (the call with ``create_graph=True``), ``updated`` (its site;
``name`` is the leaf, ``op`` the operation; ``values``: ``shape``, ``dtype``, ``device`` and ``leaves``, their number).
"""

from __future__ import annotations

import collections
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from gradsan import _torch
from gradsan.detect.gradients.kept_gradients import by_gradient
from gradsan.detect.memory import Uncounted
from gradsan.graph import naming, walk
from gradsan.model import Clue, Failure
from gradsan.record.detector import Detector, Run
from gradsan.record.guarding import before_node
from gradsan.record.ledger import is_plain, some_elements
from gradsan.record.log import RawStack, logged_writes
from gradsan.record.stacks import symbolise, within_torch
from gradsan.record.steps import RawBackward, read_backward

ROW = "update_not_differentiated"
_KEPT = 32
_CALLS_AWAITED = 256
_NESTED = 8


@dataclass(slots=True)
class _State:
    open: list[Asked] = field(default_factory=list)
    moved: list[Asked] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    seen: collections.Counter[Any] = field(default_factory=collections.Counter)
    reported: set[Any] = field(default_factory=set)


class LostUpdates(Detector):
    """Searches for such updates; calls ``found`` with them, and ``listen(True)`` to be called before each backward."""

    def __init__(self, run: Run) -> None:
        """Start with no gradient taken by ``autograd.grad``."""
        self._core, self._steps, self._uncounted = run.core, run.steps, run.get(Uncounted)
        self._found, self._listeners = run.report, run.listeners
        self._wanted: collections.deque[int] = collections.deque(maxlen=_NESTED)
        self._state = _State()

    def forget(self) -> None:
        state = self._state
        for graph in [*(one.graph for one in (*state.open, *state.moved)), *(one.graph for one in state.lost)]:
            graph.let_go()
        self._state = _State()
        self._wanted.clear()
        self._listeners.call_before_backward(self.before_backward, False)

    def before_round(self, entry: RawBackward, rounds: int) -> None:
        """Note which calls to check; as ``on_round`` of the core."""
        self._wanted.append(entry.clock)

    @_torch.hushed()
    def differentiable(self, entry: RawBackward, inputs: Any, result: Any) -> None:
        """Note the gradients of a differentiable backward; as ``on_differentiable`` of the core."""
        clock, stack, thread, _, _, accumulates = entry
        is_wanted = clock in self._wanted
        if not is_wanted or _torch.is_compiling() or _torch.is_transformed():
            return
        if accumulates:
            order = walk.engine_order(read_backward(entry).roots)
            leaves = [one for one in walk.leaves_of(order) if not inputs or any(one is given for given in inputs)]
            pairs = [(leaf, leaf.grad) for leaf in leaves]
        else:
            pairs = list(zip(inputs, result, strict=False))
        pairs = [(leaf, grad) for leaf, grad in pairs if _torch.is_tensor(leaf) and grad is not None]
        made = [grad for _, grad in pairs if grad is not None and grad.grad_fn is not None]
        samples = samples_of(pairs) if made else []
        if samples:
            self._state.open.append(Asked(clock, stack, thread, samples, Graph(made), bool(accumulates)))
            self._listeners.call_before_backward(self.before_backward)

    @_torch.hushed()
    def before_backward(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the noted gradients and leaves; the arguments are those of ``listeners.BeforeBackward``."""
        state = self._state
        self._settle_lost()
        self._settle_open()
        state.moved = [one for one in state.moved if self._is_awaited(one)]
        if state.moved and not (len(args) > 2 and args[2]):
            self._look_at(entry, args)
        if not (state.open or state.moved or any(one.calls < _CALLS_AWAITED for one in state.lost)):
            self._listeners.call_before_backward(self.before_backward, False)

    @_torch.hushed()
    def settle(self) -> None:
        """Report, as watching ends, the updates whose gradients nobody has differentiated."""
        state = self._state
        self._settle_lost()
        for lost in state.lost:
            if not lost.graph.was_used and (lost.is_own or lost.is_strong):
                self._report(lost)
        self.forget()

    def _settle_open(self) -> None:
        """Check whether the leaves have moved, once, at the next call into the engine."""
        state = self._state
        waiting, state.open = state.open, []
        for one in waiting:
            one.samples = descended(one.samples)
            one.update = self._update(one) if one.samples else None
            # Gradient checks by differences are no update: torch moves the inputs, and restores them.
            is_own = one.update is not None and not within_torch(one.update.stack, one.stack)
            if is_own and len(state.moved) < _KEPT:
                state.moved.append(one)
            else:
                one.graph.let_go()

    def _is_awaited(self, one: Asked) -> bool:
        one.calls += 1
        lives = any(sample.leaf() is not None for sample in one.samples)
        if lives and one.calls <= _CALLS_AWAITED and not one.graph.was_used:
            return True
        one.graph.let_go()
        return False

    def _look_at(self, entry: RawBackward, args: tuple[Any, ...]) -> None:
        """Check whether this backward starts from values that the updates have left."""
        state, thread, stack = self._state, entry.thread, entry.stack
        # A line that differentiates only some of the times is no other use.
        own = [one for one in state.moved if one.thread == thread and one.stack is not stack]
        if not own:
            return
        last = own[-1]
        reached = self._reached(entry, args, last)
        if not reached:
            return
        state.moved = [one for one in state.moved if one.thread != thread]
        for one in own[:-1]:
            one.graph.let_go()
        before = {sample.storage: sample for one in reversed(own) for sample in one.samples}
        origin = [before[sample.storage] for sample in reached]
        failure = self._failure(entry, last, reached)
        key = (last.stack, stack)
        if entry.accumulates:
            state.seen[key] += 1
        if key not in state.reported and len(state.lost) < _KEPT:
            is_own = last.fills_grad or last.update is None or not last.update.by_grad
            state.lost.append(Lost(key, last.graph, origin, failure, is_own))
        else:
            last.graph.let_go()

    def _reached(self, entry: RawBackward, args: tuple[Any, ...], last: Asked) -> list[Sample]:
        assert last.update is not None
        backward = read_backward(entry)
        inputs = tuple(args[3]) if len(args) > 3 and args[3] else ()
        leaves: set[int] = set()
        for node in walk.engine_order(backward.roots, inputs, backward.via == "backward"):
            number = _torch.node_sequence(node)
            if number is not None and number >= last.update.sequence:
                leaves |= {id(getattr(child, "variable", None)) for child, _ in node.next_functions}
        return [sample for sample in last.samples if (leaf := sample.leaf()) is not None and id(leaf) in leaves]

    def _settle_lost(self) -> None:
        state = self._state
        waiting, state.lost = state.lost, []
        for lost in waiting:
            lost.calls += 1
            is_back = stand_again(lost.origin)
            lost.is_strong = lost.is_strong or is_back or (lost.is_own and state.seen[lost.key] > 1)
            if lost.graph.was_used or lost.key in state.reported:
                lost.graph.let_go()
            elif lost.is_strong and lost.graph.is_gone:
                self._report(lost)
            else:
                state.lost.append(lost)

    def _report(self, lost: Lost) -> None:
        if lost.key not in self._state.reported:
            self._state.reported.add(lost.key)
            strength = {"is_strong": "yes" if lost.is_strong else ""}
            failure = lost.failure
            self._found(Failure(failure.row, "", "", failure.site, failure.clues, strength, raised=False))

    def _update(self, one: Asked) -> Update | None:
        storages = {sample.storage for sample in one.samples}
        found = [
            Update(raw.clock, raw.stack, raw.op, raw.sequence, by_gradient(raw.stack))
            for raw in logged_writes(self._core, one.clock)
            if raw.storage in storages and raw.kind != "metadata"
        ]
        found += [
            Update(record.end, record.stack, f"{record.optimizer}.step", record.sequence, by_grad=True)
            for record in self._steps.steps
            if record.end is not None and record.end > one.clock and not storages.isdisjoint(record.storages)
        ]
        for sample in one.samples:
            leaf = sample.leaf()
            given = None if leaf is None else self._uncounted.replaced_since(leaf, one.clock)
            if given is not None:
                found.append(Update(given.clock, given.stack, "data =", given.sequence, by_gradient(given.stack)))
        return min(found, key=lambda update: update.clock, default=None)

    def _failure(self, entry: RawBackward, last: Asked, reached: list[Sample]) -> Failure:
        assert last.update is not None
        update, leaf = last.update, reached[0].leaf()
        name = None if leaf is None else naming.name_of(leaf, sys._getframe(1))
        values = {**({} if leaf is None else _torch.facts_of(leaf)), "leaves": len(reached)}
        updated = Clue("updated", symbolise(update.stack), name, update.op, values)
        return Failure(
            ROW, "", "", symbolise(entry.stack), (Clue("asked", symbolise(last.stack)), updated), raised=False
        )


class Graph:
    """The graph of some gradients, tracked by a hook that lives as long as one of its first Nodes does."""

    def __init__(self, gradients: list[Any], is_use: Callable[[], bool] = lambda: True) -> None:
        """Register hooks on the Nodes that made ``gradients``; ``is_use`` says whether a run counts."""
        self.was_used = False

        def used(_: Any) -> None:
            self.was_used = self.was_used or is_use()

        nodes = {gradient.grad_fn for gradient in gradients}
        self._alive = weakref.ref(used)
        self._handles = [before_node(node, used) for node in nodes]

    @property
    def is_gone(self) -> bool:
        """Whether the gradients can no longer be differentiated."""
        return self._alive() is None

    def let_go(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class Update(NamedTuple):
    """The first write to one of the leaves since their gradients were taken.

    ``by_grad`` says that it uses ``.grad``: an optimizer, or code that reads that attribute.
    """

    clock: int
    stack: RawStack
    op: str
    sequence: int
    by_grad: bool


@dataclass(slots=True)
class Asked:
    """A call that took gradients with ``create_graph=True``; ``update`` is known once leaves have moved.

    ``fills_grad`` distinguishes ``backward`` from ``grad``.
    """

    clock: int
    stack: RawStack
    thread: int
    samples: list[Sample]
    graph: Graph
    fills_grad: bool
    update: Update | None = None
    calls: int = 0


@dataclass(slots=True)
class Lost:
    """A finding to be reported if confirmed: ``origin`` are the leaves before the first of the updates.

    ``is_own`` says that the update is by these gradients as far as can be seen: not by others, in ``.grad``, of the
    same direction. ``is_strong``: strong evidence that the step is part of the computation.
    """

    key: tuple[Any, Any]
    graph: Graph
    origin: list[Sample]
    failure: Failure
    is_own: bool
    is_strong: bool = False
    calls: int = 0


_LEAVES = 64
_ALONG = 0.9
"""The share of moved elements that must move against the gradient: weight decay and momentum turn a few."""


class Sample(NamedTuple):
    """A leaf at an earlier time: its memory, and some elements of it and of its gradient (float64)."""

    leaf: _torch.weak_tensor
    storage: int
    values: Any
    gradient: _torch.weak_tensor


def samples_of(pairs: Iterable[tuple[Any, Any]]) -> list[Sample]:
    """Return samples of the first ``64`` pairs (leaf, gradient); only dense real leaves are taken."""
    found: list[Sample] = []
    with torch.no_grad():
        for leaf, gradient in pairs:
            if len(found) == _LEAVES:
                break
            if leaf.is_leaf and leaf.requires_grad and is_plain(leaf) and is_plain(gradient):
                storage = _torch.storage_or_none(leaf)
                found.append(Sample(_torch.weak_tensor(leaf), storage, some_elements(leaf), some_elements(gradient)))
    return found


def descended(samples: Iterable[Sample]) -> list[Sample]:
    """Return the leaves that have moved, if they have moved against their gradients, as in a descent; else none."""
    looked_at: list[Sample] = []
    counts: list[Any] = []
    with torch.no_grad():
        for one, leaf in _living(samples):
            now = some_elements(leaf)
            if now.shape == one.values.shape:
                moved = now - one.values
                looked_at.append(one)
                counts += [(moved != 0).sum(), (moved * one.gradient < 0).sum()]
        numbers = _torch.numbers_of(counts)
    moved = [one for one, total in zip(looked_at, numbers[::2], strict=True) if total]
    against, total = sum(numbers[1::2]), sum(numbers[::2])
    return moved if against and against >= _ALONG * total else []


def stand_again(samples: Iterable[Sample]) -> bool:
    """Whether all the leaves have their sampled values again; False where one of them is gone."""
    wanted = list(samples)
    with torch.no_grad():
        living = list(_living(wanted))
        if not living or len(living) < len(wanted):
            return False
        now = [(one.values, some_elements(leaf)) for one, leaf in living]
        if any(before.shape != after.shape for before, after in now):
            return False
        return not any(_torch.numbers_of([(before != after).any() for before, after in now]))


def _living(samples: Iterable[Sample]) -> Iterator[tuple[Sample, Any]]:
    for one in samples:
        leaf = one.leaf()
        if leaf is not None and is_plain(leaf):
            yield one, leaf
