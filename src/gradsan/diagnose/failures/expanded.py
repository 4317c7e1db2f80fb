"""GS308: an expanded tensor, whose elements share memory, was written in place, or stepped as a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gradsan import source
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.failures import parts, statements
from gradsan.model import Clue, Diagnosis, Failure, Fix, Frame, Lines, Message


def expanded_written(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure."""
    late = failure.clue("overlapping_write")
    if late is not None:
        return _found_late(failure)
    if (shared := failure.clue("shared_parameter")) is not None:
        return _parameter_expanded(failure, shared)
    if (shared := failure.clue("shared_buffer")) is not None and shared.site is not None and shared.name is not None:
        return _buffer_expanded(failure, shared.site.user_frame, shared.name)
    return statements.stopped(
        failure,
        "GS308",
        "expanded_written",
        fixes=lambda values: (*copy_where_made(failure, values), *statements.new_tensor(failure, values)[:1]),
    )


def windows_written(failure: Failure) -> Diagnosis | None:
    """A warning, where PyTorch let windows that overlap be written."""
    written = failure.clue("written")
    frame = None if written is None else written.user_frame
    name = None if frame is None or written is None else source.written_expression(frame, written.op or "")
    if written is None or frame is None or name is None:
        return None
    values = {"name": name, "op": label_texts.as_written(written.op)}
    made = source.definition_of(frame, name)
    label = None if made is None or made.is_loop else Message("label.bound", {"name": name, "value": made.value})
    once = Message("help.written_apart_how", {"name": name})
    copied = parts.fix("clone_before_mutation", "changed", values, lines=copied_where_made(frame, name))
    return parts.diagnosis(
        failure,
        "GS308",
        "expanded_written",
        values=values,
        words="windows_written",
        labels=(
            *(() if made is None or label is None else statements.at_frame("created", made.frame, label)),
            *parts.label_of(written, "written", "label.expanded_written_late", values),
        ),
        tensor=parts.tensor_of(written, name),
        fixes=(replace(copied, how_changed=once),),
    )


def _parameter_expanded(failure: Failure, shared: Clue) -> Diagnosis:
    """Diagnose a step that updates a parameter of an expanded tensor, which is mended where the parameter is made."""
    definition, own = None if shared.site is None else shared.site.user_frame, failure.site.user_frame
    made_by_class = definition is not None and shared.name is not None
    if definition is not None and shared.name is not None:
        frame = source.bound_in_class(definition, shared.name)
    else:
        made = None if own is None or shared.name is None else source.definition_of(own, shared.name)
        frame = None if made is None else made.frame
    lines = () if frame is None else source.changed_at(frame, source.parameter_of_copy)
    name = parts.name_of(failure.clue("target"))
    label = Message("label.made_expanded", {"name": name})
    return statements.stopped(
        failure,
        "GS308",
        "expanded_written",
        between=() if frame is None or not made_by_class else statements.at_frame("created", frame, label),
        fixes=lambda values: (
            parts.fix("clone_before_mutation", "preserved", values, lines=lines, summary="help.parameter_of_copy"),
            parts.fix("compute_in_forward", "changed", values, summary="help.expand_in_forward"),
        ),
    )


def _buffer_expanded(failure: Failure, definition: Frame | None, attribute: str) -> Diagnosis:
    """Diagnose a write into a buffer made of an expanded tensor: a new tensor would not be what the module keeps."""
    frame = None if definition is None else source.bound_in_class(definition, attribute)
    lines = () if frame is None else source.changed_at(frame, source.buffer_of_copy)
    label = Message("label.made_expanded", {"name": attribute})
    return statements.stopped(
        failure,
        "GS308",
        "expanded_written",
        between=() if frame is None else statements.at_frame("created", frame, label),
        fixes=lambda values: (
            parts.fix("clone_before_mutation", "preserved", values, lines=lines, summary="help.buffer_of_copy"),
        ),
    )


def _found_late(failure: Failure) -> Diagnosis:
    """Diagnose shared memory found by backward: a write with a mask or an index succeeds, and its backward fails."""
    clues = tuple(clue for clue in failure.clues_of("overlapping_write") if clue.site is not None)
    frame = None if clues[-1].site is None else clues[-1].site.user_frame
    written = None if frame is None else source.writing_at(frame)
    name = written.target if written is not None else Message("label.unnamed")
    values = {"name": name, "op": label_texts.as_written(clues[-1].op)}
    made = None if frame is None or written is None else source.definition_of(frame, written.target)
    copied = () if frame is None or written is None else copied_where_made(frame, written.target)
    # Backward begins with the last computed value.
    passing = made.elements[clues[-1].count("turn") % len(made.elements)] if made and made.elements else None
    key = "label.taken_in_turn" if made is not None and made.is_loop else "label.bound"
    new, result = _written_once(failure, clues, values), parts.fix("out_of_place", "preserved", values)
    copy = parts.fix("clone_before_mutation", "preserved", values, lines=copied)
    created = (
        ()
        if made is None
        else statements.at_frame("created", made.frame, Message(key, {"name": name, "value": made.value}))
    )
    return parts.diagnosis(
        failure,
        "GS308",
        "expanded_written",
        values=values,
        explanation="explanation.expanded_written_late",
        labels=(
            *created,
            *parts.labels_of(clues, "written", "label.expanded_written_late", values),
            *parts.used(failure, "label.overlap_found"),
        ),
        tensor=parts.tensor_of(clues[-1], passing or (name if isinstance(name, str) else None)),
        fixes=new if new and not copied else (copy, next((one for one in new if one.kind == result.kind), result)),
    )


def _written_once(failure: Failure, writes: tuple[Clue, ...], values: Mapping[str, object]) -> tuple[Fix, ...]:
    """A new tensor at the statement that wrote, where it is one: an argument may be a copy to nobody else."""
    places = {
        (one.site.user_frame.file, one.site.user_frame.line) for one in writes if one.site and one.site.user_frame
    }
    fixes = statements.new_tensor_at(failure, writes, values) if len(places) == 1 else ()
    return fixes if any(one.lines for one in fixes) else ()


def copy_where_made(
    failure: Failure, values: Mapping[str, object], kind: str = "clone_before_mutation"
) -> tuple[Fix, ...]:
    """Bind the name to a copy from the start: ``x = y.expand(3, 4).clone()``; without a line if that is unknown."""
    target, frame = failure.clue("target"), failure.site.user_frame
    lines = () if target is None or not target.name or frame is None else copied_where_made(frame, target.name)
    return (parts.fix(kind, "preserved", values, lines=lines),)


def copied_where_made(frame: Frame, name: str) -> Lines:
    """The changed lines that bind ``name`` to a copy from the start; for a loop over names, each of them."""
    made = source.definition_of(frame, name)
    if made is None:
        return ()
    if made.is_loop:
        each = [copied_where_made(made.frame, element) for element in made.elements]
        return tuple(line for lines in each for line in lines) if all(each) else ()
    change = source.clone_at_save(made.frame, name)
    is_there = change is not None and made.frame.line == change.line
    return source.changed_lines(made.frame.file, change) if change is not None and is_there else ()
