"""Ranking of tried fixes: the same training, then the smallest difference, then the smallest edit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gradsan.model import Fix
from gradsan.repair.patch import Patch
from gradsan.repair.trials.trial import Cost, Trial

COST_TOLERANCE = 0.02
"""Costs closer than this to those of the leanest fix count as equal, so that a copy of little does not outweigh a
larger change."""
DEAR = 1.25
"""Times the cost of the leanest fix of the same training from which on a smaller edit does not outweigh it: a copy of
the whole in every round of a loop."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate that was run. ``patch`` holds this fix and those of the faults before it."""

    fix: Fix
    patch: Patch
    trial: Trial
    passed: bool
    went_further: bool


IMPLIED = frozenset(
    {
        *("detach_carried_state", "detach_in_modules", "detach_kept", "detach_out_of_place", "detach_other_network"),
        *("reset_state", "reset_modules", "recompute_forward", "recompute_after_change", "rebuild_in_loop"),
        *("rebuild_in_function", "as_property", "record_the_change", "change_a_copy", "leave_the_argument"),
        *("clear_gradient", "clear_by_optimizer", "detach_built_once", "collect_each_value", "forget_collected"),
        *("give_to_optimizer", "cache_each_round", "create_graph"),
        *("undo_item", "undo_new_tensor", "undo_gradient"),
        *("stable_form", "double_where", "clamp_input", "eps_inside", "clamp_count", "nonzero_denominator"),
        *("without_correction", "sum_over_count", "finite_mask", "zeros_instead", "float32_operation"),
        *("leave_out_empty", "drop_rows", "leave_out_batch", "positive_eps"),
    }
)
"""Kinds whose change of the training is the one that the cause implies: truncated where a state is cut, the gradient
at updated parameters, a change that is recorded at last, a finite value where there was none. Any other kind says that
the gradients stay; where they do not, it is not what anybody meant."""

_VERDICTS = ("same", "gradients")


def is_implied(fix: Fix) -> bool:
    """Whether the change that ``fix`` makes to the training is the one that the cause of the fault implies."""
    return fix.kind in IMPLIED


def measured(tried: Sequence[Tried], measure: Callable[[Sequence[Patch]], Sequence[Cost | None]]) -> list[Tried]:
    """``tried`` with the costs of those of the best that are alike in all else, relative to the leanest of them.

    Only those are run once more: costs break ties.
    """
    passed = [number for number, one in enumerate(tried) if one.passed]
    ranks = {number: (*_standing(tried[number]), _size_if_changed(tried[number])) for number in passed}
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
    """Best first; of what is equal, what was suggested first stays first.

    Of those that change the training, the ones whose change the cause implies come first, then the order in which the
    diagnosis names the kinds decides. So it does where PyTorch has refused the statement, or it gave NaN
    (``was_refused``): what it is meant to do is what the first of them says.
    """
    kinds = list(dict.fromkeys(one.fix.kind for one in tried))
    return sorted(tried, key=lambda one: _rank(one, kinds.index(one.fix.kind), was_refused))


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
        tried.patch.size,
        int(cost / COST_TOLERANCE),
    )


def _standing(tried: Tried) -> tuple[int, bool]:
    """How close to the training of the program as written, and whether it changes that as nobody meant."""
    verdict = tried.fix.verification.training
    is_preserved = tried.fix.meaning == "preserved"
    # A fix that was not compared (no reference) may say that it preserves nothing.
    closeness = _VERDICTS.index(verdict) if verdict in _VERDICTS else 0 if is_preserved else len(_VERDICTS)
    return closeness, not is_preserved and not is_implied(tried.fix)


def _size_if_changed(tried: Tried) -> int:
    return 0 if tried.fix.meaning == "preserved" else tried.patch.size


def _with_cost(tried: Tried, cost: Cost, leanest: Cost) -> Tried:
    verification = replace(
        tried.fix.verification,
        time_ratio=_ratio(cost.written, leanest.written),
        memory_ratio=_ratio(cost.kept, leanest.kept),
    )
    return replace(tried, fix=replace(tried.fix, verification=verification))


def _ratio(value: int, least: int) -> float | None:
    return value / least if least else None
