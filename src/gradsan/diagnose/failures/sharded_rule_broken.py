"""GS519: what FullyShardedDataParallel cannot do with parameters that it gathers and gives back."""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Fix, Frame, Message

CODE = "GS519"
SLUG = "sharded_rule_broken"

_FIXES = {
    "sharded_after_inference": "no_grad_before_training",
    "sharded_called_past": "call_sharded_module",
    "sharded_changed_between": "change_between_rounds",
    "sharded_flags_differ": "use_original_parameters",
    "sharded_gathered_inside": "gather_outside",
    "sharded_second_order": "first_order_only",
    "sharded_shape_changed": "change_before_sharding",
}
_CHANGED = ("change_between_rounds", "change_before_sharding", "first_order_only")
ROWS = tuple(sorted(_FIXES))


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure: the rule, the parameters it is about, the place."""
    parameters = parts.clue(failure, "parameters")
    names = parameters.name if parameters is not None and parameters.name else Message("label.its_parameters")
    kind = _FIXES[failure.row]

    def fixes(values: object) -> tuple[Fix, ...]:
        lines = statements.changed(failure, _original) if kind == "use_original_parameters" else ()
        return (parts.fix(kind, "changed" if kind in _CHANGED else "preserved", {"names": names}, lines=lines),)

    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        values={"names": names},
        title=f"title.{failure.row}",
        explanation=f"explanation.{failure.row}",
        label=f"label.{failure.row}",
        fixes=fixes,
    )


def _original(frame: Frame) -> source.Change | None:
    return source.add_keyword(frame, "use_orig_params", "True")
