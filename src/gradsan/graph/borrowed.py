"""Tensors that a loss takes from a network which only another optimizer trains: where its graph may be cut.

Two losses share a forward, and between their backwards an optimizer has stepped. Parameters of this optimizer alone
are *moved*; those of another one are not. Where every path from a loss to moved parameters leads through tensors whose
graphs have moved parameters only, these tensors are the border between the networks: ``fake`` of ``D(fake)``. A path
that ends at a moved parameter itself runs the network, and cannot be cut without loss. Parameters that were updated by
hand, and that no optimizer has, form such a network, too: a teacher, a target network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.graph import naming, walk
from gradsan.graph.naming import optimizers_alive
from gradsan.graph.variables import search
from gradsan.model import Bridge, Site
from gradsan.record.backwards import BackwardLog, PastBackward
from gradsan.record.log import Log, calls_near, logged_writes
from gradsan.record.stacks import symbolise
from gradsan.record.steps import BackwardRecord, StepLog

_MOVED, _OTHERS, _NOBODYS = 1, 2, 4
_MOST = 8
_MOST_CALLS = 64


def by_later_loss(
    core: Log,
    steps: StepLog,
    backwards: BackwardLog,
    backward: BackwardRecord,
    since: int,
    frame: FrameType | None,
    inputs: Sequence[Any] = (),
) -> tuple[Bridge, ...]:
    """The tensors that the loss of ``backward`` takes from networks whose optimizers have stepped after ``since``.

    Empty where another loss used the same path (or may have, its graph being gone) or will: the cut would affect it.
    Likewise where the backward was asked for a gradient behind it: one of ``inputs``.
    """
    raws = logged_writes(core, since)
    by_hand = {raw.storage for raw in raws if raw.is_parameter and raw.clock < backward.clock}
    moved = _moved(steps, since, backward.clock)
    if not _has_network_of(moved | by_hand, backward.roots):
        return ()
    edges = _border(backward.roots, _Leaves(moved, by_hand), _OTHERS, _MOVED)
    if _asks_behind(edges, inputs):
        return ()
    past = [one for one in backwards.before_in_thread(backward.clock) if one.clock >= since] if edges else []
    if any(_went_through(edge.younger, one) for one in past for edge in edges) or _others_go(edges, backward, frame):
        return ()
    return _as_bridges(core, backward.thread, frame, edges)


def is_for_others(
    steps: StepLog, backward: BackwardRecord, since: int, needing: Sequence[Node | None], inputs: Sequence[Any] = ()
) -> bool:
    """Whether ``needing``, all Nodes whose values are overwritten, lead to parameters of stepped networks alone.

    Whatever other losses use them: the loss has parameters of its own, for whose gradients none of these is needed.
    """
    moved = _moved(steps, since, backward.clock)
    if inputs or not needing or not _has_network_of(moved, backward.roots):
        return False
    reached = _reached(backward.roots, _Leaves(moved).kind_of)
    has_own = any(reached.get(root, 0) & _OTHERS for root in backward.roots)
    return has_own and all(reached.get(node) == _MOVED for node in needing)


def by_earlier_loss(
    core: Log, steps: StepLog, roots: Iterable[Node], since: int, backward: BackwardRecord, frame: FrameType | None
) -> tuple[Bridge, ...]:
    """The same for an earlier loss (``roots``) whose own optimizer stepped after ``since``: what others train."""
    edges = _border(tuple(roots), _Leaves(_moved(steps, since, backward.clock)), _MOVED, _OTHERS | _NOBODYS)
    later = set(walk.engine_order(backward.roots)) if edges else set()
    if any(edge.younger in later for edge in edges):
        return ()
    return _as_bridges(core, backward.thread, frame, edges)


def by_gone_loss(
    core: Log, steps: StepLog, past: PastBackward, backward: BackwardRecord, frame: FrameType | None
) -> tuple[Bridge, ...]:
    """Return the same for an earlier loss that is gone, from the Nodes of the later graph that its backward has freed.

    Which call used the tensor for the earlier loss is unknown: every call until its backward may have.
    """
    moved = _moved(steps, past.clock, backward.clock)
    reached = _reached(backward.roots, _Leaves(moved).kind_of) if moved else {}
    freed: dict[tuple[Any, int], Any] = {}
    for node in reached:
        if _is_before(node, past):
            continue
        for child, output in node.next_functions:
            if child is not None and not _is_leaf(child) and _is_before(child, past) and _torch.was_freed(child):
                freed.setdefault((child, output), node)
    if len(freed) > _MOST or any(reached[older] & _MOVED or not reached[older] for older, _ in freed):
        return ()
    found: list[Bridge] = []
    for (older, _), younger in freed.items():
        taken = _calls_between(core, _torch.node_sequence(older) or 0, past)
        name = naming.name_of_output(older, frame)
        found.append(Bridge(older.name(), younger.name(), name, taken, sites_near(core, older, backward.thread)))
    return tuple(found)


def by_another_optimizer(
    core: Log, past: PastBackward, backward: BackwardRecord, frame: FrameType | None, inputs: Sequence[Any] = ()
) -> tuple[tuple[Bridge, ...], bool]:
    """The same where no step lies between: what ``past`` has freed, if other optimizers have all of its parameters.

    Of the later loss, else of the earlier one; and whether one of both trains nothing else than these parameters.
    """
    order, roots = walk.engine_order(backward.roots), tuple(past.live_roots() or ())
    earlier = walk.engine_order(roots) if roots else []
    shared = _freed_storages(order, past, set(earlier))
    if not shared:
        return (), False
    kinds = _Leaves(shared)
    for own, other in ((backward.roots, earlier), (roots, order)):
        edges = _border(own, kinds, _OTHERS, _MOVED) if _has_network_of(shared, own) else []
        if not edges or any(edge.younger in set(other) for edge in edges):
            continue
        trained = {_torch.storage_identity(leaf) for leaf in walk.leaves_of(other)}
        is_asked = own is backward.roots and _asks_behind(edges, inputs)
        found = () if is_asked else _as_bridges(core, backward.thread, frame, edges)
        return found, bool(trained) and trained <= shared
    return (), False


def _freed_storages(order: list[Node], past: PastBackward, known: set[Node]) -> set[int]:
    """The storages of the leaves behind what ``past`` has freed of a graph; ``known`` are the Nodes of its own.

    The later backward itself has freed what it has run; it came to the oldest Node last, or not at all. Without
    ``known``, the earlier loss may have trained all parameters of the optimizers that have the leaves of that one.
    """
    freed = [node for node in order if _is_before(node, past) and _torch.was_freed(node)]
    freed = [node for node in freed if node in known] if known else freed[-1:]
    found = {_torch.storage_identity(leaf) for leaf in walk.leaves_of(walk.engine_order(freed) if freed else ())}
    if not known:
        for one in optimizers_alive() if found else ():
            held = {_torch.storage_identity(p) for p in _torch.parameters_of(one)}
            found |= held if held & found else set()
    return found


def _asks_behind(edges: Sequence[walk.Crossing], inputs: Sequence[Any]) -> bool:
    """Whether one of ``inputs`` lies behind the border, so that its gradient would be lost: GradNorm's shared layer."""
    behind = set(walk.engine_order([edge.older for edge in edges])) if edges and inputs else set()
    leaves = {_torch.storage_identity(leaf) for leaf in walk.leaves_of(behind)}
    return any(
        one.grad_fn in behind or (one.is_leaf and _torch.storage_identity(one) in leaves)
        for one in inputs
        if _torch.is_tensor(one)
    )


def _is_before(node: Node, past: PastBackward) -> bool:
    number = _torch.node_sequence(node)
    return number is not None and number < past.begun_at


def _calls_between(core: Log, number: int, past: PastBackward) -> tuple[Site, ...]:
    """Return the sites where Nodes after ``number`` were made, up to the backward ``past``, and that of ``past``."""
    stacks: dict[int, Any] = {}
    number += 1
    while number < past.begun_at and len(stacks) < _MOST_CALLS:
        near = [one for one in calls_near(core, number, past.thread) if one.end > number]
        if not near:
            break
        first, end, _, stack = near[-1]
        if first < past.begun_at:
            stacks.setdefault(id(stack), stack)
        number = end
    return tuple(symbolise(stack) for stack in (*stacks.values(), past.stack))


def _went_through(node: Node, past: PastBackward) -> bool:
    """Whether the graph of an earlier backward has ``node``, or may have, its loss being gone."""
    roots = past.live_roots()
    if roots is None:
        return (_torch.node_sequence(node) or 0) < past.begun_at
    return node in set(walk.engine_order(roots))


def _others_go(edges: list[walk.Crossing], backward: BackwardRecord, frame: FrameType | None) -> bool:
    """Whether a live value outside of this loss's graph, such as a loss to come, leads through one of the edges."""
    own = set(walk.engine_order(backward.roots)) if edges else set()
    found = search(frame, lambda t: t.requires_grad and not t.is_leaf and t.grad_fn not in own) if edges else ()
    return bool(walk.lead_to(walk.roots_of(one.tensor for one in found), *(edge.younger for edge in edges)))


def retained_for(steps: StepLog, backwards: BackwardLog, backward: BackwardRecord, since: int) -> Site | None:
    """The one backward between both that kept its graph; None where the later loss needs more than stepped networks."""
    kept = [one for one in backwards.before_in_thread(backward.clock) if one.retain_graph and one.clock > since]
    if len(kept) != 1:
        return None
    shared = set(walk.engine_order(kept[0].live_roots() or ()))
    reached = _reached(backward.roots, _Leaves(_moved(steps, since, backward.clock)).kind_of) if shared else {}
    is_shared = any(kinds & _OTHERS for node, kinds in reached.items() if node in shared and not _is_leaf(node))
    return None if is_shared else symbolise(kept[0].stack)


def is_nobodys(core: Log, older: Node, since: int) -> bool:
    """Whether a graph computes with parameters only, none of which an optimizer has, and which stay as they are.

    A frozen copy, a teacher, a target network: nothing learns from a gradient that reaches them. Parameters that are
    updated by hand (written after ``since``) may well learn.
    """
    leaves = walk.leaves_of(walk.engine_order([older]))
    storages = {_torch.storage_identity(one) for one in leaves}
    if not leaves or not all(isinstance(one, torch.nn.Parameter) for one in leaves):
        return False
    if any(raw.storage in storages for raw in logged_writes(core, since)):
        return False
    held = {_torch.storage_identity(one) for one in _torch.parameters_of(*optimizers_alive())}
    return bool(held) and held.isdisjoint(storages)


def _moved(steps: StepLog, since: int, until: int) -> set[int]:
    """Return the storages that optimizers have stepped between two times of the clock."""
    return {one for record in steps.steps if since < record.clock < until for one in record.storages}


def _has_network_of(moved: AbstractSet[int], roots: tuple[Node, ...]) -> bool:
    """Whether a Node between the roots and several leaves may lead to ``moved`` storages only; else there is no border.

    This is checked first: finding the parameters of all optimizers takes a walk of the heap.
    """
    found: set[int] = set()

    def kind_of(leaf: torch.Tensor) -> int:
        storage = _torch.storage_identity(leaf)
        found.add(storage)
        return _MOVED if storage in moved else _OTHERS

    reached = _reached(roots, kind_of) if moved else {}
    inner = (kinds for node, kinds in reached.items() if node not in roots and not _is_leaf(node))
    return len(found) > 1 and _MOVED in inner


class _Leaves:
    """Kinds of leaves of a graph: those of the storages ``moved`` have moved if their optimizers stepped all of theirs.

    Those of the storages ``by_hand`` have moved if no optimizer has them.
    """

    def __init__(self, moved: AbstractSet[int], by_hand: AbstractSet[int] = frozenset()) -> None:
        self._kinds: dict[int, int] = {}
        alive = optimizers_alive() if moved or by_hand else []
        all_held = [{_torch.storage_identity(p) for p in _torch.parameters_of(one)} for one in alive]
        for held in all_held:
            parts = [one for one in all_held if one < held]
            if parts and held == set().union(*parts):
                continue  # of several networks, each of which has an optimizer of its own
            kind = _MOVED if held and all(one in moved for one in held) else _OTHERS
            for one in held:
                self._kinds[one] = self._kinds.get(one, 0) | kind
        for one in by_hand:
            self._kinds.setdefault(one, _MOVED)

    def kind_of(self, leaf: torch.Tensor) -> int:
        """``_MOVED`` if stepped optimizers have it, or it was updated by hand; ``_OTHERS``; both; else nobody's.

        A loss does not train what nobody has: the teacher whose targets it was given.
        """
        return self._kinds.get(_torch.storage_identity(leaf), _NOBODYS)


def _border(roots: tuple[Node, ...], leaves: _Leaves, own: int, borrowed: int) -> list[walk.Crossing]:
    """Return the edges from Nodes that lead to ``own`` leaves to Nodes that lead to ``borrowed`` ones only."""
    reached = _reached(roots, leaves.kind_of)
    return [
        walk.Crossing(node, child, output)
        for node, kinds in reached.items()
        if kinds & own
        for child, output in node.next_functions
        if child is not None and reached[child] and not reached[child] & ~borrowed
    ]


def _reached(roots: tuple[Node, ...], kind_of: Callable[[Any], int]) -> dict[Any, int]:
    """Return the Nodes below ``roots``, children first, with the kinds of their leaves; empty if there are too many."""
    reached: dict[Any, int] = {}
    for root in roots:
        # A Node is decided when all its children are, so it stays on the stack below them.
        stack = [root]
        while stack:
            node = stack[-1]
            if node in reached:
                stack.pop()
                continue
            if len(reached) + len(stack) > walk.NODES_WALKED:
                return {}
            leaf = getattr(node, "variable", None)
            children = [child for child, _ in node.next_functions if child is not None]
            waiting = [child for child in children if child not in reached]
            if waiting and leaf is None:
                stack.extend(waiting)
                continue
            kinds = kind_of(leaf) if _torch.is_tensor(leaf) else 0
            for child in children:
                kinds |= reached[child]
            reached[node] = kinds
            stack.pop()
    return reached


def _is_leaf(node: Node) -> bool:
    return _torch.is_tensor(getattr(node, "variable", None))


def _as_bridges(core: Log, thread: int, frame: FrameType | None, edges: list[walk.Crossing]) -> tuple[Bridge, ...]:
    """Convert the border to data; empty if a parameter itself lies on it, or if it is too long for two networks."""
    found: list[Bridge] = []
    waiting = list(edges)
    looked_at: set[tuple[Any, int]] = set()
    while waiting:
        edge = waiting.pop(0)
        if _is_leaf(edge.older) or len(looked_at) > _MOST:
            return ()
        taken, made = (sites_near(core, node, thread) for node in (edge.younger, edge.older))
        if taken and made and _line(taken[0]) == _line(made[0]):
            # ``D(torch.cat([real, fake]))``: the result of this line itself has no name; its inputs have.
            inner = (walk.Crossing(edge.older, child, output) for child, output in edge.older.next_functions if child)
            fresh = [one for one in inner if (one.older, one.output) not in looked_at]
            looked_at.update((one.older, one.output) for one in fresh)
            waiting += fresh
            continue
        name = naming.name_of_output(edge.older, frame)
        found.append(Bridge(edge.older.name(), edge.younger.name(), name, taken, made))
    return tuple(found) if len(found) <= _MOST else ()


def _line(site: Site) -> tuple[tuple[str, int], ...]:
    return tuple((frame.file, frame.line) for frame in site.frames if frame.is_user)


def sites_near(core: Log, node: Node, thread: int) -> tuple[Site, ...]:
    """Return the site of a Node; where its call was not watched, those of the calls before and after it."""
    number = _torch.node_sequence(node)
    return () if number is None else tuple(symbolise(one.stack) for one in calls_near(core, number, thread))
