"""GS420, GS421, GS422 and GS409: lost leaves, parameters without a gradient, growing graphs.

PyTorch reports none of the first three. A lost leaf and a growing graph are warnings. A parameter without a gradient
may be intended, and is a note, unless the optimizer gets none at all, or a forward reads the parameter, but only
outside of its graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gradsan import source
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.failures import parts, statements
from gradsan.diagnose.failures.loss_without_graph import loss_made_leaf, recorded_again, undone_cuts
from gradsan.diagnose.failures.replaced import given_to_optimizer
from gradsan.model import Clue, Diagnosis, Failure, Fix, Frame, Label, Message, NamedTensor, Site

_ATTRIBUTES_SHOWN = 4


def leaf_lost(failure: Failure) -> Diagnosis:
    """GS420, a warning, for an optimizer that holds a leaf which the model no longer uses."""
    parameter, holder, replaced = (failure.clue(role) for role in ("parameter", "holder", "replaced"))
    values = {"name": parts.name_of(parameter, "label.the_tensor"), "holder": parts.name_of(holder, "label.the_tensor")}
    was_computed = replaced is not None and replaced.site is not None
    return parts.diagnosis(
        failure,
        "GS420",
        "leaf_lost",
        values=values,
        explanation="explanation.leaf_lost_step" if was_computed else "explanation.leaf_lost_moved",
        labels=(*_where_lost(failure, replaced, values), *parts.used(failure, _used(parameter), values)),
        tensor=_tensor(parameter),
        fixes=(parts.fix("update_in_place", "changed", values),)
        if was_computed
        else (parts.fix("give_to_optimizer", "changed", values, lines=given_to_optimizer(failure)),),
        notes=(Message("note.who_holds", values),),
    )


def parameter_not_reached(failure: Failure) -> Diagnosis:
    """GS421: a warning where the optimizer gets no gradient at all, or a forward reads the parameter past its graph."""
    parameter, holder = failure.clue("parameter"), failure.clue("holder")
    counts = {} if parameter is None else parameter.values
    is_all = "missing" in counts and counts["missing"] == counts["total"]
    values = {
        "name": parts.name_of(parameter, "label.the_tensor"),
        "holder": parts.name_of(holder, "label.the_tensor"),
        "missing": counts.get("missing", "?"),
        "total": counts.get("total", "?"),
    }
    read = failure.clue("read")
    if read is not None:
        return _read_past_graph(failure, read, {**values, "read": read.name}, _tensor(parameter))
    where = _where_left_out(failure.clues_of("parameter"))
    cuts, used = _cuts(failure)
    if used and (made := loss_made_leaf(failure, used[-1], _where_cut(cuts), values)) is not None:
        undone = tuple(fix for fix in undone_cuts(cuts) if fix.lines)
        return replace(made, fixes=(*undone, *made.fixes))
    is_frozen = bool(counts.get("frozen"))
    is_off = any(one.message.key == "label.gradients_off" for one in where)
    how = Message("help.use_it_how", values)
    recorded = Fix("undo_no_grad", "changed", Message("help.cut_no_grad"), how_changed=how)
    return parts.diagnosis(
        failure,
        "GS421",
        "parameter_not_reached",
        values=values,
        severity="warning" if is_all else "note",
        explanation=_explanation(is_all, is_frozen),
        labels=(
            *parts.label_of(failure.clue("made"), "created", "label.optimizer_made_of_frozen", values),
            *where,
            *_where_cut(cuts),
            *parts.used(failure, "label.not_reached_step", values),
        ),
        tensor=_tensor(parameter),
        fixes=(
            *_with_graph(cuts, used),
            *((recorded,) if is_off else ()),
            parts.fix("use_it", "changed", values, summary="help.use_frozen" if is_frozen else "help.use_it"),
        ),
        notes=_others(failure.clues_of("parameter"), 0 if parameter is None else parameter.count("missing")),
    )


def _explanation(is_all: bool, is_frozen: bool) -> str | None:
    if is_frozen:
        return "explanation.parameter_frozen"
    return None if is_all else "explanation.parameter_never_reached"


def _cuts(failure: Failure) -> tuple[tuple[source.Cut, ...], tuple[Frame, ...]]:
    """The operations that detach the loss from everything that its optimizer trains, and where its backward is."""
    backward = failure.clue("backward")
    used = backward.site.user_frames if backward is not None and backward.site is not None else ()
    step = failure.site.user_frames
    live = [source.Live(one.requires_grad, one.callees) for one in parts.live(failure)[-len(used) :]]
    is_one_round = len(used) == len(step) == len(live)
    if not is_one_round or not all(source.in_same_function(*pair) for pair in zip(used, step, strict=True)):
        return (), used
    return source.find_cuts(used, live), used


def _is_one_place(cuts: tuple[source.Cut, ...]) -> bool:
    return len({(one.frame.file, one.frame.line) for one in cuts}) == 1 and not cuts[0].is_covered


def _where_cut(cuts: tuple[source.Cut, ...]) -> tuple[Label, ...]:
    if not _is_one_place(cuts):
        return ()
    return statements.at_frame(
        "created", cuts[0].frame, Message(f"label.cut_{cuts[0].kind}", {"operand": cuts[0].operand})
    )


def _with_graph(cuts: tuple[source.Cut, ...], used: tuple[Frame, ...]) -> tuple[Fix, ...]:
    """The one operation of ``cuts``, undone."""
    undone = tuple(fix for fix in undone_cuts(cuts) if fix.lines)
    if undone or not _is_one_place(cuts):
        return undone
    return _kept_for_one(source.cut_at_use(cuts[0].frame, cuts[0].operand, used))


def term_uncut(term: Clue, used: Site) -> tuple[Fix, ...]:
    """The fix for a term of the loss of the backward at ``used`` that was computed from a detached value."""
    frame = term.shown_frame
    return () if frame is None else _kept_for_one(source.term_uncut(frame, used.user_frames))


def _kept_for_one(found: source.Uncut | None) -> tuple[Fix, ...]:
    """The graph kept for one loss, with the value detached for its other readers."""
    if found is None:
        return ()
    words = "help.cut_at_use" if found.is_read_by_others else "help.with_graph"
    return (parts.fix("cut_at_use", "changed", {"name": found.name}, lines=found.lines, summary=words),)


def _others(parameters: tuple[Clue, ...], missing: int) -> tuple[Message, ...]:
    """The names that the title does not contain."""
    names = [one.name for one in parameters[1:] if one.name]
    if not names:
        return ()
    key = "note.also_without" if len(names) + 1 == missing else "note.also_without_and_more"
    return (Message(key, {"names": ", ".join(names), "more": missing - 1 - len(names)}),)


def _where_left_out(parameters: tuple[Clue, ...]) -> tuple[Label, ...]:
    """The labels of the parameters' uses in their modules' forwards; of at most four attributes."""
    found: list[Label] = []
    shown: set[tuple[Frame, str]] = set()
    for one in parameters:
        frame = one.user_frame
        attribute = str(one.values.get("attribute", ""))
        if frame is None or (frame, attribute) in shown or len(shown) == _ATTRIBUTES_SHOWN:
            continue
        shown.add((frame, attribute))
        uses = source.uses_in(frame, attribute)
        values = {"attribute": attribute, "owner": one.values.get("owner", "?")}
        if uses == ():
            found += statements.at_frame("note", frame, Message("label.not_read", values))
        always = [use for use in uses or () if not source.is_conditional(use.frame)]
        for use in (always or uses or ())[:1]:
            # Only the source is known here: what stands under a condition may never have run.
            condition = "" if always else "_perhaps"
            if use.mode is not None:
                found += statements.at_frame("note", use.mode, Message("label.gradients_off"))
                found += statements.at_frame("note", use.frame, Message(f"label.used_without_graph{condition}", values))
            else:
                found += statements.at_frame("note", use.frame, Message(f"label.used_in_vain{condition}", values))
    # One ``with`` may hold several of them.
    places = {(one.frame, one.message.key, one.message.values.get("attribute")): one for one in found}
    return tuple(places.values())


def _where_lost(failure: Failure, replaced: Clue | None, values: Mapping[str, object]) -> tuple[Label, ...]:
    """The labels where the optimizer took the tensor, and of the later statement that rebound its name."""
    shown = parts.label_of(replaced, "created", "label.leaf_lost_at", values)
    frame = failure.site.user_frame
    if frame is None or replaced is None or not replaced.name:
        return shown
    receiver = source.method_receiver(frame)
    made = [] if receiver is None else [place for _, place in source.assignments(frame, receiver)]
    holder = made[0] if len(made) == 1 else None
    if not shown:
        bound = [
            (part, place)
            for part, place in source.assignments(frame, replaced.name)
            if holder is None or place.function != holder.function or place.line > holder.line
        ]
        places = [place for part, place in bound if part == bound[0][0]]
        if len(places) == 1 and (holder is not None or len(bound) == 1):
            shown = statements.at_frame("created", places[0], Message("label.leaf_lost_at", dict(values)))
    shown = shown or parts.label_of(failure.clue("registered"), "created", "label.leaf_lost_at", values)
    if holder is None:
        return shown
    return (*statements.at_frame("note", holder, Message("label.holder_made", dict(values))), *shown)


def _used(parameter: Clue | None) -> str:
    is_later = parameter is not None and "later" in parameter.values
    return "label.not_reached_later" if is_later else "label.not_reached_step"


def _read_past_graph(failure: Failure, read: Clue, values: dict[str, object], tensor: NamedTensor | None) -> Diagnosis:
    is_cut = "how" in read.values
    lines = () if is_cut and read.op != "item" else source.changed_at(read.shown_frame, source.read_with_graph)
    words, kind = ("parameter_cut_off", "use_it") if is_cut else ("parameter_read_past_graph", "read_with_graph")
    words = "parameter_read_as_data" if read.count("is_data") else words
    has_holder = failure.clue("holder") is not None
    values = {**values, "op": label_texts.as_written((read.op or "?").strip("_"))}
    return parts.diagnosis(
        failure,
        "GS421",
        "parameter_not_reached",
        values=values,
        explanation=f"explanation.{words}{'' if has_holder else '_once'}",
        labels=(
            *parts.label_of(read, "created", "label.cut_off" if is_cut else "label.read_past_graph", values),
            *parts.without_graph(read),
            *parts.used(failure, "label.not_reached_step" if has_holder else "label.not_reached_once", values),
        ),
        tensor=tensor,
        fixes=(*recorded_again(read, values), parts.fix(kind, "changed", values, lines=lines)),
    )


def parameter_behind_flat(failure: Failure) -> Diagnosis:
    """GS421, a warning, for a parameter behind an operation whose gradient is zero everywhere."""
    parameter, flat = failure.clue("parameter"), failure.clue("flat")
    count = 0 if parameter is None else parameter.count("parameters")
    values = {"name": parts.name_of(parameter, "label.the_tensor"), "op": parts.op_of(flat), "parameters": count}
    way = "straight_through" if flat is None or flat.op != "normal" else "reparametrised"
    return parts.diagnosis(
        failure,
        "GS421",
        "parameter_not_reached",
        values=values,
        explanation="explanation.parameter_behind_flat",
        labels=(
            *parts.label_of(flat, "created", "label.gradient_ends", values),
            *parts.used(failure, "label.gradient_is_zero", values),
        ),
        tensor=_tensor(parameter),
        fixes=(parts.fix("straight_through", "changed", values, summary=f"help.{way}"),),
    )


def value_written_past(failure: Failure) -> Diagnosis:
    """GS421, a warning, for a value with a graph that is written into other memory past autograd."""
    written, parameter, holder = (failure.clue(role) for role in ("written", "parameter", "holder"))
    values = {
        "name": parts.name_of(written, "label.the_tensor"),
        "parameter": parts.name_of(parameter, "label.the_tensor"),
        "holder": parts.name_of(holder, "label.the_tensor"),
        "parameters": 0 if parameter is None else parameter.count("parameters"),
    }
    how = Message("help.use_it_how", {"name": values["parameter"]})
    recorded = Fix("use_it", "changed", Message("help.record_written", dict(values)), how_changed=how)
    # What is copied is the parameter itself; what is computed has the name of the memory it is written into.
    is_copied = parameter is not None and bool(parameter.count("is_copied"))
    return parts.diagnosis(
        failure,
        "GS421",
        "parameter_not_reached",
        values=values,
        words="value_written_past",
        explanation=None if holder is not None else "explanation.value_written_past_once",
        labels=(
            *parts.label_of(written, "written", "label.value_written_past", values),
            *parts.used(failure, "label.not_reached_past", values),
        ),
        tensor=parts.tensor_of(written) if written and written.name and not is_copied else _tensor(parameter),
        fixes=(recorded,),
    )


def gradient_cancels(failure: Failure) -> Diagnosis | None:
    """GS421, a warning, for a sum that adds and subtracts a value, or ``exp(a - b)`` of a value with itself."""
    summed = failure.clue("sum") or failure.clue("ratio")
    if summed is None:
        return None
    kind = "ratio" if summed.role == "ratio" else "gradient"
    return parts.diagnosis(
        failure,
        "GS421",
        "parameter_not_reached",
        values={},
        words=f"{kind}_cancels",
        labels=(
            *parts.label_of(summed, "created", f"label.{kind}_cancels", {}),
            *parts.used(failure, "label.gradient_cancelled", {}),
        ),
        tensor=None,
        fixes=(parts.fix("detach_subtracted" if kind == "ratio" else "detach_difference", "changed", {}),),
    )


def graph_grows(failure: Failure) -> Diagnosis:
    """GS422, a warning, for a graph that every round makes longer."""
    grown = failure.clue("grown")
    facts = {} if grown is None else grown.values
    values = {
        "name": parts.name_of(grown, "label.the_tensor"),
        "rounds": facts.get("rounds", "?"),
        "depth": facts.get("nodes", "?"),
        "bytes": facts.get("bytes_per_round", 0),
    }
    is_unused = bool(facts.get("unused"))
    used = failure.site.user_frame
    added = () if used is None or grown is None or not grown.name else source.additions(used, grown.name)
    here = None if grown is None or grown.site is None else grown.site.shown_frame
    holder = failure.clue("holder")
    if holder is not None and holder.site is not None and not added:
        added = tuple(one for at in holder.site.frames for one in source.additions(at, str(holder.name), within=True))
    elif facts.get("summed") and here is not None:
        added = _made_at(here, added)
    return parts.diagnosis(
        failure,
        "GS422",
        "graph_grows",
        values=values,
        labels=(
            *(
                statements.at_frame("bridge", added[0].frame, Message("label.grows_by", values))
                if len(added) == 1
                else parts.label_of(grown, "bridge", "label.grows_by", values)
            ),
            *_round_label(failure, is_unused),
        ),
        explanation=_why_kept(facts) if is_unused else None,
        tensor=parts.tensor_of(grown) if grown is not None and grown.name else None,
        fixes=(
            *((parts.fix("no_grad", "changed", values, summary="help.no_grad_rounds"),) if is_unused else ()),
            _cut_growth(failure, grown, added, values),
        ),
        notes=(Message("note.graph_growth", {**values, "bytes": facts.get("bytes", 0)}),),
    )


def _made_at(here: Frame, added: tuple[source.Addition, ...]) -> tuple[source.Addition, ...]:
    """The additions of what was made at ``here``."""
    return tuple(one for one in added if one.frame.line <= here.line <= (one.frame.end_line or 0))


def _why_kept(facts: Mapping[str, object]) -> str:
    return "explanation.graph_summed_unused" if facts.get("summed") else "explanation.graph_kept_unused"


def _round_label(failure: Failure, is_unused: bool) -> tuple[Label, ...]:
    """The label where each round calls backward, or makes an unused graph."""
    if is_unused:
        return label_texts.at("note", failure.site, Message("label.made_unused"))
    return parts.used(failure, "label.loss_at")


def _cut_growth(
    failure: Failure, grown: Clue | None, added: tuple[source.Addition, ...], values: Mapping[str, object]
) -> Fix:
    """Keep values without a graph: where they are appended, else at the end of a round."""
    if len(added) == 1:
        lines = source.changed_lines(added[0].frame.file, added[0].change) if added[0].change is not None else ()
        filled = {**values, "value": added[0].value}
        return parts.fix("detach_kept", "changed", filled, lines=lines, summary="help.detach_added")
    used = failure.site.user_frame
    made = None if grown is None else grown.user_frame
    if grown is None or grown.name is None or used is None or made is None or not source.in_same_function(made, used):
        return parts.fix("detach_kept", "changed", values)
    change = source.detach_after_round([used], {grown.name: "tensor"})
    lines = source.changed_lines(used.file, change)
    return parts.fix("detach_kept", "changed", values, lines=lines, summary="help.detach_each_round")


def grad_of_non_leaf(failure: Failure) -> Diagnosis:
    """GS409: a warning where an update made the tensor that was a leaf, else a note."""
    made = failure.clue("made")
    values = {"name": parts.name_of(made, "label.the_tensor"), "op": parts.op_of(made)}
    is_update = made is not None and bool(made.values.get("is_update"))
    lines = source.changed_at(failure.site.user_frame, lambda at: source.retained(at, str(values["name"])))
    return parts.diagnosis(
        failure,
        "GS409",
        "gradient_of_non_leaf",
        values=values,
        severity="warning" if is_update else "note",
        labels=(
            *parts.label_of(made, "created", "label.lost_by_update" if is_update else "label.made_by", values),
            *parts.used(failure, "label.read_grad", values),
        ),
        tensor=_tensor(made),
        fixes=(_updated(made, values) if is_update else parts.fix("retain_grad", "preserved", values, lines=lines),),
    )


def _updated(made: Clue | None, values: Mapping[str, object]) -> Fix:
    """The update in place; where gradients are never cleared, and would accumulate, as a leaf of its own."""
    frame = None if made is None else made.shown_frame
    change = None if frame is None else source.updated_in_place(frame)
    lines = () if frame is None else source.changed_lines(frame.file, change)
    is_new = change is not None and change.kind == "new_leaf"
    return parts.fix(
        "update_in_place", "changed", values, lines=lines, summary="help.update_as_leaf" if is_new else None
    )


def _tensor(found: Clue | None) -> NamedTensor | None:
    if found is None or "shape" not in found.values or not found.name:
        return None
    return parts.tensor_of(found)
