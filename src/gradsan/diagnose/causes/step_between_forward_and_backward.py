"""GS110: parameters were updated between the forward pass and its backward."""

from __future__ import annotations

from gradsan.diagnose import build, fixes
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.borrowed import detach_other_network
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis, Fix, Message

CODE = "GS110"
SLUG = "step_between_forward_and_backward"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise a parameter update (an optimizer's step, or one written by hand) among the writes."""
    updates = facts.updates
    if not updates:
        return None
    bridge = facts.conflict.bridge
    notes = []
    if bridge is not None and bridge.name is not None:
        notes.append(Message("note.hangs_on", {"bridge": bridge.name}))
    if facts.conflict.use.retain_graph:
        notes.append(Message("note.retain_graph_keeps_the_graph_not_the_values"))
    update = updates[0]
    return build.diagnosis(
        facts,
        CODE,
        SLUG,
        values={"update": label_room.update_name(facts, update)},
        labels=label_room.standard(facts, used=Message("label.used_after_step", {"op": facts.op})),
        fixes=_fixes(facts) if update else (),
        notes=tuple(notes),
    )


def _fixes(facts: Facts) -> tuple[Fix, ...]:
    """What leaves the rest of the training as it is comes first; what other losses' gradients may feel, last."""
    again, reorder = fixes.recompute_forward(facts), fixes.reorder_step(facts)
    if all(update.kind != "step" for update in facts.updates):
        after = fixes.update_after_backward(facts)
        # A perturbation that the second backward is to see (SAM) must not move behind it.
        return (*after, *again) if after else again if again[0].lines else (*again, *reorder)
    cut = detach_other_network(facts.conflict.borrowed, facts.conflict.retained_at)
    return (*cut, *again, *reorder)
