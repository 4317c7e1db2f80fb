"""GS504: nothing that a checkpointed function returned requires grad."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = ("checkpoint_needless",)
CODE = "GS504"
SLUG = "checkpoint_needless"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        fixes=lambda values: (
            parts.fix("keep_graph_in_function", "changed", values),
            parts.fix("without_checkpoint", "preserved", values),
        ),
    )
