"""Which of the tried fixes comes first: what keeps the gradients, then what costs least, then the smallest change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gradsan.model import Fix
from gradsan.repair.patch import Patch
from gradsan.repair.trial import Cost, Trial

COST_TOLERANCE = 0.02
"""Costs closer than this to those of the leanest fix count as equal, so that a copy of little does not outweigh a
larger change."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate that was run. ``patch`` holds this fix and those of the faults before it."""

    fix: Fix
    patch: Patch
    trial: Trial
    passed: bool
    went_further: bool


def measured(tried: Sequence[Tried], measure: Callable[[Patch], Cost | None]) -> list[Tried]:
    """``tried`` with the costs of those that passed, relative to the leanest of them.

    Only where several passed with the same meaning is there anything to decide, and only those are run once more.
    """
    meanings = [one.fix.meaning for one in tried if one.passed]
    costs = [measure(one.patch) if one.passed and meanings.count(one.fix.meaning) > 1 else None for one in tried]
    known = [cost for cost in costs if cost is not None]
    if not known:
        return list(tried)
    leanest = Cost(min(one.written for one in known), min(one.kept for one in known))
    return [one if cost is None else _with_cost(one, cost, leanest) for one, cost in zip(tried, costs, strict=True)]


def ranked_fixes(tried: Sequence[Tried], *, was_refused: bool = False) -> list[Tried]:
    """Best first; of what is equal, what was suggested first stays first.

    Fixes that keep the gradients compute the same, so their costs decide. Those that change them differ in what is
    computed: there the order in which the diagnosis names the kinds decides first. So it does where PyTorch
    has refused the statement (``was_refused``): what it is meant to do is what the first of them says.
    """
    kinds = list(dict.fromkeys(one.fix.kind for one in tried))
    return sorted(tried, key=lambda one: _rank(one, kinds.index(one.fix.kind), was_refused))


def _rank(tried: Tried, named: int, was_refused: bool) -> tuple[object, ...]:
    verification = tried.fix.verification
    cost = ((verification.time_ratio or 1.0) + (verification.memory_ratio or 1.0)) / 2 - 1.0
    is_preserved = tried.fix.meaning == "preserved"
    return (
        not tried.passed,
        not tried.went_further,
        not is_preserved,
        0 if is_preserved and not was_refused else named,
        int(cost / COST_TOLERANCE),
        tried.patch.size,
    )


def _with_cost(tried: Tried, cost: Cost, leanest: Cost) -> Tried:
    verification = replace(
        tried.fix.verification,
        time_ratio=_ratio(cost.written, leanest.written),
        memory_ratio=_ratio(cost.kept, leanest.kept),
    )
    return replace(tried, fix=replace(tried.fix, verification=verification))


def _ratio(value: int, least: int) -> float | None:
    return value / least if least else None
