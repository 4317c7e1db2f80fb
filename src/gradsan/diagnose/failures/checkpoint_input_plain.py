"""GS517: reentrant checkpoint was given no input that requires grad, so nothing in it is trained."""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Message

ROWS = ("checkpoint_input_plain",)
CODE = "GS517"
SLUG = "checkpoint_input_plain"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure; only a note where nothing says that what it runs is to be trained."""
    function = parts.clue(failure, "checkpointed")
    trains = function is not None and function.values.get("trains")
    is_off = source.grad_switched_off([frame for frame in failure.site.frames if frame.is_user]) is not None
    name = function.name if function is not None and function.name else Message("label.unnamed_function")
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        values={"function": name},
        between=parts.label_of(function, "note", "label.checkpointed_defined", {"function": name}),
        fixes=lambda values: (parts.fix("not_reentrant", "preserved", values),),
        severity="warning" if trains and not is_off else "note",
    )
