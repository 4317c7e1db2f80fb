"""GS304, GS306, GS307, GS311, GS315 and GS320: views and results that cannot be written as they were.

GS306: a view that came out of a custom Function, or through a module's backward hook, was written.

GS304: a view is used after its base was written, and it is one that cannot follow.

GS307: what a custom Function declares with ``mark_dirty`` is not what it returns.

GS320: a ``__torch_dispatch__`` answered a view operation with a tensor that cannot become a view.

GS311: ``detach_()`` on a tensor that an operation had saved.

GS315: an in-place activation whose backward cannot be computed from its result.
"""

from __future__ import annotations

from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Message

FUNCTION_VIEW_WRITTEN_ROWS = ("function_view_inplace",)


def function_view_written(failure: Failure) -> Diagnosis | None:
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
        "GS306",
        "function_view_written",
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


VIEW_BASE_WRITTEN_ROWS = (
    "multi_view_base_written",
    "unrecorded_view_base_written",
)


def view_base_written(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    writes = tuple(
        label
        for clue in parts.clues(failure, "base_written")
        for label in parts.label_of(clue, "written", "label.base_written", {"op": label_texts.as_written(clue.op)})
    )
    is_recorded = failure.row == "multi_view_base_written"
    return statements.stopped(
        failure,
        "GS304",
        "view_base_written",
        role="used",
        label="label.stale_view_used",
        explanation=f"explanation.view_base_written_{'several' if is_recorded else 'unrecorded'}",
        between=writes,
        fixes=lambda values: (
            parts.fix("out_of_place", "preserved", values, summary="help.base_out_of_place"),
            parts.fix("view_after_write", "changed", values),
        ),
        notes=(Message("note.hides_version_error"),) if is_recorded else (),
    )


MARK_DIRTY_MISUSED_ROWS = (
    "dirty_not_input",
    "dirty_not_returned",
    "dirty_view_of_several",
)


def mark_dirty_misused(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    if failure.row == "dirty_not_input":
        return _needless(failure)
    is_view = failure.row == "dirty_view_of_several"
    return statements.stopped(
        failure,
        "GS307",
        "mark_dirty_misused",
        explanation=f"explanation.{failure.row}",
        fixes=lambda values: (
            parts.fix(
                "clone_before_mutation" if is_view else "return_dirty",
                "preserved",
                values,
                summary="help.clone_input" if is_view else None,
            ),
        ),
    )


def _needless(failure: Failure) -> Diagnosis:
    """PyTorch only warns of a tensor that was no input."""
    function = parts.clue(failure, "definition")
    values = {"function": function.name if function is not None else Message("label.a_function")}
    return statements.stopped(
        failure,
        "GS307",
        "mark_dirty_misused",
        role="used",
        title=f"title.{failure.row}",
        explanation=f"explanation.{failure.row}",
        values=values,
        between=parts.label_of(function, "note", "label.forward_defined", values),
        fixes=lambda _: (parts.fix("drop_mark_dirty", "preserved", values),),
        severity="warning",
    )


VIEW_NOT_FRESH_ROWS = ("view_same_as_base", "view_with_history")


def view_not_fresh(failure: Failure) -> Diagnosis | None:
    """Every such failure; with the class that took the operation over, where a variable knows it."""
    dispatcher = parts.clue(failure, "dispatcher")
    values = {} if dispatcher is None else {"class": dispatcher.name}
    return statements.stopped(
        failure,
        "GS320",
        "view_not_fresh",
        role="used",
        explanation=f"explanation.{failure.row}",
        between=parts.label_of(dispatcher, "note", "label.dispatcher", values),
        fixes=lambda filled: (parts.fix("fresh_view", "preserved", filled),),
    )


SAVED_TENSOR_DETACHED_ROWS = ("saved_detached",)


def saved_tensor_detached(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    detached = tuple(
        label
        for clue in parts.clues(failure, "detached")
        for label in parts.label_of(clue, "written", "label.detached_in_place", {})
    )
    return statements.stopped(
        failure,
        "GS311",
        "saved_tensor_detached",
        role="used",
        between=detached,
        fixes=lambda values: (parts.fix("detach_out_of_place", "preserved", values),),
    )


NEGATIVE_SLOPE_IN_PLACE_ROWS = ("negative_slope",)


def negative_slope_in_place(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    forward = parts.clue(failure, "forward")
    return statements.stopped(
        failure,
        "GS315",
        "negative_slope_in_place",
        role="used",
        between=parts.label_of(forward, "written", "label.activated_in_place", {}),
        fixes=lambda values: (parts.fix("disable_inplace_module", "preserved", values),),
    )
