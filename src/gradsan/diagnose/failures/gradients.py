"""GS213, GS214, GS218 and GS223: gradients overwritten, never cleared, not differentiated, or missed by their hook.

GS214: the gradient of a leaf is never cleared, and every backward accumulates onto those of earlier rounds.

GS213: a hook, or the backward of a Function, writes into a gradient that another branch receives, too.

GS218: leaves were updated without a graph by gradients with a graph (``create_graph``) that was never used.

GS223: a gradient hook no longer runs because its view was written.
"""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.failures import parts
from gradsan.model import Clue, Diagnosis, Failure, Fix, Message, NamedTensor


def gradient_kept(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure that has a leaf with a name."""
    leaf, updated = failure.clue("gradient"), failure.clue("updated")
    if leaf is None or updated is None or not leaf.name:
        return None
    by_step = bool(updated.op and updated.op.endswith(".step"))
    values = {
        "name": f"{leaf.name}.grad",
        "leaf": leaf.name,
        "rounds": leaf.values["rounds"],
        "others": leaf.count("leaves") - 1,
        "writer": _writer(leaf.name, updated.op or "?"),
    }
    return parts.diagnosis(
        failure,
        "GS214",
        "gradient_never_cleared",
        values=values,
        severity="warning",
        labels=(
            *parts.used(failure, "label.adds_to_gradient", values),
            *parts.label_of(updated, "written", "label.updated_by_gradient", values),
        ),
        tensor=_gradient_of(leaf),
        fixes=_fixes(by_step, values),
        notes=(Message("note.more_gradients_kept", values),) if values["others"] else (),
    )


def _writer(name: str, op: str) -> str:
    return f"{name}.data = ..." if op == "data =" else label_texts.as_written(op)


def _fixes(by_step: bool, values: dict[str, object]) -> tuple[Fix, ...]:
    clear = parts.fix("clear_by_optimizer" if by_step else "clear_gradient", "changed", values)
    return (clear,) if by_step else (clear, parts.fix("ask_for_gradient", "changed", values))


def _gradient_of(leaf: Clue) -> NamedTensor:
    return parts.tensor_of(leaf, f"{leaf.name}.grad")


def gradient_overwritten(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure: a warning where another branch still needs the gradient, else a note."""
    gradient, branching, sibling = (failure.clue(role) for role in ("gradient", "branching", "sibling"))
    if gradient is None:
        return None
    values = {
        "name": gradient.name,
        "writer": label_texts.as_written(gradient.op),
        "op": parts.op_of(branching),
        "sibling": None if sibling is None else sibling.name,
    }
    is_shared = bool(failure.values.get("shared"))
    variant = "" if is_shared else "_alone"
    is_named = is_shared and branching is not None and bool(values["sibling"])
    return parts.diagnosis(
        failure,
        "GS213",
        "gradient_overwritten",
        values=values,
        severity="warning" if is_shared else "note",
        title=f"title.gradient_overwritten{variant}",
        explanation=f"explanation.gradient_overwritten{'_by' if is_named else variant}",
        labels=(
            *parts.label_of(branching, "note", "label.gradient_branches", values),
            *parts.used(failure, "label.hands_gradients", values),
            *parts.label_of(gradient, "written", f"label.gradient_written{'_by' if is_named else variant}", values),
        ),
        tensor=parts.tensor_of(gradient),
        fixes=(parts.fix("return_new_gradient", "changed" if is_shared else "preserved", values),),
    )


def update_lost(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure whose leaf has a name: a warning where all signs show an inner step, else a note."""
    asked, updated = failure.clue("asked"), failure.clue("updated")
    if asked is None or updated is None or not updated.name:
        return None
    values = {
        "name": updated.name,
        "writer": _update_shown(updated),
        "others": updated.count("leaves") - 1,
    }
    return parts.diagnosis(
        failure,
        "GS218",
        "update_not_differentiated",
        values=values,
        severity="warning" if failure.values.get("is_strong") else "note",
        labels=(
            *parts.label_of(asked, "note", "label.differentiable_gradient", values),
            *parts.label_of(updated, "written", "label.updated_past_graph", values),
            *parts.used(failure, "label.begins_at_new_values", values),
        ),
        tensor=parts.tensor_of(updated),
        fixes=(
            parts.fix("functional_fast_weights", "changed", values),
            parts.fix("leave_create_graph", "preserved", values),
        ),
        notes=(Message("note.more_leaves_updated", values),) if values["others"] else (),
    )


def _update_shown(updated: Clue) -> str:
    return f"{updated.name}.data = ..." if updated.op == "data =" else label_texts.as_written(updated.op)


def hook_lost(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure whose view has a name: a note where the hook runs for earlier uses of the view."""
    hook, written = failure.clue("hook"), failure.clue("written")
    if hook is None or written is None:
        return None
    frame = hook.shown_frame
    name = (None if frame is None else source.method_receiver(frame)) or hook.name
    if name is None:
        return None
    values = {"name": name, "writer": label_texts.as_written(written.op)}
    earlier = "_earlier" if failure.values.get("earlier") else ""
    return parts.diagnosis(
        failure,
        "GS223",
        "hook_lost",
        values=values,
        severity="note" if earlier else "warning",
        explanation=f"explanation.hook_lost{earlier}",
        labels=(
            *parts.label_of(hook, "note", "label.hook_registered", values),
            *parts.label_of(written, "written", "label.hook_left_behind", values),
            *parts.used(failure, "label.hook_passed_by", values),
        ),
        tensor=parts.tensor_of(hook, name),
        fixes=(parts.fix("register_hook_after", "changed", values),),
    )
