"""GS410: backwards of custom Functions that ignore their gradient, or return one without a graph to the input."""

from __future__ import annotations

from dataclasses import replace

from gradsan import source
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.failures import parts
from gradsan.model import Clue, Diagnosis, Failure, Site


def gradient_ignored(failure: Failure) -> Diagnosis | None:
    """GS410, a warning, for a custom backward that does not use the gradient it is given."""
    applied, backward = failure.clue("applied"), failure.clue("backward")
    if applied is None or backward is None:
        return None
    values = {"name": applied.name or "?"}
    return parts.diagnosis(
        failure,
        "GS410",
        "custom_backward_returns",
        values=values,
        severity="warning",
        title="title.gradient_ignored",
        explanation="explanation.gradient_ignored",
        labels=(
            *parts.label_of(_below_decorators(backward), "created", "label.gradient_not_read", values),
            *parts.label_of(applied, "note", "label.function_applied", values),
            *parts.used(failure, "label.gradient_not_passed", values),
        ),
        tensor=None,
        fixes=(parts.fix("multiply_by_gradient", "changed", values),),
    )


def gradient_returned_again(failure: Failure) -> Diagnosis | None:
    """GS410, a warning, for a gradient that a custom backward returns in memory which it writes again."""
    applied, backward, written = (failure.clue(role) for role in ("applied", "backward", "written"))
    if applied is None or backward is None:
        return None
    name = backward.name or "?"
    values = {
        "function": applied.name or "?",
        "name": name,
        "writer": label_texts.as_written(None if written is None else written.op),
    }
    return parts.diagnosis(
        failure,
        "GS410",
        "custom_backward_returns",
        values=values,
        severity="warning",
        title="title.gradient_returned_again",
        explanation="explanation.gradient_returned_again",
        labels=(
            *parts.label_of(applied, "note", "label.function_applied", {"name": applied.name or "?"}),
            *parts.label_of(written, "written", "label.returned_gradient_written", values),
            *parts.used(failure, "label.returned_gradient_added", values),
        ),
        tensor=parts.tensor_of(backward, backward.name) if backward.name else None,
        fixes=(parts.fix("out_of_place", "changed", values, summary="help.return_own_gradient"),),
    )


def second_derivative_lost(failure: Failure) -> Diagnosis | None:
    """GS410, a warning, for a custom backward whose result has no graph to the input, and was differentiated."""
    applied, backward = failure.clue("applied"), failure.clue("backward")
    if applied is None or backward is None:
        return None
    values = {"name": applied.name or "?", "read": backward.name or "?"}
    return parts.diagnosis(
        failure,
        "GS410",
        "custom_backward_returns",
        values=values,
        severity="warning",
        title="title.second_derivative_lost",
        explanation="explanation.second_derivative_lost",
        labels=(
            *parts.label_of(_below_decorators(backward), "created", "label.derivative_constant", values),
            *parts.label_of(applied, "note", "label.function_applied", values),
            *parts.used(failure, "label.differentiated_again", values),
        ),
        tensor=parts.tensor_of(backward) if backward.name else None,
        fixes=(parts.fix("save_input_for_backward", "changed", values),),
    )


def _below_decorators(backward: Clue) -> Clue:
    """The clue at the line of ``def``."""
    frame = backward.user_frame
    while frame is not None and (source.source_line(frame.file, frame.line) or "").lstrip().startswith("@"):
        frame = replace(frame, line=frame.line + 1)
    return backward if frame is None else replace(backward, site=Site((frame,)))
