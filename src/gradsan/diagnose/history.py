"""History of a conflict for the timeline and the drawn graph: its events, and the path to its Node, repeats folded."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from gradsan.diagnose.facts import Facts
from gradsan.model import Conflict, Diagnosis, Event, EventKind, Failure, Moment, Passed, PathClue, PathNode

LONGEST_REPEATED = 12
"""Largest number of Nodes in one iteration of a loop."""

_FIRST_SHOWN = 6
_LAST_SHOWN = 5
_FEWEST_ROUNDS = 3


def folded(nodes: Sequence[Passed]) -> tuple[PathNode, ...]:
    """``nodes`` in order; iterations of a loop become one entry, and of a long path both ends are kept."""
    keys = [(one.name, one.frame and (one.frame.file, one.frame.line)) for one in nodes]
    shown: list[PathNode] = []
    at = 0
    while at < len(nodes):
        length, rounds = _repeated(keys, at)
        part = nodes[at : at + length]
        lines = {key[1] for key in keys[at : at + length]}
        frame = part[0].frame if len(lines) == 1 else None
        if rounds == 1:
            shown.append(PathNode("node", part[0].name, frame=frame))
        else:
            name = " → ".join(one.name for one in part)
            shown.append(PathNode("repeat", name, count=rounds, frame=frame, nodes=length * rounds))
        at += length * rounds
    if len(shown) <= _FIRST_SHOWN + _LAST_SHOWN + 1:
        return tuple(shown)
    left_out = sum(one.nodes for one in shown[_FIRST_SHOWN:-_LAST_SHOWN])
    return (*shown[:_FIRST_SHOWN], PathNode("gap", nodes=left_out), *shown[-_LAST_SHOWN:])


def _repeated(keys: Sequence[object], at: int) -> tuple[int, int]:
    """The length of a repeated sequence of Nodes from ``at`` on, and its repetitions: most Nodes, shortest sequence."""
    best = (1, 1)
    for length in range(1, LONGEST_REPEATED + 1):
        rounds = 1
        while keys[at + rounds * length : at + (rounds + 1) * length] == keys[at : at + length]:
            rounds += 1
        if rounds >= _FEWEST_ROUNDS and length * rounds > best[0] * best[1]:
            best = (length, rounds)
    return best


_UNKNOWN = PathNode("gap", nodes=0)

EVENTS_KEPT = 2_000
"""Events that a diagnosis holds at most; the same finding a thousand times over has millions."""


def events_of(facts: Facts, moments: Sequence[Moment] = ()) -> tuple[tuple[Event, ...], int]:
    """The save, the writes to that memory, the backward that used it, and the run's steps and backwards in between.

    They are ordered by the run's clock; so are ``moments``. Of very many those in the middle are left
    out; the second result is their number.
    """
    conflict = facts.conflict
    save, use = conflict.save, conflict.use
    counting = {id(write) for write in facts.writes}
    events = [Event("saved", save.clock, save.step, save.node, save.version, save.site.shown_frame)]
    for write in conflict.writes:
        kind: EventKind = "step" if write.kind == "step" else "written"
        touches = id(write) in counting
        events.append(Event(kind, write.clock, write.step, write.op, write.version, write.site.shown_frame, touches))
    events += _around(conflict, moments)
    if use.via != "write":
        if not any(event.kind == "backward" for event in events):
            # The log of calls does not reach back that far; the one that failed is still known.
            events.append(Event("backward", use.clock, use.step, use.via, None, use.site.shown_frame))
        events.append(Event("used", use.clock, use.step, save.node, use.version, use.site.shown_frame))
    return _both_ends(sorted(events, key=lambda event: event.clock))


def _both_ends(events: list[Event]) -> tuple[tuple[Event, ...], int]:
    """``events`` without the excess in the middle, and the number of those left out."""
    left_out = len(events) - EVENTS_KEPT
    if left_out <= 0:
        return tuple(events), 0
    last = EVENTS_KEPT // 2
    return (*events[: EVENTS_KEPT - last], *events[-last:]), left_out


def _around(conflict: Conflict, moments: Sequence[Moment]) -> Iterator[Event]:
    """The events between save and use; a step that wrote this memory is among the writes already."""
    first = bisect_left(moments, conflict.save.clock, key=lambda moment: moment.clock)
    last = bisect_right(moments, conflict.use.clock, key=lambda moment: moment.clock)
    known = {write.clock for write in conflict.writes if write.kind == "step"}
    for moment in moments[first:last]:
        if moment.kind == "backward" or moment.clock not in known:
            touches = moment.kind == "backward"
            yield Event(moment.kind, moment.clock, moment.step, moment.op, None, moment.site.shown_frame, touches)


def way_of(facts: Facts) -> tuple[PathNode, ...]:
    """The path from the loss to the Node that saved the value, as far as it is known; empty without a Node.

    A tensor on the path is a bridge where it leads across an update of parameters, into the graph of an earlier step.
    """
    conflict = facts.conflict
    save, bridge = conflict.save, conflict.bridge
    if save.node is None:
        return ()
    over = (PathNode("bridge", bridge.name),) if bridge is not None and facts.updates else ()
    kept = PathNode("saved", save.node, save.step, frame=save.site.shown_frame)
    loss = PathNode("loss", None, conflict.use.step)
    if conflict.passed:
        return (loss, *_between(conflict.passed, over), kept)
    if bridge is None:
        return (loss, _UNKNOWN, kept)
    middle = (PathNode("node", bridge.younger), *over)
    older = () if bridge.older == save.node else (PathNode("node", bridge.older), _UNKNOWN)
    return (loss, _UNKNOWN, *middle, *older, kept)


def way_of_failure(failure: Failure, *, carries: bool) -> tuple[PathNode, ...]:
    """The path from the loss to the Node that an earlier backward freed; empty for another failure.

    ``carries`` says that a tensor of an earlier round leads there: it is a bridge.
    """
    clues = {clue.role: clue for clue in failure.clues if clue.role in ("way", "bridge", "saved", "needed", "freed_by")}
    way = clues.get("way")
    if not isinstance(way, PathClue) or not way.passed:
        return ()
    bridge, saved = clues.get("bridge"), clues.get("saved")
    over = (PathNode("bridge", bridge.name),) if bridge is not None and carries else ()
    steps = [clues[role].count("step") if role in clues else None for role in ("needed", "freed_by")]
    frame = None if saved is None else saved.shown_frame
    loss, kept = PathNode("loss", None, steps[0]), PathNode("saved", way.passed[-1].name, steps[1], frame=frame)
    return (loss, *_between(way.passed, over), kept)


def _between(passed: Sequence[Passed], over: tuple[PathNode, ...]) -> tuple[PathNode, ...]:
    """The Nodes between the loss and the last one, folded; ``over`` is where the path crosses into the old graph."""
    crossed = max((index for index, one in enumerate(passed) if one.is_younger), default=-1) + 1
    if not over or not 0 < crossed < len(passed):
        return folded(passed[:-1])
    return (*folded(passed[:crossed]), *over, *folded(passed[crossed:-1]))


def joined(known: Diagnosis, again: Diagnosis) -> tuple[tuple[Event, ...], int]:
    """The events of one finding observed twice, each once, and the largest number left out in the middle."""
    events = sorted(dict.fromkeys((*known.events, *again.events)), key=lambda event: event.clock)
    kept, left_out = _both_ends(events)
    return kept, known.events_left_out + again.events_left_out + left_out
