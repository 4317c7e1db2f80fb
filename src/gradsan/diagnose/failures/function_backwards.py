"""GS410: backwards of custom Functions that ignore their gradient, or return one without a graph to the input."""

from __future__ import annotations

from dataclasses import replace

from gradsan import source
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
