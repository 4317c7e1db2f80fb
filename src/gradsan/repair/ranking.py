"""Ranking of tried candidates: the closest to the training as written first, then the smallest edit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from gradsan.diagnose.value_fixes import NOT_BY_BOTH
from gradsan.model import Fix, Message
from gradsan.repair.judging import APART, MEANT, TWICE, Tried
from gradsan.repair.patch import Patch
from gradsan.repair.trials.trial import Cost

COST_TOLERANCE = 0.02
"""Costs closer than this to those of the leanest fix are equal: a copy of little does not outweigh a larger change."""
DEAR = 1.25
"""Times the cost of the leanest fix of the same training from which on a smaller edit does not outweigh it: a copy of
the whole in every round of a loop."""


IMPLIED = frozenset(
    {
        *("detach_carried_state", "detach_in_modules", "detach_kept", "detach_out_of_place", "detach_other_network"),
        *("reset_state", "reset_modules", "recompute_forward", "recompute_after_change", "rebuild_in_loop"),
        *("rebuild_in_function", "as_property", "record_the_change", "change_a_copy", "leave_the_argument"),
        *("clear_gradient", "clear_by_optimizer", "clear_between", "detach_built_once", "collect_each_value"),
        "forget_collected",
        *("give_to_optimizer", "cache_each_round", "switch_on", "create_graph", "copy_second_name", "clip_between"),
        *("penalty_with_graph", "term_as_tensor", "term_undetached", "term_with_graph"),
        *(
            "clear_elsewhere",
            "clear_once",
            "clear_after_step",
            "step_after_backward",
            "give_parameters",
            "scale_out_of_place",
        ),
        *("undo_item", "undo_new_tensor", "undo_gradient", "undo_no_grad", "undo_inference_mode", "cut_at_use"),
        "undo_set_late",
        *("schedule_anew", "differentiate_base", "compute_each_round", "functional_fast_weights", "bound_after_loop"),
        *("stable_form", "double_where", "clamp_input", "eps_inside", "clamp_count", "nonzero_denominator"),
        *("without_correction", "sum_over_count", "finite_mask", "zeros_instead", "float32_operation"),
        *("input_itself", "leave_out_empty", "drop_rows", "leave_out_batch", "positive_eps", "step_behind_backward"),
    }
)
"""Kinds whose change of the training is the one that the cause implies: truncated where a state is cut, the gradient
at updated parameters, a change that is recorded at last, a finite value where there was none. Any other kind says that
the gradients stay; where they do not, it is not what anybody meant."""

_CUTS = ("help.build_without_graph", "help.build_under_no_grad")
_UNSURE, _CUT_TERM = "fix.stays_or_follows", "help.cut_term_how"
_VERDICTS = ("same", "gradients")
_ROWS = "help.retain_for_rows"
_BORROWED = "detach_other_network"


def is_implied(fix: Fix) -> bool:
    """Whether the fix's change of the training is the one that the cause of the fault implies.

    A value that every round computes anyway is not meant to be recomputed: the earlier value was to be kept. Where only
    a name suggests so, the user is asked.
    """
    if fix.how_changed is not None and fix.how_changed.key == APART:
        return True
    if fix.how_changed is not None and fix.how_changed.key in (TWICE, _UNSURE, _CUT_TERM, NOT_BY_BOTH):
        return False
    return fix.kind in IMPLIED or fix.summary.key in MEANT or fix.summary.key == _ROWS


def settled(tried: list[Tried]) -> list[Tried]:
    """``tried``, certain that a value was to be kept where a run has shown that each round computes it.

    Where nothing shows whether it was to be kept or recomputed, both work, and the rounds call networks
    themselves, neither is certain.
    """
    hows = [one.fix.how_changed for one in tried]
    if any(how is not None and how.key == TWICE for how in hows):
        return [
            _told(one, cast("Message", how.values["how"])) if how is not None and how.key == _UNSURE else one
            for one, how in zip(tried, hows, strict=True)
        ]
    passed = [one for one in tried if one.passed and one.fix.meaning == "changed"]
    anew = [one for one in passed if one.fix.kind == "recompute_forward"]
    busy = [one for one in passed if one.trial.recording.called * 2 > len(one.trial.recording.steps)]
    cuts = [one for one in busy if one.fix.summary.key in _CUTS]
    if not anew or not cuts or tried.index(cuts[0]) < tried.index(anew[0]):
        return tried
    unsure = [*anew, *cuts]
    return [_told(one, Message(_UNSURE, {"how": one.fix.how_changed})) if one in unsure else one for one in tried]


def _told(tried: Tried, how: Message) -> Tried:
    return replace(tried, fix=replace(tried.fix, how_changed=how))


def measured(tried: Sequence[Tried], measure: Callable[[Sequence[Patch]], Sequence[Cost | None]]) -> list[Tried]:
    """``tried`` with the costs of the best candidates that are otherwise equal, relative to the cheapest of them.

    Only those are run once more: costs break ties.
    """
    passed = [number for number, one in enumerate(tried) if one.passed]
    sizes = [0 if one.fix.meaning == "preserved" else one.patch.size for one in tried]
    ranks = {number: (*_standing(tried[number]), sizes[number]) for number in passed}
    compared = [number for number in passed if ranks[number] == min(ranks.values())]
    measures = measure([tried[number].patch for number in compared]) if len(compared) > 1 else ()
    found = dict(zip(compared, measures, strict=False))
    known = [cost for cost in found.values() if cost is not None]
    if not known:
        return list(tried)
    leanest = Cost(min(one.written for one in known), min(one.kept for one in known))
    costs = [found.get(number) for number in range(len(tried))]
    return [one if cost is None else _with_cost(one, cost, leanest) for one, cost in zip(tried, costs, strict=True)]


def ranked_fixes(tried: Sequence[Tried], *, was_refused: bool = False) -> list[Tried]:
    """The fixes, best first; equal ones in the order in which they were suggested.

    Among those that change the training, the ones whose change the cause implies come first, then the diagnosis's
    order of kinds decides. That order also decides where PyTorch rejected the statement, or it returned NaN
    (``was_refused``): the first kind then says what the statement is meant to do.
    """
    kinds = list(dict.fromkeys(one.fix.kind for one in tried))
    is_cut = any(one.passed and one.fix.kind == _BORROWED and one.fix.meaning == "preserved" for one in tried)

    def rank(one: Tried) -> tuple[object, ...]:
        # For gradients of a network that this loss is not to train: copies of all parameters, or a list of others.
        is_needless = is_cut and (one.fix.kind == "backward_for_own" or one.fix.summary.key == "fix.clone_for_call")
        return is_needless, *_rank(one, kinds.index(one.fix.kind), was_refused)

    return sorted(tried, key=rank)


def _rank(tried: Tried, named: int, was_refused: bool) -> tuple[object, ...]:
    verification = tried.fix.verification
    time, memory = verification.time_ratio or 1.0, verification.memory_ratio or 1.0
    cost = (time + memory) / 2 - 1.0
    is_preserved = tried.fix.meaning == "preserved"
    return (
        not tried.passed,
        not tried.went_further,
        *_standing(tried),
        0 if is_preserved and not was_refused else named,
        0.0 if is_preserved else verification.gradient_difference or 0.0,
        is_preserved and max(time, memory) > DEAR,
        _effort(tried),
        # A backward that names its inputs says least about what was meant; a copy that nothing trains needs no graph.
        is_preserved and tried.fix.kind in ("backward_for_own", "clone_for_copy"),
        int(cost / COST_TOLERANCE),
        # Of two that do the same, the one that copies nothing; a part put into a new tensor copies the rest.
        is_preserved and (tried.fix.kind == "clone_before_mutation" or tried.patch.scatters > 0),
    )


def _effort(tried: Tried) -> int:
    """How many lines a reader has to understand anew."""
    patch = tried.patch
    if patch.shortens:
        return 1  # A program that does the same in fewer lines is no large change.
    if tried.fix.kind != "out_of_place":
        return patch.size
    # ``x = x.exp()`` in a line of its own leaves nothing to copy, and ``x = x + y`` is read as ``x += y`` was.
    # One part put into a new tensor is one line for another; several of them hide what is written where.
    return 1 if patch.splits or patch.spells_out else patch.size + max(patch.scatters - 1, 0)


def _standing(tried: Tried) -> tuple[int, bool]:
    """The rank of the training by closeness to the original's, and whether it changes in a way that is not implied."""
    verdict = tried.fix.verification.training
    is_preserved = tried.fix.meaning == "preserved"
    # A fix that was not compared (no reference) may declare that it does not preserve the training.
    closeness = _VERDICTS.index(verdict) if verdict in _VERDICTS else 0 if is_preserved else len(_VERDICTS)
    return closeness, not is_preserved and not is_implied(tried.fix)


def _with_cost(tried: Tried, cost: Cost, leanest: Cost) -> Tried:
    verification = replace(
        tried.fix.verification,
        time_ratio=_ratio(cost.written, leanest.written),
        memory_ratio=_ratio(cost.kept, leanest.kept),
    )
    return replace(tried, fix=replace(tried.fix, verification=verification))


def _ratio(value: int, least: int) -> float | None:
    return value / least if least else None
