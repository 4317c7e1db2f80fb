"""GS518: checkpoint was not told which of its two forms to take, and took the reentrant one."""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Frame

ROWS = ("checkpoint_form_not_said",)
CODE = "GS518"
SLUG = "checkpoint_form_not_said"


def match(failure: Failure) -> Diagnosis | None:
    """Every such warning: a note, as the gradients of both forms are the same where both work."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        fixes=lambda values: (
            parts.fix("not_reentrant", "preserved", values, lines=statements.changed(failure, _not_reentrant)),
        ),
        severity="note",
    )


def _not_reentrant(frame: Frame) -> source.Change | None:
    return source.add_keyword(frame, "use_reentrant", "False")
