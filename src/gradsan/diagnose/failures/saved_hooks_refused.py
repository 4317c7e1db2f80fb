"""GS510: hooks were put on a saved tensor, or on all that is saved, where PyTorch takes none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradsan import source
from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Fix, Label, Message

ROWS = ("hooks_disabled", "hooks_set_again", "hooks_on_freed", "hooks_on_none", "hooks_under_transform")
CODE = "GS510"
SLUG = "saved_hooks_refused"

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


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure; with the last backward, where one may have freed the tensor."""
    hooks = parts.clue(failure, "hooks")
    if hooks is not None:
        return _in_region(failure, bool(hooks.values["are_outside"]), hooks.name)
    return statements.stopped(
        failure,
        CODE,
        SLUG,
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
        CODE,
        SLUG,
        role="used",
        values={"hooks": name},
        title="title.saved_hooks_refused",
        explanation=f"explanation.{failure.row}",
        label="label.region_began" if are_outside else "label.hooks_asked",
        between=around,
        fixes=fixes,
    )
