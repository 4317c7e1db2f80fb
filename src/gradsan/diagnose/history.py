"""What the timeline and the graph of a report are drawn from: the events of a conflict, and the way to its Node."""

from __future__ import annotations

from gradsan.diagnose.facts import Facts
from gradsan.diagnose.levels import place
from gradsan.model import Diagnosis, Event, EventKind, Knot

EVENTS_KEPT = 2_000
"""Events that a diagnosis holds at most; the same finding a thousand times over has millions."""


def events_of(facts: Facts) -> tuple[Event, ...]:
    """The save, the writes to that memory, and the backward that used it, by the clock, which is the run's own."""
    conflict = facts.conflict
    save, use = conflict.save, conflict.use
    events = [Event("saved", save.clock, save.step, save.node, save.version, place(save.site))]
    counting = {id(write) for write in facts.writes}
    for write in conflict.writes:
        kind: EventKind = "step" if write.kind == "step" else "written"
        touches = id(write) in counting
        events.append(Event(kind, write.clock, write.step, write.op, write.version, place(write.site), touches))
    # A backward has no end of its own in the log: its beginning and the use that failed in it stand at one moment.
    events.append(Event("backward", use.clock, use.step, use.via, None, place(use.site)))
    events.append(Event("used", use.clock, use.step, save.node, use.version, place(use.site)))
    return tuple(sorted(events, key=lambda event: event.clock)[:EVENTS_KEPT])


def way_of(facts: Facts) -> tuple[Knot, ...]:
    """From the loss to the Node that kept the value, as far as it is known; empty where no Node is.

    A tensor on the way is a bridge where it leads over an update of parameters, into the graph of an earlier step.
    """
    conflict = facts.conflict
    save, bridge = conflict.save, conflict.bridge
    if save.node is None:
        return ()
    loss, kept = Knot("loss", None, conflict.use.step), Knot("saved", save.node, save.step)
    if bridge is None:
        return (loss, Knot("gap"), kept)
    over = (Knot("bridge", bridge.name),) if facts.updates else ()
    middle = (Knot("node", bridge.younger), *over)
    older = () if bridge.older == save.node else (Knot("node", bridge.older), Knot("gap"))
    return (loss, Knot("gap"), *middle, *older, kept)


def joined(known: Diagnosis, again: Diagnosis) -> tuple[Event, ...]:
    """The events of one finding met twice, each once."""
    if len(known.events) >= EVENTS_KEPT:
        return known.events
    events = sorted(dict.fromkeys((*known.events, *again.events)), key=lambda event: event.clock)
    return tuple(events[:EVENTS_KEPT])
