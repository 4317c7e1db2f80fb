"""Terms of a loss that are made of gradients taken without ``create_graph=True``: constants, which train nothing.

What is computed from such gradients is followed by the results of calls, from the 1st, 2nd, 4th and 8th call of
``autograd.grad`` at a line to the next ``backward``. It is a term if, without a graph, it was added to a value of one
element that has one, and only sums and constant factors lie between there and the loss. Where a gradient is a factor or
an input of what is differentiated, or was detached, it is data on purpose, and nothing is said.

Row: ``term_is_constant``. Roles: ``asked`` (the call of ``autograd.grad``; ``values``: ``shape``, ``dtype``,
``device``), ``added`` (where the term joined the loss).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsan import _torch
from gradsan.model import Clue, Failure
from gradsan.record.detector import Detector
from gradsan.record.stacks import symbolise
from gradsan.record.steps import read_backward

ROW = "term_is_constant"
_ROUNDS = (1, 2, 4, 8)
_CALLS_FOLLOWED = 20_000
_TENSORS_FOLLOWED = 1_024
_SUMS = frozenset({"AddBackward0", "SubBackward0", "RsubBackward1", "StackBackward0", "CatBackward0"})
_LISTED = frozenset({"StackBackward0", "CatBackward0"})
_SCALED = frozenset({"MulBackward0", "DivBackward0", "NegBackward0", "SumBackward0", "MeanBackward0", "ViewBackward0"})
_ON_PURPOSE = frozenset({"detach", "detach_"})


@dataclass(slots=True)
class _Followed:
    """Gradients of one call, and what was computed from them: weak references by ``id``."""

    stack: Any
    thread: int
    facts: dict[str, Any]
    held: dict[int, Any] = field(default_factory=dict)
    joined: list[tuple[int | None, Any]] = field(default_factory=list)
    is_data: bool = False
    calls: int = 0


class ConstantTerms(Detector):
    """Follows some gradients; ``listen(True)`` asks for a call before each backward."""

    def __init__(self, core: Any, found: Callable[[Failure], None], listen: Callable[[bool], None]) -> None:
        """``core`` tells of results while something is followed."""
        self._core, self._found, self._listen = core, found, listen
        self._wanted = 0
        self._followed: list[_Followed] = []
        self._described: set[Any] = set()

    def forget(self) -> None:
        """Begin anew, as a stretch of watching does."""
        self._stop()
        self._described.clear()

    def settle(self) -> None:
        """Nothing is watched any more."""
        self._stop()

    def before_round(self, entry: Any, rounds: int) -> None:
        """Note which calls to look at; as ``on_round`` of the core."""
        if rounds in _ROUNDS and not entry[5]:
            self._wanted = entry[0]

    @_torch.hushed()
    def gradients(self, entry: Any, inputs: Any, result: Any) -> None:
        """Follow gradients that were taken; as ``on_gradients`` of the core."""
        if entry[0] != self._wanted or entry[1] in self._described or _torch.is_compiling() or _torch.is_transformed():
            return
        # Somebody else listens: the search for NaN and Inf.
        if self._core.on_result not in (None, self._on_result):
            return
        taken = [one for one in result if type(one) in _torch.PLAIN_TENSORS and not one.requires_grad]
        if taken:
            facts = {
                "shape": tuple(taken[0].shape),
                "dtype": str(taken[0].dtype).removeprefix("torch."),
                "device": str(taken[0].device),
            }
            followed = _Followed(entry[1], entry[2], facts)
            followed.held.update((id(one), weakref.ref(one)) for one in taken)
            self._followed.append(followed)
            self._core.on_result = self._on_result
            self._listen(True)

    @_torch.hushed()
    def before_backward(self, entry: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See whether a term has joined this loss; the arguments are those of ``listeners.BeforeBackward``."""
        if not entry[5]:
            return
        followed, self._followed = self._followed, []
        self._stop()
        for one in followed:
            if one.joined and not one.is_data and one.thread == entry[2]:
                sums = set(_sums_below(read_backward(entry).roots))
                stack = next((stack for number, stack in one.joined if number in sums), None)
                if stack is not None and one.stack not in self._described:
                    self._described.add(one.stack)
                    clues = (
                        Clue("asked", symbolise(one.stack), values=one.facts),
                        Clue("added", symbolise(stack)),
                    )
                    self._found(Failure(ROW, "", "", symbolise(entry[1]), clues, raised=False))

    def _stop(self) -> None:
        self._followed.clear()
        if self._core.on_result == self._on_result:
            self._core.on_result = None
        self._listen(False)

    @_torch.hushed()
    def _on_result(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = list(_tensors_in((args, kwargs)))
        for one in self._followed:
            one.calls += 1
            if one.calls < _CALLS_FOLLOWED and any(_holds(one.held, tensor) for tensor in given):
                self._follow(one, op, given, result)

    def _follow(self, one: _Followed, op: str, given: list[Any], result: Any) -> None:
        if op in _ON_PURPOSE:
            one.is_data = True
            return
        for made in _tensors_in(result):
            if made.requires_grad:
                # ``g.requires_grad_()`` makes a leaf of it.
                node = made.grad_fn
                is_sum = node is not None and node.name() in _SUMS
                if not is_sum or (made.numel() != 1 and node.name() not in _LISTED):
                    one.is_data = True
                else:
                    one.joined.append((_torch.node_sequence(node), self._core.stack()))
            elif made.is_floating_point() and len(one.held) < _TENSORS_FOLLOWED:
                one.held[id(made)] = weakref.ref(made)


def _holds(held: dict[int, Any], tensor: Any) -> bool:
    known = held.get(id(tensor))
    return known is not None and known() is tensor


def _tensors_in(value: Any, depth: int = 3) -> Iterator[Any]:
    if torch.is_tensor(value):
        yield value
    elif depth and isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item, depth - 1)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item, depth - 1)


def _sums_below(roots: tuple[Any, ...]) -> Iterator[int]:
    """The numbers of the sums that reach ``roots`` by sums and constant factors alone."""
    waiting, seen = list(roots), set(roots)
    while waiting:
        node = waiting.pop()
        name, number = node.name(), _torch.node_sequence(node)
        children = [child for child, _ in node.next_functions if child is not None]
        if name in _SUMS and number is not None:
            yield number
        elif name not in _SCALED or len(children) > 1:
            continue
        for child in children:
            if child not in seen:
                seen.add(child)
                waiting.append(child)
