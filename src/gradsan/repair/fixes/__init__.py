"""Candidate fixes beyond the line of a diagnosis: one file per kind, each ``suggest(diagnosis) -> (Fix, …)``.

They read the source that ran (in the child, the patched texts), and are unverified: each is run and compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from gradsan.model import Diagnosis, Fix, Message
from gradsan.repair.fixes import _blocks as blocks
from gradsan.repair.fixes import (
    arguments,
    backwards,
    chains,
    copies,
    fast_weights,
    gradients,
    graphs,
    kept_values,
    loops,
    made,
    nonfinite,
    own_copies,
    states,
    steps,
    turns,
    views,
)
from gradsan.source.change import changed_lines
from gradsan.source.imports import with_imports
from gradsan.source.joined import on_own_lines
from gradsan.source.rewrite.suggest import drop_keyword

_SUGGESTERS: tuple[Callable[[Diagnosis], tuple[Fix, ...]], ...] = (
    arguments.disable_inplace_module,
    copies.clone_for_call,
    views.index_views,
    views.record_view,
    views.views_after_write,
    gradients.return_new_gradient,
    gradients.clear_gradients,
    gradients.before_step_or_backward,
    gradients.unscale_before_clip,
    gradients.clear_after_step,
    gradients.clear_once,
    backwards.step_after_backward,
    gradients.set_to_none,
    gradients.differentiate_base,
    copies.record_change,
    states.state_in_module,
    states.cut_where_bound,
    copies.list_and_stack,
    states.renew_buffers,
    turns.later_turn_first,
    chains.steps_behind_all,
    turns.steps_held,
    steps.reorder_step,
    steps.reorder_update,
    backwards.backward_first,
    backwards.one_backward,
    graphs.recompute_forward,
    kept_values.recompute_from_kept,
    chains.backward_for_own,
    chains.steps_behind_kept_graph,
    graphs.rebuild_in_loop,
    graphs.cut_once,
    loops.step_after_loop,
    loops.bound_after_loop,
    loops.each_in_its_round,
    loops.compute_in_own_loop,
    loops.compute_behind_step,
    arguments.not_reentrant,
    arguments.find_unused_parameters_in_ddp,
    arguments.disable_fused,
    arguments.change_call,
    fast_weights.functional_fast_weights,
    fast_weights.begin_anew,
    made.register_container,
    made.register_parameter,
    made.give_forgotten,
    made.schedule_anew,
    own_copies.copy_where_made,
    own_copies.copy_state_where_taken,
    nonfinite.leave_out_empty,
    nonfinite.clean_data,
    nonfinite.positive_eps,
)


_UNSURE = "fix.stays_or_follows"
_RENEWING = frozenset({"detach_carried_state", "recompute_forward", "reset_state"})
"""Kinds after which no two backwards need to share a graph."""


_FOR_LINES = frozenset({"backward_for_own"})
"""Kinds that are no advice where the source does not show their line: which optimizer is the loss's own."""


def with_candidates(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with every further fix that the source allows.

    Advice without lines is replaced by candidates of the same kind: the order of kinds decides between
    fixes that change the training.
    """
    return on_own_lines(diagnosis, _with_candidates)


def _with_candidates(diagnosis: Diagnosis) -> Diagnosis:
    if any(one.kind == "step_behind_backward" and one.lines for one in diagnosis.fixes):
        return diagnosis  # what keeps the training keeps a step that uses no gradient
    found: list[Fix] = []
    for suggest in _SUGGESTERS:
        try:
            found.extend(suggest(diagnosis))
        except (SyntaxError, ValueError, LookupError):
            # Source that does not match the run: no suggestion from it.
            continue
    found.extend(_without_kept_graph(diagnosis, (*diagnosis.fixes, *found)))
    ordered: list[Fix] = []
    for fix in copies.with_masks(diagnosis):
        same = [one for one in found if one.kind == fix.kind]
        if fix.kind in _FOR_LINES and not fix.lines and not same:
            continue
        # Of two copies that both pass, the one before the loop is made once.
        ordered.extend(copies.clone_before_loop(diagnosis) if fix.kind == "clone_before_mutation" else ())
        ordered.extend([fix] if fix.lines or not same else [one for one in same if one not in ordered])
    ordered.extend(one for one in found if one not in ordered)
    return with_imports(replace(diagnosis, fixes=copies.collect_each_value(diagnosis, tuple(ordered))))


def with_lines(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with lines for its advice where candidates of the same kind have them, and such advice first.

    Fixes that change the training do not move before those that preserve it, nor the other way round.
    """
    candidates = with_candidates(diagnosis).fixes
    first = {fix.kind: fix for fix in reversed(candidates) if fix.lines}
    known = {fix.lines for fix in diagnosis.fixes}
    fixes = [
        first[fix.kind]
        if not fix.lines
        and fix.kind in first
        and first[fix.kind].lines not in known
        and not _is_of_several(fix, first[fix.kind])
        else fix
        for fix in diagnosis.fixes
        if fix.lines or fix.kind in first or fix.kind not in _FOR_LINES
    ]
    cut = first.get("detach_built_once")
    if cut is not None and any(fix.lines and fix.kind == "recompute_forward" for fix in fixes):
        # Behind the line that keeps the gradient; alone, it would be taken for the fix.
        fixes = [
            replace(cut, how_changed=fix.how_changed) if fix.summary.key == graphs.CUT_ONCE and not fix.lines else fix
            for fix in fixes
        ]
    first_of_all = ("differentiate_base", kept_values.CUT, "one_backward", "bound_after_loop")
    fixes = [*(one for one in candidates if one.kind in first_of_all and one not in fixes), *fixes]
    if fixes and fixes[0].meaning == "preserved":
        fixes.sort(key=lambda fix: not fix.lines or fix.meaning != "preserved")
    if diagnosis.cause in blocks.STEPPED or any(fix.how_changed and fix.how_changed.key == _UNSURE for fix in fixes):
        # Run again, it would draw other random numbers, or the target of a loss would move with the network.
        has_lines = any(fix.lines for fix in fixes)
        fixes.sort(key=lambda fix: has_lines and fix.kind == "recompute_forward" and not fix.lines)
    # With several steps in between, moving or repeating one of them does not fix the others.
    several = {turns.FIRST, turns.HELD, chains.ALL_AT_ONCE, loops.ONCE, fast_weights.BEGUN, kept_values.AGAIN} | (
        {loops.APART} if fixes and not fixes[0].lines else set()
    )
    fixes.sort(key=lambda fix: fix.summary.key not in several and not _is_call_first(fix))
    return with_imports(replace(diagnosis, fixes=copies.collect_each_value(diagnosis, tuple(fixes))))


def _is_of_several(fix: Fix, candidate: Fix) -> bool:
    """Whether several values have to be computed anew, and the candidate does so for some of them only."""
    names = str(fix.summary.values.get("name", "")).split(", ")
    # One line of a class computes that attribute of each of its objects.
    several, text = {name.rpartition(".")[2] for name in names}, "\n".join(text for _, _, text in candidate.lines)
    is_all = all(re.search(rf"\b{re.escape(one)}\b.*=", text) for one in several)
    return fix.kind == "recompute_forward" and len(several) > 1 and not is_all


def _is_call_first(fix: Fix) -> bool:
    return fix.summary.key == steps.CALL_FIRST and fix.meaning == "preserved"


def fixes_to_try(diagnoses: Iterable[Diagnosis]) -> int:
    """The number of different changes that `gradsan fix` could run for these findings."""
    found = {
        fix.lines
        for one in diagnoses
        if one.severity in ("error", "warning")
        for fix in with_candidates(one).fixes
        if fix.lines
    }
    return len(found)


def _without_kept_graph(diagnosis: Diagnosis, fixes: tuple[Fix, ...]) -> list[Fix]:
    """The fixes that give every round a graph of its own, and that also remove the ``retain_graph`` of its backward."""
    found: list[Fix] = []
    for label in diagnosis.labels:
        change = drop_keyword(label.frame, "retain_graph") if label.role == "used" else None
        dropped = changed_lines(label.frame.file, change)
        taken = {(file, line) for file, line, _ in dropped}
        for fix in fixes if dropped else ():
            if fix.kind in _RENEWING and fix.lines and not taken & {(file, line) for file, line, _ in fix.lines}:
                summary = Message("fix.and_drop_retain_graph", {"fix": fix.summary})
                found.append(replace(fix, summary=summary, lines=(*fix.lines, *dropped)))
    return found


__all__ = ["fixes_to_try", "with_candidates", "with_lines"]
