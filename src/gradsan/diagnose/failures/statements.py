"""What the diagnoses of errors raised at a writing statement have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gradsan import source
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.failures import parts
from gradsan.model import Clue, Failure, Fix, Frame, Label, Message, NamedTensor, Site

Lines = tuple[tuple[str, int, str], ...]


def name_of(target: Clue | None) -> str | Message:
    """What the source calls the tensor, or words for one without a name."""
    return target.name if target is not None and target.name else Message("label.unnamed")


def op_shown(target: Clue | None) -> str:
    """The operation as one writes it: ``+=`` for ``__iadd__``."""
    if target is None or not target.op:
        return "?"
    return label_room.as_written([target.op])[0]


def known_as(target: Clue | None) -> tuple[Message, ...]:
    """The tensor's name in its module, where the source calls it something else."""
    other = "" if target is None else target.values.get("known_as", "")
    if target is None or not other or other == target.name:
        return ()
    return (Message("note.known_as", {"name": target.name, "known_as": other}),)


def named_tensor(target: Clue | None) -> NamedTensor | None:
    """The tensor as the report shows it; None where it was not found."""
    if target is None:
        return None
    facts = target.values
    if "shape" not in facts:
        return NamedTensor(target.name, (), "?", "?", None, None) if target.name else None
    return NamedTensor(target.name, facts["shape"], facts["dtype"], facts["device"], None, None)


def created(failure: Failure, target: Clue | None) -> tuple[Label, ...]:
    """Where the tensor was made: the operation that capture knows of, else the assignment that the source shows."""
    made = parts.clue(failure, "made")
    name = name_of(target)
    if made is not None and made.site is not None:
        return parts.label_of(made, "created", "label.made", {"name": name, "op": parts.op_of(made)})
    frame = failure.site.user_frame
    found = None if frame is None or target is None or target.name is None else source.definition_of(frame, target.name)
    if found is None:
        return ()
    key = "label.taken_in_turn" if found.is_loop else "label.bound"
    return at_frame("created", found.frame, Message(key, {"name": name, "value": found.value}))


def at_frame(role: Any, frame: Frame, message: Message) -> tuple[Label, ...]:
    """A label at a place that the source told."""
    return label_room.at(role, Site((frame,)), message)


def changed(failure: Failure, suggest: Callable[[Frame], source.Change | None]) -> Lines:
    """The changed lines that ``suggest`` gives for the failing statement."""
    frame = failure.site.user_frame
    change = None if frame is None else suggest(frame)
    return () if frame is None or change is None else source.changed_lines(frame.file, change)


def new_tensor(failure: Failure, values: Mapping[str, Any]) -> tuple[Fix, ...]:
    """Compute a new tensor, or write into a copy; the one with a concrete line first."""
    target = parts.clue(failure, "target")
    op = "" if target is None else target.op or ""
    new = changed(failure, lambda frame: source.out_of_place(frame, op))
    copy = changed(failure, lambda frame: source.clone_before(frame, op))
    fixes = (
        parts.fix("out_of_place", "preserved", values, lines=new),
        parts.fix("clone_before_mutation", "preserved", values, lines=copy),
    )
    return tuple(sorted(fixes, key=lambda fix: not fix.lines))
