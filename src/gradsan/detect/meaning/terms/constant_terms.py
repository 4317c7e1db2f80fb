"""Terms of a loss made of gradients taken without ``create_graph=True``: constants, which train nothing.

Values computed from such gradients are followed by the results of calls, from the 1st, 2nd, 4th and 8th call of
``autograd.grad`` at a line to the next ``backward``; so are gradients that a backward with ``retain_graph=True`` leaves
in ``.grad``. Such a value is a term if, without a graph, it is added to a one-element value
with one, and only sums and constant factors lie between there and the loss. It is part of a residual if it
is added to, or compared with, a value of any size computed from the differentiated outputs. Where a gradient is
a factor or an input of the loss, or was detached, it is data on purpose, and not reported. Results
that ``torch.autograd.functional`` detaches itself are followed on.

Row: ``term_is_constant``. Roles: ``asked`` (the call that returned the gradient; ``name`` of a ``.grad``; ``values``:
``shape``, ``dtype``, ``device``), ``added`` (where the term was added to the loss; ``name``, that of the term;
``values`` as before).
"""

from __future__ import annotations

import collections
import functools
import operator
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.graph import naming, walk
from gradsan.model import Clue
from gradsan.record.detector import Finder, Run
from gradsan.record.log import RawStack
from gradsan.record.patches import Patches, standing
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward, read_backward

ROW = "term_is_constant"
_ROUNDS = (1, 2, 4, 8)
_CALLS_FOLLOWED = 20_000
_FOLLOWED_AT_ONCE = 16
_TENSORS_FOLLOWED, NODES_BELOW = 1_024, 64
SUMS = frozenset({"AddBackward0", "SubBackward0", "RsubBackward1", "StackBackward0", "CatBackward0"})
LISTED = frozenset({"StackBackward0", "CatBackward0"})
_SCALED = frozenset({"MulBackward0", "DivBackward0", "NegBackward0", "SumBackward0", "MeanBackward0", "ViewBackward0"})
_COMPARED = frozenset({"MseLossBackward0", "L1LossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0"})
_ON_PURPOSE = frozenset({"detach", "detach_"})
SCALES = frozenset({"mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide", "mul_", "div_"})
REDUCES = SCALES | {"mean", "sum", "neg", "__neg__"}
_REDUCED_AT_MOST, _KEPT = 4, 256
_FUNCTIONAL = torch.autograd.functional.__file__


class Terms:
    """Names of constants as a loss adds them: ``gp``, of ``loss + lam * gp.mean()``."""

    def __init__(self, names: dict[RawStack, str | None]) -> None:
        """Keep the names found in ``names``, which its owner empties as watching begins."""
        self._of: dict[int, tuple[_torch.weak_tensor, ...]] = {}
        """A value and what it was computed from, the nearest first, by the ``id`` of the value."""
        self._names = names

    def clear(self) -> None:
        """Drop the values of a round."""
        self._of.clear()

    def note(self, op: str, made: torch.Tensor, source: torch.Tensor | None) -> None:
        """Note what a call has multiplied, or reduced to one number."""
        if op in REDUCES and source is not None and len(self._of) < _KEPT:
            self._of[id(made)] = _torch.weak_tensor(made), *self._chain(source)

    def name(self, stack: RawStack, term: torch.Tensor | None, frame: FrameType) -> str | None:
        """Return the program's name of what is added at ``stack``, or of what that is a multiple or a mean of."""
        # To look for a name takes milliseconds, and a line may add up hundreds of terms in a round.
        if stack not in self._names:
            self._names[stack] = self._found(term, frame)
        return self._names[stack]

    def _chain(self, tensor: torch.Tensor) -> tuple[_torch.weak_tensor, ...]:
        known = self._of.get(id(tensor), ())
        return known if known and known[0]() is tensor else (_torch.weak_tensor(tensor),)

    def _found(self, term: torch.Tensor | None, frame: FrameType) -> str | None:
        for weak in () if term is None else self._chain(term)[:_REDUCED_AT_MOST]:
            one = weak()
            found = () if one is None else naming.find(frame, functools.partial(operator.is_, one))
            best = min(found, key=lambda each: each.depth, default=None)
            if best is not None:
                return best.path
        return None


class _Sum(NamedTuple):
    """A sum with a constant: the number of its Node, where it is, and the constant's name and facts."""

    number: int | None
    stack: RawStack
    name: str | None = None
    facts: Mapping[str, Any] = {}

    def as_clue(self) -> Clue:
        return Clue("added", symbolise(self.stack), name=self.name, values=self.facts)


@dataclass(slots=True)
class _Followed:
    """Gradients of one call, and values computed from them: weak references by ``id``.

    ``outputs`` are the numbers of the differentiated Nodes, ``joined`` the sums with values with a graph, and
    ``residuals`` those with values computed from the outputs. ``leaves`` are those with the gradients in ``.grad``, and
    ``leaf`` the one whose gradient was read first.
    """

    stack: RawStack
    thread: int
    facts: dict[str, Any]
    outputs: frozenset[int | None]
    held: dict[int, Any] = field(default_factory=dict)
    joined: list[_Sum] = field(default_factory=list)
    residuals: list[_Sum] = field(default_factory=list)
    leaves: dict[int, Any] = field(default_factory=dict)
    leaf: _torch.weak_tensor | None = None
    is_data: bool = False
    calls: int = 0


class ConstantTerms(Finder):
    """Follows some gradients; listens to results, and to the next backward, while something is followed."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._wanted = 0
        self._retained: tuple[int, list[Any]] = (0, [])
        self._followed: list[_Followed] = []
        self._open: list[_Followed] = []
        self._patches = Patches()
        self._terms = Terms(self._notes({}))

    def forget(self) -> None:
        self.settle()
        super().forget()

    def settle(self) -> None:
        """Stop following, as watching ends."""
        self._stop()
        self._listeners.call_after_backward(self.after_backward, False)

    def before_round(self, entry: RawBackward, rounds: int) -> None:
        """Note which calls to follow; as ``on_round`` of the core."""
        if rounds not in _ROUNDS:
            return
        if not entry.accumulates:
            self._wanted = entry.clock
        elif read_backward(entry).retain_graph and entry.stack not in self._described and not _torch.is_compiling():
            leaves = walk.leaves_of(walk.engine_order(read_backward(entry).roots))
            self._retained = entry.clock, [_torch.weak_tensor(one) for one in leaves]
            self._listeners.call_after_backward(self.after_backward)

    @_torch.hushed()
    def after_backward(self, entry: RawBackward) -> None:
        """Follow gradients that a backward has left in ``.grad``; as ``listeners.AfterBackward``."""
        clock, leaves = self._retained
        if entry.clock != clock:
            return
        self._listeners.call_after_backward(self.after_backward, False)
        held = {id(leaf.grad): leaf for weak in leaves if (leaf := weak()) is not None and leaf.grad is not None}
        leaves_held = {key: _torch.weak_tensor(leaf) for key, leaf in held.items()}
        self._begin(entry, [leaf.grad for leaf in held.values()], leaves_held)

    @_torch.hushed()
    def gradients(self, entry: RawBackward, inputs: Any, result: Any) -> None:
        """Follow gradients returned by ``autograd.grad``; as ``on_gradients`` of the core."""
        if (
            entry.clock != self._wanted
            or entry.stack in self._described
            or _torch.is_compiling()
            or _torch.is_transformed()
        ):
            return
        self._begin(entry, result, {})

    def _begin(self, entry: RawBackward, gradients: Any, leaves: dict[int, Any]) -> None:
        if len(self._followed) >= _FOLLOWED_AT_ONCE:
            return
        taken = [one for one in gradients if type(one) in _torch.PLAIN_TENSORS and not one.requires_grad]
        if taken:
            facts = _torch.facts_of(taken[0])
            roots = read_backward(entry).roots
            # ``autograd.grad(u.sum(), x)`` differentiates u.
            summed = [child for node in linear_below(roots) for child, _ in node.next_functions]
            numbers = frozenset(_torch.node_sequence(node) for node in (*roots, *summed) if node is not None) - {None}
            followed = _Followed(entry.stack, entry.thread, facts, numbers, leaves=leaves)
            followed.held.update((id(one), _torch.weak_tensor(one)) for one in taken)
            self._followed.append(followed)
            self._open.append(followed)
            self._listen(True)
            if any(code.co_filename == _FUNCTIONAL for code in entry.stack.codes):
                self._follow_detached()

    def _follow_detached(self) -> None:
        """Watch ``detach`` while gradients are followed: ``torch.autograd.functional`` detaches its results."""

        def note(given: Any, result: Any) -> None:
            for one in self._followed:
                if _holds(one.held, given):
                    one.held[id(result)] = _torch.weak_tensor(result)

        def detached(_: Any, args: tuple[Any, ...], __: dict[str, Any], result: Any) -> None:
            if self._core.stack(1).codes[0].co_filename == _FUNCTIONAL:
                self._listeners.guard.run_hushed(lambda: note(args[0], result))

        self._patches.undo()
        called = self._core.listener(standing(torch.Tensor, "detach"), None, detached)
        self._patches.set(torch.Tensor, "detach", called)

    @_torch.hushed()
    def before_backward(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check whether a term has been added to this loss; the arguments are those of ``listeners.BeforeBackward``."""
        if not entry.accumulates:
            return
        followed, self._followed = self._followed, []
        self._stop()
        for one in followed:
            if one.thread == entry.thread:
                added = _joined_at(one, read_backward(entry).roots)
                if added is not None and one.stack not in self._described:
                    self._described.add(one.stack)
                    leaf = None if one.leaf is None else one.leaf()
                    held = None if leaf is None else naming.name_of(leaf, sys._getframe(1))
                    name = None if held is None else f"{held}.grad"
                    facts = one.facts if leaf is None else _torch.facts_of(leaf)
                    self._report_at(
                        ROW,
                        entry.stack,
                        Clue("asked", symbolise(one.stack), name=name, values=facts),
                        added,
                    )

    def _stop(self) -> None:
        self._followed.clear()
        self._open.clear()
        self._terms.clear()
        self._patches.undo()
        self._listen(False)

    def _listen(self, wanted: bool) -> None:
        self._listeners.call_on_result(self._on_result, wanted)
        self._listeners.call_before_backward(self.before_backward, wanted)

    def _on_result(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = _torch.tensors_of_call(args, kwargs)
        for one in self._open:
            one.calls += 1
            read = [tensor for tensor in given if _holds(one.held, tensor)]
            if read:
                one.leaf = one.leaf or next((one.leaves[id(held)] for held in read if id(held) in one.leaves), None)
                self._follow(one, op, given, result, read[-1])
        if self._open[0].calls >= _CALLS_FOLLOWED:
            del self._open[0]
            self._listeners.call_on_result(self._on_result, bool(self._open))

    def _follow(self, one: _Followed, op: str, given: list[Any], result: Any, read: torch.Tensor) -> None:
        if op in _ON_PURPOSE:
            one.is_data = True
            return
        for made, _ in made_of(op, given, result):
            if made.requires_grad:
                # ``g.requires_grad_()`` makes it a leaf.
                node = _torch.grad_fn_of(made)
                name = "" if node is None else node.name()
                if name not in SUMS or (made.numel() != 1 and name not in LISTED):
                    one.is_data = True
                    if name in SUMS or name in _COMPARED:
                        self._note_residual(one, node, given)
                else:
                    stack = self._core.stack()
                    named = self._terms.name(stack, read if len(given) > 1 else None, sys._getframe(1))
                    one.joined.append(_Sum(_torch.node_sequence(node), stack, named, _torch.facts_of(read)))
            elif made.is_floating_point() and len(one.held) < _TENSORS_FOLLOWED:
                one.held[id(made)] = _torch.weak_tensor(made)
                self._terms.note(op, made, read)

    def _note_residual(self, one: _Followed, node: Node, given: list[Any]) -> None:
        made_by = (_torch.grad_fn_of(tensor) for tensor in given if tensor.requires_grad)
        starts = [maker for maker in made_by if maker is not None]
        if not one.residuals and not one.outputs.isdisjoint(map(_torch.node_sequence, walk.engine_order(starts))):
            one.residuals.append(_Sum(_torch.node_sequence(node), self._core.stack()))


def _joined_at(one: _Followed, roots: tuple[Node, ...]) -> Clue | None:
    """Return the sum by which a constant became a part of this loss; None where none did."""
    if one.joined and not one.is_data:
        sums = set(sums_below(roots))
        return next((sum_.as_clue() for sum_ in one.joined if sum_.number in sums), None)
    if one.residuals:
        ran = set(map(_torch.node_sequence, walk.engine_order(roots)))
        return next((sum_.as_clue() for sum_ in one.residuals if sum_.number in ran), None)
    return None


def _holds(held: dict[int, Any], tensor: torch.Tensor) -> bool:
    known = held.get(id(tensor))
    # A tensor returned by the forward of a custom Function gets its graph afterwards.
    return known is not None and known() is tensor and _torch.grad_fn_of(tensor) is None


def made_of(op: str, given: list[Any], result: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the tensors that a call has made, each with the arguments that it may come from.

    ``broadcast_tensors(a, b)``, as in a loss, gives back each argument, or a view of that one. The results of a
    ``_foreach_`` operation come each from its own members of the lists.
    """
    results = list(_torch.tensors_in(result))
    many = len(results)
    listed = len(given) // many * many if many and op.startswith("_foreach_") else 0
    for place, made in enumerate(results):
        if op != "broadcast_tensors":
            yield made, [*given[place:listed:many], *given[listed:]] if listed else given
        elif not any(made is one for one in given):
            yield made, [one for one in given if _torch.storage_or_none(one) == _torch.storage_or_none(made)]


def sums_below(roots: tuple[Node, ...]) -> Iterator[int]:
    """Yield the numbers of the sums above ``roots`` with only sums and constant factors in between."""
    for node in linear_below(roots):
        number = _torch.node_sequence(node)
        if node.name() in SUMS and number is not None:
            yield number


def linear_below(roots: tuple[Node, ...]) -> Iterator[Any]:
    """Yield the Nodes of sums and constant factors above ``roots`` with only such Nodes in between."""

    def is_linear(node: Node) -> bool:
        inputs = sum(child is not None for child, _ in node.next_functions)
        return node.name() in SUMS or (node.name() in _SCALED and inputs < 2)

    return walk.each_behind(roots, is_linear)


def numbers_below(*nodes: Any, most: int | None = NODES_BELOW) -> tuple[int, ...]:
    """Return the numbers of Nodes and of those nearest below them, at most so many; for a leaf, its negative ``id``."""
    return tuple(nodes_below(nodes, most))


def leaves_near(node: Node) -> list[Any]:
    """Return the leaves among the Nodes nearest below one."""
    found = nodes_below((node,), NODES_BELOW).values()
    return [leaf for one in found if (leaf := getattr(one, "variable", None)) is not None]


def nodes_below(nodes: tuple[Node, ...], most: int | None) -> dict[int, Any]:
    """Return Nodes and those nearest below them by number, at most so many; a leaf's by its negative ``id``."""
    waiting, found = collections.deque(nodes), dict[int, Any]()
    while waiting and (most is None or len(found) < most):
        one = waiting.popleft()
        leaf = getattr(one, "variable", None)
        number = _torch.node_sequence(one) if leaf is None else -id(leaf)
        if number is not None and number not in found:
            found[number] = one
            waiting.extend(child for child, _ in one.next_functions if child is not None)
    return found
