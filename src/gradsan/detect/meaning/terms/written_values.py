"""Values with a graph that are written into other memory past autograd, where the forward reads them as data.

``self.layer.weight.data.copy_(hyper(task))``, ``packed[i, :n] = features`` under ``no_grad``, an adapter merged into a
buffer: what computed the value gets no gradient. Writes are followed in some rounds, before the first backward, too. A
write counts if it comes again in a later round, if a result with a graph is computed from the memory that it wrote, and
if no parameter near the value was reached by a backward or changed until the end, while some optimizer has one. Of a
value with a graph each parameter counts by itself. A program without any optimizer may differentiate only once: then
one round is enough for a value with a graph in a variable's memory that is no parameter's, and that is not compared
with others, as a target is; what an object keeps may be a memory bank.

Networks are often frozen on purpose, so the value must have its graph when it is written, and nothing computed from the
same parameters is detached; or it is made of parameters alone, under ``no_grad``; or it is detached, but written into a
parameter, whose own gradient the loss computes.

Row: ``value_written_past``. Roles: ``parameter`` (the first parameter near the value; ``values``: ``shape``, ``dtype``,
``device``, ``parameters``, their number, and ``is_copied``, whether it was written itself), ``written`` (the write;
``op``; ``name`` of the memory; ``values`` as above), ``holder`` (the optimizer).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gradsan import _torch
from gradsan.detect.meaning.made import Making
from gradsan.detect.meaning.rounds import RoundDetector
from gradsan.detect.meaning.terms.constant_terms import leaves_near
from gradsan.detect.meaning.terms.cut_terms import CutTerms
from gradsan.detect.meaning.terms.drawn_samples import COMPARES
from gradsan.detect.memory import Uncounted
from gradsan.graph import naming, walk
from gradsan.model import Clue, Frame
from gradsan.record.detector import Run
from gradsan.record.ledger import Noted
from gradsan.record.log import RawStack
from gradsan.record.stacks import is_called_by_program, symbolise
from gradsan.record.steps import RawBackward, read_backward

ROW = "value_written_past"
_LINES, _FOLLOWED, _ROUNDS = 32, 1_024, 2
_GIVEN = "data ="
"""The operation that gives a tensor the memory of a value."""


@dataclass(slots=True, eq=False)
class _Written:
    """Writes of one line: their memory and the leaves near what was written, weakly held.

    ``rounds`` is how many rounds had one; ``is_whole`` whether what was written was meant to be trained for all that
    the write shows: if not, it counts where the memory is that of a parameter of the loss (``is_parameter``).
    ``has_graph``: all that was written has its graph. ``is_copied``: it was a parameter itself.
    """

    stack: RawStack
    op: str
    name: str | None
    facts: dict[str, Any]
    storage: int
    leaves: dict[int, _torch.weak_tensor]
    is_whole: bool
    has_graph: bool
    is_copied: bool
    rounds: int = 0
    is_read: bool = False
    is_compared: bool = False
    is_parameter: bool = False
    is_trained: bool = False
    noted: Noted | None = None
    backward: RawStack | None = None
    clues: tuple[Clue, ...] = ()

    @property
    def counts(self) -> bool:
        is_meant = self.is_whole or self.is_parameter
        is_seen = self.is_alone or (self.is_owned and self.rounds >= _ROUNDS)
        return is_meant and self.is_read and is_seen and not self.is_trained and bool(self.clues)

    @property
    def is_owned(self) -> bool:
        """Whether an optimizer has one of the leaves."""
        return any(clue.role == "holder" for clue in self.clues)

    @property
    def is_alone(self) -> bool:
        """Whether the write shows by itself that its value was meant to be trained."""
        is_local = self.name is not None and "." not in self.name
        return self.has_graph and is_local and not self.is_parameter and not self.is_compared


class _Kind(NamedTuple):
    is_whole: bool
    has_graph: bool
    is_copied: bool


class _Held(NamedTuple):
    """A result without a graph: the writes whose memory it was computed from, and its leaves if of parameters alone."""

    weak: _torch.weak_tensor
    read: tuple[_Written, ...]
    leaves: tuple[_torch.weak_tensor, ...]


class WrittenValues(RoundDetector):
    """Follows such writes in some rounds; reports as watching ends."""

    from_start = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._steps, self._making, self._left = run.steps, run.get(Making), run.get(CutTerms).left
        self._lines = self._notes(dict[Frame, _Written]())
        self._written = dict[int, tuple[_torch.weak_storage, tuple[_Written, ...]]]()
        """By the memory that was written, whose number no other memory gets while its weak reference is held."""
        self._seen = set[int]()
        self._held = dict[int, _Held]()
        self._made = dict[int, _torch.weak_tensor]()
        self._cut = dict[int, tuple[_torch.weak_storage, tuple[_torch.weak_tensor, ...]]]()
        """By the memory of a value whose graph was left by ``detach`` or ``.data``: the trainable leaves near it."""
        for listening in (run.get(Uncounted).on_data_read, run.get(CutTerms).on_detached):
            listening.append(self._left_graph)
        run.get(Uncounted).on_replaced.append(self._replaced)

    def begins(self, entry: RawBackward) -> bool:
        """Drop what was followed in the round before."""
        for one in (self._written, self._seen, self._held, self._made, self._cut):
            one.clear()
        return True

    def result(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Follow what is written, and what is computed from it."""
        given = _torch.tensors_of_call(args, kwargs)
        out = kwargs.get("out")
        if _is_write(op) and given and given[0] is args[0]:
            self._write(op, given[0], given[1:])
        elif isinstance(out, torch.Tensor):
            self._write(op, out, [one for one in given if one is not out])
        else:
            self._read(op, given, _torch.tensors_in(result))

    def _replaced(self, target: torch.Tensor, given: torch.Tensor, _: object, stack: RawStack) -> None:
        if self._is_of_thread():
            self._write(_GIVEN, target, [given], stack)

    def _left_graph(self, value: torch.Tensor) -> None:
        """Note the leaves of a value that may be gone when what was detached from it is written."""
        node = _node_of(value) if self._is_of_thread() and len(self._cut) < _FOLLOWED else None
        if node is not None and (storage := _torch.storage_or_none(value)):
            leaves = tuple(map(_torch.weak_tensor, leaves_near(node)))
            self._cut[storage] = _torch.weak_storage(value.untyped_storage()), leaves

    def _write(self, op: str, target: torch.Tensor, values: list[torch.Tensor], stack: RawStack | None = None) -> None:
        storage = _torch.storage_or_none(target)
        read = self._read_from(values)
        leaves, is_whole, has_graph = dict[int, torch.Tensor](), False, True
        # ``x[i] += y`` ends with an assignment of the view that it has written already.
        for one in (one for one in values if op == _GIVEN or _torch.storage_or_none(one) != storage):
            own, is_own_whole = self._leaves_of(one)
            before = len(leaves)
            leaves.update((id(leaf), leaf) for leaf in own)
            is_whole = is_whole or is_own_whole
            has_graph = has_graph and (_node_of(one) is not None or len(leaves) == before)
        kind = _Kind(is_whole, has_graph, len(leaves) == 1 and any(one is leaves.get(id(one)) for one in values))
        line = self._line(op, target, leaves, kind, stack) if storage and leaves else None
        if line is not None:
            read = (*read, line)
        if storage and read:
            weak, known = self._written.get(storage) or (_torch.weak_storage(target.untyped_storage()), ())
            if len(self._written) < _FOLLOWED or known:
                self._written[storage] = weak, tuple(dict.fromkeys((*known, *read)))

    def _line(
        self, op: str, target: torch.Tensor, leaves: dict[int, torch.Tensor], kind: _Kind, stack: RawStack | None
    ) -> _Written | None:
        storage = _torch.storage_or_none(target)
        # A parameter that is written itself, as by an average of weights, is no memory for what others compute.
        if any(_torch.storage_or_none(leaf) == storage for leaf in leaves.values()):
            return None
        stack = stack or self._core.stack()
        frame = symbolise(stack).user_frame if is_called_by_program(stack) else None
        if frame is None:
            return None
        known = self._lines.get(frame)
        if known is None:
            if len(self._lines) >= _LINES or not self.is_before_first_backward:
                return None
            name, facts = _name_of(storage), _torch.facts_of(target)
            known = _Written(stack, op, name, facts, storage, {}, *kind)
            self._lines[frame] = known
        if id(known) not in self._seen:
            self._seen.add(id(known))
            known.rounds += 1
            known.storage = storage
        if self.is_before_first_backward:
            known.leaves.update((key, _torch.weak_tensor(leaf)) for key, leaf in leaves.items())
        return known

    def _leaves_of(self, value: torch.Tensor) -> tuple[Iterable[torch.Tensor], bool]:
        """Return trainable leaves near a value, and whether it was not detached."""
        node = _node_of(value)
        if node is not None:
            return leaves_near(node), True
        if _torch.is_trainable_leaf(value):
            return (value,), not _torch.is_grad_enabled()
        held = self._held_as(value)
        if held is not None and held.leaves:
            return [leaf for weak in held.leaves if (leaf := weak()) is not None], True
        weak = self._made.get(_torch.storage_or_none(value))
        made = None if weak is None else weak()
        node = None if made is None else _node_of(made)
        if node is not None:
            return leaves_near(node), False
        _, cut = self._cut.get(_torch.storage_or_none(value), (None, ()))
        return [leaf for one in cut if (leaf := one()) is not None], False

    def _held_as(self, value: torch.Tensor) -> _Held | None:
        held = self._held.get(id(value))
        return held if held is not None and held.weak() is value else None

    def _read_from(self, given: list[torch.Tensor]) -> tuple[_Written, ...]:
        found = dict[_Written, None]()
        for one in given:
            if self._written:
                _, written = self._written.get(_torch.storage_or_none(one), (None, ()))
                found.update(dict.fromkeys(written))
            if (held := self._held_as(one)) is not None:
                found.update(dict.fromkeys(held.read))
        return tuple(found)

    def _read(self, op: str, given: list[torch.Tensor], made: Iterable[torch.Tensor]) -> None:
        read = self._read_from(given)
        leaves = self._composed(given)
        for one in made:
            if one.requires_grad:
                for written in read:
                    written.is_read = True
                    written.is_compared = written.is_compared or op in COMPARES or "loss" in op or "entropy" in op
                if len(self._made) < _FOLLOWED:
                    self._made[_torch.storage_or_none(one)] = _torch.weak_tensor(one)
            elif (read or leaves) and len(self._held) < _FOLLOWED:
                self._held[id(one)] = _Held(_torch.weak_tensor(one), read, leaves)
            else:
                self._held.pop(id(one), None)

    def _composed(self, given: list[torch.Tensor]) -> tuple[_torch.weak_tensor, ...]:
        """Return the trainable leaves of a value computed unrecorded of parameters alone; empty for others."""
        if _torch.is_grad_enabled():
            return ()
        found = list[_torch.weak_tensor]()
        for one in given:
            held = self._held_as(one)
            if held is not None and held.leaves:
                found += held.leaves
            elif _torch.is_trainable_leaf(one):
                found.append(_torch.weak_tensor(one))
            elif not isinstance(one, torch.nn.Parameter):
                return ()
        return tuple(found)

    def looks(self, entry: RawBackward, is_last: bool) -> None:
        """Note what this backward reaches, and which optimizer has the parameters."""
        lines = [one for one in self._lines.values() if not one.is_trained]
        if not lines:
            return
        leaves = walk.leaves_of(walk.engine_order(read_backward(entry).roots))
        reached, storages = {id(one) for one in leaves}, {_torch.storage_or_none(one) for one in leaves}
        for one in lines:
            own = [leaf for weak in one.leaves.values() if (leaf := weak()) is not None]
            one.is_parameter = one.is_parameter or one.storage in storages
            still = [leaf for leaf in own if id(leaf) not in reached and leaf.grad is None]
            one.is_trained = not still if one.has_graph else len(still) < len(own)
            if one.is_trained:
                continue
            if one.has_graph:
                own, one.leaves = still, {id(leaf): _torch.weak_tensor(leaf) for leaf in still}
            if any((left := self._left(leaf)) is not None and left.how == "detached" for leaf in own):
                one.is_whole = False  # what is read beside the memory is cut off on purpose
            one.noted = one.noted or Noted(self._core, own)
            one.backward = entry.stack
            owned = self._owned(own)
            if not one.clues and (owned is not None or (one.is_alone and not self._making.has_optimizer(leaves))):
                leaf, holder = owned or (max(own, key=torch.Tensor.dim), None)
                one.clues = _clues(one, leaf, holder, own)

    def _owned(self, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, str] | None:
        """Return the first of the leaves that an optimizer has, and the optimizer's class."""
        for optimizer, _ in self._making.optimizers():
            own = {id(one) for one in leaves}
            first = next((one for one in _torch.parameters_of(optimizer) if id(one) in own), None)
            if first is not None:
                return first, type(optimizer).__name__
        return None

    def settle(self) -> None:
        """Report the writes whose values nothing has trained until the end."""
        super().settle()
        told = set[frozenset[int]]()
        for one in self._lines.values():
            own = [leaf for weak in one.leaves.values() if (leaf := weak()) is not None]
            is_still = one.counts and all(leaf.grad is None for leaf in own) and one.noted is not None
            if not is_still or one.backward is None or one.noted is None or one.noted.was_written():
                continue
            # An optimizer that was made later shows what is trained.
            if not one.is_owned and self._making.has_optimizer(()):
                continue
            if not one.noted.was_logged(self._core, self._steps, 0) and frozenset(one.leaves) not in told:
                told.add(frozenset(one.leaves))
                self._report_at(ROW, one.backward, *one.clues)
        self._lines.clear()


def _node_of(value: torch.Tensor) -> Any:
    """Return the Node of a value, or of its base, as asking for that of a view of it may renew it."""
    base = value._base
    return base.grad_fn if base is not None and _torch.is_view_of_written(value) else _torch.grad_fn_of(value)


def _is_write(op: str) -> bool:
    if op.endswith("__"):
        return op == "__setitem__" or (op.startswith("__i") and op != "__invert__")
    return op.endswith("_")


def _name_of(storage: int) -> str | None:
    """Return the program's name of some memory, that of the variable found with the fewest steps."""
    found = naming.find(sys._getframe(1), lambda tensor: _torch.storage_or_none(tensor) == storage)
    best = min(found, key=lambda one: one.depth, default=None)
    return None if best is None else best.path


def _clues(one: _Written, leaf: torch.Tensor, holder: str | None, leaves: list[torch.Tensor]) -> tuple[Clue, ...]:
    values = {**_torch.facts_of(leaf), "parameters": len(leaves), "is_copied": int(one.is_copied)}
    return (
        Clue("parameter", name=naming.name_of(leaf, sys._getframe(1)), values=values),
        Clue("written", symbolise(one.stack), name=one.name, op=one.op, values=one.facts),
        *(() if holder is None else (Clue("holder", name=holder),)),
    )
