"""GS309: the written tensor and the one it reads from overlap in memory."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = ("source_overlap",)
CODE = "GS309"
SLUG = "written_from_itself"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        fixes=lambda values: (
            parts.fix("clone_source", "preserved", values),
            *statements.new_tensor(failure, values)[:1],
        ),
    )
