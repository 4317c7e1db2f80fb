"""Gradients kept by reference while a later backward adds to them: ``first = w.grad; ...; second = w.grad - first``.

``.grad`` is one tensor, to which each backward adds in place; a reference to it without a copy has the sum of both.
Checked at the 1st, 2nd and 4th backward of a line: a variable of the program's that holds the gradient of a leaf of
this graph, and whose source reads it afterwards as if it were the earlier one. Reported if the backward has added to
it.

At the 2nd, 4th and 8th, and at the first step: lists that a function of the program has in one list or dict, or
unpacked together, and that hold the same gradients: those of several losses were meant. And a list or dict that holds
the gradient of one leaf three times or more, and more often than at the look before, as a tensor or as an array over
its memory. ``zero_()`` keeps that tensor, so all elements are the gradient of the last round.

And one tensor that is ``.grad`` of two parameters of one optimizer: at the 1st, 2nd, 4th and 8th backward of a line,
which adds to the one and so to the other, and at the first step, where a loop over parameters has written ``p.grad``
once for each. Parameters over one memory, or of equal values, may share their gradient. And one that was given to a
parameter by reference, and cleared as another's before that step.

What a function keeps as the best values so far (``BestValues``) is looked at in 64 backwards, and at powers of two;
what a list keeps of weights (``kept_weights.py``) in the first 16, and at powers of two.

And an array over a parameter's memory into which an average of the same parameter is mixed: looked at where the
program asks for that memory again, once a line.

And a list that gets a copy of ``x.grad`` in each iteration, though nobody clears that: each is the sum so far.

Row: ``gradient_collected``. Roles: ``gradient`` (the leaf; ``values`` as below), ``bound`` (the line; ``name``).
Row: ``own_operand``, as in ``own_operands.py``.
Row: ``gradient_of_two``. Roles: ``gradient`` (``name``; ``op``, a variable that holds it; ``values``: ``shape``,
``dtype``, ``device``), ``second`` (``name``) and ``written`` (where a loop has; ``op``).
Row: ``kept_gradient_changed``. Roles: ``bound`` (where it was kept), ``written`` (the backward; ``name`` of the
gradient; ``values``: ``shape``, ``dtype``, ``device``), ``read`` (``name`` of the variable).
Row: ``gradients_are_one``. Role ``bound`` (``name`` of the list; ``op`` is the gradient's; ``values``: ``shape``,
``dtype``, ``device``, ``times``).
"""

from __future__ import annotations

import collections
import itertools
import sys
from collections.abc import Hashable, Iterable, Iterator
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradsan import _torch, source
from gradsan.detect.exports import Exports
from gradsan.detect.gradients.clip_calls import CLEARS
from gradsan.detect.gradients.kept_gradients import COMPREHENSIONS, by_gradient, others_run, reads_gradient
from gradsan.detect.meaning.made import Making
from gradsan.detect.one_tensor.second_names import at_line
from gradsan.graph import naming, walk
from gradsan.graph.live import value_of
from gradsan.graph.variables import reached, spaces_of
from gradsan.model import Clue, Failure, Frame, Site
from gradsan.record.detector import Finder, Run
from gradsan.record.log import RawStack, RawWrite, logged_writes
from gradsan.record.stacks import is_own_file, is_user_file, symbolise
from gradsan.record.steps import RawBackward, read_backward

if TYPE_CHECKING:
    from gradsan.detect.one_tensor.kept_weights import BestValues, KeptWeights

ROW, LISTED, SHARED = "kept_gradient_changed", "gradients_are_one", "gradient_of_two"
COPIED = "gradient_collected"
BEST, WEIGHTS = "best_values_of_now", "weights_are_one"
_SHARES = frozenset({"detach", "data", "numpy"})
_LOOKS, _WEIGHT_LOOKS = 64, 16
_ROUNDS, _ROUNDS_OF_LISTS, _TIMES = (1, 2, 4), (2, 4, 8), 3
_FRAMES, _ITEMS, _LINES = 3, 64, 64
_CHANGES = frozenset(
    {
        *("add_", "sub_", "mul_", "div_", "addcmul_", "addcdiv_", "lerp_"),
        *("__iadd__", "__isub__", "__imul__", "__itruediv__"),
    }
)
"""Writes that change a value once more when they are made again."""


class _Kept(NamedTuple):
    """A gradient kept by reference, in its state before the backward at ``clock``."""

    clock: int
    gradient: _torch.weak_tensor
    version: int
    failure: Failure


class KeptReferences(Finder):
    """Checks the variables of the functions that call backward; findings go to ``found``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._making, self._exports = run.get(Making), run.get(Exports)
        self._exports.on_taken.append(self._taken)
        self._arrays = self._notes(set[RawStack]())
        self._best: BestValues | None = None
        self._weights: KeptWeights | None = None
        self._looks = 0
        self._kept = self._notes(list[_Kept]())
        self._places = self._notes(dict[tuple[int, int, int], tuple[_torch.weak_tensor, RawStack]]())
        """The gradients that a backward of the last of these rounds has found, whose lists a step may find full."""
        self._seen, self._counted = self._notes(set[Hashable]()), self._notes(dict[tuple[str, Any], int]())

    def forget(self) -> None:
        super().forget()
        self._best, self._weights, self._looks = None, None, 0

    @_torch.hushed()
    def before_round(self, entry: RawBackward, rounds: int) -> None:
        if not entry.accumulates:
            return
        if rounds <= _ROUNDS_OF_LISTS[-1] and not others_run(self._core, entry):
            filled = list(_filled(entry))
            reached = set(map(id, filled))
            self._places.clear()
            self._places.update((_place(one.grad), (_torch.weak_tensor(one), entry.stack)) for one in filled)
            every = [list(_torch.parameters_of(optimizer)) for optimizer, _ in self._making.optimizers()]
            # Another thread's backward may be writing the gradients of a model of its own.
            held = [leaves for leaves in every if not reached.isdisjoint(map(id, leaves))]
            # Without an optimizer, what one backward reaches is updated together.
            for first, second in itertools.chain.from_iterable(map(_sharing, held if every else [filled[::-1]])):
                # Two weights of equal values stay equal with one gradient, the sum: that may be meant.
                is_tied = first.is_cpu and second.is_cpu and torch.equal(first.detach(), second.detach())
                if not is_tied and (id(first) in reached or id(second) in reached):
                    self._tell(first, second, entry.stack)
                    break
        if rounds in _ROUNDS_OF_LISTS:
            self._look_at_lists(entry, rounds)
        self._look_at_best(entry)
        self._look_at_weights(entry)
        if rounds not in _ROUNDS:
            return
        callers = list(_program_frames(sys._getframe(1)))
        if not any(reads_gradient(frame.f_code) for frame in callers) or others_run(self._core, entry):
            return
        gradients = {_torch.storage_or_none(leaf.grad): leaf.grad for leaf in _filled(entry)}
        if not gradients:
            return
        site = symbolise(entry.stack)
        for frame in callers:
            place = next((one for one in site.frames if _is_at(one, frame)), None)
            if place is not None and rounds == _ROUNDS[1]:
                from gradsan.detect.one_tensor.kept_weights import copied

                owned = set(map(id, _torch.parameters_of(*(one for one, _ in self._making.optimizers()))))
                for clues in copied([one for one in _filled(entry) if id(one) not in owned], frame, site, place):
                    self._report_at(COPIED, entry.stack, *clues)
            for name, gradient in _held(frame, gradients) if place is not None else ():
                if (frame.f_code, name) not in self._seen:
                    self._keep(entry, site, place, name, gradient)
                    self._seen.add((frame.f_code, name))

    @_torch.hushed()
    def first_step(self, optimizer: Any) -> None:
        """Report a gradient of two parameters that a loop over parameters has written for each of them.

        And lists that hold the same gradients, though each backward of this step was to have its own.
        """
        for listed, place, times in _equal_lists(self._places):
            weak, stack = self._places[place]
            self._tell_list(weak(), stack, listed, times)
        for first, second in _sharing(_torch.parameters_of(optimizer)):
            storage = _torch.storage_or_none(first.grad)
            raws = collections.defaultdict[tuple[Any, str], list[RawWrite]](list)
            for raw in logged_writes(self._core):
                if raw.storage == storage and raw.op in _CHANGES:
                    raws[raw.stack, raw.op].append(raw)
            written = next((own for (stack, _), own in raws.items() if len(own) > 1 and by_gradient(stack)), None)
            frame = None if written is None else symbolise(written[0].stack).user_frame
            name = None if frame is None or written is None else source.written_expression(frame, written[0].op)
            owner = (name or "").removesuffix(".grad")
            if frame is not None and written and owner != name and source.is_target_of_loop(frame, owner, frame):
                self._tell(first, second, self._core.stack(), written[0])
                return
        self._look_at_adopted(list(_torch.parameters_of(optimizer)))

    def _look_at_adopted(self, leaves: list[Any]) -> None:
        """Report a gradient that was given to one of ``leaves`` without a copy, and cleared as that of the other.

        No backward has filled it since: it has moved by the logged writes alone.
        """
        grads = {
            _place(one.grad): one for one in leaves if one.grad is not None and (_torch.use_count(one.grad) or 0) > 2
        }
        own = set(map(id, leaves))
        models = naming.all_modules_alive() if grads else ()
        others = (one for model in models for one in model.parameters(recurse=False) if id(one) not in own)
        for other in others:
            gradient = other.grad
            leaf = None if gradient is None else grads.get(_place(gradient))
            if gradient is None or leaf is None:
                continue
            storage = _torch.storage_or_none(gradient)
            raws = [raw for raw in logged_writes(self._core) if raw.storage == storage and raw.kind != "metadata"]
            cleared = next((raw for raw in reversed(raws) if raw.op in CLEARS), None)
            later = sum(cleared is not None and raw.clock > cleared.clock for raw in raws)
            if cleared is not None and int(gradient._version) == (cleared.version or 0) + later:
                self._tell(leaf, other, self._core.stack(), cleared)
                return

    def _taken(self, tensor: torch.Tensor, stack: RawStack) -> None:
        """Report a line that mixes the values of a tensor into an array over its own memory."""
        export = self._exports.of(_torch.storage_or_none(tensor)) if self._exports.any else None
        is_due = export is not None and export.arrays is not None and len(self._arrays) < _LINES
        if not is_due or stack in self._arrays or not is_user_file(stack.codes[0].co_filename):
            return
        self._arrays.add(stack)
        place = symbolise(stack).user_frame
        pair = None if place is None else source.averaged_array(place)
        frame = next(_program_frames(sys._getframe(1)), None)
        array: Any = None if pair is None or frame is None else value_of(frame, pair[0])
        if pair is None or type(array).__name__ != "ndarray" or array.size != tensor.numel():
            return
        if array.__array_interface__["data"][0] != tensor.data_ptr():
            return
        facts = {**_torch.facts_of(tensor), "kept": pair[0]}
        self._report_at(
            "own_operand",
            stack,
            Clue("written", symbolise(stack), name=pair[0], op="__iadd__", values=facts),
            Clue("read", symbolise(stack), name=pair[1]),
        )

    def _tell(self, first: Any, second: Any, stack: Any, raw: RawWrite | None = None) -> None:
        names = [naming.name_of(one, sys._getframe(1)) or "?" for one in (first, second)]
        if (SHARED, *names) in self._seen:
            return
        self._seen.add((SHARED, *names))
        written = () if raw is None else (Clue("written", symbolise(raw.stack), op=raw.op),)
        held = naming.name_of(first.grad, sys._getframe(1))
        gradient = Clue("gradient", name=f"{names[0]}.grad", op=held, values=_torch.facts_of(first.grad))
        self._report_at(SHARED, stack, gradient, Clue("second", name=f"{names[1]}.grad"), *written)

    def _look_at_lists(self, entry: RawBackward, rounds: int) -> None:
        """Report a list or dict that holds one gradient more and more often, though each round has filled it anew.

        One that holds it as often as before lists a weight that several layers share.
        """
        before = dict(self._counted)
        self._counted.clear()
        places = {_place(leaf.grad): leaf for leaf in _filled(entry) if int(leaf.grad._version) >= rounds // 2}
        if not places:
            return
        held = collections.Counter[tuple[str, Any]]()
        for one in reached(spaces_of(sys._getframe(1))):
            tensor = one.value.base if type(one.value).__name__ == "ndarray" else one.value
            if "[" in one.path and torch.is_tensor(tensor) and (place := _place(tensor)) in places:
                held[one.path.partition("[")[0], place] += 1
        self._counted.update(held)
        found = [(*key, times) for key, times in held.items() if _TIMES <= times > before.get(key, times)]
        for name, place, times in found[:1] or _equal_lists(places):
            self._tell_list(places[place], entry.stack, name, times)

    def _tell_list(self, leaf: Any, stack: RawStack, name: str, times: int) -> None:
        if (LISTED, name) not in self._seen:
            from gradsan.detect.one_tensor.kept_weights import added_at

            self._seen.add((LISTED, name))
            gradient = f"{naming.name_of(leaf, sys._getframe(1)) or '?'}.grad"
            values = {**_torch.facts_of(leaf), "times": times}
            self._report_at(LISTED, stack, Clue("bound", added_at(symbolise(stack), name), name, gradient, values))

    def _look_at_best(self, entry: RawBackward) -> None:
        """Report what was kept beside the best score so far, and has changed with a parameter since."""
        running = list(_program_frames(sys._getframe(1)))
        if self._best is None and any(map(_may_share, running)):
            from gradsan.detect.one_tensor.kept_weights import BestValues, KeptWeights

            self._best, self._weights = BestValues(), KeptWeights()
        if self._best is not None:
            trained = _torch.parameters_of(*(one for one, _ in self._making.optimizers()))
            for clues in self._best.changed(running, symbolise(entry.stack), trained):
                self._report_at(BEST, entry.stack, *clues)
            # A short training is looked at more often.
            self._looks += 1
            most = _LOOKS if self._best.has_any else _WEIGHT_LOOKS
            self._listeners.call_before_backward(self.before_backward, self._looks < most)

    def _look_at_weights(self, entry: RawBackward) -> None:
        if self._weights is not None:
            leaves = walk.leaves_of(walk.engine_order(read_backward(entry).roots))
            for clue in self._weights.grown(leaves, sys._getframe(1), symbolise(entry.stack)):
                self._report_at(WEIGHTS, entry.stack, clue)

    @_torch.hushed()
    def before_backward(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at kept values between the rounds, too; as ``listeners.BeforeBackward``."""
        if entry.accumulates:
            self._look_at_best(entry)
            if self._looks <= _WEIGHT_LOOKS:
                self._look_at_weights(entry)

    def _keep(self, entry: RawBackward, site: Site, place: Frame | None, name: str, gradient: torch.Tensor) -> None:
        second = None if place is None else source.kept_gradient(place, name)
        if place is None or second is None:
            return
        clues = (
            Clue("bound", at_line(site, place, second.bound)),
            Clue("written", at_line(site, place, place.line), name, op="backward", values=_torch.facts_of(gradient)),
            Clue("read", at_line(site, place, second.read), name=name),
        )
        failure = Failure(ROW, "", "", symbolise(entry.stack), clues, raised=False)
        self._kept.append(_Kept(entry.clock, _torch.weak_tensor(gradient), int(gradient._version), failure))
        self._listeners.call_after_backward(self.after_backward)

    @_torch.hushed()
    def after_backward(self, entry: RawBackward) -> None:
        """Report the kept gradients that this backward has added to; as ``listeners.AfterBackward``."""
        due = [one for one in self._kept if one.clock == entry.clock]
        self._kept[:] = [one for one in self._kept if one.clock > entry.clock]
        self._listeners.call_after_backward(self.after_backward, bool(self._kept))
        for one in due:
            gradient = one.gradient()
            if gradient is not None and int(gradient._version) > one.version:
                self._found(one.failure)
                self._places.clear()


def _equal_lists(places: dict[tuple[int, int, int], Any]) -> list[tuple[str, tuple[int, int, int], int]]:
    """Return the first list, or dict, of lists that hold the same gradients: the name, the first's place, how often."""
    for frame in _program_frames(sys._getframe(2)) if places else ():
        values = _torch.locals_of(frame)
        together = [
            (", ".join(one), [values.get(name) for name in one])
            for one in source.names_unpacked(frame.f_code.co_filename)
        ]
        for name, each in [*values.items(), *together]:
            held = list(each.values()) if type(each) is dict else each
            if (
                not isinstance(held, (list, tuple))
                or not 1 < len(held) <= _ITEMS
                or len(set(map(id, held))) < len(held)
            ):
                continue
            inner = {_places_in(one) for one in held}
            first = next(iter(inner), ())
            if len(inner) == 1 and first and places.keys() >= set(first):
                return [(name, first[0], len(held))]
    return []


def _places_in(held: Any) -> tuple[tuple[int, int, int], ...]:
    """The places of the tensors in a list; empty for anything else."""
    parts = list(held.values()) if isinstance(held, dict) else held
    is_of_tensors = type(parts) in (list, tuple) and 0 < len(parts) <= _ITEMS and all(map(torch.is_tensor, parts))
    return tuple(map(_place, parts)) if is_of_tensors else ()


def _may_share(frame: FrameType) -> bool:
    """Whether the function that runs in ``frame`` names what gives a tensor's memory without a copy."""
    code = frame.f_code
    inner = [one for one in code.co_consts if isinstance(one, CodeType) and one.co_name in COMPREHENSIONS]
    return any(not _SHARES.isdisjoint(one.co_names) for one in (code, *inner))


def _filled(entry: RawBackward) -> Iterator[Any]:
    """The leaves behind a backward that have a gradient already."""
    for leaf in walk.leaves_of(walk.engine_order(read_backward(entry).roots)):
        if leaf.grad is not None and leaf.grad.layout is torch.strided:
            yield leaf


def _sharing(leaves: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Pairs of leaves with memory of their own whose ``.grad`` is one tensor."""
    known: dict[tuple[int, int, int], Any] = {}
    for one in leaves:
        place = (0, 0, 0) if one.grad is None or not one.grad.numel() else _place(one.grad)
        first = known.setdefault(place, one) if place[0] else one
        if _place(first) != _place(one):
            yield first, one


def _place(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The memory of a tensor: several gradients may lie in one storage."""
    if tensor.layout is not torch.strided:
        return 0, 0, 0
    return _torch.storage_or_none(tensor), int(tensor.storage_offset()), tensor.numel()


def _program_frames(frame: FrameType | None) -> Iterator[FrameType]:
    found = 0
    while frame is not None and found < _FRAMES:
        file = frame.f_code.co_filename
        if is_user_file(file) and not is_own_file(file):
            found += 1
            yield frame
        frame = frame.f_back


def _is_at(place: Frame, frame: FrameType) -> bool:
    is_same_function = place.function.rpartition(".")[2] == frame.f_code.co_name
    return is_same_function and (place.file, place.line) == (frame.f_code.co_filename, frame.f_lineno)


def _held(frame: FrameType, gradients: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a frame that hold one of the gradients, directly or in lists and dicts."""
    for name, value in _torch.locals_of(frame).items():
        for tensor in _torch.tensors_in(value, most=_ITEMS):
            storage = _torch.storage_or_none(tensor)
            if storage in gradients:
                yield name, gradients[storage]
                break


def reads_at(known: Failure, frame: Frame) -> bool:
    """Whether a failure reports a gradient kept by reference that is read by the statement of ``frame``, or around."""
    sites = [one.site for one in known.clues if one.role == "read" and one.site is not None]
    places = [one.user_frame for one in sites if known.row == "kept_gradient_changed"]
    return any(one is not None and one.file == frame.file and _has_line(one, frame.line) for one in places)


def _has_line(frame: Frame, line: int) -> bool:
    statement = source.statement_at(frame)
    last = None if statement is None else statement.node.end_lineno
    return frame.line <= line <= (last or frame.line)
