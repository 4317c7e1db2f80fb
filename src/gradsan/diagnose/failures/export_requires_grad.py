"""GS317: a tensor that requires grad was handed out of PyTorch."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Message

ROWS = (
    "numpy_requires_grad",
    "apply_requires_grad",
    "export_requires_grad",
)
CODE = "GS317"
SLUG = "export_requires_grad"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        fixes=lambda values: (
            parts.fix("detach_to_read", "preserved", values),
            parts.fix("detach_and_clone", "preserved", values),
        ),
        notes=(Message("note.detached_memory_is_shared"),),
    )
