"""Parameters without a gradient at their optimizer's first step: not reached, cut off, or replaced by other leaves.

One that has no gradient beside others that have one is given some rounds, as several tasks may take turns, and a
parameter without one beside others all the rounds that there are: parts may be thawed, or chosen, later. In a program
without an optimizer, one that its module reads as ``.data`` is looked for as lines first call backward. An optimizer
whose parameters something else writes, such as an average of another network, is reported at the end if no
gradient has ever come to it, while leaves that no optimizer has, and that keep their values, get theirs.

Rows: ``leaf_lost``, ``parameter_not_reached``. Roles: ``parameter`` (a tensor without gradient;
``values``: ``missing`` of ``total``, ``shape``, ``dtype``, ``device``, and where one of the program's own modules holds
it ``owner``, its class, and ``attribute``; ``site``: the definition of that class's forward), ``replaced`` (the tensor
that the program uses instead; ``site``: where it was made), ``registered`` (where a module got that one), ``read`` (the
expression and place that read it past its graph), ``backward`` (the last one, if none has a gradient; ``values``: its
loss, if a leaf) with ``live`` of the step's frames, ``holder`` (the optimizer).
"""

from __future__ import annotations

import itertools
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from gradsan import _torch, source
from gradsan.detect.meaning.made import Making
from gradsan.detect.meaning.terms.constant_penalties import DataReads
from gradsan.detect.meaning.terms.cut_terms import CutTerms
from gradsan.graph import naming, walk
from gradsan.graph.live import live_clues
from gradsan.graph.variables import Found
from gradsan.model import Clue, Failure, Frame, Site
from gradsan.record.detector import Detector, Run
from gradsan.record.ledger import Noted, site_that_made
from gradsan.record.log import logged_writes
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward, moved_storages, read_backward

_ROUNDS_AWAITED = 16
_LOOKS_AT_A_LINE = 32
_SHOWN = 3
_NAMED = 12
_FIRST_BACKWARDS = 4
_Waiting = tuple[Noted, Failure]


class _Unused(NamedTuple):
    """A parameter without a gradient at its optimizer's first step, beside others that had one."""

    weak: Any
    version: int
    storage: int
    clock: int
    clue: Clue | None


@dataclass(slots=True)
class _Starved:
    """An optimizer's parameters that are written, but not by it, and leaves that have gradients and no optimizer."""

    held: list[Any]
    failure: Failure
    orphans: dict[int, tuple[Any, int]] = field(default_factory=dict)


class MissingGradients(Detector):
    """Checks optimizers at their first step, and leaves replaced since then at later ones."""

    def __init__(self, run: Run) -> None:
        self._core, self._steps, self._backwards, self._found = run.core, run.steps, run.backwards, run.report
        self._began = 0
        self._making = run.get(Making)
        self._looks = Counter[Any]()
        self._unfed: list[_Waiting] = []
        self._starved: list[_Starved] = []
        self._cut_off: list[tuple[Noted, Failure, int]] = []
        self._unused: list[tuple[list[_Unused], Failure]] = []
        self._bypassed: list[tuple[Noted, Any, Failure]] = []
        self._first_backwards = 0
        self._left, self._data_reads = run.get(CutTerms).left, run.get(DataReads)
        self._lost: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
        """The ids of the reported parameters, by the optimizer, which keeps them alive."""

    def forget(self) -> None:
        # The log also has steps of an earlier watching, to memory that may be in use again.
        self._began = self._core.clock
        self._unfed.clear()
        self._starved.clear()
        self._cut_off.clear()
        self._unused.clear()
        self._looks.clear()
        self._bypassed.clear()
        self._first_backwards = 0

    def settle(self) -> None:
        """Report, as watching ends, what no backward has reached until then."""
        self._unfed += [one[:2] for one in self._cut_off if not one[0].was_logged(self._core, self._steps, one[2])]
        self._look_at_unfed(is_last=True)
        self._report_starved()
        self._report_unused()
        self._report_bypassed()
        self.forget()

    def before_round(self, entry: RawBackward, rounds: int) -> None:
        """Drop the parameters that have been written since; as ``on_round`` of the core."""
        # By the end of the watching, the parameters of a function that has returned are gone.
        self._cut_off = [one for one in self._cut_off if not one[0].was_written()]
        if self._unfed:
            self._look_at_unfed(is_last=rounds >= _ROUNDS_AWAITED)
        if self._starved and entry.accumulates:
            self._look_at_starved(entry)
        for own, _ in self._unused:
            own[:] = [one for one in own if (leaf := one.weak()) is None or leaf._version == one.version]
        if rounds == 1 and entry.accumulates and not self._making.has_optimizer(()):
            self._first_backwards += 1
            if self._first_backwards <= _FIRST_BACKWARDS:
                self._look_for_bypassed(entry)

    @_torch.hushed()
    def _look_for_bypassed(self, entry: RawBackward) -> None:
        """Note the parameters that a module reads as ``.data``, while others of it are reached."""
        leaves = walk.leaves_of(walk.engine_order(read_backward(entry).roots))
        # A gradient of something else, as of an image for an attack, may be all that is wanted.
        if not leaves or not all(isinstance(one, torch.nn.Parameter) for one in leaves):
            return
        from gradsan.detect.bypassed import bypassed, unreached_beside

        missing = unreached_beside({id(one) for one in leaves})
        if not missing or self._making.has_optimizer((*leaves, *missing)):
            return
        for key, read in bypassed(self._core, missing).items():
            parameter = next(one for one in missing if id(one) == key)
            # ``detach()`` says that no gradient is wanted, and only an optimizer says that the parameter is trained.
            if not read.expression.endswith(".data") or _is_conditional(symbolise(read.stack)):
                continue
            name = naming.name_of(parameter, sys._getframe(1))
            clues = (
                Clue("parameter", name=name, values=_torch.facts_of(parameter)),
                Clue("read", symbolise(read.stack), name=read.expression),
            )
            failure = Failure("parameter_not_reached", "", "", symbolise(entry.stack), clues, raised=False)
            self._bypassed.append((Noted(self._core, [parameter]), _torch.weak_tensor(parameter), failure))

    def _report_bypassed(self) -> None:
        """Report them where the program has made no optimizer, and neither trained nor written them until the end."""
        for noted, weak, failure in () if self._making.has_optimizer(()) else self._bypassed:
            leaf = weak()
            is_kept = noted.was_written() or noted.was_logged(self._core, self._steps, self._began)
            if leaf is not None and leaf.grad is None and not is_kept:
                self._found(failure)

    def first_step(self, optimizer: Optimizer, frame: FrameType) -> None:
        """Check for parameters without gradient at an optimizer's first step; variables are searched from ``frame``."""
        held = [one for one in _torch.parameters_of(optimizer) if one.requires_grad]
        is_frozen = not held
        held = held or list(_torch.parameters_of(optimizer))
        # A tensor without elements has nothing to learn; sharded training leaves most ranks with such tensors.
        missing = [one for one in held if one.grad is None and not is_lazy(one) and one.numel()]
        stack = self._core.stack()
        if not missing or self._looks[stack] >= _LOOKS_AT_A_LINE or (is_frozen and len(missing) < len(held)):
            return
        # A program may make one optimizer per task: no finding for the first one says nothing about the later ones.
        self._looks[stack] += 1
        site = symbolise(stack)
        counts = {"missing": len(missing), "total": len(held), "frozen": int(is_frozen)}
        name = type(optimizer).__name__
        replaced = [] if is_frozen else self._replaced(optimizer, held, missing, frame)
        clues = [Clue("holder", site, name=name)]
        if is_frozen and (made := self._made(optimizer)) is not None:
            clues.append(Clue("made", Site((made,)), name=name))
        is_all = len(missing) == len(held)
        if is_all and self._has_computed_nothing(optimizer):
            return
        if lost := self._lost_among(replaced):
            self._report_lost(optimizer, lost, counts, site, clues)
            return
        gone = set[int]() if is_all else {id(one) for one, _ in replaced}
        missing = [one for one in missing if id(one) not in gone]
        from gradsan.detect.bypassed import bypassed

        past_graph = {} if is_frozen else bypassed(self._core, missing)
        # What stands under a condition may never have run.
        past_graph = {key: one for key, one in past_graph.items() if not _is_conditional(symbolise(one.stack))}
        for parameter, read in [(one, past_graph[id(one)]) for one in missing if id(one) in past_graph]:
            values = {**_torch.facts_of(parameter), **counts}
            shown = Clue("parameter", name=naming.name_of(parameter, frame), values=values)
            where = Clue("read", symbolise(read.stack), name=read.expression)
            self._found(Failure("parameter_not_reached", "", "", site, (shown, where, clues[0]), raised=False))
        missing = [one for one in missing if id(one) not in past_graph]
        cut_off = self._note_cut_off(optimizer, [] if is_all else missing, held, counts, frame)
        cut_off |= set() if is_all else self._note_read_as_data(optimizer, missing, counts, frame)
        missing = [one for one in missing if id(one) not in cut_off]
        if not missing:
            return
        named = _names(missing, frame)
        listed = [
            naming.clue_of(named.get(id(one)), frame, {**_torch.facts_of(one), **counts}) for one in missing[:_NAMED]
        ]
        if is_all and sum(one.numel() for one in held) == 1 and _is_placeholder(listed[0], frame):
            return
        if not is_all:
            own = [
                _Unused(_torch.weak_tensor(one), one._version, _torch.storage_or_none(one), self._core.clock, clue)
                for one, clue in itertools.zip_longest(missing, listed)
            ]
            failure = Failure("parameter_not_reached", "", "", site, tuple(clues), raised=False)
            self._unused.append((own, failure))
            return
        clues += (*listed, *self._last_backward(held, frame))
        failure = Failure("parameter_not_reached", "", "", site, tuple(clues), raised=False)
        self._starved.append(_Starved([_torch.weak_tensor(one) for one in held], failure))
        if not is_frozen:
            # A program that updates by hand may step an optimizer for the sake of its schedule alone.
            self._unfed.append((Noted(self._core, held), failure))
            # As a function returns, its optimizer still holds them.
            weakref.finalize(optimizer, self._look_at_unfed, is_last=False).atexit = False

    def _note_cut_off(
        self, optimizer: Optimizer, missing: list[Any], held: list[Any], counts: dict[str, int], frame: FrameType
    ) -> set[int]:
        """Await the parameters whose values were used, and left the graph there: a later backward may reach them."""
        from gradsan.detect.meaning.evidence import cut_off

        still = {id(one) for group in optimizer.param_groups if not group.get("lr", 1) for one in group["params"]}
        cut = {id(one): left for one in missing if id(one) not in still and (left := self._left(one)) is not None}
        cut = cut_off(cut, missing, lambda: _names(held, frame), len(held), self._made(optimizer)) if cut else cut
        for how in dict.fromkeys(one.how for one in cut.values()):
            own = [one for one in missing if id(one) in cut and cut[id(one)].how == how]
            first = cut[id(own[0])]
            clues = (
                Clue("parameter", name=naming.name_of(own[0], frame), values={**_torch.facts_of(own[0]), **counts}),
                Clue("read", symbolise(first.stack), op=first.op, values={"how": how}),
                Clue("holder", name=type(optimizer).__name__),
            )
            failure = Failure("parameter_not_reached", "", "", symbolise(self._core.stack()), clues, raised=False)
            self._cut_off.append((Noted(self._core, own), failure, self._began))
        return set(cut)

    def _note_read_as_data(
        self, optimizer: Optimizer, missing: list[Any], counts: dict[str, int], frame: FrameType
    ) -> set[int]:
        """Await the parameters that the loss was computed from by ``.data``: a later backward may reach them."""
        from gradsan.detect.bypassed import read_as_data

        still = {id(one) for group in optimizer.param_groups if not group.get("lr", 1) for one in group["params"]}
        noted = set[int]()
        for one in missing:
            stack = None if id(one) in still else self._data_reads.of(one)
            if stack is None or (clues := read_as_data(self._core, one, stack, counts, frame)) is None:
                continue
            clues = (*clues, Clue("holder", name=type(optimizer).__name__))
            failure = Failure("parameter_not_reached", "", "", symbolise(self._core.stack()), clues, raised=False)
            self._cut_off.append((Noted(self._core, [one]), failure, self._began))
            noted.add(id(one))
        return noted

    @_torch.hushed()
    def _look_at_unfed(self, is_last: bool) -> None:
        """Drop the optimizers whose parameters have been updated by now; report the others where ``is_last``."""
        self._unfed = [one for one in self._unfed if not one[0].was_written()]
        while is_last and self._unfed:
            failure = self._unfed.pop(0)[1]
            self._starved = [one for one in self._starved if one.failure is not failure]
            self._found(failure)

    def _look_at_starved(self, entry: RawBackward) -> None:
        """Note the leaves of this backward that no optimizer has; drop the optimizers whose parameters it reaches."""
        leaves = [one for one in walk.leaves_of(walk.engine_order(read_backward(entry).roots)) if one.requires_grad]
        reached, moved = {id(one) for one in leaves}, moved_storages(self._steps, self._began)
        owned = {id(one) for it, _ in self._making.optimizers() for one in _torch.parameters_of(it)}
        orphans = {id(one): (_torch.weak_tensor(one), one._version) for one in leaves if id(one) not in owned}
        kept = list[_Starved]()
        for one in self._starved:
            alive = [leaf for weak in one.held if (leaf := weak()) is not None]
            if not any(id(leaf) in reached or _torch.storage_or_none(leaf) in moved for leaf in alive):
                one.orphans = {**orphans, **one.orphans}
                kept.append(one)
        self._starved = kept

    def _report_starved(self) -> None:
        """Report the optimizers that no gradient has come to until the end, where it went to leaves beside them."""
        moved = moved_storages(self._steps, self._began) if self._starved else set()
        for one in self._starved:
            held = [leaf for weak in one.held if (leaf := weak()) is not None]
            is_trained = any(leaf.grad is not None or _torch.storage_or_none(leaf) in moved for leaf in held)
            owned = {id(leaf) for it, _ in self._making.optimizers() for leaf in _torch.parameters_of(it)}
            orphans = ((weak(), version) for key, (weak, version) in one.orphans.items() if key not in owned)
            is_untouched = (leaf is not None and leaf._version == version for leaf, version in orphans)
            if len(held) == len(one.held) and not is_trained and any(is_untouched):
                self._found(one.failure)

    def _report_unused(self) -> None:
        """Report the parameters that nothing has trained until the end; loading a state is no training."""
        moved = moved_storages(self._steps, self._began) if self._unused else set()
        for own, failure in self._unused:
            # An average of other parameters is often written through ``.data``, which no counter of the tensor shows.
            since = min((one.clock for one in own), default=self._core.clock)
            written = {raw.storage for raw in logged_writes(self._core, since)}
            still = [one for one in own if one.storage not in moved and one.storage not in written]
            never = [one for one in still if getattr(one.weak(), "grad", None) is None]
            shown = [one.clue for one in never if one.clue is not None]
            clues = [replace(one, values={**one.values, "missing": len(never)}) for one in shown]
            if clues:
                self._found(replace(failure, clues=(*failure.clues, *clues)))

    def _last_backward(self, held: list[Any], frame: FrameType) -> Iterator[Clue]:
        """Yield the last backward, which should have reached the parameters, and live variables depending on one.

        Yields nothing where several lines called backward since the last step: any of them may be meant.
        """
        past = self._backwards.before(self._core.clock)
        sites = [symbolise(one.stack) for one in past if one.step == past[-1].step]
        if sites and all(one.user_frame == sites[-1].user_frame for one in sites):
            from gradsan.detect.replaced_leaves import comes_from

            yield Clue("backward", sites[-1], op=past[-1].via, values=_facts_of_leaf(past[-1].outputs[0]()))
            yield from live_clues(
                frame, lambda tensor: any(tensor is one or comes_from(tensor, one) for one in held[:_NAMED])
            )

    def later_step(self, optimizer: Optimizer, frame: FrameType) -> None:
        """Check for parameters replaced since the optimizer's first step; a missing gradient alone is no finding."""
        held = [one for one in _torch.parameters_of(optimizer) if one.requires_grad]
        missing = [one for one in held if one.grad is None and not is_lazy(one) and one.numel()]
        reported = self._lost.get(optimizer, set())
        replaced = self._lost_among(self._replaced(optimizer, held, missing, frame)) if missing else []
        if replaced and not any(id(parameter) in reported for parameter, _ in replaced):
            site = symbolise(self._core.stack())
            counts = {"missing": len(missing), "total": len(held), "later": 1}
            self._report_lost(optimizer, replaced, counts, site, [Clue("holder", site, name=type(optimizer).__name__)])

    def _replaced(self, optimizer: Optimizer, held: list[Any], missing: list[Any], frame: FrameType) -> list[Any]:
        from gradsan.detect.replaced_leaves import replacements

        return list(replacements(held, missing, frame, self._made(optimizer)))

    def _lost_among(self, replaced: list[tuple[Any, Found]]) -> list[tuple[Any, Found]]:
        """Those of which one or the other is trained; else it may be a state that the program computes by itself."""
        if not replaced:
            return []
        from gradsan.detect.replaced_leaves import is_reached

        moved = moved_storages(self._steps, self._began)
        return [one for one in replaced if is_reached(one[1].tensor) or _torch.storage_or_none(one[0]) in moved]

    def _made(self, optimizer: Optimizer) -> Frame | None:
        return next((symbolise(one.stack).user_frame for it, one in self._making.optimizers() if it is optimizer), None)

    def _has_computed_nothing(self, optimizer: Optimizer) -> bool:
        """Whether no graph was recorded since an optimizer was made: its step is for the sake of something else."""
        made = next((one for it, one in self._making.optimizers() if it is optimizer), None)
        return made is not None and made.sequence == _torch.sequence_number()

    def _report_lost(
        self,
        optimizer: Optimizer,
        replaced: list[tuple[Any, Found]],
        counts: dict[str, int],
        site: Site,
        clues: list[Clue],
    ) -> None:
        self._lost.setdefault(optimizer, set()).update(id(parameter) for parameter, _ in replaced)
        for parameter, instead in replaced[:_SHOWN]:
            clues.append(Clue("parameter", name=instead.path, values={**_torch.facts_of(parameter), **counts}))
            made = site_that_made(self._core, instead.tensor.grad_fn, threading.get_ident())
            clues.append(Clue("replaced", made, name=instead.path, values=_torch.own_group(optimizer, parameter)))
            if (late := self._making.late(instead.tensor)) is not None:
                clues.append(Clue("registered", symbolise(late.stack), name=instead.path))
        clues += [
            Clue("replaced", name=instead.path, values=_torch.own_group(optimizer, parameter))
            for parameter, instead in replaced[_SHOWN:]
        ]
        failure = Failure("leaf_lost", "", "", site, tuple(clues), raised=False)
        if any(instead.tensor.is_leaf for _, instead in replaced):
            self._found(failure)
        else:  # fast weights of a phase that does not train the leaves yet are computed from them, too
            self._cut_off.append((Noted(self._core, [leaf for leaf, _ in replaced]), failure, self._core.clock))


def _is_placeholder(parameter: Clue, frame: FrameType) -> bool:
    """Whether nothing has or reads an optimizer's only number: a schedule or a trainer wants some parameter."""
    if parameter.name is None:
        return True
    made, attribute = None if parameter.site is None else parameter.site.user_frame, parameter.values.get("attribute")
    if made is None or attribute is None:
        # The optimizer was given the list or the variable.
        held = re.split(r"[.\[]", parameter.name.removeprefix("self."))[0]
        return not source.reads_value_of(frame.f_code.co_filename, held, times=1)
    return not source.reads_value_of(made.file, str(attribute))


def _facts_of_leaf(loss: Any) -> dict[str, Any]:
    """The facts of a loss that is a number told to require a gradient; empty for others."""
    is_number = type(loss) is torch.Tensor and loss.numel() == 1
    return _torch.facts_of(loss) if is_number and _torch.is_trainable_leaf(loss) else {}


def _names(tensors: list[torch.Tensor], frame: FrameType) -> dict[int, str]:
    """The expressions by which the program holds the tensors, by ``id``; a name in a module comes first."""
    wanted = {id(one) for one in tensors}
    found: dict[int, Found] = {}
    for one in naming.find(frame, lambda tensor: id(tensor) in wanted):
        known = found.get(id(one.tensor))
        if known is None or (known.origin != "module" and one.origin == "module"):
            found[id(one.tensor)] = one
    return {key: one.path for key, one in found.items()}


def _is_conditional(site: Site) -> bool:
    frame = site.shown_frame
    return frame is None or source.is_conditional(frame)
