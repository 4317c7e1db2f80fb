"""Terms of a loss that were computed from its own graph without being recorded: constants, which train nothing.

``loss = pixel + 0.5 * perceptual(sr, hr)`` with a ``perceptual`` under ``no_grad``, ``ce + (logits.argmax(1) !=
y).float().mean()``, or ``ce + mse(a.detach(), b.detach())``. Results without a graph of calls on values with one are
followed in some rounds; for those that become Python numbers see ``number_terms.py``. Such a result is a term if it is
added to a one-element value with a graph, and only sums and constant factors lie between there and the loss, whose
backward runs through the values that it was computed from, or through their parameters. Where a value computed from the
same is a factor, an input, an index or a bound of one with a graph, or is subtracted unscaled, it is data or a
baseline. A scalar that is detached as a whole is a constant on purpose, and so may be a term of detached values and
frozen parameters; ``(alpha * logp - q.detach()).mean()`` counts if what ``q`` is computed from is not in the loss.

Row: ``term_is_cut``. Roles: ``read`` (where the graph was left; ``op``; ``values``: ``shape``, ``dtype``, ``device``
of the term, ``how``: ``no_grad``, ``discrete``, ``detached`` or, past autograd into other memory, ``written``),
``added`` (where the term was added to the loss).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.detect.exports import Exports
from gradsan.detect.meaning.made import is_in_forward
from gradsan.detect.meaning.rounds import RoundDetector
from gradsan.detect.meaning.terms.constant_terms import (
    LISTED,
    REDUCES,
    SCALES,
    SUMS,
    Terms,
    leaves_near,
    made_of,
    numbers_below,
    sums_below,
)
from gradsan.detect.meaning.terms.drawn_samples import DrawnSamples
from gradsan.detect.memory import Uncounted
from gradsan.detect.one_tensor.second_names import DetachedLeaves
from gradsan.model import Clue
from gradsan.record.detector import Run
from gradsan.record.log import RawStack
from gradsan.record.stacks import is_called_by_program, is_own_file, symbolise
from gradsan.record.steps import RawBackward, read_backward

ROW = "term_is_cut"
_ON_PURPOSE = frozenset({"detach", "detach_", "clone", "copy_"})
_ADDS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__", "stack", "cat"})
_CONVERSIONS = ("to", "float", "double", "half", "bfloat16", "type", "int", "long", "bool")
"""Methods that are no operators, and are not logged: they are wrapped for the length of a round."""
_LOGARITHMS = frozenset({"log", "log_"})
_PICKS = frozenset({"argmax", "argmin", "argsort", "max", "min", "multinomial", "sort", "topk"})
_INDEXED = ("__getitem__", "embedding", "gather", "index", "scatter", "take")
"""What operations that read or write elements by an index begin with."""
_TENSORS_FOLLOWED, _MEASURED, _NEAREST = 1_024, 16, 4


@dataclass(slots=True, eq=False)
class Cut:
    """The stack where the graph of a value was left, and the numbers of the value's Node and of some below it.

    ``is_data`` says whether values computed from it are more than a term, ``is_each`` whether each of its elements is
    added to one of another value.
    """

    stack: RawStack
    op: str
    sources: tuple[int, ...]
    how: str
    is_data: bool = False
    is_each: bool = False
    written: dict[str, Any] = field(default_factory=dict)
    """Facts of what was written past autograd."""


class _Held(NamedTuple):
    """A value computed from cuts; ``unscaled`` is the value that it is a multiple of, if any.

    ``is_whole``: it is a detached value, its sum or a multiple of it. ``leaves``: those that it was computed from
    under ``no_grad`` outside of a forward, which may only have been measured there.
    """

    weak: Any
    cuts: tuple[Cut, ...]
    unscaled: Any
    is_whole: bool
    leaves: tuple[tuple[_torch.weak_tensor, Cut], ...] = ()

    def as_index(self) -> _Held:
        """The same; its cuts are others if it is the index of what was picked: how many were may still be a term."""
        made = self.weak()
        is_index = made is not None and not made.is_floating_point()
        cuts = (replace(cut) if is_index and cut.op in _PICKS else cut for cut in self.cuts)
        return self._replace(cuts=tuple(cuts))


class _Joined(NamedTuple):
    number: int | None
    cuts: tuple[Cut, ...]
    stack: RawStack
    name: str | None
    facts: dict[str, Any]
    memory: _torch.weak_storage | None = None
    """What was added element by element after it was written past autograd: no state, if it is gone soon."""


class CutTerms(RoundDetector):
    """Follows values computed unrecorded from values with a graph in some rounds; findings go to ``found``."""

    from_start = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._samples, self._leaves = run.get(DrawnSamples), run.get(DetachedLeaves)
        run.get(Exports).on_taken.append(self._exported)
        self.on_detached: list[Callable[[Any], None]] = []
        """Called with a tensor that is detached in a round that is followed."""
        self._held: dict[int, _Held] = {}
        self._filled: dict[int, tuple[_torch.weak_storage, _Held]] = {}
        """What was written past autograd, by the number of its memory, which no other gets while it is held."""
        self._read_as_data = set[int]()
        run.get(Uncounted).on_data_read.append(self._data_read)
        self._joined: list[_Joined] = []
        self._passing = self._notes(list[tuple[Any, _Joined]]())
        """Sums with written memory that may be a state, to be looked at in the next round."""
        self._arrays = dict[Cut, None]()
        self._terms = Terms(self._notes({}))
        self._left = self._notes(dict[int, tuple[Any, Cut]]())

    def left(self, leaf: torch.Tensor) -> Cut | None:
        """Return where what was computed from a leaf first left its graph before the first backward."""
        known = self._left.get(id(leaf))
        return known[1] if known is not None and known[0]() is leaf else None

    def note_left(self, leaf: torch.Tensor, cut: Cut) -> None:
        """Note where what is computed from a leaf leaves its graph, if it is the first such place."""
        if self.left(leaf) is None:
            self._left[id(leaf)] = _torch.weak_tensor(leaf), cut

    def begins(self, entry: RawBackward) -> bool:
        """Drop the values followed before."""
        self._tell_passing()
        self._held.clear()
        self._filled.clear()
        self._read_as_data.clear()
        self._joined.clear()
        self._terms.clear()
        self._watch((*_CONVERSIONS, "detach"), self._converted)
        self._arrays.clear()
        return True

    def _exported(self, tensor: torch.Tensor, _: RawStack) -> None:
        if self._is_of_thread() and (held := self._of(tensor)) is not None:
            self._arrays.update(dict.fromkeys(held.cuts))

    def imported(self, array: Any, made: Any) -> None:
        """Follow a tensor made of an array: NumPy may have computed it from the values exported before."""
        if self._arrays and self._is_of_thread() and type(array).__module__ == "numpy":
            cuts, self._arrays = tuple(self._arrays), {}
            if type(made) in _torch.PLAIN_TENSORS and made.is_floating_point():
                self._held[id(made)] = _Held(_torch.weak_tensor(made), cuts, None, False)

    def _converted(self, name: str, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if is_own_file(self._core.stack(1).codes[0].co_filename):
            return
        self._listeners.guard.run_hushed(lambda: self._on_result(name, args, kwargs, result))
        if name == "detach":
            self._samples.detached(args[0])
            self._listeners.guard.run_hushed(lambda: self._leaves.note(args[0], result))
            for note in self.on_detached:
                self._listeners.guard.run_hushed(functools.partial(note, args[0]))

    def result(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Follow values that leave the graph, and their uses with values in it."""
        for made, given in made_of(op, _torch.tensors_of_call(args, kwargs), result):
            held = [known for one in given if (known := self._of(one)) is not None]
            held = [one.as_index() for one in held] if op.startswith(_INDEXED) else held
            cuts = tuple(dict.fromkeys(cut for one in held for cut in one.cuts))
            if made.requires_grad:
                for weak, cut in (pair for one in held for pair in one.leaves):
                    if (leaf := weak()) is not None:
                        self.note_left(leaf, cut)
                if op.endswith("_") and made is args[0] and _torch.storage_or_none(made) in self._read_as_data:
                    nodes, facts = filter(None, map(_torch.grad_fn_of, given[1:])), _torch.facts_of(made)
                    own = tuple(
                        Cut(self._core.stack(), op, numbers_below(one), "written", written=facts) for one in nodes
                    )
                    self._fill(made, (*cuts, *own))
                    continue
                self._came_back(op, args, made, [one for one in held if one.cuts], cuts)
            elif op in _ON_PURPOSE and not (
                (op == "detach" and _torch.grad_fn_of(given[0]) is not None)
                or (op == "clone" and _torch.storage_or_none(given[0]) in self._filled)
            ):
                _are_data(cuts)
            # Some operations read only the shape and kind of a tensor.
            elif len(self._held) < _TENSORS_FOLLOWED and not op.endswith("_like") and not op.startswith("new_"):
                self._follow(op, made, given, held)

    def _of(self, tensor: torch.Tensor) -> _Held | None:
        known = self._held.get(id(tensor))
        if (known is None or known.weak() is not tensor) and self._filled and not tensor.requires_grad:
            _, known = self._filled.get(_torch.storage_or_none(tensor), (None, None))
            return known
        # A result of a custom Function's forward has a graph by now: that of the Function.
        return known if known is not None and known.weak() is tensor and _torch.grad_fn_of(tensor) is None else None

    def _data_read(self, tensor: torch.Tensor) -> None:
        """Note memory that may be written through ``.data``: what has it keeps no graph."""
        if not tensor.requires_grad and self._is_of_thread() and len(self._read_as_data) < _TENSORS_FOLLOWED:
            self._read_as_data.add(_torch.storage_or_none(tensor))

    def _fill(self, made: torch.Tensor, cuts: tuple[Cut, ...]) -> None:
        if len(self._filled) < _TENSORS_FOLLOWED and made.is_floating_point():
            kept = _Held(_torch.weak_tensor(made), cuts[-_MEASURED:], None, False)
            self._filled[_torch.storage_or_none(made)] = _torch.weak_storage(made.untyped_storage()), kept

    def _came_back(self, op: str, args: tuple[Any, ...], made: Any, held: list[_Held], cuts: tuple[Cut, ...]) -> None:
        node = _torch.grad_fn_of(made)
        name = "" if node is None else node.name()
        is_term = name in SUMS and (made.numel() == 1 or name in LISTED)
        is_each = name in SUMS and not is_term and len(held) == 1 and held[0].is_whole
        if is_each and not any(one.is_data for one in cuts):
            # Summed up later, a term of each element: what it is computed from must have no other part in the loss.
            self._join(node, made, held[0]._replace(cuts=tuple(replace(one, is_each=True) for one in cuts)))
        elif name == "AddBackward0" and not is_term and all(cut.how == "written" for cut in cuts):
            memory = next(
                (
                    self._filled.get(_torch.storage_or_none(one))
                    for one in args
                    if torch.is_tensor(one) and not one.requires_grad
                ),
                None,
            )
            if memory is not None and cuts:
                self._join(node, made, held[0], memory[0])
        if is_term and (op in _ADDS or all(one.unscaled is not None for one in held)):
            _are_data(tuple(cut for one in held if one.is_whole for cut in one.cuts))
            if cuts:
                self._join(node, made, held[0]._replace(cuts=cuts))
        else:
            _are_data(cuts)

    def _join(self, node: Node, made: Any, term: _Held, memory: _torch.weak_storage | None = None) -> None:
        facts, stack = {**_torch.facts_of(made), "shape": ()}, self._core.stack()
        # What a library adds up (the density of a point mass) is its own affair.
        if not is_called_by_program(stack):
            return
        name = self._terms.name(stack, term.weak(), sys._getframe(1))
        self._joined.append(_Joined(_torch.node_sequence(node), term.cuts, stack, name, facts, memory))

    def _follow(self, op: str, made: Any, given: list[Any], held: list[_Held]) -> None:
        cuts = tuple(dict.fromkeys(cut for one in held for cut in one.cuts))
        measured = tuple(pair for one in held for pair in one.leaves)[:_MEASURED]
        held = [one for one in held if one.cuts]
        if any(isinstance(one, torch.nn.Parameter) for one in given):
            _are_data(tuple(cut for cut in cuts if cut.how == "detached"))
        if op in _LOGARITHMS:
            # Of a comparison it is 0 or infinite: where a density has its support.
            _are_data(tuple(cut for cut in cuts if cut.how == "discrete"))
        # A view taken unrecorded has the graph of its base.
        nodes = [_torch.grad_fn_of(one) or (None if one._base is None else one._base.grad_fn) for one in given]
        sources = [numbers_below(node) for node in nodes if node is not None]
        leaves = [one for one in given if _torch.is_trainable_leaf(one)]
        if sources or leaves:
            how = "detached" if op == "detach" else "discrete" if _torch.is_grad_enabled() else "no_grad"
            stack = self._core.stack()
            # Outside of a forward, parameters are measured and checked, too.
            # A transform records its values itself, without ``requires_grad``.
            is_measured = not is_in_forward(stack)
            left = [Cut(stack, op, one, how) for one in sources]
            cuts = (*cuts, *left)
            if _torch.is_transformed():
                leaves = []
            elif is_measured and how == "no_grad" and self.is_before_first_backward:
                own = tuple((_torch.weak_tensor(one), Cut(stack, op, (), how)) for one in leaves)
                measured = (*measured, *own)[:_MEASURED]
            if self.is_before_first_backward:
                leaves = [] if is_measured else leaves
                below = (leaf for node in nodes if node is not None for leaf in leaves_near(node))
                for leaf in (*below, *leaves):
                    self.note_left(leaf, left[0] if left else Cut(stack, op, (), how))
        if cuts or measured:
            unscaled = held[0].weak if held and op in SCALES else None
            is_whole = op == "detach" or (op in REDUCES and bool(held) and all(one.is_whole for one in held))
            self._held[id(made)] = _Held(_torch.weak_tensor(made), cuts, unscaled, is_whole, measured)
            self._terms.note(op, made, held[0].weak() if held else None)
            if cuts and op.endswith("_"):
                self._fill(made, cuts)
        else:
            self._held.pop(id(made), None)

    def looks(self, entry: RawBackward, is_last: bool) -> None:
        """Check whether such a term has been added to this loss."""
        joined, self._joined = self._joined, []
        if not joined or entry.stack in self._described:
            return
        roots = read_backward(entry).roots
        sums = set(sums_below(roots))
        own = [one for one in joined if one.number in sums and not any(cut.is_data for cut in one.cuts)]
        if not own:
            return
        ran = set(numbers_below(*roots, most=None))
        for one in own:
            # A running average of the loss is made of a sum on the path.
            if not any(ran.isdisjoint(each.sources) or _has_part(each, sums, ran) for each in one.cuts):
                if one.memory is None:
                    self._tell(entry.stack, one)
                    return
                self._passing.append((entry.stack, one))

    def _tell_passing(self) -> None:
        passing = [one for one in self._passing if one[1].memory is not None and one[1].memory.expired()]
        self._passing.clear()
        for stack, one in passing:
            if stack not in self._described:
                self._tell(stack, one)

    def settle(self) -> None:
        """Report sums with memory that is gone as watching ends."""
        super().settle()
        self._tell_passing()

    def _tell(self, stack: Any, one: _Joined) -> None:
        self._described.add(stack)
        cut = one.cuts[0]
        values = {**(cut.written or one.facts), "how": cut.how, **({"is_each": "yes"} if cut.is_each else {})}
        read = Clue("read", symbolise(cut.stack), name=one.name, op=cut.op, values=values)
        self._report_at(ROW, stack, read, Clue("added", symbolise(one.stack)))


def _has_part(cut: Cut, sums: set[int], ran: set[int]) -> bool:
    """Whether the value is in the loss with its graph, or, for each element, what it is computed from at once."""
    return not ran.isdisjoint(cut.sources[:_NEAREST]) if cut.is_each else cut.sources[0] in sums


def _are_data(cuts: tuple[Cut, ...]) -> None:
    for cut in cuts:
        # What is written into memory in a loop is read from there for the next iteration, too.
        cut.is_data = cut.how != "written"
