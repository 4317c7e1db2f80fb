"""GS213, GS218 and GS223: gradients overwritten, not differentiated, hooks lost; rules GS406 to GS419.

GS213: a hook, or the backward of a Function, writes into a gradient that another branch receives, too.

GS218: leaves were updated without a graph by gradients with a graph (``create_graph``) that was never used.

GS223: a gradient hook no longer runs because its view was written.

GS406 to GS419: rules of backward, .grad and hooks, each one cause with one row or a few. A rule has the code, the words
and the suggestions; details of a failure come from its clues.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from gradsan import source
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.failures import parts, statements
from gradsan.diagnose.failures.loss_without_graph import cuts_before, cuts_in_order, undone_cuts
from gradsan.diagnose.needs import op_name
from gradsan.model import Clue, Diagnosis, Failure, Fix, Frame, Lines, Message, NamedTensor, Severity


def gradient_overwritten(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure: a warning where another branch still needs the gradient, else a note."""
    roles = ("gradient", "branching", "sibling", "again")
    gradient, branching, sibling, again = (failure.clue(role) for role in roles)
    if gradient is None:
        return None
    values = {
        "name": gradient.name,
        "writer": label_texts.as_written(gradient.op),
        "op": parts.op_of(branching),
        "sibling": None if sibling is None else sibling.name,
        "given": None if again is None else again.name,
    }
    is_shared = bool(failure.values.get("shared"))
    variant = "_given" if again is not None else "" if is_shared else "_alone"
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
            *parts.label_of(again, "note", "label.gradient_read_again", values),
        ),
        tensor=parts.tensor_of(gradient if again is None else replace(gradient, name=again.name)),
        fixes=(parts.fix("return_new_gradient", "changed" if is_shared else "preserved", values),),
    )


def update_lost(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure whose leaf has a name: a warning where all signs show an inner step, else a note."""
    asked, updated = failure.clue("asked"), failure.clue("updated")
    if asked is None or updated is None or not updated.name:
        return None
    values = {
        "name": updated.name,
        "writer": parts.writer(updated),
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


def hook_result_dropped(failure: Failure) -> Diagnosis | None:
    """GS223, a warning, for a hook that computes a gradient and returns nothing."""
    hook, computed = failure.clue("hook"), failure.clue("computed")
    if hook is None or computed is None or computed.site is None:
        return None
    values = {"name": parts.name_of(hook, "label.the_tensor"), "function": computed.site.frames[-1].function}
    return parts.diagnosis(
        failure,
        "GS223",
        "hook_lost",
        values=values,
        title="title.hook_result_dropped",
        explanation="explanation.hook_result_dropped",
        labels=(
            *parts.label_of(computed, "created", "label.hook_computes", values),
            *parts.used(failure, "label.hook_registered", values),
        ),
        tensor=parts.tensor_of(hook) if hook.name else None,
        fixes=(parts.fix("return_from_hook", "changed", values),),
    )


def hook_repeated(failure: Failure) -> Diagnosis | None:
    """GS223, a warning, for a parameter that gets the same hook again in every round."""
    hook = failure.clue("hook")
    if hook is None:
        return None
    values = {"name": parts.name_of(hook, "label.the_tensor"), "times": hook.values["times"]}
    return parts.diagnosis(
        failure,
        "GS223",
        "hook_lost",
        values=values,
        title="title.hook_repeated",
        explanation="explanation.hook_repeated",
        labels=parts.used(failure, "label.hook_repeated", values),
        tensor=parts.tensor_of(hook) if hook.name else None,
        fixes=(parts.fix("register_hook_once", "changed", values),),
    )


def hook_lost(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure whose tensor has a name: a note where the hook runs for earlier uses of a view."""
    hook, written = failure.clue("hook"), failure.clue("written")
    if hook is None or written is None:
        return None
    frame = hook.shown_frame
    name = (None if frame is None else source.method_receiver(frame)) or hook.name
    if name is None:
        return None
    values = {"name": name, "writer": label_texts.as_written(written.op)}
    earlier, is_replaced = failure.values.get("earlier"), failure.values.get("replaced")
    words = "hook_replaced" if is_replaced else "hook_lost_earlier" if earlier else "hook_lost"
    changed, passed = ("replaced", "of_another") if is_replaced else ("left_behind", "passed_by")
    fix = "register_hook_on_new" if is_replaced else "register_hook_after"
    return parts.diagnosis(
        failure,
        "GS223",
        "hook_lost",
        values=values,
        severity="note" if earlier else "warning",
        title="title.hook_replaced" if is_replaced else None,
        explanation=f"explanation.{words}",
        labels=(
            *parts.label_of(hook, "note", "label.hook_registered", values),
            *parts.label_of(written, "written", f"label.hook_{changed}", values),
            *parts.used(failure, f"label.hook_{passed}", values),
        ),
        tensor=parts.tensor_of(hook, name),
        fixes=(parts.fix("register_hook_after", "changed", values, summary=f"help.{fix}"),),
    )


_Suggestion = tuple[str, Literal["preserved", "changed"]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A cause without further cases: its code, the label at the failing line, (kind, meaning) of each suggestion."""

    code: str
    slug: str
    label: str
    fixes: tuple[_Suggestion, ...]
    severity: Severity = "error"
    note: str | None = None


_RETURNS = Rule("GS410", "custom_backward_returns", "asked_here", (("return_one_each", "preserved"),))
_GRAD = Rule("GS412", "gradient_does_not_fit", "failed_here", (("fit_gradient", "preserved"),))
_HOOK = Rule("GS413", "hook_does_not_fit", "failed_here", (("fit_hook", "preserved"),))
RULES: Mapping[str, Rule] = {
    "unused_in_graph": Rule("GS406", "input_not_in_graph", "asked_here", (("allow_unused", "changed"),)),
    "input_needs_no_gradient": Rule("GS407", "input_without_gradient", "asked_here", (("wanted_input", "changed"),)),
    "output_not_scalar": Rule(
        "GS408", "loss_not_scalar", "loss_at", (("mean_or_sum", "changed"), ("pass_gradient", "preserved"))
    ),
    "custom_backward_count": _RETURNS,
    "custom_backward_shape": _RETURNS,
    "custom_backward_type": _RETURNS,
    "saved_no_tensor": _RETURNS,
    "differentiated_once_only": Rule(
        "GS411", "differentiated_once_only", "asked_here", (("no_second_derivative", "changed"),)
    ),
    "grad_does_not_fit": _GRAD,
    "grad_is_no_tensor": _GRAD,
    "hook_returned": _HOOK,
    "hook_returned_no_tensor": _HOOK,
    "hook_refused": _HOOK,
    "nan_in_backward": Rule(
        "GS414", "nan_gradient", "asked_here", (("anomaly_values", "preserved"),), note="nonfinite_search"
    ),
    "gradient_cycle": Rule("GS416", "gradient_cycle", "warned_here", (("autograd_grad", "preserved"),), "note"),
    "derivative_missing": Rule("GS417", "derivative_missing", "asked_here", (("use_argument", "changed"),)),
    "kernel_without_autograd": Rule(
        "GS418", "kernel_without_autograd", "warned_here", (("add_autograd", "preserved"),), "note"
    ),
    "old_backward_hook": Rule(
        "GS419", "old_backward_hook", "warned_here", (("full_backward_hook", "preserved"),), "note"
    ),
}


def graph_rules(failure: Failure) -> Diagnosis | None:
    """Diagnose every failure of these rows."""
    rule = RULES[failure.row]
    loss = failure.clue("loss") if failure.row == "output_not_scalar" else None
    tensor = failure.clue("input") or loss
    frame = failure.site.user_frame
    receiver = None if frame is None else source.method_receiver(frame)
    asked = None if frame is None or failure.row != "output_not_scalar" else source.differentiated(frame)
    name = tensor.name if tensor is not None and asked is None else None
    # ``trainer.fit()``, ``accelerator.backward(loss)``: no tensor's method.
    called = None if frame is None or failure.row != "output_not_scalar" else source.called_expression(frame)
    is_own = loss is None and called is not None and called.endswith("backward")
    name = name or asked or (receiver if is_own else None)
    made = None if name is not None or loss is None or loss.site is None else loss.site.user_frame
    reduced = None if made is None else source.mean_where_made(made)
    name = name if reduced is None else reduced[0]
    mean = () if made is None or reduced is None else source.changed_lines(made.file, reduced[1])
    node = failure.clue("node")
    values = {
        "name": name or Message("label.the_tensor"),
        "op": op_name(node.op) if node is not None and node.op else "?",
        "function": "?",
        "shape": list(tensor.shape) if tensor is not None else "?",
        **failure.values,
    }
    # Where a library calls backward, nobody passes weights.
    fixes = rule.fixes if made is None else rule.fixes[:1]
    is_mismatch = failure.row == "output_not_scalar" and "got" in failure.values
    if is_mismatch:
        # What was passed is a weight of each element: ones in its place would lose it.
        fixes = ((("pass_reshaped" if _fitted(failure) == "view_as" else "pass_other"), "preserved"),)
    outputs = failure.clue("differentiated")
    if asked is not None and not is_mismatch and outputs is not None and outputs.values["outputs"] == 1:
        # The sum over a loss of each example is as many times their mean.
        fixes = fixes[:1] if outputs.values["has_parameters"] else (("sum_differentiated", "preserved"),)
    behind = cuts_before(failure, name) if failure.row == "unused_in_graph" and name is not None else ()
    cuts = tuple(one for one in behind if one.kind == "gradient")
    before = None if frame is None or failure.row != "unused_in_graph" else source.computed_before_rounds(frame)
    if failure.row == "unused_in_graph" and tensor is not None and tensor.values.get("rebased"):
        fixes = (("take_before_write", "preserved"), *fixes)
    elif before is not None:
        values["loss"] = before[0]
    elif _is_passed_by(tensor):
        fixes = (("compute_with_input", "changed"),)
    late = () if frame is None or name is None or failure.row != "unused_in_graph" else _told_late(frame, name)
    return parts.diagnosis(
        failure,
        rule.code,
        rule.slug,
        values=values,
        severity=rule.severity,
        title="title.loss_not_scalar_mismatch" if is_mismatch else None,
        explanation=_explanation(failure, rule, is_before=before is not None),
        labels=(
            *parts.label_of(failure.clue("definition"), "note", "label.backward_defined", values),
            *(() if before is None else statements.at_frame("created", before[1], _once(before[0]))),
            *(cuts_in_order(cuts) if cuts else ()),
            *parts.label_of(node, "created", "label.forward_of_function", values),
            *parts.label_of(failure.clue("rebased"), "written", "label.rebased_here", values),
            *(() if made is None else parts.label_of(loss, "created", "label.loss_made", values)),
            *parts.used(failure, f"label.{rule.label}", values),
        ),
        tensor=_tensor(failure, name),
        fixes=(
            *(() if before is None else _each_round(values)),
            *late,
            *_itself(failure, values),
            *undone_cuts(cuts),
            *(
                _fix(failure, kind, meaning, values, _lines(failure, kind, name) or mean * (kind == "mean_or_sum"))
                for kind, meaning in fixes
            ),
        ),
        notes=() if rule.note is None else (Message(f"note.{rule.note}"),),
    )


def _told_late(frame: Frame, name: str) -> tuple[Fix, ...]:
    """The input told to require grad before what is differentiated is computed from it."""
    lines, how = source.flag_before_use(frame, name), Message("help.wanted_input_how")
    summary = Message("help.cut_set_late", {"operand": name})
    return (Fix("undo_set_late", "changed", summary, how_changed=how, lines=lines),) if lines else ()


def _fix(
    failure: Failure, kind: str, meaning: Literal["preserved", "changed"], values: Mapping[str, object], lines: Lines
) -> Fix:
    summary = "help.allow_unused_kept" if lines and kind == "allow_unused" else None
    summary = "help.hook_where_grad" if failure.row == "hook_refused" else summary
    return parts.fix(kind, meaning, values, lines=lines, summary=summary)


def _lines(failure: Failure, kind: str, name: str | None) -> Lines:
    """The lines of ``return_one_each`` where backward returns too few gradients: None for the inputs that need none.

    Of ``wanted_input``, the line that makes the input a leaf that requires grad.
    """
    asked = failure.site.user_frame
    if kind == "wanted_input" and name is not None and asked is not None:
        return source.changed_lines(asked.file, source.wanted_where_bound(asked, name))
    if kind == "allow_unused":
        given = failure.clue("input")
        is_some = given is not None and bool(given.values.get("others_reached"))
        return source.kept_without_gradient(asked) if is_some and asked is not None else ()
    if kind == "sum_differentiated":
        outputs = failure.clue("differentiated")
        is_sum = outputs is not None and outputs.values["is_summable"]
        return source.changed_at(asked, source.sum_differentiated) if is_sum else ()
    if kind == "no_second_derivative":
        return source.changed_at(asked, source.without_once_differentiable)
    if kind == "pass_reshaped":
        index, shape = int(str(failure.values["index"])), str(failure.values["shape"])
        change = partial(source.passed_gradient_in_shape, index=index, is_scalar=shape == "[]")
        return source.changed_at(asked, change)
    if kind == "fit_gradient":
        how = _fitted(failure)
        return (
            () if how is None else source.changed_at(asked, partial(source.gradient_in_shape, is_transposed=how == "t"))
        )
    defined, node = failure.clue("definition"), failure.clue("node")
    frame = None if defined is None else defined.shown_frame
    if kind != "return_one_each" or failure.row != "custom_backward_count" or frame is None or node is None:
        return ()
    needs = node.values.get("needs")
    many = int(str(failure.values.get("got", 0)))
    changes = source.gradients_for_inputs(frame, needs if isinstance(needs, tuple) else (), many)
    return tuple(line for change in changes for line in source.changed_lines(frame.file, change))


def _is_passed_by(tensor: Clue | None) -> bool:
    return tensor is not None and bool(tensor.values.get("passed_by"))


def _itself(failure: Failure, values: Mapping[str, object]) -> tuple[Fix, ...]:
    """The tensor itself, where the call asks for the gradient of a copy that it makes: no loss was computed from it."""
    lines = () if failure.row != "unused_in_graph" else source.changed_at(failure.site.user_frame, source.input_itself)
    return (parts.fix("input_itself", "changed", values, lines=lines),) if lines else ()


def _fitted(failure: Failure) -> Literal["t", "view_as"] | None:
    """How a gradient gets its tensor's shape: a flat one as a view, a transposed matrix by ``t()``; None if unknown."""
    keys = ("got", "shape" if failure.row == "output_not_scalar" else "expected")
    found = [re.findall(r"\d+", str(failure.values.get(key))) for key in keys]
    got, expected = ([int(one) for one in sizes if one != "1"] for sizes in found)
    if math.prod(got) != math.prod(expected):
        return None
    if got == expected or min(len(got), len(expected)) == 1:
        return "view_as"
    return "t" if len(found[0]) == 2 and found[0][::-1] == found[1] else None


def _once(loss: str) -> Message:
    return Message("label.built_once", {"name": loss})


def _each_round(values: Mapping[str, object]) -> tuple[Fix, ...]:
    return (parts.fix("recompute_forward", "changed", values, summary="help.loss_each_round"),)


def _explanation(failure: Failure, rule: Rule, *, is_before: bool) -> str:
    """The key of the explanation; some rows have several."""
    ending = ""
    if failure.row == "output_not_scalar":
        ending = "_complex" if "dtype" in failure.values else "_mismatch" if "got" in failure.values else ""
    elif failure.row == "hook_refused":
        ending = "_refused"
    elif failure.row == "derivative_missing" and "argument" not in failure.values:
        ending = "_plain"
    elif failure.row == "unused_in_graph":
        tensor = failure.clue("input")
        is_rebased = tensor is not None and tensor.values.get("rebased")
        ending = "_rebased" if is_rebased else "_earlier" if is_before else "_passed_by" * _is_passed_by(tensor)
    return f"explanation.{rule.slug}{ending}"


def _tensor(failure: Failure, name: str | None) -> NamedTensor | None:
    loss = failure.clue("loss")
    if failure.row != "output_not_scalar" or name is None or loss is None or "shape" not in loss.values:
        return None
    return parts.tensor_of(loss, name)
