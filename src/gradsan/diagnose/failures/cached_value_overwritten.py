"""GS512: a value that selective checkpointing kept for the second run was overwritten in place."""

from __future__ import annotations

from dataclasses import replace

from gradsan import source
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.failures import parts, statements
from gradsan.model import Clue, Diagnosis, Failure, Fix, Message, NamedTensor

ROWS = ("cached_overwritten",)
CODE = "GS512"
SLUG = "cached_value_overwritten"


def match(failure: Failure) -> Diagnosis | None:
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
            write, "written", "label.written.op", {**values, "op": label_room.as_written(write.op)}
        )
    }
    return parts.diagnosis(
        failure,
        CODE,
        SLUG,
        values=values,
        labels=(
            *label_room.at("saved", failure.site, Message("label.cached", values)),
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
    facts = cached.values
    return NamedTensor(name, facts["shape"], facts["dtype"], facts["device"], None, None)
