"""The forward that the loss hangs on runs once more after the step, with the parameters as they are by then."""

from __future__ import annotations

import ast

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import _blocks as blocks

_CAUSES = blocks.STEPPED | {"input_changed_between_passes", "statistics_updated"}


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Repeat the assignments between the save and the write on which the loss depends; else all it depends on."""
    used = next(iter(blocks.labels(diagnosis, "used")), None)
    saved = next(iter(blocks.labels(diagnosis, "saved")), None)
    written = blocks.labels(diagnosis, "written")
    if used is None or not written or diagnosis.cause not in _CAUSES:
        return ()
    pairs = [blocks.in_one_block(one, used) for one in written]
    places = [pair for pair in pairs if pair is not None and pair[0].index < pair[1].index]
    if len(places) != len(pairs):
        return ()
    last, backward = max(places, key=lambda pair: pair[0].index)
    if not blocks.is_whole_lines(last.source, last.statement):
        return ()
    start = None if saved is None else blocks.at_block(saved, last.block)
    found: list[Fix] = []
    words = "recompute_forward" if diagnosis.cause in blocks.STEPPED else "recompute_after_change"
    for first, only_dependent in ((start, True), (0, False)):
        if first is None or first >= last.index:
            continue
        again = _slice(last, backward, first, only_dependent)
        if not again:
            continue
        copies = "\n".join(blocks.text_of(last.source, node) for node in again)
        span = last.source.span(last.statement)
        text = f"{last.source.lines[span.end_line - 1]}\n{copies}"
        fix = blocks.fix("recompute_forward", blocks.lines_changed(last.source, {span.end_line: text}), words)
        if fix not in found:
            found.append(fix)
    return tuple(found)


def _slice(write: blocks.Placed, backward: blocks.Placed, first: int, only_dependent: bool) -> list[ast.stmt]:
    """The assignments from ``first`` to the write which the statements after it, up to the backward, depend on.

    With ``only_dependent``, of these only such as hang on what the statement at ``first`` binds: inputs and random
    numbers drawn before it stay what they were.
    """
    between = write.block[first : write.index]
    hanging: set[ast.stmt] = set()
    tainted: set[str] = set()
    for position, node in enumerate(between):
        if position == 0 or blocks.names_read([node]) & tainted:
            hanging.add(node)
            tainted |= blocks.names_bound(node)
    needed = blocks.names_read(write.block[write.index + 1 : backward.index + 1])
    again: list[ast.stmt] = []
    for node in reversed(between):
        bound = blocks.names_bound(node)
        if not bound & needed or (only_dependent and node not in hanging) or blocks.constructs(write.source, node):
            continue
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not blocks.is_whole_lines(write.source, node):
            return []
        again.append(node)
        needed = (needed - bound) | blocks.names_read([node])
    return again[::-1]
