"""Name of a conflict's tensor, as a person would call it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gradsan import source
from gradsan.diagnose.levels import inner_frames, lifted, place, shared_level, user_frames
from gradsan.model import Conflict, Message, Site, Write

# Saved by an operation inside of a layer that was called, these are the layer's own and no argument of the call.
_OF_A_LAYER = ("weight", "mat2")


def name_of(conflict: Conflict, writes: Iterable[Write]) -> tuple[str | Message, str]:
    """The name and its kind: a lasting name first, then what the writing line calls it, then any live variable."""
    # What has a history is no data: a variable that is data holds a detached alias of it.
    passing = ("value", "data") if conflict.save.tensor.requires_grad else ("value",)
    lasting = next((name for name in conflict.names if name.kind not in passing), None)
    written = _written(conflict, writes)
    if lasting is not None:
        # batch[0] says less than the variable that the writing line calls it by; p of "for p in params" says nothing.
        is_position = lasting.kind == "data" and re.search(r"\[\d+\]$", lasting.text)
        return (written if is_position and written is not None else lasting.text), lasting.kind
    if written is not None:
        return written, "value"
    if conflict.names:
        return conflict.names[0].text, conflict.names[0].kind
    return _at_save(conflict) or _nameless(conflict), "value"


def producer(conflict: Conflict) -> str | None:
    """What was called where a value without a name of its own was saved: ``self.net`` of ``return self.net(x)``."""
    frame = place(conflict.save.site)
    return source.called_expression(frame) if frame is not None else None


def _written(conflict: Conflict, writes: Iterable[Write]) -> str | None:
    """The written expression of the first write that shows one, in the words of the function that also saved it."""
    for write in writes:
        frame = place(write.site)
        found = None if frame is None else source.written_expression(frame, write.op, inner_frames(write.site))
        if found is not None:
            return _where_saved(found, write.site, conflict)
    return None


def _where_saved(name: str, site: Site, conflict: Conflict) -> str:
    written, saved = user_frames(site), user_frames(conflict.save.site)
    level = shared_level(written, saved)
    if level < 0:
        return name
    found = lifted(name, written, level, site) or name
    result = result_at_save(conflict) if conflict.save.is_output else None
    there = source.operand_expressions(saved[-1]) if result is None else [result]
    at_save = {lifted(one, saved, level) for one in there}
    alias = source.alias_of(written[level], found) if found not in at_save else None
    return alias if alias is not None and alias in at_save else found


def _at_save(conflict: Conflict) -> str | None:
    if conflict.save.is_output:
        return result_at_save(conflict)
    operands = operands_at_save(conflict)
    return operands[0] if len(operands) == 1 else None


def result_at_save(conflict: Conflict) -> str | None:
    """What the user's line binds to the result of the operation that saved it.

    Nothing where the line goes on computing with what the call gives it, or calls layers one after another: what it
    binds is another tensor.
    """
    frame = place(conflict.save.site)
    statement = source.statement_at(frame) if frame is not None else None
    if frame is None or statement is None or not source.binds_result(frame):
        return None
    names = source.assigned_names(statement)
    inner = inner_frames(conflict.save.site)
    return names[0] if len(names) == 1 and not any("container.py" in below.file for below in inner) else None


def operands_at_save(conflict: Conflict) -> list[str]:
    """What the user's line gives to the operation that saved one of its operands, as it stands there.

    Nothing where that line called layers one after another, or where the saved operand is a layer's own parameter:
    what such a line gives on is another tensor.
    """
    frame = place(conflict.save.site)
    if frame is None:
        return []
    inner = inner_frames(conflict.save.site)
    if any("container.py" in below.file for below in inner) or (inner and conflict.save.slot in _OF_A_LAYER):
        return []
    return source.operand_expressions(frame)


def _nameless(conflict: Conflict) -> Message:
    callee = producer(conflict)
    return Message("label.unnamed") if callee is None else Message("label.value_inside", {"callee": callee})
