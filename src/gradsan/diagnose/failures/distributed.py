"""GS513, GS514 and GS519: misuse of DistributedDataParallel and FullyShardedDataParallel.

GS513: DistributedDataParallel got the gradient of one parameter twice in one backward.

GS514: DistributedDataParallel still waits for gradients of the round before.

GS519: a use of parameters that FullyShardedDataParallel, which gathers and releases them, does not support.
"""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Fix, Frame, Label, Message


def gradient_reduced_twice(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure; with the calls of reentrant checkpoint, where those are the reason."""
    parameter, calls = failure.clue("parameter"), failure.clues_of("checkpoint_call")
    values = {"name": parts.name_of(parameter, "label.a_parameter")}
    labels = {
        (label.frame.file, label.frame.line, label.frame.column): label
        for call in calls
        for label in parts.label_of(call, "created", "label.reentrant_call", values)
    }
    return parts.diagnosis(
        failure,
        "GS513",
        "gradient_reduced_twice",
        values=values,
        explanation=f"explanation.gradient_reduced_twice{'_by_checkpoint' if calls else ''}",
        labels=(*labels.values(), *parts.used(failure, "label.gradient_reduced_twice", values)),
        fixes=(
            parts.fix("not_reentrant" if calls else "one_backward_a_round", "preserved", values),
            parts.fix("static_graph", "preserved", values),
        ),
    )


def reduction_unfinished(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure; with the parameters' names where the wrapped module was found."""
    parameters = failure.clues_of("parameter")
    names = ", ".join(one.name for one in parameters if one.name)
    values = {"name": names or Message("label.some_parameters")}
    owners: dict[tuple[str, int, str], Label] = {}
    for one in parameters:
        for label in parts.label_of(one, "note", "label.left_out", dict(one.values)):
            owners.setdefault((label.frame.file, label.frame.line, str(one.values.get("attribute"))), label)
    return parts.diagnosis(
        failure,
        "GS514",
        "reduction_unfinished",
        values=values,
        labels=(
            *owners.values(),
            *parts.label_of(failure.clue("past_backward"), "note", "label.ended_without", values),
            *parts.used(failure, "label.reduction_unfinished", values),
        ),
        fixes=(parts.fix("find_unused_parameters", "preserved", values), parts.fix("use_or_remove", "changed", values)),
    )


SHARDED_FIXES = {
    "sharded_after_inference": "no_grad_before_training",
    "sharded_called_past": "call_sharded_module",
    "sharded_changed_between": "change_between_rounds",
    "sharded_flags_differ": "use_original_parameters",
    "sharded_gathered_inside": "gather_outside",
    "sharded_second_order": "first_order_only",
    "sharded_shape_changed": "change_before_sharding",
}
_CHANGED = ("change_between_rounds", "change_before_sharding", "first_order_only")


def sharded_rule_broken(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure: the rule, its parameters, the place."""
    names = parts.name_of(failure.clue("parameters"), "label.its_parameters")
    kind = SHARDED_FIXES[failure.row]

    def fixes(values: object) -> tuple[Fix, ...]:
        lines = statements.changed(failure, _original) if kind == "use_original_parameters" else ()
        return (parts.fix(kind, "changed" if kind in _CHANGED else "preserved", {"names": names}, lines=lines),)

    return statements.stopped(
        failure,
        "GS519",
        "sharded_rule_broken",
        role="used",
        values={"names": names},
        words=failure.row,
        label=f"label.{failure.row}",
        fixes=fixes,
    )


def _original(frame: Frame) -> source.Change | None:
    return source.add_keyword(frame, "use_orig_params", "True")
