"""A conflict looked at closely: which writes count, what the tensor is called, what needs it. Reads source text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gradsan import source
from gradsan.diagnose.needs import Need, need_of, op_name
from gradsan.diagnose.overlap import overlap
from gradsan.model import Conflict, Frame, Message, Name, Site, Write


@dataclass(frozen=True, slots=True)
class Facts:
    """What the causes decide by.

    ``writes`` are those that count: they overlap what was saved, or it is not known that they do not. ``missed`` are
    the logged writes that only touched other bytes of the storage. ``name`` is what the tensor is called, a Message
    where it has no name of its own.
    """

    conflict: Conflict
    writes: tuple[Write, ...]
    missed: tuple[Write, ...]
    name: str | Message
    name_kind: str
    op: str
    need: Need | None

    @property
    def is_false_alarm(self) -> bool:
        """Whether every move of the counter is explained by writes to other bytes or by changes of shape only."""
        conflict = self.conflict
        return not self.writes and bool(self.missed) and not conflict.unexplained and not conflict.log_was_cut

    @property
    def updates(self) -> tuple[Write, ...]:
        """The writes that are parameter updates: optimizer steps, and leaves written under ``no_grad``."""
        return tuple(write for write in self.writes if is_update(write))

    @property
    def first(self) -> Write | None:
        """The first write that counts."""
        return self.writes[0] if self.writes else None


def is_update(write: Write) -> bool:
    """Whether a write is an update of a parameter rather than a part of the computation."""
    return write.kind == "step" or (write.is_parameter and not write.grad_enabled)


def examine(conflict: Conflict) -> Facts:
    """Work out the facts of one conflict."""
    counting: list[Write] = []
    missed: list[Write] = []
    for write in conflict.writes:
        (counting if _may_touch(conflict, write) else missed).append(write)
    name, kind = _name(conflict, (*counting, *missed))
    save = conflict.save
    return Facts(
        conflict=conflict,
        writes=tuple(counting),
        missed=tuple(missed),
        name=name,
        name_kind=kind,
        op=op_name(save.node) if save.node else "?",
        need=need_of(save.node, save.slot.partition("[")[0]) if save.node and save.slot else None,
    )


def place(site: Site) -> Frame | None:
    """The frame to show for a site: the user's own, else the outermost that is known."""
    return site.user_frame or (site.frames[-1] if site.frames else None)


def inner_frames(site: Site) -> tuple[Frame, ...]:
    """The frames below the user frame, outermost first."""
    own = site.user_frame
    if own is None:
        return ()
    position = max(index for index, frame in enumerate(site.frames) if frame is own)
    return site.frames[position + 1 :]


def _may_touch(conflict: Conflict, write: Write) -> bool:
    if write.kind == "metadata":
        return False
    if write.region is None:
        return True
    return overlap(conflict.save.tensor.region, write.region)


def _name(conflict: Conflict, writes: tuple[Write, ...]) -> tuple[str | Message, str]:
    """What the tensor is called: a lasting name first, then what the writing line calls it, then any live variable."""
    lasting = next((name for name in conflict.names if name.kind != "value"), None)
    written = _written_name(writes)
    if lasting is not None:
        # batch[0] says less than the variable that the writing line calls it by; p of "for p in params" says nothing.
        is_position = lasting.kind == "data" and re.search(r"\[\d+\]$", lasting.text)
        return (written if is_position and written is not None else lasting.text), lasting.kind
    if written is not None:
        return written, "value"
    if conflict.names:
        return conflict.names[0].text, conflict.names[0].kind
    return _name_from_save(conflict) or _nameless(conflict), "value"


def _written_name(writes: tuple[Write, ...]) -> str | None:
    for write in writes:
        frame = place(write.site)
        if frame is not None:
            found = source.written_expression(frame, write.op, inner_frames(write.site))
            if found is not None:
                return found
    return None


def _name_from_save(conflict: Conflict) -> str | None:
    frame = place(conflict.save.site)
    if frame is None:
        return None
    if conflict.save.is_output:
        statement = source.statement_at(frame)
        names = source.assigned_names(statement) if statement is not None else []
        inner = inner_frames(conflict.save.site)
        return names[0] if len(names) == 1 and not any("container.py" in below.file for below in inner) else None
    operands = source.operand_expressions(frame)
    return operands[0] if len(operands) == 1 else None


def _nameless(conflict: Conflict) -> str | Message:
    frame = place(conflict.save.site)
    callee = source.called_expression(frame) if frame is not None else None
    return callee if callee is not None else Message("label.unnamed")


def best_name(names: tuple[Name, ...]) -> str | None:
    """The first of the names, None where there are none."""
    return names[0].text if names else None
