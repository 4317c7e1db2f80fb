"""GS306: a view that came out of a custom Function, or through a module's backward hook, was written."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Message

ROWS = ("function_view_inplace",)
CODE = "GS306"
SLUG = "function_view_written"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    modules = parts.clues(failure, "hooked_module")
    is_hook = failure.values.get("op", "").startswith("BackwardHookFunction")
    notes = [
        Message(
            f"note.hooked_module_{'certain' if clue.values.get('certain') else 'possible'}",
            {"module": clue.name or clue.values.get("module", "?"), "kind": clue.values.get("module", "?")},
        )
        for clue in (modules if is_hook else ())
    ]
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        values={"maker": failure.values.get("op", "?")},
        explanation=f"explanation.function_view_written_{'hook' if is_hook else 'function'}",
        fixes=lambda values: (
            *statements.new_tensor(failure, values, of_view=True),
            *(
                (
                    parts.fix("disable_inplace_module", "preserved", values),
                    parts.fix("tensor_hook", "preserved", values),
                )
                if is_hook
                else ()
            ),
        ),
        notes=tuple(notes),
    )
