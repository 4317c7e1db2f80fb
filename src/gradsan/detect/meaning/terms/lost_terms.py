"""Terms of a loss whose gradients are thrown away: they are cleared before any update of the parameters they reach.

``adversarial = criterion(D(fake.detach()))`` in the loss of the generator fills the gradients of ``D``; the generator's
optimizer steps, and those of ``D`` are cleared. Checked in the 2nd, 4th, 8th and 16th round of a line whose loss is a
sum, and in the two next ones, as optimizers may take turns at it, if several have stepped: the use of each term's
gradients is checked at the backward calls
that follow. A term is reported if its gradients went unused in two of these rounds and were never used before.

A term may have no gradient for other parameters by its nature, like ``judge(real).mean()`` in a loss that both
sides use in turn. The source shows whether its graph was cut. If it was not, nothing is reported if the
program's own code reads gradients, or if another line's loss has a term made at the same place that reaches the same
leaves: several phases take turns with one objective. Cut or not, nothing is reported where another line's loss has the
same terms, by their source, and some step has updated what the term reaches: one loss for several optimizers, each of
which uses its part. Nothing is reported either of a backward that is made for hooks:
one that passes hooks on its way, or whose other terms' gradients are cleared unused, too.

A term may also be left out of the loss: a number with a graph, computed by the function that calls backward from
parameters of optimizers, bound to a name that nothing reads, or only for a sum that is bound anew before it is read.

Row: ``term_left_out``. Roles: ``term`` (as below), ``overwritten`` (where that sum is computed).
Row: ``term_lost``. Roles: ``term`` (where it was computed; ``name``; ``values``: ``shape``, ``dtype``, ``device``,
``is_cut``),
``stepped`` (the step that uses the other terms; ``name`` is the optimizer), ``reached`` (a parameter that it reaches).
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import Node

from gradsan import _torch, source
from gradsan.detect.gradients.kept_gradients import program_reads_gradients
from gradsan.graph import naming, walk
from gradsan.model import Clue, Site
from gradsan.record.backwards import PastBackward
from gradsan.record.detector import Finder, Run
from gradsan.record.ledger import call_that_made
from gradsan.record.log import RawStack, logged_writes
from gradsan.record.stacks import is_user_file, symbolise
from gradsan.record.steps import RawBackward, StepRecord, read_backward
from gradsan.record.user_hooks import may_look

ROW, LEFT_OUT = "term_lost", "term_left_out"
_ROUNDS, _ROUND_OF_NAMES = (2, 4, 8, 16), 4
_TURNS = 2
_TERMS = 16
_CALLS_AWAITED = 32
_CLEARS = frozenset({"zero_", "_foreach_zero_"})
_SCALED = frozenset({"MulBackward0", "DivBackward0", "NegBackward0"})
_REDUCED = frozenset({"MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1"})


@dataclass(slots=True)
class _Term:
    """A term of one backward's loss, and the optimized leaves it reaches: weak references, memory, gradients."""

    key: Any
    place: Any
    clock: int
    thread: int
    stack: RawStack
    leaves: list[Any]
    storages: list[int]
    gradients: list[int]
    other_leaves: list[Any]
    others: list[int]
    term: Clue
    made: RawStack | None
    """The call that made the loss."""
    terms: tuple[RawStack, ...]
    """The calls that made the terms of that loss."""
    calls: int = 0
    is_cleared: bool = False
    """Whether its gradients are gone, while the step of the other terms is awaited."""
    is_of_turn: bool = False
    """Whether it is of a call that follows the round, as optimizers may take turns."""
    other_gradients: list[int] = field(default_factory=list)


class LostTerms(Finder):
    """Checks some losses; ``listen(True)`` requests a call before and after each backward."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._steps, self._optimizers, self._backwards = run.steps, run.stepped_optimizers, run.backwards
        self._waiting: list[_Term] = []
        self._turns: dict[RawStack, tuple[int, int]] = {}
        """How many of a line's next backward calls are to be looked at, and the clock of the last one that was."""
        self._rounds_at = self._notes(collections.Counter[Hashable]())
        self._phases = self._notes(dict[Hashable, set[Any]]())
        """The lines whose losses have a term made at one place, by that place and the memory of a leaf."""
        self._losses = self._notes(dict[RawStack, tuple[RawStack, ...]]())
        """The calls that made the terms of a line's loss."""

    def forget(self) -> None:
        super().forget()
        self._waiting.clear()
        self._turns.clear()
        self._listen(False)

    @_torch.hushed()
    def before_round(self, entry: RawBackward, rounds: int) -> None:
        if rounds == _ROUND_OF_NAMES and entry.accumulates:
            self._look_for_names(entry, sys._getframe(1))
        if rounds in _ROUNDS and entry.accumulates and len(self._optimizers()) > 1:
            self._turns[entry.stack] = _TURNS, entry.clock
            self._listen(True)
            self._note_terms(entry)

    def _look_for_names(self, entry: RawBackward, running: FrameType | None) -> None:
        """Report terms that the function that calls backward has computed, and left out of this loss."""
        while running is not None and not is_user_file(running.f_code.co_filename):
            running = running.f_back
        used = None if running is None else symbolise(entry.stack).user_frame
        if running is None or used is None:
            return
        numbers = {
            name: one
            for name, one in _torch.locals_of(running).items()
            if type(one) in _torch.PLAIN_TENSORS and one.numel() == 1 and _torch.grad_fn_of(one) is not None
        }
        if len(numbers) < 2:
            return
        order = set(walk.engine_order(read_backward(entry).roots))
        owned = set(map(id, _torch.parameters_of(*self._optimizers())))
        for name, place in source.left_out(used, numbers):
            node = numbers[name].grad_fn
            made = call_that_made(self._core, _torch.node_sequence(node), entry.thread)
            is_trained = any(id(one) in owned for one in walk.leaves_of(walk.engine_order([node])))
            if node in order or made is None or not is_trained or (LEFT_OUT, made.stack) in self._described:
                continue
            self._described.add((LEFT_OUT, made.stack))
            clues = [Clue("term", symbolise(made.stack), name=name, values=_torch.facts_of(numbers[name]))]
            clues += [] if place is None else [Clue("overwritten", Site((place,)))]
            self._report_at(LEFT_OUT, entry.stack, *clues)

    def _note_terms(self, entry: RawBackward, is_of_turn: bool = False) -> None:
        optimizers = self._optimizers()
        if len(self._waiting) >= _TERMS:
            return
        roots = read_backward(entry).roots
        terms = _terms(roots[0]) if len(roots) == 1 else []
        if not 2 <= len(terms) <= _TERMS:
            return
        owned = set(map(id, _torch.parameters_of(*optimizers)))
        whole = call_that_made(self._core, _torch.node_sequence(roots[0]), entry.thread)
        orders = [walk.engine_order([term]) for term in terms]
        reached = [[leaf for leaf in walk.leaves_of(order) if id(leaf) in owned] for order in orders]
        found = []
        makers = [call_that_made(self._core, _torch.node_sequence(term), entry.thread) for term in terms]
        stacks = self._losses[entry.stack] = tuple(made.stack for made in makers if made is not None)
        for term, order, leaves, made in zip(terms, orders, reached, makers, strict=True):
            own = {id(one) for one in leaves}
            others = [one for some in reached for one in some if id(one) not in own]
            if not leaves or not others or made is None or (made.stack, entry.stack) in self._described:
                continue
            if not any(map(may_look, order)) and not any(map(_torch.has_leaf_hooks, leaves)):
                found.append((term, leaves, others, made))
        frame = sys._getframe(1)
        held = naming.names_of_outputs((term for term, *_ in found), frame) if found else {}
        for term, leaves, others, made in found:
            made_at = symbolise(made.stack)
            place = made_at.user_frame, _torch.storage_or_none(leaves[0])
            self._phases.setdefault(place, set()).add(entry.stack)
            shape, dtype, device = _torch.output_info(term, 0) or ((), "?", "?")
            info = {"shape": shape, "dtype": dtype, "device": device}
            self._waiting.append(
                _Term(
                    (made.stack, entry.stack),
                    place,
                    entry.clock,
                    entry.thread,
                    entry.stack,
                    [_torch.weak_tensor(one) for one in leaves],
                    [_torch.storage_or_none(one) for one in leaves],
                    [],
                    [_torch.weak_tensor(one) for one in others],
                    [_torch.storage_or_none(one) for one in others],
                    Clue("term", made_at, name=held.get(term), values=info),
                    None if whole is None else whole.stack,
                    stacks,
                    is_of_turn=is_of_turn,
                )
            )
            self._listen(True)

    @_torch.hushed()
    def after_backward(self, entry: RawBackward) -> None:
        """Note the gradients; as ``listeners.AfterBackward``."""
        for one in self._waiting:
            if one.clock == entry.clock:
                one.gradients = _gradients(one.leaves)
                one.other_gradients = _gradients(one.other_leaves)

    @_torch.hushed()
    def before_backward(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the gradients of waiting terms; the arguments are those of ``listeners.BeforeBackward``."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.calls += 1
            # Not the terms of this backward: their gradients do not exist yet.
            if one.clock == entry.clock:
                self._waiting.append(one)
            elif one.gradients and entry.thread == one.thread and one.calls <= _CALLS_AWAITED:
                self._judge(one)
        left, clock = self._turns.get(entry.stack, (0, 0))
        if left and entry.accumulates and entry.clock > clock:
            self._turns.pop(entry.stack)
            if left > 1:
                self._turns[entry.stack] = left - 1, entry.clock
            self._note_terms(entry, is_of_turn=True)
        if not (self._waiting or self._turns):
            self._listen(False)

    def _listen(self, wanted: bool) -> None:
        self._listeners.call_before_backward(self.before_backward, wanted)
        self._listeners.call_after_backward(self.after_backward, wanted)

    def _judge(self, one: _Term) -> None:
        steps = [record for record in self._steps.steps if record.clock > one.clock]
        if one.is_cleared:
            self._report_unused(one, steps)
            return
        writes = logged_writes(self._core, one.clock)
        own = set(one.storages)
        if any(not own.isdisjoint(record.storages) for record in steps):
            return
        if any(raw.storage in own for raw in writes):
            return
        zeroed = {raw.storage for raw in writes if raw.op in _CLEARS}
        leaves = [leaf() for leaf in one.leaves]
        if any(leaf is None for leaf in leaves):
            return
        cleared = [
            _gradient(leaf) != before or before in zeroed
            for leaf, before in zip(leaves, one.gradients, strict=True)
            if before
        ]
        if self._was_used(one, own):
            self._described.add(one.key)
            return
        if not cleared or not any(cleared):
            # Still there: a later step may use it.
            self._waiting.append(one)
        elif all(cleared):
            now = zip(_gradients(one.other_leaves), one.other_gradients, strict=True)
            # Where nothing of this backward is left for a step, no term has been used: hooks may have read all.
            if steps or any(before and after == before and before not in zeroed for after, before in now):
                self._report_unused(one, steps)

    def _report_unused(self, one: _Term, steps: list[StepRecord]) -> None:
        """Report a term whose gradients were cleared, once the other terms have been used."""
        others = set(one.others)
        step = next((record for record in steps if not others.isdisjoint(record.storages)), None)
        if step is None:
            one.is_cleared = True
            self._waiting.append(one)
            return
        self._rounds_at[one.key] += 1
        if self._rounds_at[one.key] > 1 and one.key not in self._described:
            self._described.add(one.key)
            if self._is_for_several(one):
                return
            used, frame = symbolise(one.stack), sys._getframe(1)
            # Only now: the source is read, and all frames, or all modules alive, are searched for a name.
            is_cut = _is_cut(one.term.site or used, used)
            in_turn = len(self._phases[one.place]) > 1
            # Without a cut, phases that train one network after the other throw the same gradients away.
            if not is_cut and (in_turn or one.is_cleared or one.is_of_turn or program_reads_gradients(frame)):
                return
            if used.user_frame is not None and source.steps_in_some_rounds(used.user_frame):
                return
            leaf = one.leaves[0]()
            self._report_at(
                ROW,
                one.stack,
                replace(one.term, values={**one.term.values, "is_cut": is_cut}),
                Clue("reached", name=None if leaf is None else naming.name_of(leaf, frame)),
                Clue("stepped", symbolise(step.stack), name=step.optimizer),
            )

    def _is_for_several(self, one: _Term) -> bool:
        """Whether another line sends the same loss back, and some step has updated what the term reaches."""
        own = set(one.storages)
        if all(own.isdisjoint(record.storages) for record in self._steps.steps):
            return False
        texts = _texts(one.terms)
        return any(stack is not one.stack and _texts(made) == texts for stack, made in self._losses.items())

    def _was_used(self, one: _Term, own: set[int]) -> bool:
        """Whether a step used the gradients that an earlier backward of this line, of such a loss, had left."""
        calls = [call for call in self._backwards.before_in_thread(one.clock) if call.via == "backward"]
        ends = [*(call.clock for call in calls[1:]), one.clock]
        turns = [(call.clock, end) for call, end in zip(calls, ends, strict=True) if self._is_of(one, call)]
        return any(
            begun < record.clock < end and not own.isdisjoint(record.storages)
            for begun, end in turns
            for record in self._steps.steps
        )

    def _is_of(self, one: _Term, call: PastBackward) -> bool:
        """Whether an earlier backward is of the term's line, and its loss, if known, was made at the same place."""
        if call.stack is not one.stack:
            return False
        made = call_that_made(self._core, call.root_sequence, call.thread)
        return made is None or one.made is None or made.stack is one.made


def _is_cut(term: Site, used: Site) -> bool:
    """Whether the source of a term uses something detached, in the function that calls backward or further in."""
    frame, frames = used.user_frame, term.frames
    own = [at for at, one in enumerate(frames) if frame and (one.file, one.function) == (frame.file, frame.function)]
    return any(one.is_user and source.takes_cut(one) for one in frames[own[-1] if own else 0 :])


def _texts(stacks: tuple[RawStack, ...]) -> list[str]:
    """The lines of source that made the terms of a loss."""
    frames = (symbolise(stack).user_frame for stack in stacks)
    lines = (source.source_line(frame.file, frame.line) for frame in frames if frame is not None)
    return sorted((line or "").strip() for line in lines)


def _gradients(leaves: list[Any]) -> list[int]:
    return [0 if leaf is None else _gradient(leaf) for leaf in (reference() for reference in leaves)]


def _gradient(leaf: torch.Tensor) -> int:
    """Return the memory of a leaf's gradient; 0 where it has none."""
    return 0 if leaf.grad is None or leaf.grad.is_sparse else int(_torch.storage_or_none(leaf.grad))


def _terms(root: Node, is_reduced: bool = False) -> list[Any]:
    """Return the Nodes of the terms of a loss, without constant factors; those of its elements, if it is a mean."""
    found: list[Any] = []
    waiting = [root]
    while waiting and len(found) <= _TERMS:
        node = waiting.pop()
        children = [child for child, _ in node.next_functions if child is not None]
        inner = _terms(children[0], True) if node.name() in _REDUCED else []
        if is_sum_or_multiple(node, children, is_reduced):
            waiting += children
        else:
            found += inner[::-1] if len(inner) > 1 else [node]
    return found[::-1]


def is_sum_or_multiple(node: Node, children: list[Any], is_reduced: bool = False) -> bool:
    """Whether a Node adds scalars (elements, if ``is_reduced``), or multiplies one by a constant."""
    name = node.name()
    return (is_reduced or is_scalar(node)) and (
        name in ("AddBackward0", "SubBackward0") or (name in _SCALED and len(children) == 1)
    )


def is_scalar(node: Node) -> bool:
    """Whether a Node made one number."""
    info = _torch.output_info(node, 0)
    return info is not None and all(size == 1 for size in info[0])
