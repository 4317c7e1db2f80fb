"""GS303: one of the views that a single call made (unbind, split, chunk, iteration) was written."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Message

ROWS = ("multi_view_inplace",)
CODE = "GS303"
SLUG = "one_of_several_views_written"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        fixes=lambda values: (
            *statements.new_tensor(failure, values, of_view=True),
            parts.fix("index_base_instead", "preserved", values),
        ),
        notes=(Message("note.unsafe_views"),),
    )
