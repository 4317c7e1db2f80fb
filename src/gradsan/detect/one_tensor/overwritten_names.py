"""Names of values that are overwritten before they are compared: ``last = ring.newest(); ring.put(z); z - last``.

``last`` shares the memory that the later call fills with what it is then compared with: their difference is zero in
every round. The memory shows that: it was written as a whole since the round began, and has the other operand's very
values. The source shows that an older value was meant: the name was bound before that write, in the same function, and
the write does not use it.
"""

from __future__ import annotations

from typing import Any

import torch

from gradsan import _torch, source
from gradsan.model import Clue, Frame, Region, Site
from gradsan.overlap import covers
from gradsan.record.ledger import QUIET_KINDS, as_write
from gradsan.record.log import Log, RawStack, RawWrite, logged_writes
from gradsan.record.stacks import is_of_program, symbolise

ROW = "name_overwritten"
_FILLS = frozenset({"copy_", "__setitem__"})


def fills(core: Log, since: int, kept: torch.Tensor, other: torch.Tensor) -> RawWrite | None:
    """Return the last write to a tensor's memory, if it filled all of that and left it equal to ``other``."""
    storage = _torch.storage_or_none(kept)
    write = next((one for one in reversed(logged_writes(core, since)) if one.storage == storage), None)
    if write is None or write.op not in _FILLS or write.kind in QUIET_KINDS or not is_of_program(write.stack):
        return None
    where = int(kept.storage_offset()), tuple(kept.shape), tuple(kept.stride()), kept.element_size()
    region, written = Region(*where), as_write(write).region
    with _torch.hushed():
        is_filled = written is not None and covers(written, region) and torch.equal(kept, other.detach())
    return write if is_filled else None


def clues(compared: RawStack, write: RawWrite, facts: dict[str, Any]) -> tuple[Clue, ...] | None:
    """Return where the name was bound, overwritten and compared; None where the source does not show that order."""
    read_at, written = symbolise(compared), symbolise(write.stack)
    read, folder = read_at.user_frame, _torch.package_folder()
    if read is None or not all(one.file.startswith(folder) for one in read_at.inner_frames):
        return None
    at = next((one for one in reversed(written.frames) if one.is_user and source.in_same_function(one, read)), None)
    statement = None if at is None else source.statement_at(at)
    if at is None or statement is None:
        return None
    used = {*source.consumed_names(statement), *source.assigned_names(statement)}
    for name in source.operand_expressions(read):
        bound = _bound_before(read, at, name)
        if bound is not None and not any(one.partition("[")[0] == name for one in used):
            own = Clue("written", written, op=write.op, name=name, values=facts)
            return Clue("bound", Site((bound,))), own, Clue("read", read_at, name=name)
    return None


def _bound_before(read: Frame, written: Frame, name: str) -> Frame | None:
    """The one statement that binds a local name, if it stands before the write, and that before the read."""
    if not name.isidentifier():
        return None
    places = [one for part, one in source.assignments(read, name) if part == name]
    own = [one for one in places if source.in_same_function(one, read)]
    is_ordered = len(own) == 1 and own[0].line < written.line < read.line
    return own[0] if is_ordered and source.in_same_loops(own[0], written, read) else None
