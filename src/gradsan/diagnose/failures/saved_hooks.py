"""GS501, GS509 and GS510: hooks of saved tensors that return no tensor, come too late or are forbidden.

GS510: hooks were put on a saved tensor, or on all that is saved, where PyTorch takes none.

GS501: a pack hook changed the tensor that it was given, or an unpack hook returned no tensor.

GS509: a custom backward read its saved tensors a second time where they are handed out once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradsan import source
from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Fix, Label, Message

SAVED_HOOKS_REFUSED_ROWS = (
    "hooks_disabled",
    "hooks_set_again",
    "hooks_on_freed",
    "hooks_on_none",
    "hooks_under_transform",
)

_FIXES = {
    "hooks_set_again": "one_pair_of_hooks",
    "hooks_on_freed": "hooks_before_backward",
    "hooks_on_none": "skip_empty_slots",
    "hooks_under_transform": "hooks_outside_transform",
    "hooks_disabled": "hooks_outside_region",
}
_REGIONS = frozenset({"disable_saved_tensors_hooks"})
_HOOKED = frozenset({"saved_tensors_hooks", "save_on_cpu", "allow_mutation_on_saved_tensors"})
# Those that only spare memory: without them the gradients are the same.
_SPARING = ("checkpoint", "save_on_cpu")


def saved_hooks_refused(failure: Failure) -> Diagnosis | None:
    """Every such failure; with the last backward, where one may have freed the tensor."""
    hooks = parts.clue(failure, "hooks")
    if hooks is not None:
        return _in_region(failure, bool(hooks.values["are_outside"]), hooks.name)
    return statements.stopped(
        failure,
        "GS510",
        "saved_hooks_refused",
        role="used",
        explanation=f"explanation.{failure.row}",
        between=parts.label_of(parts.clue(failure, "past_backward"), "freed", "label.freed_before", {}),
        fixes=lambda values: (parts.fix(_FIXES[failure.row], "preserved", values),),
    )


def _in_region(failure: Failure, are_outside: bool, owner: str | None) -> Diagnosis:
    """Hooks met a region that forbids them: who entered first, and who came second."""
    frames = [frame for frame in failure.site.frames if frame.is_user]
    first = source.context_around(frames, _HOOKED if are_outside else _REGIONS)
    if are_outside and first is not None:
        owner = first[1]
    name: str | Message = owner or Message("label.some_hooks")
    around: tuple[Label, ...] = ()
    if first is not None:
        key = "label.hooks_began" if are_outside else "label.hooks_forbidden"
        around = statements.at_frame("created", first[0], Message(key, {"hooks": name}))

    def fixes(values: Mapping[str, Any]) -> tuple[Fix, ...]:
        found = [parts.fix(_FIXES[failure.row], "preserved", values)]
        if owner in _SPARING and failure.row == "hooks_disabled":
            found.append(parts.fix("without_sparing_hooks", "preserved", values))
        return tuple(found)

    return statements.stopped(
        failure,
        "GS510",
        "saved_hooks_refused",
        role="used",
        values={"hooks": name},
        title="title.saved_hooks_refused",
        explanation=f"explanation.{failure.row}",
        label="label.region_began" if are_outside else "label.hooks_asked",
        between=around,
        fixes=fixes,
    )


SAVED_TENSOR_HOOK_MISUSED_ROWS = (
    "pack_hook_writes",
    "unpack_hook_result",
)


def saved_tensor_hook_misused(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    fix = "clone_in_hook" if failure.row == "pack_hook_writes" else "unpack_a_tensor"
    return statements.stopped(
        failure,
        "GS501",
        "saved_tensor_hook_misused",
        role="used",
        label=f"label.{failure.row}",
        explanation=f"explanation.{failure.row}",
        fixes=lambda values: (parts.fix(fix, "preserved", values),),
    )


SAVED_VALUE_READ_TWICE_ROWS = ("saved_read_twice", "checkpoint_unpacked_twice")


def saved_value_read_twice(failure: Failure) -> Diagnosis | None:
    """Every such failure; with the first reading where the same function shows it."""
    function = parts.clue(failure, "definition")
    values = {"function": function.name if function is not None else Message("label.a_function")}
    own = failure.site.user_frame
    reads = () if own is None else source.earlier_reads(own, "saved_tensors")
    return statements.stopped(
        failure,
        "GS509",
        "saved_value_read_twice",
        role="used",
        explanation=f"explanation.{failure.row}",
        values=values,
        between=(
            *parts.label_of(parts.clue(failure, "node"), "created", "label.forward_of_function", values),
            *parts.label_of(parts.clue(failure, "rerun"), "note", "label.backward_began", values),
            *(label for read in reads for label in statements.at_frame("freed", read, Message("label.read_first"))),
        ),
        fixes=lambda _: (parts.fix("read_once", "preserved", values),),
    )
