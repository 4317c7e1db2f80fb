"""GS110 to GS112: a saved value was overwritten by an update of parameters, states or statistics.

GS110: parameters were updated between the forward pass and its backward.

GS111: the graph of this loss crosses a parameter update over a bridge: the state carried from step to step.

GS112: running statistics or another buffer of a module were updated before the backward that reads them.
"""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose import build, carriers, fixes
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.collected import (
    BuiltOnce,
    anew_or_cut,
    detach_by_own,
    detach_held,
    detach_other_network,
    forget_collected,
)
from gradsan.diagnose.facts import Facts, examine, is_update, stack_of
from gradsan.diagnose.names import shared_level
from gradsan.diagnose.value_fixes import written_with_graph
from gradsan.model import Bridge, Diagnosis, Fix, Frame, Label, Message, Site, Write

_ENTRY = "/torch/autograd/__init__.py"


def step_between_forward_and_backward(facts: Facts) -> Diagnosis | None:
    """Recognise a parameter update (an optimizer's step, or a manual one) among the writes."""
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
    words = "step_over_live_graph" if facts.conflict.use.via == "write" else None
    return build.diagnosis(
        facts,
        "GS110",
        "step_between_forward_and_backward",
        title=words,
        explanation=words,
        values={"update": label_texts.update_name(facts, update)},
        labels=_labels(facts),
        fixes=instead_of_update(facts) if update else (),
        notes=tuple(notes),
    )


def _labels(facts: Facts) -> tuple[Label, ...]:
    """The labels of this value, and of the updates elsewhere that have overwritten others that the backward needs."""
    known = {stack_of(write) for write in facts.writes}
    beside: dict[object, tuple[Facts, Write]] = {}
    for one in map(examine, facts.conflict.further):
        for write in one.updates:
            if stack_of(write) not in known:
                beside.setdefault(stack_of(write), (one, write))
    labels = label_texts.standard(facts, used=Message("label.used_after_step", {"op": facts.op}))
    found = [(facts.updates[0].clock, tuple(one for one in labels if one.role == "written"))]
    found += [(write.clock, label_texts.written(one, [write])) for one, write in beside.values()]
    written = [label for _, several in sorted(found, key=lambda pair: pair[0]) for label in several]
    saved, used = ([one for one in labels if one.role == role] for role in ("saved", "used"))
    return (*saved, *written, *used)


def instead_of_update(facts: Facts) -> tuple[Fix, ...]:
    """The fixes: first those that preserve the rest of the training, last those that may affect other losses."""
    again, reorder = fixes.recompute_forward(facts), fixes.advice(facts, "reorder_step", "changed")
    once = _built_once(facts)
    if once:
        return (*once, *reorder)
    compared = _compared(facts)
    if compared:
        return compared
    used_at, within = facts.conflict.use.site.user_frame, _updated_within(facts)
    if within and used_at is not None and all(one.line != used_at.line for one in within):
        joined = source.backward_of_sum(within[-1], used_at) if len(set(within)) == 1 else ()
        return (Fix.worded("help.sum_before_update", {}, joined, kind="sum_losses"), *again)
    # An optimizer that a hook calls may be one of many for one network.
    is_shared = bool(within) or _learns_from_each(facts)
    cut = () if is_shared else detach_other_network(facts.conflict.borrowed, facts.conflict.retained_at)
    if facts.conflict.for_others and not is_shared:
        cut = fixes.advice(facts, "backward_for_own", "changed")
    slipped = () if used_at is None else source.backward_to_its_step(used_at)
    if not slipped:
        stacks = [update.site.user_frames for update in facts.updates_of_all]
        slipped = source.called_step_behind(stacks, facts.conflict.use.site.user_frames)
    if slipped:
        # Whatever else makes the backward run, its gradients are cleared before a step uses them.
        return (Fix.worded("help.step_behind_backward", {}, slipped),)
    if all(update.kind != "step" for update in facts.updates):
        after = (*fixes.update_after_backward(facts), *fixes.copy_within_forward(facts))
        if not after and _is_of_forward(facts):
            return (*cut, *fixes.advice(facts, "update_between_forwards", "changed"))
        # A perturbation meant for the second backward (SAM) must not move after it.
        if after or again[0].lines or fixes.is_put_back(facts):
            return (*after, *cut, *again)
        # The write may be in a callback of a library, which no line of the program calls.
        later = fixes.advice(facts, "reorder_step", "preserved", "help.update_after_backward")
        return (*cut, *later, *again)
    used = facts.conflict.use.site.user_frames
    if all(source.stands_before_its_backward(used, update.site.user_frames) for update in facts.updates):
        # With one backward there are no two trainings that take turns: the step has slipped before it.
        return (Fix.worded("help.step_behind_backward", {}), *cut, *again)
    return (*cut, *again, *reorder)


def _updated_within(facts: Facts) -> list[Frame]:
    """Where the program called the backwards in which a hook has updated the parameters; empty if not all of them."""
    found = [_calling_backward(update.site) for update in facts.updates]
    return [one for one in found if one is not None] if None not in found else []


def _calling_backward(site: Site) -> Frame | None:
    """The user's innermost call of a backward in which the program's code at ``site`` was running."""
    called_at: Frame | None = None
    found = None
    for frame in site.frames:
        if frame.is_user:
            called_at = frame
        elif frame.file.replace("\\", "/").endswith(_ENTRY):
            found = called_at
    return found


def _compared(facts: Facts) -> tuple[Fix, ...]:
    """A value from before the loop that the loss compares with a new one of the same function, detached."""
    bridge, walks = facts.conflict.bridge, facts.conflict.use.site.user_frames
    if bridge is None or bridge.name is None:
        return ()
    updated = [one for update in facts.updates for one in update.site.user_frames]
    values = {"name": bridge.name}
    for made in (near.user_frames for near in bridge.made_near):
        if not any(source.are_later_rounds(one, used, updated) for one in made for used in walks):
            continue
        for taken in (one for near in bridge.taken_near for one in near.user_frames):
            change = source.detach_compared(taken, bridge.name, made)
            if change is not None:
                lines = source.changed_lines(taken.file, change)
                return (Fix.worded("help.build_without_graph", values, lines, kind="detach_built_once"),)
    return ()


def _is_of_forward(facts: Facts) -> bool:
    """Whether the forward itself writes (a mask in a hook): run again, it would write again."""
    saved = facts.conflict.save.site.user_frames
    level = shared_level(saved, facts.conflict.use.site.user_frames)
    return all(shared_level(saved, one.site.user_frames) > level for one in facts.updates)


def _learns_from_each(facts: Facts) -> bool:
    """Whether the borrowed network is to learn from this loss, too: its optimizer steps after each of the losses."""
    updated = [one for update in facts.updates for one in update.site.user_frames]
    made = [one for bridge in facts.conflict.borrowed for site in bridge.made_near for one in site.user_frames]
    used = facts.conflict.use.site.user_frames
    if any(source.steps_again(used, update.site.user_frames) for update in facts.updates):
        return True
    return any(source.are_updated_alike(one, other, updated) for one in made for other in used)


def _built_once(facts: Facts) -> tuple[Fix, ...]:
    """The fixes for a value computed before the loop that every round's backward uses, with ``retain_graph``."""
    bridge, walks = facts.conflict.bridge, facts.conflict.use.site.user_frames
    if bridge is None or bridge.name is None or not _went_back_before(facts):
        return ()
    root = bridge.name.partition("[")[0]
    updated = [one for update in facts.updates for one in update.site.user_frames]
    for near in bridge.made_near:
        made = near.user_frames
        for used in reversed(walks):
            # The value that a function returns may have the same name in it.
            bound_at = source.binding_of([one for one in made if source.in_same_function(one, used)], root)
            if bound_at is not None and source.are_later_rounds(bound_at, used, updated):
                at = bound_at if root == bridge.name else None
                return anew_or_cut(BuiltOnce(bridge.name, at, [bound_at], used, is_nobodys=_follows_others(facts)))
    return ()


def _follows_others(facts: Facts) -> bool:
    """Whether the parameters are written by hand alone, where no gradient is read: those of a target network."""
    stacks = [update.site.user_frames for update in facts.updates_of_all]
    by_hand = all(update.kind != "step" for update in facts.updates_of_all) and all(stacks)
    return by_hand and not any(source.reads_gradient_beside(one) for stack in stacks for one in stack[-1:])


def state_carried_over(facts: Facts) -> Diagnosis | None:
    """Recognise an update, a bridge across it, and a repeated round: forward on this side, backward on both."""
    bridge = facts.conflict.bridge
    # A recorded write of the parameter itself is no step over which it was carried.
    parameter = bridge.parameter if bridge is not None and any(map(is_update, facts.updates)) else None
    if not facts.updates or bridge is None or not (bridge.forward_ran_again or parameter):
        return None
    carrier = carriers.find(facts.conflict.use.site, bridge)
    is_next = carrier is not None and (bridge.backward_ran_between or _crosses_rounds(facts, carrier, bridge))
    kept = carriers.cut_put_back(facts.conflict.use.site, bridge.held)
    is_next = is_next or (kept is not None and bridge.backward_ran_between)
    if not is_next and parameter is None and not _went_back_before(facts):
        return None
    shown: str | Message = Message("label.unnamed_state") if carrier is None else carrier.name
    shown = str(kept.summary.values["bridge"]) if carrier is None and kept is not None else shown
    shown = parameter or shown
    use, save = facts.conflict.use, facts.conflict.save
    used = Message("label.used_across_step", {"bridge": shown, "step": use.step, "earlier": save.step})
    labels = (
        *label_texts.standard(facts, used=used),
        *_bridge_label(bridge, carrier, Message("label.bridge", {"bridge": shown})),
    )
    updated = facts.updates[0].site
    forgotten = forget_collected(use.site, updated, bridge.held)
    cut = fixes.detach_carried_state(facts, carrier, shown) if forgotten is None else (forgotten,)
    known = carrier.names_in_round if carrier is not None and cut[0].lines else ()
    whole = detach_held(use.site, updated, bridge.held, known) if forgotten is None else None
    if whole is None and not cut[0].lines:
        whole = detach_held(use.site, updated, bridge.held, or_renewed=True)
        whole = whole or carriers.cut_read(use.site, bridge.taken_near, bridge.held)
        whole = whole or kept
    cut = cut if whole is None else (whole,)
    cut = carriers.cut_term(cut, updated, carrier, bridge.made_near) if bridge.is_term else cut
    if parameter is not None:
        cut = written_with_graph(parameter, bridge.made_near, carrier)
    own = detach_by_own(use.site, updated, bridge.held)
    cut = cut if own is None else (own,)
    return build.diagnosis(
        facts,
        "GS111",
        "state_carried_over",
        values={
            "bridge": shown,
            "update": label_texts.update_name(facts, facts.updates[0]),
            "step": use.step,
            "earlier": save.step,
        },
        labels=labels,
        fixes=(*cut, *fixes.drop_retain_graph(facts)),
    )


def _went_back_before(facts: Facts) -> bool:
    """Whether the older part of the graph may have had its backward already.

    Then it was kept on purpose (``retain_graph``) and only the carried state depends on it. Otherwise this is its first
    backward: nothing is carried over, the step came between the loss and its backward.
    """
    use = facts.conflict.use
    frame = use.site.shown_frame
    return bool(use.retain_graph) or (frame is not None and source.has_keyword(frame, "retain_graph"))


def _crosses_rounds(facts: Facts, carrier: carriers.Carrier, bridge: Bridge) -> bool:
    """Whether the state was bound after the last loss before the update, in rounds of which several make one loss."""
    bound_at, use = carrier.bound_at, facts.conflict.use.site.user_frames
    if bound_at is None or (bridge.is_term and not source.reads_what_it_binds(bound_at)):
        return False
    return any(source.in_same_function(bound_at, one) and source.runs_more_often(bound_at, one) for one in use)


def _bridge_label(bridge: Bridge, carrier: carriers.Carrier | None, message: Message) -> tuple[Label, ...]:
    if carrier is not None and carrier.bound_at is not None:
        bound_at = carrier.bound_at
        is_called = any(source.in_same_function(above, bound_at) for above in carrier.callers)
        callers = () if is_called else carrier.callers
        return (Label("bridge", bound_at, message, bridge.older, Site((*callers, bound_at))),)
    return label_texts.at("bridge", bridge.taken_near[-1] if bridge.taken_near else None, message, op=bridge.older)


def statistics_updated(facts: Facts) -> Diagnosis | None:
    """Recognise a saved buffer of floating-point statistics."""
    if not facts.writes:
        return None
    slot = facts.conflict.save.slot or ""
    is_statistics = slot.startswith("running_")
    is_float_buffer = facts.name_kind == "buffer" and "int" not in facts.conflict.save.tensor.dtype
    if not is_statistics and not is_float_buffer:
        return None
    return build.diagnosis(
        facts,
        "GS112",
        "statistics_updated",
        fixes=(*fixes.advice(facts, "reorder_update", "preserved"), *fixes.instead_of_writing_buffer(facts)),
    )
