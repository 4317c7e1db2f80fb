"""Terms of a loss that were computed from its own graph without being recorded: constants, which train nothing.

``loss = pixel + 0.5 * perceptual(sr, hr)`` with a ``perceptual`` under ``no_grad``, ``ce + (logits.argmax(1) !=
y).float().mean()``, or ``ce + mse(a.detach(), b.detach())``. Results without a graph of calls on values with one are
followed in some rounds; for those that become Python numbers see ``number_terms.py``. Such a result is a term if it is
added to a one-element value with a graph, and only sums and constant factors lie between there and the loss, whose
backward runs through the values that it was computed from, or through their parameters. Where a value computed from the
same is a factor, an input, an index or a bound of one with a graph, or is subtracted unscaled, it is data or a
baseline. A term that is detached as a whole is a constant on purpose, and so may be one of detached values and frozen
parameters.

Row: ``term_is_cut``. Roles: ``read`` (where the graph was left; ``op``; ``values``: ``shape``, ``dtype``, ``device``
of the term, ``how``: ``no_grad``, ``discrete`` or ``detached``), ``added`` (where the term was added to the loss;
``name``).
"""

from __future__ import annotations

import collections
import functools
import operator
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.detect.meaning.made import is_in_forward
from gradsan.detect.meaning.rounds import RoundDetector
from gradsan.detect.meaning.terms.constant_terms import LISTED, SUMS, made_of, sums_below
from gradsan.graph import naming
from gradsan.model import Clue
from gradsan.record.detector import Run
from gradsan.record.log import RawStack
from gradsan.record.stacks import is_called_by_program, symbolise
from gradsan.record.steps import RawBackward, read_backward

ROW = "term_is_cut"
_TENSORS_FOLLOWED, _NODES_BELOW = 1_024, 64
_ON_PURPOSE = frozenset({"detach", "detach_", "clone", "copy_"})
_ADDS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__", "stack", "cat"})
_CONVERSIONS = ("to", "float", "double", "half", "bfloat16", "type", "int", "long", "bool")
"""Methods that are no operators, and are not logged: they are wrapped for the length of a round."""
_SCALES = frozenset({"mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide", "mul_", "div_"})
_REDUCES = _SCALES | {"mean", "sum", "neg", "__neg__"}


@dataclass(slots=True, eq=False)
class Cut:
    """The stack where the graph of a value was left, and the numbers of the value's Node and of some below it.

    ``is_data`` says whether values computed from it are more than a term.
    """

    stack: RawStack
    op: str
    sources: tuple[int, ...]
    how: str
    is_data: bool = False


class _Held(NamedTuple):
    """A value computed from cuts; ``unscaled`` is the value that it is a multiple of, if any.

    ``is_whole``: it is a detached value, its sum or a multiple of it.
    """

    weak: Any
    cuts: tuple[Cut, ...]
    unscaled: Any
    is_whole: bool


class _Joined(NamedTuple):
    number: int | None
    cuts: tuple[Cut, ...]
    stack: RawStack
    name: str | None
    facts: dict[str, Any]


class CutTerms(RoundDetector):
    """Follows values computed unrecorded from values with a graph in some rounds; findings go to ``found``."""

    from_start = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._held: dict[int, _Held] = {}
        self._joined: list[_Joined] = []
        self._names = self._notes(dict[RawStack, str | None]())
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
        self._held.clear()
        self._joined.clear()
        self._watch((*_CONVERSIONS, "detach"), self._converted)
        return True

    def _converted(self, name: str, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        guard = self._listeners.guard
        guard.run_hushed(lambda: self._on_result(name, args, kwargs, result))

    def result(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Follow values that leave the graph, and their uses with values in it."""
        for made, given in made_of(op, list(_torch.tensors_in((args, kwargs))), result):
            held = [known for one in given if (known := self._of(one)) is not None]
            cuts = tuple(dict.fromkeys(cut for one in held for cut in one.cuts))
            if made.requires_grad:
                self._came_back(op, args, made, held, cuts)
            elif op in _ON_PURPOSE and not (op == "detach" and _torch.grad_fn_of(given[0]) is not None):
                _are_data(cuts)
            elif len(self._held) < _TENSORS_FOLLOWED and not _is_of_shape_only(op):
                self._follow(op, made, given, held)

    def _of(self, tensor: torch.Tensor) -> _Held | None:
        known = self._held.get(id(tensor))
        # A result of a custom Function's forward has a graph by now: that of the Function.
        return known if known is not None and known.weak() is tensor and _torch.grad_fn_of(tensor) is None else None

    def _came_back(self, op: str, args: tuple[Any, ...], made: Any, held: list[_Held], cuts: tuple[Cut, ...]) -> None:
        node = _torch.grad_fn_of(made)
        name = "" if node is None else node.name()
        is_term = name in SUMS and (made.numel() == 1 or name in LISTED)
        if is_term and (op in _ADDS or all(one.unscaled is not None for one in held)):
            _are_data(tuple(cut for one in held if one.is_whole for cut in one.cuts))
            # What a library adds up (the density of a point mass) is its own affair.
            if cuts and is_called_by_program(self._core.stack()):
                self._join(node, made, held[0]._replace(cuts=cuts))
        else:
            _are_data(cuts)

    def _join(self, node: Node, made: Any, term: _Held) -> None:
        facts = {**_torch.facts_of(made), "shape": ()}
        stack = self._core.stack()
        # To look for a name takes milliseconds, and a line may add up hundreds of terms in a round.
        if stack not in self._names:
            self._names[stack] = _name_of(term, sys._getframe(1))
        self._joined.append(_Joined(_torch.node_sequence(node), term.cuts, stack, self._names[stack], facts))

    def _follow(self, op: str, made: Any, given: list[Any], held: list[_Held]) -> None:
        cuts = tuple(dict.fromkeys(cut for one in held for cut in one.cuts))
        if any(isinstance(one, torch.nn.Parameter) for one in given):
            _are_data(tuple(cut for cut in cuts if cut.how == "detached"))
        # A view taken unrecorded has the graph of its base.
        nodes = [_torch.grad_fn_of(one) or (None if one._base is None else one._base.grad_fn) for one in given]
        sources = [numbers_below(node) for node in nodes if node is not None]
        leaves = [one for one in given if _torch.is_trainable_leaf(one)]
        if sources or leaves:
            how = "detached" if op == "detach" else "discrete" if _torch.is_grad_enabled() else "no_grad"
            stack = self._core.stack()
            # Outside of a forward, parameters are measured and checked, too.
            # A transform records its values itself, without ``requires_grad``.
            leaves = leaves if is_in_forward(stack) and not _torch.is_transformed() else []
            left = [Cut(stack, op, one, how) for one in sources]
            cuts = (*cuts, *left)
            if self.is_before_first_backward:
                below = (leaf for node in nodes if node is not None for leaf in _leaves_near(node))
                for leaf in (*below, *leaves):
                    self.note_left(leaf, left[0] if left else Cut(stack, op, (), how))
        if cuts:
            unscaled = held[0].weak if held and op in _SCALES else None
            is_whole = op == "detach" or (op in _REDUCES and bool(held) and all(one.is_whole for one in held))
            self._held[id(made)] = _Held(_torch.weak_tensor(made), cuts, unscaled, is_whole)
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
            cut = one.cuts[0]
            # A running average of the loss is made of a sum on the path.
            if not any(ran.isdisjoint(each.sources) or each.sources[0] in sums for each in one.cuts):
                self._described.add(entry.stack)
                self._report_at(
                    ROW,
                    entry.stack,
                    Clue("read", symbolise(cut.stack), name=one.name, op=cut.op, values={**one.facts, "how": cut.how}),
                    Clue("added", symbolise(one.stack)),
                )
                return


def numbers_below(*nodes: Any, most: int | None = _NODES_BELOW) -> tuple[int, ...]:
    """Return the numbers of Nodes and of those nearest below them, at most so many; for a leaf, its negative ``id``."""
    return tuple(_below(nodes, most))


def _leaves_near(node: Node) -> list[Any]:
    found = _below((node,), _NODES_BELOW).values()
    return [leaf for one in found if (leaf := getattr(one, "variable", None)) is not None]


def _below(nodes: tuple[Node, ...], most: int | None) -> dict[int, Any]:
    waiting, found = collections.deque(nodes), dict[int, Any]()
    while waiting and (most is None or len(found) < most):
        one = waiting.popleft()
        leaf = getattr(one, "variable", None)
        number = _torch.node_sequence(one) if leaf is None else -id(leaf)
        if number is not None and number not in found:
            found[number] = one
            waiting.extend(child for child, _ in one.next_functions if child is not None)
    return found


def _are_data(cuts: tuple[Cut, ...]) -> None:
    for cut in cuts:
        cut.is_data = True


def _name_of(held: _Held, frame: FrameType) -> str | None:
    """Return the program's name of a term, or of the value that it is a multiple of."""
    for weak in (held.weak, held.unscaled):
        tensor = None if weak is None else weak()
        if tensor is not None:
            found = naming.find(frame, functools.partial(operator.is_, tensor))
            best = min(found, key=lambda one: one.depth, default=None)
            if best is not None:
                return best.path
    return None


def _is_of_shape_only(op: str) -> bool:
    """Whether an operation reads only the shape and kind of a tensor."""
    return op.endswith("_like") or op.startswith("new_")
