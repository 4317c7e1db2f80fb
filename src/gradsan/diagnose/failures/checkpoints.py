"""GS502, GS512, GS517 and GS518: checkpointing that finds something else the second time, or nothing to train.

GS512: a value that selective checkpointing kept for the second run was overwritten in place.

GS502: checkpoint ran a function again for backward, and it did something else than in forward.

GS518: checkpoint was not told which of its two forms to take, and took the reentrant one.

GS517: reentrant checkpoint was given no input that requires grad, so nothing in it is trained.
"""

from __future__ import annotations

from dataclasses import replace

from gradsan import source
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.failures import parts, statements
from gradsan.model import Clue, Diagnosis, Failure, Fix, Frame, Message, NamedTensor

CACHED_VALUE_OVERWRITTEN_ROWS = ("cached_overwritten",)


def cached_value_overwritten(failure: Failure) -> Diagnosis | None:
    """Every such failure; with the writes where they were logged."""
    cached, writes = parts.clue(failure, "cached"), parts.clues(failure, "base_written")
    function = parts.clue(failure, "checkpointed")
    name = _name(writes)
    values = {
        "name": name or Message("label.unnamed"),
        "op": cached.op if cached is not None and cached.op else "?",
        "function": function.name if function is not None else Message("label.unnamed_function"),
    }
    written = {
        (label.frame.file, label.frame.line): label
        for write in writes
        for label in parts.label_of(
            write, "written", "label.written.op", {**values, "op": label_texts.as_written(write.op)}
        )
    }
    return parts.diagnosis(
        failure,
        "GS512",
        "cached_value_overwritten",
        values=values,
        labels=(
            *label_texts.at("saved", failure.site, Message("label.cached", values)),
            *written.values(),
            *parts.label_of(parts.clue(failure, "rerun"), "used", "label.checkpoint_differs", values),
        ),
        tensor=_tensor(cached, name),
        fixes=(*_new_tensor(failure, writes, name), parts.fix("recompute_it", "preserved", values)),
        notes=(Message("note.allow_cache_entry_mutation"),),
    )


def _name(writes: tuple[Clue, ...]) -> str | None:
    for write in reversed(writes):
        own = None if write.site is None else write.site.user_frame
        written = None if own is None else source.writing_at(own)
        if written is not None:
            return written.target
    return None


def _new_tensor(failure: Failure, writes: tuple[Clue, ...], name: str | None) -> tuple[Fix, ...]:
    first = next((write for write in writes if write.site is not None), None)
    if first is None or first.site is None or name is None:
        return ()
    target = Clue("target", first.site, name=name, op=first.op)
    return statements.new_tensor(replace(failure, site=first.site, clues=(target,)), {"name": name})


def _tensor(cached: Clue | None, name: str | None) -> NamedTensor | None:
    if cached is None:
        return None
    return parts.tensor_of(cached, name)


CHECKPOINT_DIFFERS_ROWS = (
    "checkpoint_metadata",
    "checkpoint_count",
)


def checkpoint_differs(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    function = parts.clue(failure, "checkpointed")
    name = function.name if function is not None and function.name else Message("label.unnamed_function")
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


CHECKPOINT_FORM_NOT_SAID_ROWS = ("checkpoint_form_not_said",)


def checkpoint_form_not_said(failure: Failure) -> Diagnosis | None:
    """Every such warning: a note, as the gradients of both forms are the same where both work."""
    return statements.stopped(
        failure,
        "GS518",
        "checkpoint_form_not_said",
        role="used",
        fixes=lambda values: (
            parts.fix("not_reentrant", "preserved", values, lines=statements.changed(failure, _not_reentrant)),
        ),
        severity="note",
    )


def _not_reentrant(frame: Frame) -> source.Change | None:
    return source.add_keyword(frame, "use_reentrant", "False")


CHECKPOINT_INPUT_PLAIN_ROWS = ("checkpoint_input_plain",)


def checkpoint_input_plain(failure: Failure) -> Diagnosis | None:
    """Every such failure; only a note where nothing says that what it runs is to be trained."""
    function = parts.clue(failure, "checkpointed")
    trains = function is not None and function.values.get("trains")
    is_off = source.grad_switched_off([frame for frame in failure.site.frames if frame.is_user]) is not None
    name = function.name if function is not None and function.name else Message("label.unnamed_function")
    return statements.stopped(
        failure,
        "GS517",
        "checkpoint_input_plain",
        role="used",
        values={"function": name},
        between=parts.label_of(function, "note", "label.checkpointed_defined", {"function": name}),
        fixes=lambda values: (parts.fix("not_reentrant", "preserved", values),),
        severity="warning" if trains and not is_off else "note",
    )
