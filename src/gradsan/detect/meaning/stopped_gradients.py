"""Gradients that end at an operation whose derivative is zero everywhere: ``torch.round(z)`` on the way to the loss.

The graph goes on behind ``round``, ``floor``, ``sign`` or a draw such as ``torch.bernoulli(p)``, where backward
passes zeros on. Two faults are reported. Parameters that no backward of the program reaches by another path, whose
gradient is zero at their optimizer's first step: reported at the end, as a later loss may reach them. And terms of a
loss, sums of scalars, without another path, while the rest of the loss trains the parameters behind them. A
straight-through estimate, ``z + (z.round() - z).detach()``, has no such operation in its graph. Without its ``detach``
the gradients of ``z`` cancel exactly: reported at once, if ``q`` in ``z + (q - z)`` has no graph, is looked up in a
table, or is flat, and nothing else is computed from the difference. Two networks' results may cancel on purpose.
``exp(log_prob - old)`` cancels likewise, where both were computed in the same way from the same parameters, and the
ratio is 1 in each of two rounds.

Rows: ``parameter_behind_flat``. Roles: ``parameter`` (``name``; ``values``: ``shape``, ``dtype``, ``device``,
``parameters``, their number), ``flat`` (the operation; ``op``). And ``term_is_cut``, as in ``cut_terms.py``, with
``how``: ``flat``. And ``gradient_cancels``, with the role ``sum`` (where ``z`` is added and subtracted), or ``ratio``.
"""

from __future__ import annotations

import collections
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.optim.optimizer import Optimizer

from gradsan import _torch
from gradsan.detect.meaning.terms.cut_terms import ROW as TERM
from gradsan.detect.meaning.terms.lost_terms import is_scalar, is_sum_or_multiple
from gradsan.graph import naming, walk
from gradsan.model import Clue, Site
from gradsan.originals.originals import Kept
from gradsan.record.detector import Finder, Run
from gradsan.record.ledger import site_that_made
from gradsan.record.log import RawStack
from gradsan.record.steps import RawBackward, read_backward

PARAMETER, CANCELS = "parameter_behind_flat", "gradient_cancels"
_FLAT = re.compile(r"(Round|Floor|Ceil|Trunc|Sign|Bernoulli|Normal)Backward\d")
_LOOKS_UP, _PRODUCT = re.compile("Embedding|Index|Gather|Take"), re.compile("(Mm|Bmm)Backward")
_LEAVES, _TERMS, _ALIKE, _TIMES = 4_096, 32, 4_096, 2


@dataclass(slots=True)
class _Stopped:
    """The parameters behind one operation, by ``id``, with their names; ``seen`` at a first step."""

    stack: RawStack
    flat: Clue
    leaves: dict[int, tuple[Any, str | None, dict[str, Any]]] = field(default_factory=dict)
    seen: dict[int, Any] = field(default_factory=dict)


class StoppedGradients(Finder):
    """Checks graphs in some rounds, and gradients at an optimizer's first step; findings go to ``found``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._fed = self._notes(dict[int, Any]())
        self._stopped = self._notes(list[_Stopped]())
        self._ratios = self._notes(collections.Counter[Site]())

    @_torch.hushed()
    def before_round(self, entry: RawBackward, rounds: int) -> None:
        """Check the graph of some rounds of a line that calls backward; as ``on_round`` of the core."""
        backward = read_backward(entry)
        order = walk.engine_order(backward.roots)
        if entry.accumulates:
            self._look_at_sums(entry, order)
        flat = [node for node in order if _is_flat(node)]
        if not flat or len(order) >= walk.NODES_WALKED:
            self._feed(walk.leaves_of(order))
            return
        fed = _fed_by(backward.roots)
        self._feed(fed)
        known = set(map(id, fed))
        stopped = [one for one in walk.leaves_of(order) if id(one) not in known and not self._was_fed(one)]
        if entry.accumulates:
            for node in flat if stopped else ():
                self._note(entry, node, stopped)
            if entry.stack not in self._described:
                self._look_at_terms(entry, backward.roots, known)

    def _feed(self, leaves: Iterable[torch.Tensor]) -> None:
        if len(self._fed) > _LEAVES:
            for key in [key for key, weak in self._fed.items() if weak() is None]:
                del self._fed[key]
        for one in leaves:
            if not self._was_fed(one):
                self._fed[id(one)] = _torch.weak_tensor(one)

    def _was_fed(self, leaf: torch.Tensor) -> bool:
        weak = self._fed.get(id(leaf))
        return weak is not None and weak() is leaf

    def _note(self, entry: RawBackward, node: Node, stopped: list[Any]) -> None:
        """Keep the leaves behind ``node`` that are not kept yet."""
        kept = {key for one in self._stopped for key in one.leaves}
        fresh = {id(one): one for one in stopped if id(one) not in kept}
        behind = [fresh[key] for key in map(id, walk.leaves_of(walk.each_behind([node]))) if key in fresh]
        if not behind:
            return
        one = _Stopped(entry.stack, Clue("flat", site_that_made(self._core, node, entry.thread), op=_op_of(node)))
        for leaf in behind:
            name = naming.name_of(leaf, sys._getframe(2))
            one.leaves[id(leaf)] = _torch.weak_tensor(leaf), name, _torch.facts_of(leaf)
        self._stopped.append(one)

    @_torch.hushed()
    def first_step(self, optimizer: Optimizer) -> None:
        """Check the gradients at the first step of an optimizer, which are those that the program uses."""
        if self._stopped:
            held = {id(one): one for one in _torch.parameters_of(optimizer)}
            for stopped in self._stopped:
                for key in stopped.leaves.keys() & held.keys():
                    grad = held[key].grad
                    if grad is None or not bool(grad.any()):
                        stopped.seen[key] = _torch.weak_tensor(held[key])
                    else:
                        self._feed([held[key]])

    def settle(self) -> None:
        """Report, as watching ends, the parameters that no backward has reached by another path."""
        stopped = [*self._stopped]
        self._stopped.clear()
        for one in stopped:
            own = [one.leaves[key] for key in one.seen if key not in self._fed or self._fed[key]() is None]
            if own and one.flat.site is not None:
                own.sort(key=lambda leaf: (leaf[1] is None, str(leaf[1]).endswith("bias")))
                _, name, facts = own[0]
                clues = (Clue("parameter", name=name, values={**facts, "parameters": len(own)}), one.flat)
                self._report_at(PARAMETER, one.stack, *clues)

    def _look_at_sums(self, entry: RawBackward, order: list[Node]) -> None:
        for node in order:
            inner = _cancelling(node)
            is_alone = inner is not None and not any(
                child is inner for other in order if other is not node for child, _ in other.next_functions
            )
            site = site_that_made(self._core, node, entry.thread) if is_alone else None
            if site is not None and site.user_frame is not None and site not in self._described:
                self._described.add(site)
                self._report_at(CANCELS, entry.stack, Clue("sum", site))
        for node in order:
            site = site_that_made(self._core, node, entry.thread) if _is_ratio_to_itself(node) else None
            if site is not None and site.user_frame is not None:
                self._ratios[site] += 1
                if self._ratios[site] == _TIMES:
                    self._report_at(CANCELS, entry.stack, Clue("ratio", site))

    def _look_at_terms(self, entry: RawBackward, roots: Iterable[Node], fed: set[int]) -> None:
        for joined, term in _terms(roots):
            behind = [node for node in walk.each_behind([term]) if _is_flat(node)]
            # A rounded number added to its old value is its own remainder.
            if not behind or _is_flat(term) or _fed_by([term]):
                continue
            if any(id(one) in fed for one in walk.leaves_of(walk.each_behind([term]))):
                self._described.add(entry.stack)
                info = _torch.output_info(joined, 0)
                facts = {"shape": (), "dtype": info[1] if info else "?", "device": info[2] if info else "?"}
                node = behind[0]
                self._report_at(
                    TERM,
                    entry.stack,
                    Clue(
                        "read",
                        site_that_made(self._core, node, entry.thread),
                        op=_op_of(node),
                        values={**facts, "how": "flat"},
                    ),
                    Clue("added", site_that_made(self._core, joined, entry.thread)),
                )
                return


def _is_flat(node: Node) -> bool:
    return _FLAT.fullmatch(node.name()) is not None


def _cancelling(node: Node) -> Node | None:
    """The Node of ``q - z`` in ``z + (q - z)``, or that of ``z - q`` in ``z - (z - q)``; None for other Nodes."""
    place = {"AddBackward0": 1, "SubBackward0": 0}.get(node.name())
    edges = node.next_functions if place is not None else ()
    pairs = [edges, edges[::-1]] if place == 1 else [edges]
    for own, (inner, _) in (pair for pair in pairs if len(pair) == 2):
        if own[0] is None or inner is None or inner.name() != "SubBackward0" or place is None:
            continue
        parts, is_scaled = inner.next_functions, any(_torch.saved_number(one, "alpha") != 1 for one in (node, inner))
        if is_scaled or len(parts) < 2 or parts[place] != own:
            continue
        rest = parts[1 - place][0]
        if _is_quantised(rest) and own[0] not in walk.each_behind(
            [rest] if rest else [], lambda one: not _is_flat(one)
        ):
            return inner
    return None


def _is_ratio_to_itself(node: Node) -> bool:
    """Whether a Node is ``exp(a - b)`` with all results 1, whose operands come from the same leaves in the same way."""
    if node.name() != "ExpBackward0":
        return False
    inner = node.next_functions[0][0]
    while inner is not None and inner.name() != "SubBackward0" and len(inner.next_functions) == 1:
        inner = inner.next_functions[0][0]
    if inner is None or inner.name() != "SubBackward0" or _torch.saved_number(inner, "alpha") != 1:
        return False
    parts = [child for child, _ in inner.next_functions]
    if len(parts) != 2 or None in parts or not _are_alike(*parts):
        return False
    packed = next((_torch.packed_object(saved) for slot, saved in _torch.saved_slots(node) if slot == "result"), None)
    result = packed.alias if isinstance(packed, Kept) else packed
    return torch.is_tensor(result) and result.numel() > 0 and bool((result == 1).all())


def _are_alike(one: Node | None, other: Node | None) -> bool:
    """Whether two graphs have the same operations in the same places, and the same leaves."""
    waiting, seen = [(one, other)], set[tuple[Any, Any]]()
    while waiting:
        pair = waiting.pop()
        first, second = pair
        if first is second or pair in seen:
            continue
        leaves = getattr(first, "variable", None), getattr(second, "variable", None)
        if first is None or second is None or first.name() != second.name() or leaves[0] is not leaves[1]:
            return False
        seen.add(pair)
        edges = first.next_functions, second.next_functions
        if len(seen) > _ALIKE or len(edges[0]) != len(edges[1]):
            return False
        waiting += [(own, their) for (own, _), (their, _) in zip(*edges, strict=True)]
    return True


def _is_quantised(node: Node | None) -> bool:
    """Whether a value has no graph, or is taken from a table or flat, apart from views and scales of it."""
    while node is not None and not (_is_flat(node) or _LOOKS_UP.match(node.name())):
        inner = [child for child, _ in node.next_functions if child is not None]
        if _PRODUCT.match(node.name()) and hasattr(node.next_functions[-1][0], "variable"):
            return node.next_functions[0][0] is None  # a row of the table, chosen by ``one_hot``
        if len(inner) != 1 or _PRODUCT.match(node.name()):
            return False
        node = inner[0]
    return True


def _op_of(node: Node) -> str:
    return str(node.name()).partition("Backward")[0].lower()


def _fed_by(roots: Iterable[Node]) -> list[Any]:
    """Return the leaves to which a backward from ``roots`` may pass more than zeros."""
    return walk.leaves_of(walk.each_behind(roots, lambda node: not _is_flat(node)))


def _terms(roots: Iterable[Node]) -> Iterator[tuple[Any, Any]]:
    """Yield the Nodes of the terms of a loss, without constant factors, each with the Node of the sum."""
    waiting: list[tuple[Any, Any]] = [(None, root) for root in roots]
    found = 0
    while waiting and found < _TERMS:
        joined, node = waiting.pop()
        children = [child for child, _ in node.next_functions if child is not None]
        if is_sum_or_multiple(node, children):
            is_sum = len(children) > 1
            waiting += ((node if is_sum else joined, child) for child in children)
        elif joined is not None and is_scalar(node):
            found += 1
            yield joined, node
