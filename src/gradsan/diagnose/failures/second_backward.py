"""GS401 to GS404: a second backward through a graph that had been freed.

The connection between the new graph and the freed one decides. If the tensor between them was made by code that ran
again since, a state is carried from round to round (GS401). If it was made once and every round reads it: GS403. If it
is the loss itself: GS404. Else two losses share a forward pass: GS402.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gradsan import source
from gradsan.diagnose import carriers, needs
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.collected import (
    BuiltOnce,
    anew_or_cut,
    detach_collected,
    detach_held,
    detach_other_network,
    forget_collected,
)
from gradsan.diagnose.completed import joined
from gradsan.diagnose.failures import parts
from gradsan.diagnose.names import shared_level
from gradsan.diagnose.value_fixes import LEFT_CONSTANT, NOT_BY_BOTH, TRAINED_BY_BOTH
from gradsan.model import (
    Bridge,
    Clue,
    Diagnosis,
    Failure,
    Fix,
    Frame,
    Held,
    HeldClue,
    Label,
    Lines,
    Message,
    PathClue,
    Site,
)

CARRIED = ("GS401", "freed_state_carried_over", "label.bridge")
SHARED = ("GS402", "forward_shared_by_two_backwards", "label.shared_by_both")
ONCE = ("GS403", "graph_built_once", "label.built_once")
SAME = ("GS404", "same_loss_twice", None)
"""Code and slug of each cause, and the words at the tensor between both graphs."""

COMPUTED_ONCE_TOO = "label.built_once_before"
COSTS, GROWS = "note.retain_graph_costs", "note.retain_graph_grows"
SUM_CUT = "help.detach_sum_how"
BECOMES_GS110, KEEPS_OLD = "note.retain_graph_becomes_gs110", "note.retain_graph_keeps_old"


@dataclass(frozen=True, slots=True)
class _Case:
    """The clues by role, and the name of the tensor between both graphs."""

    failure: Failure
    needed: Clue
    freed_by: Clue
    bridge: Clue
    carrier: carriers.Carrier | None
    name: str | Message
    bound_at: Frame | None
    saved: Clue | None = None

    @property
    def updated(self) -> Site | None:
        """The site where parameters were updated between the two backwards."""
        clue = self.failure.clue("updated")
        return None if clue is None else clue.site

    @property
    def if_kept(self) -> str:
        """The note on what ``retain_graph`` would lead to, where parameters were updated in between."""
        clue = self.failure.clue("updated")
        operands = None if clue is None else clue.values.get("operands")
        if not isinstance(operands, tuple):
            return KEEPS_OLD  # it is not known what the update changed
        is_stale = any(needs.has_saved_written(name, states) for name, states in operands)
        return BECOMES_GS110 if is_stale else KEEPS_OLD if operands else COSTS


def second_backward(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure."""
    needed, freed_by, bridge = (failure.clue(role) for role in ("needed", "freed_by", "bridge"))
    if needed is None or freed_by is None or bridge is None:
        return parts.diagnosis(
            failure,
            *SHARED[:2],
            words="freed_graph_needed_again",
            labels=parts.used(failure, "label.needs_freed_graph"),
            fixes=(parts.fix("recompute_forward", "changed", {}, summary="help.recompute_shared"),),
            notes=(Message(COSTS),),
        )
    if freed_by.values.get("same_loss"):
        case, made, used = _case(failure, needed, freed_by, bridge), bridge.user_frame, needed.user_frame
        if made is None or used is None or not _same_line(needed.site, freed_by.site):
            return _same(case)
        is_again = source.in_same_function(made, used) and not source.in_same_loops(made, used)
        return _once(case) if is_again else _same(case)
    made = bridge.user_frame
    if bridge.values.get("made_after") and made is not None and source.is_filled_once(made):
        # The line may still have run again: for another key of the cache.
        return _once(_case(failure, needed, freed_by, bridge))
    if bridge.values.get("made_after") and bridge.values.get("ran_again"):
        return _carried(_case(failure, needed, freed_by, bridge, is_carried=True))
    case = _case(failure, needed, freed_by, bridge)
    if bridge.values.get("made_after") and _same_line(needed.site, freed_by.site):
        return _shared(case) if _is_one_round(needed, freed_by, bridge) else _once(case)
    return _shared(case)


def _case(failure: Failure, needed: Clue, freed_by: Clue, bridge: Clue, is_carried: bool = False) -> _Case:
    carrier = None
    if is_carried and needed.site is not None:
        taken = tuple(one.site for one in failure.clues_of("bridge_taken") if one.site is not None)
        made = tuple(one.site for one in failure.clues_of("bridge_made") if one.site is not None)
        between = Bridge(
            bridge.op or "?", str(bridge.values.get("younger", "")), bridge.name, taken, made, True, _held(failure)
        )
        numbers = bridge.values.get("numbers")
        between = replace(between, numbers=numbers) if isinstance(numbers, frozenset) else between
        carrier = carriers.find(needed.site, between)
    if carrier is not None:
        return _Case(failure, needed, freed_by, bridge, carrier, carrier.name, carrier.bound_at)
    bound = None if bridge.site is None else source.bound_name(bridge.site.user_frames)
    name: str | Message | None = bridge.name or (bound[0] if bound else None)
    if name is None and freed_by.values.get("same_loss"):
        frame = needed.shown_frame
        name = None if frame is None else source.method_receiver(frame)
    return _Case(
        failure, needed, freed_by, bridge, None, name or Message("label.shared_value"), bound[1] if bound else None
    )


def _carried(case: _Case) -> Diagnosis:
    changed = None
    if case.carrier is not None and case.needed.site is not None:
        changed = carriers.cut(case.needed.site, case.updated, case.carrier)
    lines = () if changed is None else source.changed_lines(changed[1].file, changed[0])
    values = {"bridge": case.name}
    used = case.needed.site
    forgotten = None if used is None else forget_collected(used, case.updated, _held(case.failure))
    if forgotten is not None:
        return _diagnosis(case, CARRIED, (forgotten,), GROWS)
    cut = parts.fix("detach_carried_state", "changed", values, lines=lines)
    held = _held(case.failure)
    collected = None if lines else detach_collected(held)
    if collected is None and used is not None:
        name = case.carrier.names_in_round if lines and case.carrier is not None else ()
        collected = detach_held(used, case.updated, held, name)
        if collected is None and not lines:
            collected = detach_held(used, case.updated, held, or_renewed=True)
    cuts: tuple[Fix, ...] = (cut if collected is None else collected,)
    if case.bridge.values.get("is_term"):
        made = tuple(one.site for one in case.failure.clues_of("bridge_made") if one.site is not None)
        cuts = carriers.cut_term(cuts, case.updated, case.carrier, made)
        if case.bridge.values.get("is_sum"):
            cuts = tuple(
                replace(one, how_changed=Message(SUM_CUT)) if one.kind == cut.kind and one.lines else one
                for one in cuts
            )
        if not cuts[0].lines and isinstance(case.name, str) and case.name.endswith("]"):
            # An old prediction in a memory: detached, this loss would train nothing.
            cuts = (parts.fix("recompute_forward", "changed", values, summary="help.recompute_kept"), *cuts)
        if _is_average(case, made):
            # Detached, the sum gives each round the gradient of an ever smaller part of its own loss.
            cuts = (parts.fix("own_loss", "changed", values), *(replace(one, lines=()) for one in cuts))
    is_sum = bool(case.bridge.values.get("is_sum"))
    anew = parts.fix("reset_sum" if is_sum else "reset_state", "changed", values)
    why = "explanation.freed_sum_carried_over" if is_sum else None
    return _diagnosis(case, CARRIED, (*cuts, anew), GROWS, explanation=why)


def _is_average(case: _Case, made: Sequence[Site]) -> bool:
    """Whether the loss scales a sum to which each round adds, or that sum itself does: an average of all losses."""
    frames = [frame for site in made for frame in site.user_frames]
    paths = (one.passed for one in case.failure.clues if isinstance(one, PathClue))
    is_scaled = any(node.name.startswith(("Div", "Mul")) and node.is_younger for path in paths for node in path)
    is_scaled = is_scaled and any(source.reads_what_it_binds(frame) for frame in frames)
    is_average = is_scaled or any(source.reads_what_it_binds(frame, times=2) for frame in frames)
    return is_average and bool(case.bridge.values.get("is_sum"))


def _shared(case: _Case) -> Diagnosis:
    case = _from_oldest(case)
    values = {"name": case.name}
    if case.updated is not None and case.bridge.values.get("cached"):
        updated = case.updated.shown_frame
        lines = source.changed_at(updated, lambda at: source.enter_once_more(at, "cached"))
        fix = parts.fix("cache_each_round", "changed", values, lines=lines, summary="help.cache_after_update")
        return _diagnosis(case, SHARED, (fix,), case.if_kept, explanation="explanation.graph_kept_by_cache")
    if case.updated is not None:
        fixes = (
            *_filled_before(case),
            *detach_other_network(_borrowed(case.failure), None),
            parts.fix("recompute_forward", "changed", values, summary="help.recompute_shared"),
            parts.fix("reorder_step", "changed", values),
        )
        return _diagnosis(case, SHARED, fixes, case.if_kept)
    freed, needed = case.freed_by.shown_frame, case.needed.shown_frame
    lines = source.changed_at(freed, source.graph_for_gradient)
    if lines:
        return _diagnosis(case, SHARED, _for_gradient(case, lines))
    bridges = _borrowed(case.failure)
    cut = detach_other_network(bridges, None)
    by_both = Message(TRAINED_BY_BOTH, {"name": ", ".join(one.name for one in bridges if one.name) or case.name})
    if cut and freed is not None and needed is not None and source.clears_between(freed, needed):
        # Each backward has an optimizer of its own, whose gradients are cleared before it.
        return _diagnosis(case, SHARED, (*cut, replace(_keep_graph(case), meaning="changed", how_changed=by_both)))
    if freed is not None and source.has_keyword(freed, "create_graph"):
        return _diagnosis(case, SHARED, (_keep_graph(case),))  # a gradient, which a loss computes with
    joined = source.backward_of_sum(freed, needed) if freed is not None and needed is not None else ()
    fixes = parts.fix("sum_losses", "preserved", values, lines=joined), _keep_graph(case)
    if bridges:
        # Whether both are to train what another optimizer has, the program does not say.
        fixes = tuple(replace(one, meaning="changed", how_changed=by_both) for one in fixes)
        if any(one.values.get("is_only") for one in case.failure.clues_of("borrowed")):
            return _diagnosis(case, SHARED, (*cut, *fixes))
        choice = parts.fix("choose_losses", "changed", by_both.values)
        cut = tuple(replace(one, how_changed=Message(NOT_BY_BOTH, by_both.values)) for one in cut)
        return _diagnosis(case, SHARED, (choice, *fixes, *cut))
    return _diagnosis(case, SHARED, fixes)


def _from_oldest(case: _Case) -> _Case:
    """The case of the oldest freed value, where the earlier loss is gone, and with it what else the two share.

    The later backward itself has freed the first values that it came to, and never came to the oldest.
    """
    frame, first = _computed_before(case), case.failure.clue("freed_first")
    bound = None if frame is None or case.freed_by.values.get("certain") else source.bound_name((frame,))
    if bound is None or first is None:
        return case
    return replace(case, bridge=first, saved=first, name=bound[0], bound_at=bound[1])


def _filled_before(case: _Case) -> tuple[Fix, ...]:
    """A memory that was filled before the rounds, with the graph of what it stores, detached."""
    made, used = case.bridge.user_frame, case.needed.user_frame
    if made is None or used is None or not isinstance(case.name, str):
        return ()
    lines = source.changed_lines(made.file, source.detach_behind_loop(made, used, case.name))
    values = {"name": case.name}
    return (Fix.worded("help.build_without_graph", values, lines, kind="detach_built_once"),) if lines else ()


def _held(failure: Failure) -> tuple[Held, ...]:
    return tuple(one.held for one in failure.clues if isinstance(one, HeldClue))


def _borrowed(failure: Failure) -> list[Bridge]:
    """The tensors that connect one of the losses to a network that it does not train."""
    found: list[Bridge] = []
    for one in failure.clues_of("borrowed"):
        number = one.values["number"]
        made, taken = (
            tuple(near.site for near in failure.clues_of(role) if near.site and near.values["number"] == number)
            for role in ("borrowed_made", "borrowed_taken")
        )
        found.append(Bridge(one.op or "?", "?", one.name, taken, made))
    return found


def _once(case: _Case) -> Diagnosis:
    values = {"name": case.name}
    note = case.if_kept if case.updated else COSTS
    used = case.needed.shown_frame
    if case.bridge.values.get("cached"):
        lines = () if used is None else source.enter_each_round(used, "cached")
        fix = parts.fix("cache_each_round", "changed", values, lines=lines)
        return _diagnosis(case, ONCE, (fix,), note, explanation="explanation.graph_kept_by_cache")
    made = () if case.bridge.site is None else case.bridge.site.user_frames
    if case.bridge.values.get("is_unheld"):
        whole = source.changed_at(case.bound_at or (made[-1] if made else None), source.leaf_alone)
        fix = Fix.worded("help.leaf_alone", values, whole)
        return _diagnosis(case, ONCE, (fix,), note, explanation="explanation.built_on_unheld_leaf")
    # A replay of states: what a round received is kept without its graph.
    collected = detach_collected(_held(case.failure))
    if collected is not None:
        return _diagnosis(case, ONCE, (collected,), note)
    borrowed = detach_other_network(_borrowed(case.failure), None) if case.updated is not None else ()
    # Without an update, recomputing gives the same values: the losses of several tasks, one after another.
    kept = () if case.updated is not None else (_keep_graph(case),)
    learning = bool(case.bridge.values.get("is_trained")), bool(case.bridge.values.get("is_nobodys"))
    is_tensor = "[" not in (case.bridge.name or "[")
    first = anew_or_cut(BuiltOnce(case.name, case.bound_at, made, used, *learning, is_tensor))
    for other in case.failure.clues_of("further"):
        made = () if other.site is None else other.site.user_frames
        bound = source.bound_name(made) if made else None
        if bound is not None and bound[0] != case.name:
            name = other.name or bound[0]
            beside = anew_or_cut(BuiltOnce(name, bound[1], made, used, *learning, "[" not in (other.name or "[")))
            first = tuple(joined(one, beside) or _of_both(one, name) for one in first)
    if case.freed_by.values.get("same_loss"):
        first = first[:1]  # a loss without a graph would train nothing
    if all(one.kind != "recompute_forward" for one in first):
        return _diagnosis(case, ONCE, first, note)
    return _diagnosis(case, ONCE, (*borrowed, *kept, *first), note)


def _of_both(fix: Fix, name: str) -> Fix:
    """The advice to compute a value anew, for another one as well: alone, neither would be enough."""
    mine = fix.summary.values.get("name")
    if fix.lines or fix.kind != "recompute_forward" or not isinstance(mine, str):
        return fix
    values = {**fix.summary.values, "name": f"{mine}, {name}"}
    return replace(fix, summary=replace(fix.summary, values=values))


def _same(case: _Case) -> Diagnosis:
    values = {"name": case.name}
    stepped = case.updated is not None
    again = parts.fix("recompute_forward", "changed", values, summary="help.recompute_shared")
    lines = source.changed_at(case.freed_by.shown_frame, source.graph_for_gradient)
    if lines and not stepped:
        return _diagnosis(case, SAME, _for_gradient(case, lines))
    fixes = (parts.fix("one_backward", "changed", values), again if stepped else _keep_graph(case))
    return _diagnosis(case, SAME, fixes, case.if_kept if stepped else "note.second_pass_adds_up")


def _for_gradient(case: _Case, lines: Lines) -> tuple[Fix, ...]:
    """The graph kept for the second backward: that of the gradient recorded, or only the one behind it."""
    recorded = parts.fix("create_graph", "changed", {"name": Message("label.the_gradient")}, lines=lines)
    return recorded, replace(
        _keep_graph(case), meaning="changed", how_changed=Message(LEFT_CONSTANT, {"name": case.name})
    )


def _keep_graph(case: _Case) -> Fix:
    site, shown = case.freed_by.site, case.freed_by.shown_frame
    frames = () if site is None else site.user_frames
    lines = source.keep_graph_from(frames if not frames or shown == frames[-1] or shown is None else (shown,))
    return parts.fix("retain_graph", "preserved", {"name": case.name}, lines=lines)


def _diagnosis(
    case: _Case,
    cause: tuple[str, str, str | None],
    fixes: tuple[Fix, ...],
    note: str = COSTS,
    *,
    explanation: str | None = None,
) -> Diagnosis:
    code, slug, bridge = cause
    values = {"bridge": case.name, "name": case.name, "op": parts.op_of(case.bridge)}
    tensor = None
    if isinstance(case.name, str):
        tensor = replace(parts.tensor_of(case.bridge, case.name), op=case.bridge.op)
    saved = case.saved or case.failure.clue("saved")
    certain = bool(case.freed_by.values.get("certain"))
    labels = (
        *(_first_label(case) if cause is ONCE else ()),
        *(parts.label_of(saved, "saved", "label.kept_for_backward", {"op": parts.op_of(saved)}) if saved else ()),
        *_bridge_label(case, bridge, values),
        *parts.label_of(case.freed_by, "freed", "label.freed_here" if certain else "label.freed_here_probably", values),
        *parts.label_of(case.failure.clue("updated"), "note", "label.updated_between", {}),
        *parts.label_of(case.needed, "used", "label.walks_into_freed", values),
    )
    return parts.diagnosis(
        case.failure,
        code,
        slug,
        values=values,
        labels=labels,
        tensor=tensor,
        fixes=fixes,
        notes=(Message(note, values),),
        explanation=explanation,
    )


def _first_label(case: _Case) -> tuple[Label, ...]:
    """The statement, before the one that bound the value, from which on its graph is gone."""
    frame = _computed_before(case)
    if frame is None:
        return ()
    return (Label("note", frame, Message(COMPUTED_ONCE_TOO, {"name": case.name}), None, Site((frame,))),)


def _computed_before(case: _Case) -> Frame | None:
    """The statement that made the oldest freed value, before the one that bound the shared value, in its function."""
    first, bound_at = case.failure.clue("freed_first"), case.bound_at
    frames = () if first is None or first.site is None else first.site.user_frames
    own = [one for one in frames if bound_at is not None and source.in_same_function(one, bound_at)]
    return own[-1] if own and bound_at is not None and own[-1].line < bound_at.line else None


def _bridge_label(case: _Case, key: str | None, values: Mapping[str, object]) -> tuple[Label, ...]:
    if key is None:
        return ()
    message = Message(key, dict(values))
    if case.bound_at is None:
        return label_texts.at("bridge", case.bridge.site, message, op=case.bridge.op)
    return (Label("bridge", case.bound_at, message, case.bridge.op, Site((case.bound_at,))),)


def _same_line(one: Site | None, other: Site | None) -> bool:
    a, b = (None if site is None else site.shown_frame for site in (one, other))
    return a is not None and b is not None and (a.file, a.line) == (b.file, b.line)


def _is_one_round(needed: Clue, freed_by: Clue, bridge: Clue) -> bool:
    """Whether a helper that runs backward was called twice in the round that computed the losses' shared values."""
    stacks = [one.site.user_frames for one in (needed, freed_by, bridge) if one.site is not None]
    level = shared_level(stacks[0], stacks[1]) if len(stacks) == 3 else -1
    if level < 0 or stacks[0][level].line == stacks[1][level].line or len(stacks[2]) <= level:
        return False
    return source.in_same_loops(*(stack[level] for stack in stacks))
