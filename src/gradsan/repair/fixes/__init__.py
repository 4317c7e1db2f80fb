"""Candidates that need more than the line of a diagnosis: one file per kind, each ``suggest(diagnosis) -> (Fix, …)``.

They read the source that ran (in the child, the texts laid over it), and promise nothing: each is run and compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import (
    disable_inplace_module,
    list_and_stack,
    recompute_forward,
    reorder_step,
    step_after_loop,
    sum_losses,
)

_SUGGESTERS: tuple[Callable[[Diagnosis], tuple[Fix, ...]], ...] = (
    disable_inplace_module.suggest,
    list_and_stack.suggest,
    reorder_step.suggest,
    recompute_forward.suggest,
    step_after_loop.suggest,
    sum_losses.suggest,
)


def with_candidates(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with every further fix that the source allows; advice without lines gives way to the same kind."""
    found: list[Fix] = []
    for suggest in _SUGGESTERS:
        try:
            found.extend(suggest(diagnosis))
        except (SyntaxError, ValueError, IndexError):
            # Source that does not fit the run: no suggestion from it.
            continue
    kinds = {fix.kind for fix in found}
    kept = tuple(fix for fix in diagnosis.fixes if fix.lines or fix.kind not in kinds)
    return replace(diagnosis, fixes=(*kept, *found))


__all__ = ["with_candidates"]
