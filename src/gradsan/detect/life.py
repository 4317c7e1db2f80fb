"""Parameters without a gradient and graphs that are kept alive: faults in a graph's life that PyTorch does not report.

Both checks run a few times only. Parameters: at the first step of an optimizer; one that has no gradient
at all beside others that have is given some rounds, as several tasks may take turns, and a parameter without one beside
others all the rounds that there are: parts may be thawed, or chosen, later. Graphs: when one line
calls backward for the 16th and the 32nd time; a variable whose graph reaches back over nearly all of these rounds keeps
them alive. Where these rounds leave that graph unchanged, it may be kept for a later backward (forces of
every sample, for one loss): it is reported at the end, if no backward has run it.

Rows: ``leaf_lost``, ``parameter_not_reached``, ``graph_grows``. Roles: ``parameter`` (a tensor without gradient;
``values``: ``missing`` of ``total``, ``shape``, ``dtype``, ``device``, and where one of the program's own modules holds
it ``owner``, its class, and ``attribute``; ``site``: the definition of that class's forward), ``replaced`` (the tensor
that the program uses instead; ``site``: where it was made), ``registered`` (where a module got that one), ``read`` (the
expression and place that read it past its graph), ``backward`` (the last one, where no parameter has a gradient) with
``live`` of the step's frames, ``holder`` (the optimizer), ``grown`` (the variable; ``values``: ``rounds``, ``nodes``,
``bytes``, ``bytes_per_round``).
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from gradsan import _torch
from gradsan.detect.graph_growth import bytes_kept, is_bare_chain, reaches_back
from gradsan.detect.lost_updates import Graph
from gradsan.detect.meaning.made import Making
from gradsan.detect.meaning.terms.cut_terms import CutTerms
from gradsan.graph import naming, walk
from gradsan.graph.live import live_clues
from gradsan.graph.variables import Found
from gradsan.model import Clue, Failure, Frame, Site
from gradsan.record.detector import Detector, Run
from gradsan.record.ledger import Noted, site_that_made
from gradsan.record.stacks import symbolise
from gradsan.record.steps import BackwardRecord, RawBackward, moved_storages, read_backward, running_here

_FIRST_LOOK, _SECOND_LOOK = 16, 32
_LOOKS_AT_A_LINE = 32
_SHOWN = 3
_OWN_PART = 0.1
_NAMED = 12
_Waiting = tuple[Noted, Failure]


class _Unused(NamedTuple):
    """A parameter without a gradient at its optimizer's first step, beside others that had one."""

    weak: Any
    version: int
    storage: int
    clue: Clue | None


class Life(Detector):
    """Checks optimizers at their first step, and live graphs after some rounds; calls ``found`` with findings."""

    def __init__(self, run: Run) -> None:
        self._core, self._steps, self._backwards, self._found = run.core, run.steps, run.backwards, run.report
        self._began = 0
        self._making = run.get(Making)
        self._sizes: dict[tuple[int, str], tuple[int, int]] = {}
        self._awaited: list[list[Awaited]] = []
        self._looks = Counter[Any]()
        self._unfed: list[_Waiting] = []
        self._cut_off: list[tuple[Noted, Failure, int]] = []
        self._unused: list[tuple[list[_Unused], Failure]] = []
        self._left = run.get(CutTerms).left
        self._lost: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
        """The ids of the reported parameters, by the optimizer, which keeps them alive."""

    def forget(self) -> None:
        # The log also has steps of an earlier watching, to memory that may be in use again.
        self._began = self._core.clock
        for one in itertools.chain.from_iterable(self._awaited):
            one.graph.let_go()
        self._awaited.clear()
        self._unfed.clear()
        self._cut_off.clear()
        self._unused.clear()
        self._looks.clear()

    def settle(self) -> None:
        """Report, as watching ends, the first of the graphs that grew together that no backward has run."""
        for grown in self._awaited:
            used = [one.kept for one in grown if one.graph.was_used]
            unused = next((one for one in grown if not one.graph.was_used and not any(map(one.is_kept_by, used))), None)
            if unused is not None:
                self._found(unused.failure)
        self._unfed += [one[:2] for one in self._cut_off if not one[0].was_logged(self._core, self._steps, one[2])]
        self._look_at_unfed(is_last=True)
        self._report_unused()
        self.forget()

    def before_round(self, entry: RawBackward, rounds: int) -> None:
        """Check the graphs after some rounds of a line that calls backward; as ``on_round`` of the core."""
        # By the end of the watching, the parameters of a function that has returned are gone.
        self._cut_off = [one for one in self._cut_off if not one[0].was_written()]
        if self._unfed:
            self._look_at_unfed(is_last=rounds >= _FIRST_LOOK)
        for own, _ in self._unused:
            own[:] = [one for one in own if (leaf := one.weak()) is None or leaf._version == one.version]
        if rounds in (_FIRST_LOOK, _SECOND_LOOK):
            self._look_at_graphs(entry, rounds)

    def first_step(self, optimizer: Optimizer, frame: FrameType) -> None:
        """Check for parameters without gradient at an optimizer's first step; variables are searched from ``frame``."""
        held = [one for one in _torch.parameters_of(optimizer) if one.requires_grad]
        # A tensor without elements has nothing to learn; sharded training leaves most ranks with such tensors.
        missing = [one for one in held if one.grad is None and not is_lazy(one) and one.numel()]
        stack = self._core.stack()
        if not missing or self._looks[stack] >= _LOOKS_AT_A_LINE:
            return
        # A program may make one optimizer per task: no finding for the first one says nothing about the later ones.
        self._looks[stack] += 1
        site = symbolise(stack)
        counts = {"missing": len(missing), "total": len(held)}
        name = type(optimizer).__name__
        replaced = self._replaced(optimizer, held, missing, frame)
        clues = [Clue("holder", site, name=name)]
        is_all = len(missing) == len(held)
        if lost := self._lost_among(replaced):
            self._report_lost(optimizer, lost, counts, site, clues)
            return
        gone = {id(one) for one, _ in replaced}
        missing = [one for one in missing if id(one) not in gone]
        from gradsan.detect.bypassed import bypassed

        past_graph = bypassed(self._core, missing)
        for parameter, read in [(one, past_graph[id(one)]) for one in missing if id(one) in past_graph]:
            values = {**_torch.facts_of(parameter), **counts}
            shown = Clue("parameter", name=naming.name_of(parameter, frame), values=values)
            where = Clue("read", symbolise(read.stack), name=read.expression)
            self._found(Failure("parameter_not_reached", "", "", site, (shown, where, clues[0]), raised=False))
        missing = [one for one in missing if id(one) not in past_graph]
        cut_off = self._note_cut_off(optimizer, [] if is_all else missing, held, counts, frame)
        missing = [one for one in missing if id(one) not in cut_off]
        if not missing:
            return
        named = _names(missing, frame)
        listed = [
            naming.clue_of(named.get(id(one)), frame, {**_torch.facts_of(one), **counts}) for one in missing[:_NAMED]
        ]
        if not is_all:
            own = [
                _Unused(_torch.weak_tensor(one), one._version, _torch.storage_or_none(one), clue)
                for one, clue in itertools.zip_longest(missing, listed)
            ]
            failure = Failure("parameter_not_reached", "", "", site, tuple(clues), raised=False)
            self._unused.append((own, failure))
            return
        clues += (*listed, *self._last_backward(held, frame))
        failure = Failure("parameter_not_reached", "", "", site, tuple(clues), raised=False)
        others = (one for one in naming.optimizers_alive() if one is not optimizer)
        if any(one.grad is not None for other in others for one in _torch.parameters_of(other)):
            self._unfed.append((Noted(self._core, held), failure))
        else:
            self._found(failure)

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

    @_torch.hushed()
    def _look_at_unfed(self, is_last: bool) -> None:
        """Drop the optimizers whose parameters have been updated by now; report the others where ``is_last``."""
        self._unfed = [one for one in self._unfed if not one[0].was_written()]
        while is_last and self._unfed:
            self._found(self._unfed.pop(0)[1])

    def _report_unused(self) -> None:
        """Report the parameters that nothing has trained until the end; loading a state is no training."""
        moved = moved_storages(self._steps, self._began) if self._unused else set()
        for own, failure in self._unused:
            never = [one for one in own if one.storage not in moved and getattr(one.weak(), "grad", None) is None]
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
            yield Clue("backward", sites[-1], op=past[-1].via)
            yield from live_clues(
                frame, lambda tensor: any(tensor is one or _comes_from(tensor, one) for one in held[:_NAMED])
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
        return list(_replacements(held, missing, frame, self._made(optimizer)))

    def _lost_among(self, replaced: list[tuple[Any, Found]]) -> list[tuple[Any, Found]]:
        """Those of which one or the other is trained; else it may be a state that the program computes by itself."""
        moved = moved_storages(self._steps, self._began) if replaced else set()
        return [one for one in replaced if _is_reached(one[1].tensor) or _torch.storage_or_none(one[0]) in moved]

    def _made(self, optimizer: Optimizer) -> Frame | None:
        return next((symbolise(one.stack).user_frame for it, one in self._making.optimizers() if it is optimizer), None)

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
            clues.append(Clue("replaced", made, name=instead.path))
            if (late := self._making.late(instead.tensor)) is not None:
                clues.append(Clue("registered", symbolise(late.stack), name=instead.path))
        failure = Failure("leaf_lost", "", "", site, tuple(clues), raised=False)
        if any(instead.tensor.is_leaf for _, instead in replaced):
            self._found(failure)
        else:  # fast weights of a phase that does not train the leaves yet are computed from them, too
            self._cut_off.append((Noted(self._core, [leaf for leaf, _ in replaced]), failure, self._core.clock))

    @_torch.hushed()
    def _look_at_graphs(self, entry: RawBackward, rounds: int) -> None:
        clock, stack = entry.clock, entry.stack
        past = [one for one in self._backwards.before_in_thread(clock) if one.stack is stack]
        borders = [one.sequence for one in past]
        if len(borders) < rounds - 1:
            return
        grown = []
        for path, members in _groups(sys._getframe(1)).items():
            roots = walk.roots_of(one.tensor for one in members)
            if not any(reaches_back(root, borders[len(borders) // 2]) for root in roots):
                continue
            order = walk.engine_order(roots)
            numbers = [number for number in map(_torch.node_sequence, order) if number is not None]
            covered = sum(
                any(low <= number < high for number in numbers)
                for low, high in zip([0, *borders], borders, strict=False)
            )
            if covered < 0.75 * len(borders) or is_bare_chain(order, borders[len(borders) // 2]):
                continue
            size = bytes_kept(order)
            known = self._sizes.get((id(stack), path))
            self._sizes[id(stack), path] = (len(order), size)
            if known is not None and len(order) > 1.3 * known[0]:
                per_round = (size - known[1]) / (_SECOND_LOOK - _FIRST_LOOK)
                kept = {number for number in numbers if number < borders[len(borders) // 2]}
                grown.append((min(_numbers_of(members)), path, members, len(order), size, per_round, kept))
        if grown:
            self._report_grown(entry, rounds, sorted(grown, key=lambda one: one[:2]), borders[len(borders) // 2])

    def _report_grown(self, entry: RawBackward, rounds: int, grown: list[Any], border: int) -> None:
        backward, awaited = read_backward(entry), []
        ran = set(walk.engine_order(backward.roots))

        def is_another_line() -> bool:
            here = running_here(self._core)
            return here is None or here.stack is not entry.stack

        for _, path, members, nodes, size, per_round, kept in grown:
            values = {"rounds": rounds, "nodes": nodes, "bytes": size, "bytes_per_round": int(per_round)}
            made = site_that_made(self._core, members[0].tensor.grad_fn, threading.get_ident())
            clue = Clue("grown", made, name=path, values=values)
            failure = Failure("graph_grows", "", "", symbolise(entry.stack), (clue,), raised=False)
            # ``autograd.grad`` runs only what leads to its inputs: inner steps of meta-learning wait for a backward of
            # another line.
            if backward.via == "backward" and _is_spent(backward, ran, members, border):
                self._found(failure)
                return
            awaited.append(Awaited(Graph([one.tensor for one in members], is_another_line), failure, kept))
        self._awaited.append(awaited)


class Awaited(NamedTuple):
    """A grown graph that a later backward may run; ``kept`` are the numbers of its Nodes of earlier rounds."""

    graph: Graph
    failure: Failure
    kept: set[int]

    def is_kept_by(self, used: set[int]) -> bool:
        """Whether a graph that was used holds those Nodes anyway, but for a few."""
        return len(self.kept - used) <= _OWN_PART * len(self.kept)


def _is_spent(backward: BackwardRecord, ran: set[Any], members: list[Found], border: int) -> bool:
    """Whether the graph of ``members`` is of no use after a round, or is what this backward runs over and over."""
    if any(reaches_back(root, border) for root in backward.roots):
        return True
    return not backward.retain_graph and any(one.tensor.grad_fn in ran for one in members)


def _numbers_of(members: list[Found]) -> list[int]:
    """The sequence numbers of the Nodes that made the tensors."""
    return [_torch.node_sequence(one.tensor.grad_fn) or 0 for one in members]


def _groups(frame: FrameType) -> dict[str, list[Found]]:
    """The live tensors with a graph, grouped by their container."""
    groups: dict[str, list[Found]] = {}
    for one in naming.find(frame, naming.has_graph):
        groups.setdefault(one.within or one.path, []).append(one)
    return groups


def _replacements(
    held: list[Any], missing: list[Any], frame: FrameType, made: Frame | None
) -> Iterator[tuple[Any, Found]]:
    """Yield (tensor without a gradient that no module holds any more, tensor that the program has instead).

    The latter has the same shape, requires grad and is unknown to the optimizer: a parameter of a module, or
    the result of an operation on the old one. A parameter of another shape counts, too, if it has a gradient,
    lies in the same model and no optimizer has it. A leaf whose name is first bound after the optimizer was ``made``
    replaces none: it is another one.
    """
    from gradsan.detect.meaning.evidence import is_bound_after

    known = {id(one) for one in held}
    wanted = {tuple(one.shape) for one in missing}
    others, strangers = list[Found](), list[Found]()
    models, alive = set[str](), set[int]()
    for one in naming.find(frame, lambda tensor: tensor.requires_grad and not is_lazy(tensor)):
        if id(one.tensor) in known:
            if one.origin == "module" or one.within is None:
                alive.add(id(one.tensor))
            if one.origin == "module":
                models.add(_model_of(one))
        else:
            if tuple(one.tensor.shape) in wanted:
                others.append(one)
            if one.origin == "module" and one.tensor.is_leaf and one.tensor.grad is not None:
                strangers.append(one)
    used: set[int] = set()
    gone = [one for one in missing if id(one) not in alive]
    if not any(tuple(one.shape) == tuple(other.tensor.shape) for one in gone for other in others):
        yield from zip(gone, _without_optimizer(strangers, models) if gone else (), strict=False)
        return
    for parameter in gone:
        for one in others:
            fits = one.tensor.shape == parameter.shape and id(one.tensor) not in used
            is_given = one.tensor.is_leaf and not (made and is_bound_after(made, one.path))
            if fits and (one.origin == "module" or is_given or _comes_from(one.tensor, parameter)):
                used.add(id(one.tensor))
                yield parameter, one
                break


def _is_reached(tensor: torch.Tensor) -> bool:
    return not tensor.is_leaf or tensor.grad is not None


def _without_optimizer(strangers: list[Found], models: set[str]) -> list[Found]:
    """The ``strangers`` in one of the models that no live optimizer has; optimizers are searched only if needed."""
    inside = [one for one in strangers if _model_of(one) in models]
    held = set(map(id, _torch.parameters_of(*naming.optimizers_alive()))) if inside else set()
    return [one for one in inside if id(one.tensor) not in held]


def _model_of(found: Found) -> str:
    return found.path.partition(".")[0].partition("[")[0]


def _names(tensors: list[torch.Tensor], frame: FrameType) -> dict[int, str]:
    """The expressions by which the program holds the tensors, by ``id``; a name in a module comes first."""
    wanted = {id(one) for one in tensors}
    found: dict[int, Found] = {}
    for one in naming.find(frame, lambda tensor: id(tensor) in wanted):
        known = found.get(id(one.tensor))
        if known is None or (known.origin != "module" and one.origin == "module"):
            found[id(one.tensor)] = one
    return {key: one.path for key, one in found.items()}


def _comes_from(tensor: torch.Tensor, leaf: torch.Tensor) -> bool:
    order = walk.engine_order([tensor.grad_fn]) if tensor.grad_fn is not None else []
    children = (child for node in order[:1_000] for child, _ in node.next_functions)
    return any(getattr(child, "variable", None) is leaf for child in children)
