"""Judgements on the two names of an update that computes with itself, read off the source."""

from __future__ import annotations

import re
from typing import Any

from gradsan import source
from gradsan.detect.meaning.callers_values import gives_one_twice
from gradsan.model import Frame, Site
from gradsan.record.log import RawWrite
from gradsan.record.stacks import symbolise

_COPY = re.compile(r"([\w.\[\]\"']+)\.copy_\(([\w.\[\]\"']+)\)")
_OF_ARRAY = re.compile(r"torch\.(?:from_numpy|as_tensor|asarray)\(([^,()]*)\)")


def is_meant(site: Site, pair: tuple[str, str], op: str, before: RawWrite | None) -> bool:
    """Whether both operands are one tensor on purpose; ``before`` is the last write to it by another line."""
    frame = site.user_frame
    if frame is None or gives_one_twice(site, frame, pair):
        return True
    return _is_written_back(frame, pair, before) or _is_passed_on(frame, pair, op, before)


def _is_written_back(frame: Frame, pair: tuple[str, str], before: RawWrite | None) -> bool:
    """Whether the operand was made from the target and then written: ``q = p.float(); q.add_(u); p.copy_(q)``.

    The target has those values then, whether or not the conversion has copied. A backup to be restored is another
    case: there the target was written by its own name since.
    """
    target, name = pair
    written = None if before is None else symbolise(before.stack).user_frame
    if before is None or written is None or (written.file, written.function) != (frame.file, frame.function):
        return False
    expression = source.written_expression(written, before.op)
    if expression is None or expression.removesuffix(".data") != name:
        return False
    made = (place for _, place in source.assignments(written, name) if source.in_same_function(place, written))
    read = [one for place in made if (at := source.statement_at(place)) for one in source.consumed_names(at)]
    return any(one == target or one.startswith(f"{target}.") for one in read)


def restores(frame: Frame, is_leaf: bool) -> bool:
    """Whether ``p.data.copy_(old)`` gives a parameter older values; of ``p.copy_(old)`` where ``p`` ``is_leaf``."""
    statement = source.statement_at(frame)
    found = None if statement is None else _COPY.search(statement.text)
    return found is not None and (is_leaf or found[1].endswith(".data")) and not found[2].endswith(".data")


def _is_passed_on(frame: Frame, pair: tuple[str, str], op: str, before: RawWrite | None) -> bool:
    """Whether the operand is what a function made of the target: ``p.copy_(new)`` after ``new = project(p, bounds)``.

    There is nothing to copy where it has returned the target itself. If the target was written since, ``new`` is rather
    a backup.
    """
    target, name = pair
    line, given = source.made_by_call(frame, name) if op == "copy_" else (0, frozenset())
    written = None if before is None else symbolise(before.stack).user_frame
    is_backup = written is not None and (not source.in_same_function(written, frame) or written.line > line)
    return target in given and line < frame.line and not is_backup


def compared(frame: Frame, facts: dict[str, Any], twice: int) -> tuple[str, str] | None:
    """Return the two names that an operation at ``frame`` compares; of non-leaf tensors one must be a gradient.

    ``twice`` is the number of tensors passed twice, not as aliases. A kernel of points with themselves gets one
    so, as does a function of two arguments from some callers; a list of parameters compared with itself has several.
    What a call returns has no name; it counts where the memory was written: ``quantised(w) - w``.
    """
    names = [re.sub(r"\.(data|detach\(\))", "", one) for one in source.operand_expressions(frame)]
    called = source.called_operand(frame) if len(names) == 1 and (facts["is_written"] or facts["is_array"]) else None
    if called is not None:
        array = _OF_ARRAY.fullmatch(called) if facts["is_array"] else None
        names = [called, *names] if array is None else [*names, array[1]]
    line = source.source_line(frame.file, frame.line) or ""
    is_leaf = facts["is_leaf"] or any(f"{one}.data" in line for one in names)
    if len(names) != 2 or names[0] == names[1]:
        return None
    if twice and is_leaf and (twice == 1 or all(source.is_argument(frame, one) for one in names)):
        return None
    return (names[0], names[1]) if is_leaf or any(one.endswith(".grad") for one in names) else None
