"""GS508: under vmap, a tensor that is not mapped over is written with one that is."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = ("vmap_writes_smaller",)
CODE = "GS508"
SLUG = "vmap_writes_smaller"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="written",
        fixes=lambda values: (
            parts.fix("out_of_place", "preserved", values),
            parts.fix("made_like_mapped", "preserved", values),
        ),
    )
