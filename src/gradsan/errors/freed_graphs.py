"""Clues to "backward through the graph a second time": the backward that freed the graph, and live variables on it.

A freed Node shows only that it was freed. The Nodes that this backward itself has run are freed by now as well; they
are told apart by their number, and by the graph of the earlier loss where that is still alive.

Roles: ``needed`` (this backward), ``freed_by`` (the earlier one), ``saved`` (the call that made the freed Node),
``bridge`` (the tensor by which the new graph depends on the freed one) with ``bridge_made`` and ``bridge_taken`` (the
calls around it), ``further`` (another such tensor), ``updated`` (a step between the two backwards, or another write to
a leaf of the freed graph; ``values``: the ``operands`` that steps have changed, where that is known), ``borrowed`` (a
tensor by which one of the losses depends on a network that another optimizer trains; ``values``: ``is_only``, whether
the other loss trains that network alone) with ``borrowed_made`` and
``borrowed_taken``, ``held`` (a live variable whose graph leads back to the freed Node; ``values``: the fields of
:class:`gradsan.model.Held`), ``path`` (the Nodes from the loss to the freed one; ``values``: ``passed``, as in
:class:`gradsan.model.Conflict`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import FrameType
from typing import NamedTuple

from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.errors.context import Context, written_operands
from gradsan.graph import borrowed, compiled, naming, walk
from gradsan.graph.conflicts import passed
from gradsan.model import Bridge, Clue, HeldClue, PathClue
from gradsan.record.backwards import PastBackward
from gradsan.record.ledger import call_that_made
from gradsan.record.log import Log, RawCall, logged_writes
from gradsan.record.stacks import symbolise
from gradsan.record.steps import BackwardRecord, StepRecord, moved_storages

_MOST_LOOKED_AT, _MOST_FURTHER = 500, 4


class Freed(NamedTuple):
    """A Node that an earlier backward freed; ``reach`` are the Nodes of that backward, None where its loss is gone."""

    node: Node
    by: PastBackward
    reach: set[Node] | None


class _Join(NamedTuple):
    """The edge from the new graph to the freed one; ``output`` is the output number of ``older``.

    ``younger`` is None where the root itself was freed.
    """

    younger: Node | None
    older: Node
    output: int = 0


def gather_second_backward(context: Context) -> tuple[Clue, ...]:
    """Return the clues to a backward that found its graph freed; only ``needed`` if nothing in the log fits."""
    core, backward = context.core, context.backward
    if backward is None or context.backwards is None:
        return ()
    needed = Clue("needed", symbolise(backward.stack), op=backward.via, values={"step": core.steps})
    order = walk.engine_order(backward.roots, context.inputs, backward.via == "backward")
    past = [one for one in context.backwards.before_in_thread(backward.clock) if not one.retain_graph]
    needed_at = needed.site
    # Where this line went through the graph before, no backward of before that has freed it.
    past.sort(key=lambda one: symbolise(one.stack) != needed_at)
    freed = freed_earlier(order, past)
    if freed is None:
        return (needed,)
    node, by, _ = freed
    join = _carried(context, order, freed) or _join(list(backward.roots), freed)
    saved_at = _made_at(core, node, backward.thread)
    joined_at = _made_at(core, join.older, backward.thread)
    younger = _torch.node_sequence(join.younger)
    cached = _cached(join.older, context.frame)
    info = _torch.output_info(join.older, join.output)
    clues = [
        needed,
        Clue(
            "freed_by",
            symbolise(by.stack),
            op=by.via,
            values={"step": by.step, "certain": freed.reach is not None, "same_loss": join.younger is None},
        ),
        _saved(node, join.output if node is join.older else 0, saved_at),
        Clue(
            "bridge",
            _saved(join.older, join.output, joined_at).site,
            name=cached or naming.name_of_output(join.older, context.frame),
            op=join.older.name(),
            values={
                "younger": "" if join.younger is None else join.younger.name(),
                "cached": cached is not None,
                "numbers": naming.numbers_in(context.frame),
                "parameter": naming.parameter_over(join.older, context.frame),
                "made_after": younger is not None and younger >= by.sequence,
                "is_term": not walk.meets_parameters(order, join.older),
                # A number built once is a term of the loss: as a constant, it would have no effect.
                "is_trained": bool(info and info[0])
                and _leaves(walk.engine_order([join.older])) <= _leaves(_younger(order, by)),
                "is_nobodys": join.younger is not None and borrowed.is_nobodys(core, join.older, by.clock),
                "is_unheld": _is_unheld(join.older),
                "sums": _sums(backward.roots, join.older),
                "ran_again": _ran_again(context, (joined_at, saved_at), order, by),
                **({} if info is None else dict(zip(("shape", "dtype", "device"), info, strict=True))),
            },
        ),
    ]
    clues += [Clue("bridge_made", site) for site in borrowed.sites_near(core, join.older, backward.thread)]
    if join.younger is not None:
        clues += [Clue("bridge_taken", site) for site in borrowed.sites_near(core, join.younger, backward.thread)]
    first = _first_freed(join.older)
    if first is not None and first is not join.older:
        made_at = _saved(first, 0, _made_at(core, first, backward.thread))
        clues.append(Clue("freed_first", made_at.site, op=made_at.op))
    for older, output in _further(order, by, join.older):
        site = _saved(older, output, _made_at(core, older, backward.thread)).site
        clues.append(Clue("further", site, name=naming.name_of_output(older, context.frame), op=older.name()))
    passed_nodes = passed(core, backward.roots, node, by.sequence)
    clues.append(PathClue("path", passed=passed_nodes))
    nodes = [node, *_others_freed(order, node, by.sequence)]
    held = naming.held_graphs(nodes, context.frame, by.sequence, order)
    clues += [HeldClue("held", name=one.path, held=one) for one in held]
    for step in context.steps.steps:
        if by.clock < step.clock < backward.clock or _calls_again(step, by, backward):
            values: dict[str, object] = {}
            if step.end is not None:
                behind = [one for one in order if _is_older(one, by.sequence)]
                values["operands"] = written_operands(behind, moved_storages(context.steps, by.clock))
            clues.append(Clue("updated", symbolise(step.stack), op=step.optimizer, values=values))
            return (*clues, *_borrowed(context, by))
    clues += _by_hand(context, join.older, by)
    found, is_only = borrowed.by_another_optimizer(core, by, backward, context.frame, context.inputs)
    return (*clues, *_as_clues(found, is_later=True, is_only=is_only))


def _by_hand(context: Context, older: Node, by: PastBackward) -> list[Clue]:
    """The first write since ``by`` to a leaf of the freed graph: an update that no optimizer made."""
    kept = {_torch.storage_identity(leaf) for leaf in walk.leaves_of(walk.engine_order([older]))}
    raws = logged_writes(context.core, by.clock)
    first = next((raw for raw in raws if raw.storage in kept), None)
    return [] if first is None else [Clue("updated", symbolise(first.stack), op=first.op)]


def _calls_again(step: StepRecord, by: PastBackward, backward: BackwardRecord) -> bool:
    """Whether a running step has called its closure again: it updates between two evaluations."""
    places = [symbolise(one.stack).user_frame for one in (by, backward)]
    return step.end is None and step.clock < by.clock and None not in places and places[0] == places[1]


def _saved(node: Node, output: int, call: RawCall | None) -> Clue:
    """Return the operation whose saves were freed; that inside a compiled Node, if its graph shows it."""
    if call is None:
        return Clue("saved", None, op=node.name())
    op, site = compiled.needed_first(node, output, symbolise(call.stack))
    return Clue("saved", site, op=op)


def _ran_again(context: Context, calls: Iterable[RawCall | None], order: list[Node], by: PastBackward) -> bool:
    """Whether one of the calls has been made again since ``by``."""
    core, backward = context.core, context.backward
    thread = by.thread if backward is None else backward.thread
    stacks = [call.stack for call in calls if call is not None]
    if any(core.ran_since(stack, by.sequence, thread) for stack in stacks):
        return True
    # Python may have specialised a call since: then the same lines have another stack.
    younger, sites = _younger(order, by), {symbolise(stack) for stack in stacks}
    again = (_made_at(core, node, thread) for node in younger[:_MOST_LOOKED_AT])
    if any(call is not None and symbolise(call.stack) in sites for call in again):
        return True
    return any(compiled.is_called_again(core, site, younger, thread) for site in sites)


def _younger(order: list[Node], by: PastBackward) -> list[Node]:
    return [node for node in order if (_torch.node_sequence(node) or 0) >= by.sequence]


def _is_older(node: Node, sequence: int) -> bool:
    number = _torch.node_sequence(node)
    return number is not None and number < sequence


def _further(order: list[Node], by: PastBackward, known: Node) -> list[tuple[Node, int]]:
    """The results of Nodes other than ``known`` by which the new graph depends on freed ones."""
    edges = ((child, output) for node in _younger(order, by) for child, output in node.next_functions if child)
    others = ((child, output) for child, output in edges if child is not known)
    older = dict.fromkeys(edge for edge in others if _is_older(edge[0], by.sequence))
    return [edge for edge in older if any(map(_torch.was_freed, walk.engine_order([edge[0]])))][:_MOST_FURTHER]


def _first_freed(older: Node) -> Node | None:
    """The oldest freed Node behind ``older``: from there on everything would have to be computed again."""
    behind = sorted(walk.engine_order([older]), key=lambda node: _torch.node_sequence(node) or 0)
    return next((node for node in behind if _torch.was_freed(node)), None)


def _leaves(nodes: list[Node]) -> set[Node]:
    """The Nodes of the leaves that ``nodes`` compute with."""
    children = {child for node in nodes for child, _ in node.next_functions if child is not None}
    return {child for child in children if _torch.is_tensor(getattr(child, "variable", None))}


def _others_freed(order: list[Node], node: Node, sequence: int) -> list[Node]:
    """Return further freed Nodes made before that backward: several states may be carried."""
    older = (one for one in order if one is not node and _is_older(one, sequence))
    return [one for one in itertools.islice(older, _MOST_LOOKED_AT) if _torch.was_freed(one)]


def _cached(node: Node, frame: FrameType | None) -> str | None:
    """Return a module's name of the parameter that ``node`` computed and ``parametrize.cached()`` keeps."""
    for name, tensor in _torch.cached_parametrizations().items():
        order = [] if tensor.grad_fn is None else walk.engine_order([tensor.grad_fn])
        if node not in order:
            continue
        leaves = (getattr(child, "variable", None) for one in order for child, _ in one.next_functions)
        leaf = next((one for one in leaves if one is not None), None)
        names = () if leaf is None else naming.names_of(leaf, frame)
        owner, found, _ = names[0].text.partition(".parametrizations.") if names else ("", "", "")
        return f"{owner}.{name}" if found else name
    return None


def _borrowed(context: Context, by: PastBackward) -> list[Clue]:
    """Return the tensors that one of the two losses borrows: the later one, else the one whose backward freed."""
    core, backward, backwards = context.core, context.backward, context.backwards
    if backward is None or backwards is None:
        return []
    found = borrowed.by_later_loss(core, context.steps, backwards, backward, by.clock, context.frame, context.inputs)
    is_later = bool(found)
    if not found:
        roots = by.live_roots()
        found = (
            borrowed.by_gone_loss(core, context.steps, by, backward, context.frame)
            if roots is None
            else borrowed.by_earlier_loss(core, context.steps, roots, by.clock, backward, context.frame)
        )
    return _as_clues(found, is_later=is_later)


def _as_clues(found: Iterable[Bridge], *, is_later: bool, is_only: bool = False) -> list[Clue]:
    clues: list[Clue] = []
    for number, one in enumerate(found):
        values = {"number": number, "is_later": is_later, "is_only": is_only}
        clues.append(Clue("borrowed", name=one.name, op=one.older, values=values))
        clues += [Clue("borrowed_made", site, values=values) for site in one.made_near]
        clues += [Clue("borrowed_taken", site, op=one.younger, values=values) for site in one.taken_near]
    return clues


def freed_earlier(order: list[Node], mine: list[PastBackward]) -> Freed | None:
    """Return the first Node of ``order`` that one of the backwards ``mine`` (of this thread, likeliest first) freed.

    A live loss decides by its graph; one that is gone may have reached every Node older than its root.
    """
    reaches: dict[int, set[Node]] = {}
    for one in mine:
        roots = one.live_roots()
        if roots is not None:
            reaches[one.clock] = set(walk.engine_order(roots))
    for node in order:
        number = _torch.node_sequence(node)
        if number is None or not any(number < one.sequence for one in mine) or not _torch.was_freed(node):
            continue
        for one in mine:
            if number < one.sequence and node in reaches.get(one.clock, ()):
                return Freed(node, one, reaches[one.clock])
        for one in mine:
            if one.clock not in reaches and one.root_sequence is not None and number <= one.root_sequence:
                return Freed(node, one, None)
    return None


def _carried(context: Context, order: list[Node], freed: Freed) -> _Join | None:
    """The edge to an earlier round's result by which this round goes on: the call that made it has run again since.

    It need not lie in the graph of that round's loss: the last state of a recurrent layer, beside its outputs.
    """
    backward = context.backward
    path = [] if backward is None or freed.reach is None else walk.path(list(backward.roots), freed.node)
    cut = walk.crossing(path, freed.by.sequence) if path else None
    if cut is None or backward is None or cut[1] in (freed.reach or ()):
        return None
    made_at = _made_at(context.core, cut[1], backward.thread)
    return _Join(*cut) if _ran_again(context, [made_at], order, freed.by) else None


def _join(roots: list[Node], freed: Freed) -> _Join:
    path = walk.path(roots, freed.node)
    if not path:
        return _Join(None, freed.node)
    nodes = [node for node, _ in path]
    if freed.reach is not None:
        position = next(index for index, node in enumerate(nodes) if node in freed.reach)
        return _Join(nodes[position - 1] if position else None, *path[position])
    cut = walk.crossing(path, freed.by.sequence)
    if cut is not None:
        return _Join(*cut)
    is_same_root = _torch.node_sequence(nodes[0]) == freed.by.root_sequence
    return _Join(None if is_same_root or len(nodes) < 2 else nodes[-2], *path[-1])


def _sums(roots: Iterable[Node], older: Node) -> int:
    """How many sums lie between the loss and ``older``, a term of it; 0 where that passes more than arithmetic."""
    before = [node for node, _ in walk.path(list(roots), older)][:-1]
    joining = [node for node in before if sum(child is not None for child, _ in node.next_functions) > 1]
    is_arithmetic = all(node.name().startswith(_ARITHMETIC) for node in before)
    return len(joining) if is_arithmetic and all(node.name().startswith(("Add", "Sub")) for node in joining) else 0


_ARITHMETIC = ("Add", "Div", "Mul", "Neg", "Sub")


def _is_unheld(node: Node) -> bool:
    """Whether nothing in Python holds a leaf of a graph."""
    order = walk.engine_order([node])
    unheld = walk.unheld_leaves(order)
    return bool(unheld) and len(unheld) == len(walk.leaves_of(order))


def _made_at(core: Log, node: Node, thread: int) -> RawCall | None:
    return call_that_made(core, _torch.node_sequence(node), thread)
