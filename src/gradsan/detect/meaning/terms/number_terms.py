"""Terms of a loss that are Python numbers taken out of its own graph: ``self.kl = kl.item()``, then ``nll + self.kl``.

A number has no history, so numbers are compared: ``item()``, ``float()`` or ``tolist()`` of a value with a graph gave
``v`` in each of three rounds, and a line added ``w`` times that to a scalar with a graph, with one ``w`` for all of
them. Where the number is taken within the very sum, one round suffices. Only sums and constant factors lie between
there and the loss, whose backward runs through the values that the number was computed from. Or the number comes from
parameters of optimizers that nothing trains until the end: else another loss does, and the sum is shown.

A number that becomes a tensor again (``torch.tensor(v)``) counts, too.

Nothing is reported where the same value is in the loss with its graph, too; where the number, its negative or its
inverse is used otherwise with values with a graph (a maximum that is subtracted, a weight, a loss divided by its size);
where it is subtracted unscaled, or nearly so (a baseline, a target); or where a detached value gave the same
number: then it is meant as one.

Row: ``term_is_cut``, as in ``cut_terms.py``. Roles: ``read`` (where the number was taken; ``op``; ``values``:
``shape``, ``dtype``, ``device`` of the term, ``how``: ``number``), ``added`` (where it was added to the loss).
"""

from __future__ import annotations

import collections
import itertools
import math
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.detect.meaning.made import Making, is_in_forward
from gradsan.detect.meaning.rounds import RoundDetector
from gradsan.detect.meaning.terms.constant_terms import SUMS, Terms, linear_below, numbers_below
from gradsan.detect.meaning.terms.cut_terms import ROW, Cut, CutTerms
from gradsan.graph import walk
from gradsan.model import Clue, Frame, Site
from gradsan.record.detector import Run
from gradsan.record.log import RawStack
from gradsan.record.stacks import is_of_program, symbolise
from gradsan.record.steps import RawBackward, moved_storages, read_backward

_LINES, _NUMBERS, _USES, _OF_A_LINE, _NODES_OF_A_NUMBER = 256, 256, 64, 8, 16
_ADDS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
_TAKES = frozenset({"sub", "sub_", "__sub__", "__isub__", "subtract"})
_NUMBERS_GIVEN = {"item": "item", "__float__": "float", "tolist": "tolist"}
_ROUNDS_COMPARED, _EQUAL, _EQUAL_ROUNDED, _APART = 3, 1e-9, 1e-6, 1e-3
_BASELINE = 0.5
"""A number subtracted with more than this weight is a baseline or a discounted value."""


_Key: TypeAlias = tuple[Frame, int]
"""A line that took numbers, with the place of one among those of a round, or -1 for all of them."""


@dataclass(slots=True)
class _Taken:
    """Numbers that a line took out of graphs in this round: the last one and the sum of all, or one by its place.

    ``below`` are the numbers of some of the Nodes below the value, starting with its own; ``atoms`` those of the terms
    that the line's values are sums or multiples of.
    """

    stack: RawStack
    op: str
    below: tuple[int, ...]
    atoms: frozenset[int] = frozenset()
    last: float = 0.0
    total: float = 0.0
    is_clean: bool = False


class _Use(NamedTuple):
    """A number that a line combined with a value with a graph; ``number`` is the Node of a sum.

    One that became a tensor again (``torch.tensor(v)``) is rounded.
    """

    value: float
    op: str
    number: int | None
    facts: dict[str, Any]
    is_rounded: bool
    name: str | None


class _Awaited(NamedTuple):
    """A term that reaches none of what its loss trains: the backward, the numbers, and leaves with their memory."""

    ran: RawStack
    taken: _Taken
    use: _Use
    leaves: list[tuple[_torch.weak_tensor, int]]


@dataclass(slots=True)
class _Series:
    """Multiples: numbers that a line used over those that another took, in the rounds so far; None once they differ."""

    weight: float | None
    taken: list[float] = field(default_factory=list)


class NumberTerms(RoundDetector):
    """Compares numbers of some rounds; findings go to ``found``."""

    from_start = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._note_left, self._making, self._steps = run.get(CutTerms).note_left, run.get(Making), run.steps
        self._taken: dict[_Key, _Taken] = {}
        self._counts: collections.Counter[Frame] = collections.Counter()
        self._uses: dict[Any, _Use] = {}
        self._others: list[float] = []
        self._terms = Terms(self._notes({}))
        self._series = self._notes(dict[tuple[_Key, Any, str], _Series]())
        self._data = self._notes(set[_Key]())
        self._awaited = self._notes(dict[RawStack, _Awaited]())

    def begins(self, entry: RawBackward) -> bool:
        """Drop the numbers of the round before."""
        self._taken.clear()
        self._counts.clear()
        self._uses.clear()
        self._others.clear()
        self._terms.clear()
        self._watch(_NUMBERS_GIVEN, self._became_number)
        return True

    def _became_number(self, name: str, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        opened = self._entry
        if opened is not None and threading.get_ident() == opened.thread and isinstance(result, float | list):
            stack = self._core.stack(1)
            self._listeners.guard.run_hushed(lambda: self._note(name, args[0], result, stack))

    def _note(self, name: str, tensor: torch.Tensor, result: Any, stack: RawStack) -> None:
        values = list(_floats(result))
        if not values or not is_of_program(stack):
            return
        # CPython specialises instructions, which changes offsets, so one line has several stacks.
        line = symbolise(stack).user_frame
        if line is None:
            return
        node = _torch.grad_fn_of(tensor)
        if self.is_before_first_backward and (leaf := _leaf_of(tensor, node, stack)) is not None:
            self._note_left(leaf, Cut(stack, _NUMBERS_GIVEN[name], (), "number"))
        place = self._counts[line]
        self._counts[line] += 1
        # ``{name: one.item() for ...}`` takes several numbers, each for itself.
        is_among_first = place < _OF_A_LINE
        atoms = frozenset(_atoms((node,))) if node is not None and is_among_first else frozenset[int]()
        # ``a.item() + b.item()`` takes two, which are added up.
        whole = replace(line, column=None, end_line=None, end_column=None)
        for key in dict.fromkeys([(line, -1), (whole, -1), (line, place)][: 3 if is_among_first else 2]):
            known = self._taken.get(key)
            if known is None:
                if len(self._taken) >= _LINES:
                    return
                below = () if node is None else numbers_below(node)
                known = self._taken[key] = _Taken(stack, _NUMBERS_GIVEN[name], below)
            known.atoms |= atoms
            known.is_clean = known.is_clean or node is None
            known.last, known.total = values[-1], known.total + math.fsum(values)

    def result(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note the numbers that are combined with values with a graph."""
        if not self._taken or type(result) not in _torch.PLAIN_TENSORS:
            return
        node = _torch.grad_fn_of(result)
        given = next((one for one in args if torch.is_tensor(one) and not one.requires_grad), None)
        if node is None:
            self._terms.note(op, result, given)
            return
        values = [number for one in (*args, *kwargs.values()) if (number := _number(one)) is not None]
        if not values:
            return
        name = node.name()
        if name in SUMS and result.numel() == 1 and (op in _ADDS or op in _TAKES) and len(values) == 1:
            if len(self._uses) < _USES:
                facts = {**_torch.facts_of(result), "shape": ()}
                number = _torch.node_sequence(node)
                is_rounded = not any(isinstance(one, float) for one in args)
                stack = self._core.stack()
                name = self._terms.name(stack, given, sys._getframe(1))
                self._uses[stack] = _Use(values[0], op, number, facts, is_rounded, name)
        elif len(self._others) < _NUMBERS:
            self._others += values

    def looks(self, entry: RawBackward, is_last: bool) -> None:
        """Compare the numbers taken with those added to this loss."""
        self._set_apart_data()
        if not self._uses or not self._taken:
            return
        roots = read_backward(entry).roots
        linear = set(map(_torch.node_sequence, linear_below(roots)))
        uses = {stack: use for stack, use in self._uses.items() if use.number in linear}
        if not uses:
            return
        ran = set(numbers_below(*roots, most=None))
        trained = {-id(one): one for it, _ in self._making.optimizers() for one in _torch.parameters_of(it)}
        atoms = frozenset(_atoms(roots))
        for stack, use in uses.items():
            del self._uses[stack]
            same = [line for line, taken in self._taken.items() if self._is_the_same(line, taken, stack, use)]
            # A number is data if a value without a graph gave it, too, or if it is also used otherwise.
            for line in same if not any(one in self._data or self._taken[one].is_clean for one in same) else ():
                taken = self._taken[line]
                if not taken.below or taken.below[0] in ran or not atoms.isdisjoint(taken.atoms):
                    continue
                if not ran.isdisjoint(taken.below):
                    self._tell(entry.stack, taken, stack, use)
                elif leaves := [trained[one] for one in taken.below if one in trained]:
                    held = [(_torch.weak_tensor(one), _torch.storage_or_none(one)) for one in leaves]
                    self._awaited.setdefault(stack, _Awaited(entry.stack, taken, use, held))

    def settle(self) -> None:
        """Report the terms of which no other loss has trained the parameters until the end."""
        super().settle()
        moved = moved_storages(self._steps, 0) if self._awaited else set()
        for stack, (ran, taken, use, held) in self._awaited.items():
            if not any(storage in moved or getattr(leaf(), "grad", None) is not None for leaf, storage in held):
                self._tell(ran, taken, stack, use)
        self._awaited.clear()

    def _set_apart_data(self) -> None:
        """Note the lines whose numbers are also used otherwise."""
        values, self._others = self._others, []
        for line, taken in self._taken.items():
            own = [one for one in (taken.last, taken.total) if one]
            if any(_is_near(abs(one), each, _EQUAL) for one in values for v in own for each in (abs(v), 1 / abs(v))):
                self._data.add(line)

    def _is_the_same(self, line: _Key, taken: _Taken, stack: RawStack, use: _Use) -> bool:
        """Whether the rounds so far show that the used number is a multiple of the one taken."""
        found = False
        for which, value in (("last", taken.last), ("total", taken.total)):
            weight = use.value / value if value and math.isfinite(value) else math.nan
            series = self._series.setdefault((line, stack, which), _Series(weight))
            share = _EQUAL_ROUNDED if use.is_rounded else _EQUAL
            if series.weight is None or not _is_near(weight, series.weight, share) or not weight:
                series.weight = None
                continue
            series.taken.append(value)
            least, most = min(series.taken), max(series.taken)
            is_same = len(series.taken) >= _ROUNDS_COMPARED and most - least > _APART * max(abs(least), abs(most))
            is_term = use.op in _ADDS or abs(weight) < _BASELINE
            found = found or ((is_same or _is_within(line[0], symbolise(stack))) and is_term)
        return found

    def _tell(self, ran: RawStack, taken: _Taken, stack: RawStack, use: _Use) -> None:
        if stack in self._described:
            return
        self._described.add(stack)
        values = {**use.facts, "how": "number"}
        self._report_at(
            ROW,
            ran,
            Clue("read", symbolise(taken.stack), op=taken.op, values=values),
            Clue("added", symbolise(stack), name=use.name, values=use.facts),
        )


def _leaf_of(tensor: torch.Tensor, node: Node | None, stack: RawStack) -> Any:
    """Return the parameter that a value is, or that one in a forward is computed from alone: ``scale.exp().item()``."""
    if node is None or not is_in_forward(stack):
        return tensor if _torch.is_trainable_leaf(tensor) else None
    below = list(itertools.islice(walk.each_behind([node]), _NODES_OF_A_NUMBER + 1))
    leaves = walk.leaves_of(below)
    return leaves[0] if len(leaves) == 1 and len(below) <= _NODES_OF_A_NUMBER else None


def _number(given: Any) -> float | None:
    """Return a number, or that in a CPU tensor without a graph; reading from a device would synchronise."""
    if type(given) in _torch.PLAIN_TENSORS and given.is_cpu and not given.requires_grad and given.numel() == 1:
        return float(given) if given.is_floating_point() else None
    return given if isinstance(given, float) else None


def _is_within(taken: Frame, added: Site) -> bool:
    """Whether the program took a number in the expression that adds it: ``loss = nll + kl.item()``."""
    here = added.user_frame
    if here is None or added.inner_frames or here.file != taken.file:
        return False
    starts, ends = (
        [(here.line, here.column), (taken.line, taken.column)],
        [(taken.end_line, taken.end_column), (here.end_line, here.end_column)],
    )
    edges = [*starts, *ends]
    places = [(line, column) for line, column in edges if line is not None and column is not None]
    return len(places) == len(edges) and places == sorted(places)


def _is_near(one: float, other: float, share: float) -> bool:
    return math.isfinite(one) and abs(one - other) <= share * abs(other)


def _floats(result: Any) -> Iterator[float]:
    if isinstance(result, float):
        yield result
    elif isinstance(result, list) and len(result) <= _NUMBERS:
        for one in result:
            yield from _floats(one)


def _atoms(roots: tuple[Node, ...]) -> Iterator[int]:
    """Yield the numbers of the Nodes below the sums and constant factors of a value."""
    linear = list(linear_below(roots))
    ends = [child for node in linear for child, _ in node.next_functions if child is not None] or list(roots)
    inner = set(linear)
    for node in (*ends, *roots):
        number = _torch.node_sequence(node)
        if node not in inner and number is not None:
            yield number
