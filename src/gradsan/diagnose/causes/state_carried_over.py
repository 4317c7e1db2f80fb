"""GS111: the graph of this loss crosses a parameter update over a bridge: the state carried from step to step."""

from __future__ import annotations

import re

from gradsan import source
from gradsan.diagnose import build, fixes
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.facts import Facts
from gradsan.model import Bridge, Diagnosis, Frame, Label, Message, Site

CODE = "GS111"
SLUG = "state_carried_over"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise an update, a bridge across it, and a forward that ran again on this side of it."""
    bridge = facts.conflict.bridge
    if not facts.updates or bridge is None or not bridge.forward_ran_again:
        return None
    name, bound_at = carrier(bridge)
    variable, in_tuple = _variable(name)
    shown: str | Message = variable or Message("label.unnamed_state")
    use, save = facts.conflict.use, facts.conflict.save
    used = Message("label.used_across_step", {"bridge": shown, "step": use.step, "earlier": save.step})
    labels = (
        *label_room.standard(facts, used=used),
        *_bridge_label(bridge, bound_at, Message("label.bridge", {"bridge": shown})),
    )
    update = facts.updates[0]
    return build.diagnosis(
        facts,
        CODE,
        SLUG,
        values={"bridge": shown, "update": update.op, "step": use.step, "earlier": save.step},
        labels=labels,
        fixes=(
            *fixes.detach_carried_state(facts, bound_at, variable, "tuple" if in_tuple else None),
            *fixes.drop_retain_graph(facts),
        ),
    )


def carrier(bridge: Bridge) -> tuple[str | None, Frame | None]:
    """The name that carries the state, and the line that binds it to the older graph.

    A live variable that holds the bridge's tensor is certain; otherwise the name is read from the source around the
    operation that took it, innermost function first: a name read there and bound again later in the same loop, or for
    the next call.
    """
    frames = list(
        dict.fromkeys(frame for site in bridge.taken_near for frame in reversed(site.frames) if frame.is_user)
    )
    carried = [found for frame in frames for found in source.carried_names(frame)]
    name = bridge.name
    if name is None:
        return next(((found.name, found.bound_at) for found in carried), (None, None))
    variable = name.partition("[")[0]
    return name, next((found.bound_at for found in carried if found.name in (name, variable)), None)


def _variable(name: str | None) -> tuple[str | None, bool]:
    """``state`` for the first part of a pair of states, ``state[0]``; other elements keep their own name."""
    if name is None:
        return None, False
    in_tuple = re.fullmatch(r"(.+)\[[01]\]", name)
    return (in_tuple[1], True) if in_tuple else (name, False)


def _callers(bridge: Bridge, bound_at: Frame) -> Site:
    """The stack above the function in which the state is bound, ending at the binding line."""
    for site in bridge.taken_near:
        for depth, frame in enumerate(site.frames):
            if (frame.file, frame.function) == (bound_at.file, bound_at.function):
                return Site((*site.frames[:depth], bound_at))
    return Site((bound_at,))


def _bridge_label(bridge: Bridge, bound_at: Frame | None, message: Message) -> tuple[Label, ...]:
    site = bridge.taken_near[-1] if bridge.taken_near else None
    if bound_at is not None:
        return (Label("bridge", bound_at, message, bridge.older, _callers(bridge, bound_at)),)
    return label_room.at("bridge", site, message, op=bridge.older)
