"""GS401 to GS404: a second backward through a graph that had been freed.

The connection between the new graph and the freed one decides. If the tensor between them was made by code that ran
again since, a state is carried from round to round (GS401). If it was made once and every round reads it: GS403. If it
is the loss itself: GS404. Else two losses share a forward pass: GS402.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradsan import source
from gradsan.diagnose import carriers, library_rounds
from gradsan.diagnose.collected import (
    BuiltOnce,
    anew_or_cut,
    detach_by_own,
    detach_collected,
    detach_held,
    detach_other_network,
    forget_collected,
)
from gradsan.diagnose.completed import joined
from gradsan.diagnose.failures import parts
from gradsan.diagnose.failures.freed_values import (
    CARRIED,
    COSTS,
    GROWS,
    ONCE,
    SAME,
    SHARED,
    Case,
    borrowed_of,
    case_of,
    computed_before,
    diagnosis_of,
    for_gradient,
    held_of,
    keep_graph,
)
from gradsan.diagnose.names import shared_level
from gradsan.diagnose.value_fixes import NOT_BY_BOTH, TRAINED_BY_BOTH, written_with_graph
from gradsan.model import Clue, Diagnosis, Failure, Fix, Frame, Lines, Message, PathClue, Site

SUM_CUT = "help.detach_sum_how"


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
        case, made, used = case_of(failure, needed, freed_by, bridge), bridge.user_frame, needed.user_frame
        if made is None or used is None or not _same_line(needed.site, freed_by.site):
            return _same(case)
        is_again = source.in_same_function(made, used) and not source.in_same_loops(made, used)
        return _once(case) if is_again else _same(case)
    made = bridge.user_frame
    frames = () if bridge.site is None else bridge.site.user_frames
    kept_by = next(filter(None, map(source.cached_function, frames)), None)
    if bridge.values.get("made_after") and made is not None and (kept_by or source.is_filled_once(made)):
        # The line may still have run again: for another key of the cache.
        case = case_of(failure, needed, freed_by, bridge)
        return _once(case if isinstance(case.name, str) or kept_by is None else replace(case, name=kept_by))
    if bridge.values.get("made_after") and bridge.values.get("ran_again"):
        return _carried(case_of(failure, needed, freed_by, bridge, is_carried=True))
    if bridge.values.get("parameter"):
        return _carried(case_of(failure, needed, freed_by, bridge, is_carried=True))
    case = case_of(failure, needed, freed_by, bridge)
    if bridge.values.get("made_after") and _same_line(needed.site, freed_by.site):
        other = _of_another_item(case)
        if other is not None:
            return shared(other)
        return shared(case) if _is_one_round(needed, freed_by, bridge) else _once(case)
    return shared(case)


def _carried(case: Case) -> Diagnosis:
    changed = None
    if case.carrier is not None and case.needed.site is not None:
        changed = carriers.cut(case.needed.site, case.updated, case.carrier)
    lines = () if changed is None else source.changed_lines(changed[1].file, changed[0])
    values = {"bridge": case.name}
    made = tuple(one.site for one in case.failure.clues_of("bridge_made") if one.site is not None)
    used, held = case.needed.site, held_of(case.failure)
    # No statement of the program comes after a round that a library runs.
    after = None if used is None or library_rounds.entry_of(used, made) is not None else used
    first = None if used is None else library_rounds.cut_on_entry(used, made, held)
    first = first or (None if after is None else detach_by_own(after, case.updated, held))
    if first is None and isinstance(parameter := case.bridge.values.get("parameter"), str):
        return diagnosis_of(case, CARRIED, written_with_graph(parameter, made, case.carrier), GROWS)
    first = first or (None if after is None else forget_collected(after, case.updated, held))
    if first is not None:
        return diagnosis_of(case, CARRIED, (first,), GROWS)
    cut = parts.fix("detach_carried_state", "changed", values, lines=lines)
    collected = None if lines else detach_collected(held)
    if collected is None and after is not None:
        name = case.carrier.names_in_round if lines and case.carrier is not None else ()
        collected = detach_held(after, case.updated, held, name)
        if collected is None and not lines:
            collected = detach_held(after, case.updated, held, or_renewed=True)
    if collected is None and used is not None and not lines:
        taken = tuple(one.site for one in case.failure.clues_of("bridge_taken") if one.site is not None)
        collected = carriers.cut_read(used, taken, held) or carriers.cut_put_back(used, held)
    cuts: tuple[Fix, ...] = (cut if collected is None else collected,)
    if case.bridge.values.get("is_term"):
        cuts = carriers.cut_term(cuts, case.updated, case.carrier, made)
        if case.bridge.values.get("sums") == 1:
            cuts = tuple(
                replace(one, how_changed=Message(SUM_CUT)) if one.kind == cut.kind and one.lines else one
                for one in cuts
            )
        is_kept = isinstance(case.name, str) and case.name.endswith("]")
        if is_kept and not any(one.lines or one.kind == "recompute_forward" for one in cuts):
            # An old prediction in a memory: detached, this loss would train nothing.
            cuts = (parts.fix("recompute_forward", "changed", values, summary="help.recompute_kept"), *cuts)
        if _is_average(case, made):
            # Detached, the sum gives each round the gradient of an ever smaller part of its own loss.
            cuts = (parts.fix("own_loss", "changed", values), *(replace(one, lines=()) for one in cuts))
    is_sum = case.bridge.values.get("sums") == 1
    anew = parts.fix("reset_sum" if is_sum else "reset_state", "changed", values)
    why = "explanation.freed_sum_carried_over" if is_sum else None
    return diagnosis_of(case, CARRIED, (*cuts, anew), GROWS, explanation=why)


def _is_average(case: Case, made: Sequence[Site]) -> bool:
    """Whether the loss scales a sum to which each round adds, or that sum itself does: an average of all losses."""
    frames = [frame for site in made for frame in site.user_frames]
    paths = (one.passed for one in case.failure.clues if isinstance(one, PathClue))
    is_scaled = any(node.name.startswith(("Div", "Mul")) and node.is_younger for path in paths for node in path)
    is_scaled = is_scaled and any(source.reads_what_it_binds(frame) for frame in frames)
    is_average = is_scaled or any(source.reads_what_it_binds(frame, times=2) for frame in frames)
    return is_average and case.bridge.values.get("sums") == 1


def _once(case: Case) -> Diagnosis:
    values = {"name": case.name}
    note = case.if_kept if case.updated else COSTS
    used = case.needed.shown_frame
    if case.bridge.values.get("cached"):
        lines = () if used is None else source.enter_each_round(used, "cached")
        fix = Fix.worded("help.cache_each_round", values, lines, kind="recompute_forward")
        return diagnosis_of(case, ONCE, (fix,), note, explanation="explanation.graph_kept_by_cache")
    made = () if case.bridge.site is None else case.bridge.site.user_frames
    if case.bridge.values.get("is_unheld"):
        whole = source.changed_at(case.bound_at or (made[-1] if made else None), source.leaf_alone)
        fix = Fix.worded("help.leaf_alone", values, whole)
        return diagnosis_of(case, ONCE, (fix,), note, explanation="explanation.built_on_unheld_leaf")
    # A replay of states: what a round received is kept without its graph.
    collected = detach_collected(held_of(case.failure), of_any_length=case.updated is not None)
    if collected is not None:
        return diagnosis_of(case, ONCE, (collected,), note)
    # Cut off from the one backward of all its losses, what they share would learn nothing.
    is_theirs = (
        used is not None
        and source.is_only_backward(used)
        and any(
            source.in_same_function(one, used) and one.line < used.line and not source.in_same_loops(one, used)
            for one in made
        )
    )
    is_cut = case.updated is not None and not is_theirs
    borrowed = detach_other_network(borrowed_of(case.failure), None) if is_cut else ()
    # Without an update, recomputing gives the same values: the losses of several tasks, one after another.
    kept = () if case.updated is not None else (keep_graph(case),)
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
    if case.freed_by.values.get("same_loss") or case.bridge.values.get("sums"):
        # A loss without a graph, or a term of it, would train nothing.
        first = tuple(one for one in first if one.kind == "recompute_forward") or first[:1]
    if all(one.kind != "recompute_forward" for one in first):
        return diagnosis_of(case, ONCE, first, note)
    return diagnosis_of(case, ONCE, (*borrowed, *kept, *first), note)


def _of_both(fix: Fix, name: str) -> Fix:
    """The advice to compute a value anew, for another one as well: alone, neither would be enough."""
    mine = fix.summary.values.get("name")
    if fix.lines or fix.kind != "recompute_forward" or not isinstance(mine, str):
        return fix
    values = {**fix.summary.values, "name": f"{mine}, {name}"}
    return replace(fix, summary=replace(fix.summary, values=values))


def _same(case: Case) -> Diagnosis:
    values = {"name": case.name}
    stepped = case.updated is not None
    again = parts.fix("recompute_forward", "changed", values, summary="help.recompute_shared")
    lines = source.changed_at(case.freed_by.shown_frame, source.graph_for_gradient)
    if case.needed.op == "grad" and not stepped and _same_line(case.needed.site, case.freed_by.site):
        return _row_after_row(case, lines)
    if lines and not stepped:
        # A loss that is itself sent back is older than the gradient, and so does not contain it.
        fixes = (keep_graph(case),) if case.needed.op == "backward" else for_gradient(case, lines)
        return diagnosis_of(case, SAME, fixes)
    if case.needed.op == "grad" and not stepped:
        # What it returns is no second share of .grad.
        return diagnosis_of(case, SAME, (keep_graph(case),))
    fixes = (parts.fix("one_backward", "changed", values), again if stepped else keep_graph(case))
    return diagnosis_of(case, SAME, fixes, case.if_kept if stepped else "note.second_pass_adds_up")


def _row_after_row(case: Case, lines: Lines) -> Diagnosis:
    """Diagnose one line that asks for the gradients of the same outputs again and again: the rows of a Jacobian."""
    kept = keep_graph(case)
    fixes: tuple[Fix, ...] = (replace(kept, summary=replace(kept.summary, key="help.retain_for_rows")),)
    if lines:
        recorded = for_gradient(case, lines)[:1]
        stack = () if case.freed_by.site is None else case.freed_by.site.user_frames
        fixes = (*recorded, *fixes) if source.is_differentiated_later(stack) else (*fixes, *recorded)
    found = diagnosis_of(case, SAME, fixes, explanation="explanation.same_outputs_asked")
    return replace(found, title=replace(found.title, key="title.same_outputs_asked"))


def _same_line(one: Site | None, other: Site | None) -> bool:
    a, b = (None if site is None else site.shown_frame for site in (one, other))
    return a is not None and b is not None and (a.file, a.line) == (b.file, b.line)


def _of_another_item(case: Case) -> Case | None:
    """The case of the oldest freed value, where the named one is an item of the loop that runs backward.

    Each iteration has another: this backward itself has freed the item's own Nodes before it came to what all share.
    """
    used, first = case.needed.user_frame, case.failure.clue("freed_first")
    if case.freed_by.values.get("certain") or used is None or first is None or not isinstance(case.name, str):
        return None
    made = () if case.bridge.site is None else case.bridge.site.user_frames
    stack = () if case.needed.site is None else case.needed.site.user_frames
    level = shared_level(made, stack)
    looped = _loop_over(case.name, made[level], stack[level:]) if 0 <= level < min(len(made), len(stack)) else None
    if looped is None or (stack[level] != looped and not source.in_same_loops(made[level], stack[level])):
        return None  # the function of the loop runs in rounds of its own
    bound = None if first.site is None else source.bound_name(first.site.user_frames)
    name, bound_at = (Message("label.shared_value"), None) if bound is None else bound
    return replace(case, bridge=first, saved=first, name=name, bound_at=bound_at)


def _loop_over(name: str, made: Frame, stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame of a stack with a loop over a value made beside that loop.

    The value is called ``name`` there, or in the function at the end of the stack.
    """
    passed: str | None = name
    for place in range(len(stack) - 1, -1, -1):
        frame = stack[place]
        if any(source.is_target_of_loop(frame, one, made) for one in {name, passed or name}):
            return frame
        passed = None if passed is None or not place else source.callers_expression(passed, frame, stack[place - 1])
    return None


def _is_one_round(needed: Clue, freed_by: Clue, bridge: Clue) -> bool:
    """Whether a helper that runs backward was called twice in the round that computed the losses' shared values."""
    stacks = [one.site.user_frames for one in (needed, freed_by, bridge) if one.site is not None]
    level = shared_level(stacks[0], stacks[1]) if len(stacks) == 3 else -1
    if level < 0 or stacks[0][level].line == stacks[1][level].line or len(stacks[2]) <= level:
        return False
    return source.in_same_loops(*(stack[level] for stack in stacks))


def shared(case: Case) -> Diagnosis:
    """Diagnose the case: which of the two losses was meant to train what they share decides the order of the fixes."""
    case = _from_oldest(case)
    values = {"name": case.name}
    if case.updated is not None and case.bridge.values.get("cached"):
        updated = case.updated.shown_frame
        lines = source.changed_at(updated, lambda at: source.enter_once_more(at, "cached"))
        fix = parts.fix("cache_each_round", "changed", values, lines=lines, summary="help.cache_after_update")
        return diagnosis_of(case, SHARED, (fix,), case.if_kept, explanation="explanation.graph_kept_by_cache")
    if case.updated is not None:
        fixes = (
            *_filled_before(case),
            *detach_other_network(borrowed_of(case.failure), None),
            parts.fix("recompute_forward", "changed", values, summary="help.recompute_shared"),
            parts.fix("reorder_step", "changed", values),
        )
        return diagnosis_of(case, SHARED, fixes, case.if_kept)
    freed, needed = case.freed_by.shown_frame, case.needed.shown_frame
    lines = source.changed_at(freed, source.graph_for_gradient)
    if lines:
        return diagnosis_of(case, SHARED, for_gradient(case, lines))
    bridges = borrowed_of(case.failure)
    cut = detach_other_network(bridges, None)
    by_both = Message(TRAINED_BY_BOTH, {"name": ", ".join(one.name for one in bridges if one.name) or case.name})
    if cut and freed is not None and needed is not None and source.clears_between(freed, needed):
        # Each backward has an optimizer of its own, whose gradients are cleared before it.
        return diagnosis_of(case, SHARED, (*cut, replace(keep_graph(case), meaning="changed", how_changed=by_both)))
    if freed is not None and source.has_keyword(freed, "create_graph"):
        return diagnosis_of(case, SHARED, (keep_graph(case),))  # a gradient, which a loss computes with
    joined = source.backward_of_sum(freed, needed) if freed is not None and needed is not None else ()
    fixes = parts.fix("sum_losses", "preserved", values, lines=joined), keep_graph(case)
    if bridges:
        # Whether both are to train what another optimizer has, the program does not say.
        fixes = tuple(replace(one, meaning="changed", how_changed=by_both) for one in fixes)
        if any(one.values.get("is_only") for one in case.failure.clues_of("borrowed")):
            return diagnosis_of(case, SHARED, (*cut, *fixes))
        choice = parts.fix("choose_losses", "changed", by_both.values)
        cut = tuple(replace(one, how_changed=Message(NOT_BY_BOTH, by_both.values)) for one in cut)
        return diagnosis_of(case, SHARED, (choice, *fixes, *cut))
    return diagnosis_of(case, SHARED, fixes)


def _from_oldest(case: Case) -> Case:
    """The case of the oldest freed value, where the earlier loss is gone, and with it what else the two share.

    The later backward itself has freed the first values that it came to, and never came to the oldest.
    """
    frame, first = computed_before(case), case.failure.clue("freed_first")
    bound = None if frame is None or case.freed_by.values.get("certain") else source.bound_name((frame,))
    if bound is None or first is None:
        return case
    return replace(case, bridge=first, saved=first, name=bound[0], bound_at=bound[1])


def _filled_before(case: Case) -> tuple[Fix, ...]:
    """A memory that was filled before the rounds, with the graph of what it stores, detached."""
    made, used = case.bridge.user_frame, case.needed.user_frame
    if made is None or used is None or not isinstance(case.name, str):
        return ()
    lines = source.changed_lines(made.file, source.detach_behind_loop(made, used, case.name))
    values = {"name": case.name}
    return (Fix.worded("help.build_without_graph", values, lines, kind="detach_built_once"),) if lines else ()
