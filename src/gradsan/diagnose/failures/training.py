"""GS423 to GS427, and GS420 for an update that nobody gets: what has no effect in a training.

All of them run; PyTorch reports nothing. That something else was intended is a conclusion from many
rounds, and each is a warning, except where parameters may well have been left out on purpose.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from gradsan import source
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.failures import parts
from gradsan.model import Clue, Diagnosis, Failure, Fix, Frame, Label, Message, Site

_PERHAPS_MEANT = frozenset({"criterion", "left_out_end", "left_out_chosen", "own_term", "unregistered_one"})
_FEW = 16
_VARIANTS = re.compile("_(end|chosen|one)$")


def without_optimizer(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure: a note where it may be intended (a separate module, a model's end); else warn."""
    parameters, holder = failure.clues_of("parameter"), failure.clue("holder")
    if not parameters or not parameters[0].name:
        return None
    facts = parameters[0].values
    evidence = str(facts["evidence"])
    kind = _VARIANTS.sub("", evidence)
    values = {
        "name": parameters[0].name,
        "holder": holder.name if holder is not None else Message("label.an_optimizer"),
    }
    others = [one.name for one in parameters[1:] if one.name]
    more = parameters[0].count("parameters") - 1 - len(others)
    key = "note.also_untrained_and_more" if more else "note.also_untrained"
    notes = (Message(key, {"names": ", ".join(others), "more": more}),) if others else ()
    is_unheld = evidence == "unheld"
    return parts.diagnosis(
        failure,
        "GS423",
        "parameter_without_optimizer",
        values=values,
        severity="note" if evidence in _PERHAPS_MEANT and not _is_weighting(evidence, parameters) else "warning",
        explanation=f"explanation.without_optimizer_{evidence.removesuffix('_end')}",
        labels=(
            *(_where_held(failure, parameters[0].name, values) if kind == "unregistered" else ()),
            *parts.label_of(holder, "created", "label.optimizer_made", values),
            *parts.label_of(None if is_unheld else parameters[0], "created", "label.made_in_forward", values),
            *_where_made(failure, parameters[0] if is_unheld else None, values),
            *parts.used(failure, "label.fills_untrained", values),
        ),
        tensor=parts.tensor_of(parameters[0]),
        fixes=(
            _whole(failure, parameters[0], values)
            if is_unheld
            else parts.fix("give_parameters", "changed", values, summary=f"help.give_{_way(kind)}"),
        ),
        notes=notes,
    )


def _is_weighting(evidence: str, parameters: Sequence[Clue]) -> bool:
    """Whether all that a module of its own has are a few numbers: temperatures or weights of a loss, no network."""
    sizes = [math.prod(one.shape) for one in parameters]
    return evidence == "criterion" and parameters[0].count("parameters") == len(sizes) and max(sizes) <= _FEW


def _whole(failure: Failure, parameter: Clue, values: Mapping[str, object]) -> Fix:
    """The statement that binds the result of an operation on a leaf, with the result as the leaf."""
    lines = source.changed_at(_bound_at(failure, parameter), source.leaf_alone)
    return Fix.worded("help.leaf_alone", values, lines)


def _where_made(failure: Failure, unheld: Clue | None, values: Mapping[str, object]) -> tuple[Label, ...]:
    frame = None if unheld is None else _bound_at(failure, unheld)
    return () if frame is None else label_texts.at("created", Site((frame,)), Message("label.made_of_unheld", values))


def _bound_at(failure: Failure, parameter: Clue) -> Frame | None:
    """Where a value was computed, else the one statement of the file that binds its name."""
    frame, name = failure.site.user_frame, parameter.name
    if parameter.user_frame is not None or frame is None or name is None:
        return parameter.user_frame
    if name.isidentifier():
        found = source.definition_of(frame, name)
        return None if found is None else found.frame
    return next(iter(_places_of(frame, name)), None)


def _where_held(failure: Failure, name: str, values: Mapping[str, object]) -> tuple[Label, ...]:
    """The label of the one statement that binds the attribute in which a module holds a parameter."""
    frame = failure.site.user_frame
    places = [] if frame is None else _places_of(frame, name)
    return label_texts.at("created", Site(tuple(places)), Message("label.held_plainly", dict(values))) if places else ()


def _places_of(frame: Frame, name: str) -> list[Frame]:
    """The one statement of a file that binds an attribute of ``name``, the last one that has one; else none."""
    for attribute in re.findall(r"\.(\w+)", name)[::-1]:
        places = [place for _, place in source.assignments(frame, f"self.{attribute}")]
        if len(places) == 1:
            return places
    return []


def _way(evidence: str) -> str:
    own = ("remade", "unregistered", "late", "unfrozen", "run_out", "instead", "copied")
    return evidence if evidence in own else "late" if evidence == "late_frozen" else "parameters"


def thrown_away(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure: a note where it may be meant, or only time was lost; else a warning."""
    gradient, cleared, stepped = (failure.clue(role) for role in ("gradient", "cleared", "stepped"))
    if gradient is None or cleared is None or stepped is None:
        return None
    values = {
        "name": gradient.name or Message("label.the_tensor"),
        "leaves": gradient.values["leaves"],
        "writer": label_texts.as_written(cleared.op or "zero_grad"),
        "optimizer": stepped.name,
    }
    is_idle, is_part = stepped.site is None, bool(gradient.values["is_part"])
    # Who measures times steps with nothing, and does not look at the loss.
    frame = failure.site.user_frame
    is_alone = is_idle and bool(gradient.values.get("is_alone", "yes"))
    is_measured = is_alone and frame is not None and not source.is_loss_read_elsewhere(frame)
    is_chosen = bool(gradient.values.get("is_chosen"))
    read = "read_" if gradient.values.get("is_read") else ""
    kind = "never_used" if is_idle else f"{'part_' if is_part else read}thrown_away"
    slipped = () if is_idle or frame is None else source.backward_to_its_step(frame)
    # To clear earlier would hand this step the gradients of another's loss, if its own backward comes after it.
    missed = () if is_idle or slipped or frame is None else source.later_backward_to_its_step(frame)
    late = is_idle or bool(slipped)
    # What another backward fills again was of use where some rounds, or another function, keep it.
    is_kept = bool(gradient.values["is_refilled"]) and not _is_cleared_behind(frame, cleared.user_frame)
    once = "clear_once" if gradient.values.get("is_cleared_again") else "clear_elsewhere"
    fix = "step_after_backward" if late else "clear_after_step" if is_part else once
    return parts.diagnosis(
        failure,
        "GS424",
        "gradient_thrown_away",
        values=values,
        severity="note" if is_kept or is_measured or is_chosen else "warning",
        title="title.gradient_never_used" if is_idle else None,
        explanation=f"explanation.gradient_{kind}",
        labels=(
            *parts.used(failure, "label.fills_in_vain", values),
            *parts.label_of(cleared, "written", "label.cleared_unused", values),
            *(() if is_idle else parts.label_of(stepped, "note", "label.steps_without", values)),
        ),
        tensor=parts.tensor_of(gradient, f"{gradient.name}.grad") if gradient.name else None,
        fixes=(
            Fix.worded("help.step_behind_backward", {}, missed)
            if missed
            else parts.fix(fix, "changed", values, lines=slipped),
        ),
    )


def _is_cleared_behind(ran: Frame | None, cleared: Frame | None) -> bool:
    """Whether every round of a loop clears, in the function of a backward and behind it, what that has filled."""
    if ran is None or cleared is None or not source.in_same_loops(ran, cleared):
        return False
    return ran.line < cleared.line and not source.is_conditional(ran) and not source.is_conditional(cleared)


_CLIPS = {
    "dropped": "clip_in_place",
    "run_out": "clip_list",
    "others": "clip_own",
    "of_last_step": "clip_own",
    "scaled": "clip_unscaled",
    "doubled": "clip_once",
    "part": "clip_sum",
}


_FILLS, _STEPS = ("of_last_step", "scaled", "doubled", "part"), ("scaled", "doubled")


def clip_without_effect(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure as a warning."""
    clip, stepped = failure.clue("clip"), failure.clue("stepped")
    if clip is None or stepped is None:
        return None
    kind = str(clip.values["kind"])
    values = {"clip": clip.op, "optimizer": stepped.name, "name": clip.name or "?"}
    return parts.diagnosis(
        failure,
        "GS425",
        "clip_without_effect",
        values=values,
        words=f"clip_{kind}",
        labels=(
            *parts.label_of(clip, "created", f"label.clips_{kind}", values),
            *parts.used(failure, f"label.fills_{kind if kind in _FILLS else 'unclipped'}", values),
            *parts.label_of(stepped, "note", f"label.steps_{kind if kind in _STEPS else 'unclipped'}", values),
        ),
        tensor=parts.tensor_of(clip, f"{clip.name}.grad") if clip.name else None,
        fixes=(parts.fix(_CLIPS.get(kind, "clip_between"), "changed", values),),
    )


def schedule_without_effect(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure as a warning."""
    scheduler, other = failure.clue("scheduler"), failure.clue("other")
    held = failure.clue("optimizer")
    if scheduler is None or other is None:
        return None
    values = {
        "name": parts.assigned_at(scheduler) or str(scheduler.name),
        "holder": held.name if held is not None else "?",
        "other": other.name,
    }
    return parts.diagnosis(
        failure,
        "GS426",
        "schedule_without_effect",
        values=values,
        labels=(
            *parts.label_of(held, "note", "label.scheduled_optimizer", values),
            *parts.label_of(scheduler, "created", "label.scheduler_made", values),
            *parts.label_of(other, "note", "label.other_optimizer", values),
            *parts.used(failure, "label.steps_unscheduled", values),
        ),
        tensor=parts.tensor_of(scheduler, str(values["name"])),
        fixes=(parts.fix("schedule_anew", "changed", values),),
    )


def setting_of_a_copy(failure: Failure) -> Diagnosis | None:
    """GS426, a warning, for a rate that is written into what ``state_dict()`` of an optimizer returns."""
    written = failure.clue("written")
    if written is None:
        return None
    values = {"optimizer": written.name}
    return parts.diagnosis(
        failure,
        "GS426",
        "schedule_without_effect",
        values=values,
        words=failure.row,
        labels=(
            *parts.used(failure, "label.copies_settings", values),
            *parts.label_of(written, "written", "label.sets_copy", values),
        ),
        fixes=(parts.fix("set_in_groups", "changed", values),),
    )


def flag_unread(failure: Failure) -> Diagnosis | None:
    """GS703 or GS704, a warning, for a flag that was to freeze what an optimizer updates, or to unfreeze it."""
    written, stepped = failure.clue("written"), failure.clue("stepped")
    if written is None or stepped is None:
        return None
    is_spelled = written.op == "requires_grad"
    code, slug = ("GS704", "flag_on_module") if is_spelled else ("GS703", "attribute_misspelt")
    words = "flag_unfreezes_module" if is_spelled and written.values["value"] else slug
    values = {"owner": written.name, "flag": written.op, "optimizer": stepped.name}
    return parts.diagnosis(
        failure,
        code,
        slug,
        values=values,
        words=words,
        labels=(
            *parts.label_of(written, "written", f"label.{slug}", values),
            *parts.used(failure, "label.steps_unfrozen" if words == slug else "label.steps_with_frozen", values),
        ),
        fixes=(parts.fix(f"mend_{words}", "changed", values),),
    )


def wrong_gradients(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure as a warning."""
    stepped, filled = failure.clue("stepped"), failure.clue("filled")
    if stepped is None:
        return None
    kind, values = str(stepped.values["kind"]), {"optimizer": stepped.name}
    if filled is not None and filled.name:
        values["name"] = filled.name
    step, backward = failure.site.user_frame, None if filled is None else filled.user_frame
    lines = source.step_by_scaler(step, backward) if kind == "scaled" and step and backward else ()
    return parts.diagnosis(
        failure,
        "GS427",
        "step_without_its_gradients",
        values=values,
        words=f"step_{kind}",
        labels=(
            *parts.label_of(filled, "note", f"label.fills_step_{kind}", values),
            *parts.used(failure, f"label.steps_{kind}{'_still' if kind == 'scaled' else ''}", values),
        ),
        tensor=parts.tensor_of(filled, filled.name) if filled is not None and filled.name else None,
        fixes=(parts.fix(f"step_{kind}", "changed", values, lines=lines),),
    )


def result_dropped(failure: Failure) -> Diagnosis | None:
    """GS420, a warning, for an update of a parameter out of place, as a statement of its own."""
    return _dropped(failure, "op", "label.result_dropped", "label.value_as_before", "change_in_place")


def update_dropped(failure: Failure) -> Diagnosis | None:
    """GS420, a warning, for an update of parameters that only binds the variable of a loop."""
    return _dropped(failure, "held", "label.bound_and_dropped", "label.parameters_as_before", "update_in_place")


def _dropped(failure: Failure, word: str, written_here: str, used_here: str, kind: str) -> Diagnosis | None:
    """An update with a result that nothing takes; the failure's row has the words, and ``word`` names its operation."""
    written = failure.clue("written")
    if written is None or not written.name:
        return None
    values = {"name": written.name, word: written.op}
    return parts.diagnosis(
        failure,
        "GS420",
        "leaf_lost",
        values=values,
        words=failure.row,
        labels=(*parts.label_of(written, "written", written_here, values), *parts.used(failure, used_here, values)),
        tensor=parts.tensor_of(written),
        fixes=(parts.fix(kind, "changed", values),),
    )
