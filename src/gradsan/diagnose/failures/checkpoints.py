"""GS501 to GS503, GS509, GS510, GS512, GS517 and GS518: checkpointing and hooks of saved tensors.

GS512: a value that selective checkpointing kept for the recomputation was overwritten in place.

GS502: the recomputation of a checkpointed function differed from its forward.

GS518: checkpoint was called without ``use_reentrant``, and took the reentrant form.

GS503: a backward for certain gradients came to reentrant checkpoint.
GS517: reentrant checkpoint got no input that requires grad, so nothing in it is trained.

GS510: hooks were set on a saved tensor, or on all saved tensors, where PyTorch forbids them.

GS501: a pack hook changed its tensor, or an unpack hook returned no tensor.

GS509: a custom backward read its saved tensors a second time where they are released after the first.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradsan import source
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Fix, Label, Message


def cached_value_overwritten(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure; with the writes where they were logged."""
    cached, writes = failure.clue("cached"), failure.clues_of("base_written")
    function = failure.clue("checkpointed")
    name = next((name for write in reversed(writes) if (name := parts.written_name(write)) is not None), None)
    values = {
        "name": name or Message("label.unnamed"),
        "op": cached.op if cached is not None and cached.op else "?",
        "function": parts.name_of(function, "label.unnamed_function"),
    }
    return parts.diagnosis(
        failure,
        "GS512",
        "cached_value_overwritten",
        values=values,
        labels=(
            *label_texts.at("saved", failure.site, Message("label.cached", values)),
            *parts.labels_of(writes, "written", "label.written.op", values),
            *parts.label_of(failure.clue("rerun"), "used", "label.checkpoint_differs", values),
        ),
        tensor=None if cached is None else parts.tensor_of(cached, name),
        fixes=(
            *statements.new_tensor_at(failure, writes, {"name": name}),
            parts.fix("recompute_it", "preserved", values),
        ),
        notes=(Message("note.allow_cache_entry_mutation"),),
    )


def checkpoint_differs(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure."""
    function = failure.clue("checkpointed")
    name = parts.name_of(function, "label.unnamed_function")
    return statements.stopped(
        failure,
        "GS502",
        "checkpoint_differs",
        role="used",
        explanation=f"explanation.{failure.row}",
        values={"function": name},
        between=parts.label_of(function, "note", "label.checkpointed", {"function": name}),
        fixes=lambda values: (
            parts.fix("pure_function", "preserved", values),
            parts.fix("without_checkpoint", "preserved", values),
        ),
        notes=(Message("note.more_operations_are_silent"),),
    )


def checkpoint_input_plain(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure; only a note where nothing shows that the checkpointed code is to be trained."""
    function = failure.clue("checkpointed")
    trains = function is not None and function.values.get("trains")
    is_off = source.grad_switched_off([frame for frame in failure.site.frames if frame.is_user]) is not None
    name = parts.name_of(function, "label.unnamed_function")
    return statements.stopped(
        failure,
        "GS517",
        "checkpoint_input_plain",
        role="used",
        values={"function": name},
        between=parts.label_of(function, "note", "label.checkpointed_defined", {"function": name}),
        fixes=lambda values: (parts.fix("not_reentrant", "changed", values),),
        severity="warning" if trains and not is_off else "note",
    )


def checkpoint_reentrant_grad(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure; with the calls of checkpoint that the backward came to."""
    calls = failure.clues_of("checkpoint_call")
    called = [label for call in calls for label in parts.label_of(call, "created", "label.reentrant_call", {})]
    return statements.stopped(
        failure,
        "GS503",
        "checkpoint_reentrant_grad",
        role="used",
        between=tuple({(label.frame.file, label.frame.line): label for label in called}.values()),
        fixes=lambda values: (parts.fix("not_reentrant", "preserved", values),),
    )


HOOK_FIXES = {
    "hooks_set_again": "one_pair_of_hooks",
    "hooks_on_freed": "hooks_before_backward",
    "hooks_on_none": "skip_empty_slots",
    "hooks_under_transform": "hooks_outside_transform",
    "hooks_disabled": "hooks_outside_region",
}
_REGIONS = frozenset({"disable_saved_tensors_hooks"})
_HOOKED = frozenset({"saved_tensors_hooks", "save_on_cpu", "allow_mutation_on_saved_tensors"})
# Hooks that only save memory: without them the gradients are the same.
_SPARING = ("checkpoint", "save_on_cpu")


def saved_hooks_refused(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure; with the last backward, where one may have freed the tensor."""
    hooks = failure.clue("hooks")
    if hooks is not None:
        return _in_region(failure, bool(hooks.values["are_outside"]), hooks.name)
    return statements.stopped(
        failure,
        "GS510",
        "saved_hooks_refused",
        role="used",
        explanation=f"explanation.{failure.row}",
        between=parts.label_of(failure.clue("past_backward"), "freed", "label.freed_before", {}),
        fixes=lambda values: (parts.fix(HOOK_FIXES[failure.row], "preserved", values),),
    )


def _in_region(failure: Failure, are_outside: bool, owner: str | None) -> Diagnosis:
    """Diagnose hooks in a region that forbids them: the first to enter, and the second."""
    frames = [frame for frame in failure.site.frames if frame.is_user]
    first = source.context_around(frames, _HOOKED if are_outside else _REGIONS)
    if are_outside and first is not None:
        owner = first[1]
    name: str | Message = owner or Message("label.some_hooks")
    around: tuple[Label, ...] = ()
    if first is not None:
        key = "label.hooks_began" if are_outside else "label.hooks_forbidden"
        around = statements.at_frame("created", first[0], Message(key, {"hooks": name}))

    def fixes(values: Mapping[str, object]) -> tuple[Fix, ...]:
        found = [parts.fix(HOOK_FIXES[failure.row], "preserved", values)]
        if owner in _SPARING and failure.row == "hooks_disabled":
            found.append(parts.fix("without_sparing_hooks", "preserved", values))
        return tuple(found)

    return statements.stopped(
        failure,
        "GS510",
        "saved_hooks_refused",
        role="used",
        values={"hooks": name},
        explanation=f"explanation.{failure.row}",
        label="label.region_began" if are_outside else "label.hooks_asked",
        between=around,
        fixes=fixes,
    )


def saved_value_read_twice(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure; with the first reading where the same function shows it."""
    function = failure.clue("definition")
    values = {"function": parts.name_of(function, "label.a_function")}
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
            *parts.label_of(failure.clue("node"), "created", "label.forward_of_function", values),
            *parts.label_of(failure.clue("rerun"), "note", "label.backward_began", values),
            *(label for read in reads for label in statements.at_frame("freed", read, Message("label.read_first"))),
        ),
        fixes=lambda _: (parts.fix("read_once", "preserved", values),),
    )
