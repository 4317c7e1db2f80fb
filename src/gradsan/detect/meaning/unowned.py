"""Parameters that take part in training and that no optimizer has.

Checked in the 2nd, 4th, 8th … round of a line that trains others, and reported at the end: leaves that get gradients,
that no optimizer was ever given and nobody has written. Many programs leave parameters out on purpose (a network whose
head alone is trained, adapters, a discriminator), so one kind of evidence against that is needed:

``unregistered``  a module holds it where ``parameters()`` does not look, and all of ``parameters()`` is trained
``unregistered_one``  the same behind trained parts of a module alone in its list, as one hides what is not
                  to be trained
``remade``        every forward makes it anew, and those of before are gone; nobody reads a ``.grad``
``unheld``        nothing holds it but the graph of a value that was computed from it alone before training began; no
                  Parameter, and an input of a trained layer or compared with outputs one by one, it is data
``late``          a module got it after the optimizer was made, and all others of the model are trained
``late_frozen``   a module got it after the optimizer was made, and all that the optimizer has is frozen
``unfrozen``      it did not require a gradient when training began, and does now, beside trained parts of its model,
                  whose optimizers are still those of then
``left_out``      a small part of a model, with all its module has, stands between trained parts
``left_out_end``  the same behind trained parts, which may be meant
``left_out_chosen``  the same, where the program chooses among the names of parameters
``instead``       after a backward that reaches no optimizer's parameters an optimizer steps whose steps never change
                  anything, and all of whose parameters another optimizer trains
``copied``        the same, where its parameters have the very shapes of those that the backward reaches: a copy's
``run_out``       an optimizer was given a group of parameters by a generator that had nothing left
``alone``         a leaf of no module, combined with results of trained parts; nobody reads a ``.grad``. An input of a
                  trained layer, or a leaf compared with its outputs one by one, is data
``criterion``     the same for parameters of a module that the program defines, such as a loss with weights: a method
                  of its combines them with results of trained parts
``own_term``      a term of the loss depends on it, and on nothing that is trained; nobody reads a ``.grad``
``own_term_cut``  the same, and it is computed from detached values of trained parts

Row: ``parameter_without_optimizer``. Roles: ``parameter`` (``name``; ``values``: ``shape``, ``dtype``, ``device``,
``evidence``, ``parameters``, their number; a site where it is ``remade``), ``holder`` (where the optimizer was made;
``name``).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.optim.optimizer import Optimizer

from gradsan import _torch
from gradsan.detect.gradients.kept_gradients import program_reads_gradients
from gradsan.detect.meaning.made import Made, Making
from gradsan.detect.memory import Uncounted
from gradsan.graph import naming, walk
from gradsan.graph.variables import modules_in
from gradsan.model import Clue
from gradsan.record.detector import Finder, Run
from gradsan.record.ledger import call_that_made
from gradsan.record.log import RawStack, logged_writes
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward, read_backward

ROW = "parameter_without_optimizer"
_LATEST, _ROUNDS_PASSED, _SHOWN, _LINES = 512, 2, 3, 4
_STRENGTH = (
    *("run_out", "instead", "copied", "unheld", "remade", "unregistered", "late", "late_frozen", "unfrozen"),
    *("left_out", "alone", "criterion", "unregistered_one", "left_out_end", "left_out_chosen"),
    *("own_term_cut", "own_term"),
)


@dataclass(slots=True)
class _Candidate:
    """A leaf in its state when it was first seen."""

    leaf: _torch.weak_tensor
    storage: int
    version: int
    clock: int
    backwards: int
    steps: int
    evidence: str
    name: str | None
    line: Any
    facts: dict[str, Any]
    made: Any


class Unowned(Finder):
    """Checks the leaves of a backward in some rounds; findings go to ``found``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._uncounted, self._making = run.get(Uncounted), run.get(Making)
        self._stepped, self._known = run.stepped_optimizers, run.failures
        self._steps, self._backwards = run.steps, run.backwards
        self._instead: tuple[Any, Made, str] | None = None
        self._making.on_group.append(self._grouped)
        self._candidates = self._notes(list[_Candidate]())
        """Those that are gone stay: what a forward makes anew often gets the ``id`` of one before."""
        self._dismissed = self._notes(dict[int, Any]())
        self._without_evidence = self._notes(dict[int, Any]())
        """Leaves that were looked at once; the evidence ``instead`` may still come."""
        self._frozen = self._notes(dict[int, tuple[Any, int]]())
        self._lines = 0

    def forget(self) -> None:
        super().forget()
        self._lines, self._instead = 0, None

    def _grouped(self, optimizer: Optimizer, stack: RawStack) -> None:
        for one in _torch.parameters_of(optimizer):
            self._dismiss(one)

    def _dismiss(self, leaf: Any) -> None:
        self._dismissed[id(leaf)] = _torch.weak_tensor(leaf)
        self._candidates[:] = [one for one in self._candidates if one.leaf() is not leaf]

    def asked(self, inputs: Any) -> None:
        """Note what ``autograd.grad`` was asked for: the program uses the gradients of these leaves itself."""
        for one in inputs or ():
            if torch.is_tensor(one) and _torch.is_trainable_leaf(one):
                self._dismiss(one)

    def _live_candidates(self) -> set[int]:
        return {id(leaf) for one in self._candidates if (leaf := one.leaf()) is not None}

    @_torch.hushed()
    def before_round(self, entry: RawBackward, rounds: int) -> None:
        if rounds < 2 or not entry.accumulates:
            return
        stepped = self._stepped()
        if not stepped:
            return
        order = walk.engine_order(read_backward(entry).roots)
        unheld = walk.unheld_leaves(order)
        leaves = [one for one in walk.leaves_of(order) if one.requires_grad]
        live = [*stepped, *(one for one, _ in self._making.optimizers())]
        owned = set(map(id, _torch.parameters_of(*live)))
        trained = set(map(id, _torch.parameters_of(*stepped)))
        if rounds == _ROUNDS_PASSED and self._lines < _LINES:
            # Later rounds may have unfrozen some.
            self._lines += 1
            frozen = naming.frozen_beside(owned, modules_in(sys._getframe(1)))
            self._frozen |= {id(one): (_torch.weak_tensor(one), entry.clock) for one in frozen}
        if unheld and any(id(one) in trained for one in leaves):
            self._meet_unheld(entry, order, unheld, owned)
        strangers = [one for one in reversed(leaves) if id(one) not in owned and self._is_eligible(one)]
        known = self._live_candidates() if strangers else ()
        fresh = [one for one in strangers if id(one) not in known and not self._was_met(one)]
        if not any(id(one) in trained for one in leaves):
            has_frozen = any(not any(one.requires_grad for one in _torch.parameters_of(each)) for each in stepped)
            fresh = [one for one in fresh if has_frozen and self._making.late(one) is not None]
        if fresh:
            self._meet(entry, order, fresh, owned)
        elif strangers and self._instead is None and owned.isdisjoint(map(id, leaves)):
            self._instead = self._steps_instead(entry, leaves)
            if self._instead is not None:
                self._meet(entry, order, strangers, owned, self._instead[2])
        if rounds >= _LATEST:
            self.settle()

    def _steps_instead(self, entry: RawBackward, leaves: list[Any]) -> tuple[Any, Made, str] | None:
        """Return the optimizer that stepped first after this line's last backward, if its steps changed nothing.

        And if all that it has is trained by others, or has the shapes of ``leaves``: the parameters that this backward
        reaches were meant. A function may make it anew in each of its calls, with the model.
        """
        past = [one.clock for one in self._backwards.before_in_thread(entry.clock) if one.stack is entry.stack]
        later = [one for one in self._steps.steps if past and past[-1] < one.clock < entry.clock]
        if not later:
            return None
        first = min(later, key=lambda one: one.clock)
        own = [one for one in self._steps.steps if one.identity == first.identity]
        made = self._making.optimizers()
        found = next((one for one in made if id(one[0]) == first.identity), None)
        own = own if len(own) > 1 else [one for one in self._steps.steps if one.stack is first.stack]
        is_idle = len(own) > 1 and all(one.before == one.after for one in own)
        if found is None or not is_idle or any(one.end is None for one in own):
            return None
        held = {id(one): one for one in _torch.parameters_of(found[0])}
        moved = {one.identity for one in self._steps.steps if one.before != one.after}
        others = [one for one, _ in made if id(one) in moved]
        if held and held.keys() <= set(map(id, _torch.parameters_of(*others))):
            return *found, "instead"
        shapes = sorted(tuple(one.shape) for one in held.values() if one.requires_grad)
        return (*found, "copied") if shapes == sorted(tuple(one.shape) for one in leaves) else None

    def _is_eligible(self, leaf: Any) -> bool:
        known = self._dismissed.get(id(leaf))
        is_plain = type(leaf) in _torch.PLAIN_TENSORS and leaf.is_floating_point() and bool(leaf.numel())
        return is_plain and not (known is not None and known() is leaf) and not _torch.has_leaf_hooks(leaf)

    def _was_met(self, leaf: Any) -> bool:
        known = self._without_evidence.get(id(leaf))
        return known is not None and known() is leaf

    def _was_frozen(self, leaf: Any, clock: int) -> bool:
        weak, seen = self._frozen.get(id(leaf), (None, 0))
        return weak is not None and weak() is leaf and seen > clock

    def _meet(
        self, entry: RawBackward, order: list[Node], fresh: list[Any], owned: set[int], kind: str | None = None
    ) -> None:
        from gradsan.detect.meaning.evidence import Evidence

        evidence = Evidence(self._core, self._making, owned, order, entry, self._was_frozen)
        if kind is not None and program_reads_gradients(sys._getframe(2)):
            # It updates by hand; the optimizer may be there for its schedule.
            return
        kinds = {id(one): kind or evidence.of(one) for one in fresh}
        for one in fresh:
            if kinds[id(one)] is None:
                self._without_evidence[id(one)] = _torch.weak_tensor(one)
        evident = [one for one in fresh if kinds[id(one)] is not None]
        wanted = {id(one) for one in evident}
        paths: dict[int, str] = {}
        for one in naming.find(sys._getframe(2), lambda tensor: id(tensor) in wanted) if evident else ():
            if id(one.tensor) not in paths or one.origin == "module":
                paths[id(one.tensor)] = one.path
        for one in evident:
            remade = self._making.remade(one) if kinds[id(one)] == "remade" else None
            name, made = remade or (evidence.name_of(one), None)
            self._note(one, str(kinds[id(one)]), paths.get(id(one)) or name, entry, made)

    def _meet_unheld(
        self, entry: RawBackward, order: list[Node], unheld: list[tuple[Node, Node]], owned: set[int]
    ) -> None:
        """Note the leaves whose only holder is a graph that was built before this line's first backward."""
        past = [one for one in self._backwards.before_in_thread(entry.clock) if one.stack is entry.stack]
        begun, evidence = past[0].begun_at if past else 0, None
        for reader, node in unheld:
            leaf: Any = getattr(node, "variable", None)
            value = _last_before(order, reader, begun)
            if value is None or id(leaf) in self._live_candidates() or not self._is_eligible(leaf):
                continue
            if evidence is None:
                from gradsan.detect.meaning.evidence import Evidence

                evidence = Evidence(self._core, self._making, owned, order, entry, self._was_frozen)
            if not evidence.is_parameter(leaf, value):
                self._dismiss(leaf)
                continue
            made = call_that_made(self._core, _torch.node_sequence(reader), entry.thread)
            name = naming.name_of_output(value, sys._getframe(2))
            info = _torch.output_info(value, 0)
            facts = None if info is None else dict(zip(("shape", "dtype", "device"), info, strict=True))
            self._note(leaf, "unheld", name, entry, None if made is None else made.stack, facts)

    def _note(
        self,
        leaf: Any,
        evidence: str,
        name: str | None,
        entry: RawBackward,
        made: Any,
        facts: dict[str, Any] | None = None,
    ) -> None:
        core = self._core
        self._candidates.append(
            _Candidate(
                _torch.weak_tensor(leaf),
                _torch.storage_or_none(leaf),
                int(leaf._version),
                core.clock,
                core.backwards,
                core.steps,
                evidence,
                name,
                entry.stack,
                facts or _torch.facts_of(leaf),
                made,
            )
        )

    @_torch.hushed()
    def settle(self) -> None:
        """Report the candidates that have remained for some rounds."""
        candidates = list(self._candidates)
        self._candidates.clear()
        kept = [one for one in candidates if self._stands(one)]
        for one in candidates:
            if (leaf := one.leaf()) is not None:
                self._dismissed[id(leaf)] = one.leaf
        rows = {one.row for one in self._known}
        told = {"late": rows & {"leaf_lost"}, "copied": rows & {"leaf_lost", "parameter_not_reached"}}
        kept = [one for one in kept if not told.get(one.evidence)]
        for evidence in _STRENGTH:
            named = {one.name: one for one in kept if one.evidence == evidence and one.name}
            same = sorted(named.values(), key=lambda one: str(one.name).endswith("bias"))
            if same:
                self._report(same)

    def _stands(self, one: _Candidate) -> bool:
        core, leaf = self._core, one.leaf()
        if core.backwards == one.backwards or core.steps == one.steps:
            return False
        if leaf is not None:
            given = self._uncounted.replacement_of(leaf)
            is_owned = any(held is leaf for held in _torch.parameters_of(*self._stepped()))
            if is_owned or int(leaf._version) != one.version or (given is not None and given.clock > one.clock):
                return False
        # The next one of its kind often gets the same memory.
        raws = logged_writes(core, one.clock) if one.made is None else []
        return not any(
            raw.storage == one.storage and raw.kind != "metadata" and (leaf is not None or raw.is_parameter)
            for raw in raws
        )

    def _report(self, same: list[_Candidate]) -> None:
        made = self._making.optimizers()
        stepped = [one for one in made if any(one[0] is other for other in self._stepped())] or made
        clues = []
        for one in same[:_SHOWN]:
            values = {**one.facts, "evidence": one.evidence, "parameters": len(same)}
            clues.append(Clue("parameter", one.made and symbolise(one.made), one.name, values=values))
        run_out = self._making.run_out if same[0].evidence == "run_out" else None
        stepped = stepped if run_out is None else [(run_out.weak(), run_out)]
        if self._instead is not None and same[0].evidence == self._instead[2]:
            stepped = [self._instead[:2]]
        if stepped:
            optimizer, where = stepped[-1]
            clues.append(Clue("holder", symbolise(where.stack), name=type(optimizer).__name__))
        self._report_at(ROW, same[0].line, *clues)


def _last_before(order: list[Node], first: Node, moment: int) -> Node | None:
    """The Node nearest to the loss on the way from ``first``, of those made before ``moment``; None without one."""
    reached: Node | None = None
    for node in reversed(order):
        number = _torch.node_sequence(node)
        leads = node is first or any(child is reached for child, _ in node.next_functions)
        if leads and number is not None and number < moment:
            reached = node
    return reached
