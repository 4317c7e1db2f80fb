"""What another network has computed, cut off its graph where a loss that is not meant to train it reads it.

The usual shape: the generator steps, and the loss of the discriminator on ``fake`` still reaches back into the
generator. ``discriminator(fake.detach())`` ends there. Whether any gradient is lost by it, a run shows.
"""

from __future__ import annotations

import ast

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Edit, changed_lines, edited
from gradsan.source.tree import header_nodes


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``.detach()`` behind every variable that was computed before the step and that a later loss is computed from."""
    used = next(iter(blocks.labels(diagnosis, "used")), None)
    written = blocks.labels(diagnosis, "written")
    if used is None or not written or diagnosis.cause not in blocks.STEPPED:
        return ()
    pairs = [pair for one in written if (pair := blocks.in_one_block(one, used)) is not None]
    pairs = [pair for pair in pairs if pair[0].index < pair[1].index]
    if len(pairs) != len(written):
        return ()
    step, backward = min(pairs, key=lambda pair: pair[0].index)
    saved = next(iter(blocks.labels(diagnosis, "saved")), None)
    first = None if saved is None else blocks.at_block(saved, step.block)
    computed = _hanging_on(step.block[first or 0 : step.index])
    losses = blocks.names_read([backward.statement])
    lines: list[tuple[str, int, str]] = []
    names: list[str] = []
    for node in step.block[step.index + 1 : backward.index]:
        if not _computes(node):
            continue
        reads = [
            one
            for one in header_nodes(node)
            if isinstance(one, ast.Name) and one.id in computed and _is_given(step, one, losses)
        ]
        spans = [step.source.span(one) for one in reads]
        edits = [Edit.insert(span.end_line, span.end_column, ".detach()") for span in spans]
        change = edited(step.source, edits, "detach")
        if change is not None:
            lines += changed_lines(step.source.file, change)
            names += [one.id for one in reads]
    if not lines:
        return ()
    shown = ", ".join(dict.fromkeys(names))
    return (blocks.fix("detach_other_network", tuple(lines), name=shown),)


def _hanging_on(statements: list[ast.stmt]) -> set[str]:
    """What the first of ``statements`` binds, and what the others compute from it."""
    names: set[str] = set()
    for position, node in enumerate(statements):
        if _computes(node) and (position == 0 or blocks.names_read([node]) & names):
            names |= blocks.names_bound(node)
    return names


def _computes(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign) and any(isinstance(one, ast.Call) for one in ast.walk(node))


def _is_given(place: blocks.Placed, name: ast.Name, losses: set[str]) -> bool:
    """Whether a network, as it seems, is given the name: ``fake`` of ``critic(fake).mean()``.

    What makes up a whole loss (``loss = criterion(scores, ones)``) is left alone: cut off there, it has no graph.
    """
    parent, field = place.source.parents[name]
    statement = place.source.parents.get(parent, (None, ""))[0]
    is_loss = isinstance(statement, ast.Assign | ast.AnnAssign) and bool(blocks.names_bound(statement) & losses)
    return isinstance(parent, ast.Call) and field == "args" and not is_loss
