"""GS402: two losses share a forward pass, which the first of their backward calls has freed."""

from __future__ import annotations

from dataclasses import replace

from gradsan import source
from gradsan.diagnose.collected import detach_other_network
from gradsan.diagnose.failures import parts
from gradsan.diagnose.failures.freed_values import (
    SHARED,
    Case,
    borrowed_of,
    computed_before,
    diagnosis_of,
    for_gradient,
    keep_graph,
)
from gradsan.diagnose.value_fixes import NOT_BY_BOTH, TRAINED_BY_BOTH
from gradsan.model import Diagnosis, Fix, Message


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
