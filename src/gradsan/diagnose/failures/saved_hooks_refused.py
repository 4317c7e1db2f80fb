"""GS510: hooks were put on a saved tensor, or on all that is saved, where PyTorch takes none."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = ("hooks_set_again", "hooks_on_freed", "hooks_on_none", "hooks_under_transform")
CODE = "GS510"
SLUG = "saved_hooks_refused"

_FIXES = {
    "hooks_set_again": "one_pair_of_hooks",
    "hooks_on_freed": "hooks_before_backward",
    "hooks_on_none": "skip_empty_slots",
    "hooks_under_transform": "hooks_outside_transform",
}


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure; with the last backward, where one may have freed the tensor."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        explanation=f"explanation.{failure.row}",
        between=parts.label_of(parts.clue(failure, "past_backward"), "freed", "label.freed_before", {}),
        fixes=lambda values: (parts.fix(_FIXES[failure.row], "preserved", values),),
    )
