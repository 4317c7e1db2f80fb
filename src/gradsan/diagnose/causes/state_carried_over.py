"""GS111: the graph of this loss crosses a parameter update over a bridge: the state carried from step to step."""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose import build, carriers, fixes
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.facts import Facts
from gradsan.diagnose.levels import place
from gradsan.model import Bridge, Diagnosis, Label, Message, Site

CODE = "GS111"
SLUG = "state_carried_over"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise an update, a bridge across it, and a round that ran again: forward on this side, backward on both."""
    bridge = facts.conflict.bridge
    if not facts.updates or bridge is None or not bridge.forward_ran_again or not _went_back_before(facts):
        return None
    carrier = carriers.find(facts.conflict.use.site, bridge)
    shown: str | Message = carrier.name if carrier is not None else Message("label.unnamed_state")
    use, save = facts.conflict.use, facts.conflict.save
    used = Message("label.used_across_step", {"bridge": shown, "step": use.step, "earlier": save.step})
    labels = (
        *label_room.standard(facts, used=used),
        *_bridge_label(bridge, carrier, Message("label.bridge", {"bridge": shown})),
    )
    return build.diagnosis(
        facts,
        CODE,
        SLUG,
        values={
            "bridge": shown,
            "update": label_room.update_name(facts, facts.updates[0]),
            "step": use.step,
            "earlier": save.step,
        },
        labels=labels,
        fixes=(*fixes.detach_carried_state(facts, carrier, shown), *fixes.drop_retain_graph(facts)),
    )


def _went_back_before(facts: Facts) -> bool:
    """Whether the older part of the graph may have had its backward already.

    Then it was kept on purpose (``retain_graph``) and only the carried state hangs on it. Otherwise this is its first
    backward: nothing is carried over, the loss was stepped over.
    """
    use = facts.conflict.use
    frame = place(use.site)
    return bool(use.retain_graph) or (frame is not None and source.has_keyword(frame, "retain_graph"))


def _bridge_label(bridge: Bridge, carrier: carriers.Carrier | None, message: Message) -> tuple[Label, ...]:
    if carrier is not None and carrier.bound_at is not None:
        bound_at = carrier.bound_at
        is_called = any(source.in_same_function(above, bound_at) for above in carrier.callers)
        callers = () if is_called else carrier.callers
        return (Label("bridge", bound_at, message, bridge.older, Site((*callers, bound_at))),)
    return label_room.at("bridge", bridge.taken_near[-1] if bridge.taken_near else None, message, op=bridge.older)
