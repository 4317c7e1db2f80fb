"""GS214 and GS410: gradients that nobody clears; those that a custom Function ignores, or returns without a graph."""

from __future__ import annotations

from dataclasses import replace

from gradsan import source
from gradsan.diagnose.failures import parts
from gradsan.model import Clue, Diagnosis, Failure, Fix, Message, NamedTensor, Site


def gradient_kept(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure that has a leaf with a name."""
    leaf, updated = failure.clue("gradient"), failure.clue("updated")
    if leaf is None or updated is None or not leaf.name:
        return None
    by_step = bool(updated.op and updated.op.endswith(".step"))
    values = {**_values(leaf, updated), "rounds": leaf.values["rounds"]}
    return parts.diagnosis(
        failure,
        "GS214",
        "gradient_never_cleared",
        values=values,
        labels=(
            *parts.used(failure, "label.adds_to_gradient", values),
            *parts.label_of(updated, "written", "label.updated_by_gradient", values),
        ),
        tensor=_gradient_of(leaf),
        fixes=_fixes(by_step, values),
        notes=(Message("note.more_gradients_kept", values),) if values["others"] else (),
    )


def gradient_left(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure whose leaf has a name."""
    leaf, grouped = failure.clue("gradient"), failure.clue("grouped")
    if leaf is None or grouped is None or not leaf.name:
        return None
    values = {**_values(leaf, grouped), "writer": grouped.name}
    return parts.diagnosis(
        failure,
        "GS214",
        "gradient_never_cleared",
        values=values,
        words="gradient_left_over",
        labels=(
            *parts.label_of(grouped, "note", "label.taken_with_gradient", values),
            *parts.used(failure, "label.steps_with_rest", values),
        ),
        tensor=_gradient_of(leaf),
        fixes=(parts.fix("clear_gradient", "changed", values, summary="help.clear_before_taken"),),
        notes=(Message("note.more_gradients_kept", values),) if values["others"] else (),
    )


def gradient_collected(failure: Failure) -> Diagnosis | None:
    """Diagnose a list of copies of a gradient that nobody clears in between."""
    leaf, bound = failure.clue("gradient"), failure.clue("bound")
    if leaf is None or bound is None:
        return None
    values = {"name": f"{leaf.name}.grad", "leaf": leaf.name, "list": bound.name}
    return parts.diagnosis(
        failure,
        "GS214",
        "gradient_never_cleared",
        values=values,
        words="gradient_collected",
        labels=(
            *parts.label_of(bound, "saved", "label.gradient_collected", values),
            *parts.used(failure, "label.adds_to_collected", values),
        ),
        tensor=_gradient_of(leaf),
        fixes=(parts.fix("clear_gradient", "changed", values, summary="help.clear_collected"),),
    )


def gradients_opposed(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure whose leaf has a name."""
    leaf, first, between, updated = (failure.clue(role) for role in ("gradient", "first", "between", "updated"))
    if leaf is None or first is None or between is None or updated is None or not leaf.name:
        return None
    values = {**_values(leaf, updated), "cosine": leaf.values["cosine"], "other": f"{between.name}.step"}
    return parts.diagnosis(
        failure,
        "GS214",
        "gradient_never_cleared",
        values=values,
        words="gradients_opposed",
        labels=(
            *parts.label_of(first, "note", "label.gradients_left", values),
            *parts.label_of(between, "note", "label.stepped_between", values),
            *parts.used(failure, "label.adds_opposed", values),
            *parts.label_of(updated, "written", "label.updated_by_sum", values),
        ),
        tensor=_gradient_of(leaf),
        fixes=(parts.fix("clear_between", "changed", values), parts.fix("detach_in_first", "changed", values)),
        notes=(Message("note.more_gradients_opposed", values),) if values["others"] else (),
    )


def _values(leaf: Clue, updated: Clue) -> dict[str, object]:
    return {
        "name": f"{leaf.name}.grad",
        "leaf": leaf.name,
        "others": leaf.count("leaves") - 1,
        "writer": parts.writer(updated, leaf.name),
    }


def _fixes(by_step: bool, values: dict[str, object]) -> tuple[Fix, ...]:
    clear = parts.fix("clear_by_optimizer" if by_step else "clear_gradient", "changed", values)
    return (clear,) if by_step else (clear, parts.fix("ask_for_gradient", "changed", values))


def _gradient_of(leaf: Clue) -> NamedTensor:
    return parts.tensor_of(leaf, f"{leaf.name}.grad")


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
