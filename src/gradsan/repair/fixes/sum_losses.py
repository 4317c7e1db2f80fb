"""One backward for the sum: two losses of the same forward need neither two passes nor a kept graph."""

from __future__ import annotations

import ast

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import _blocks as blocks


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Take the earlier backward away and let the later one start from the sum of both losses."""
    used = next(iter(blocks.labels(diagnosis, "used")), None)
    freed = next(iter(blocks.labels(diagnosis, "freed")), None)
    if used is None or freed is None:
        return ()
    pair = blocks.in_one_block(freed, used)
    if pair is None or pair[0].index >= pair[1].index:
        return ()
    first, second = pair
    source = first.source
    calls = [blocks.method_call(place.statement, "backward") for place in pair]
    if not all(blocks.is_whole_lines(source, place.statement) for place in pair):
        return ()
    losses = []
    for call in calls:
        if call is None or call.args or any(one.arg not in ("retain_graph",) for one in call.keywords):
            return ()
        assert isinstance(call.func, ast.Attribute)
        losses.append(source.text(call.func.value))
    between = first.block[first.index + 1 : second.index]
    if any(blocks.method_call(node, "step") or blocks.method_call(node, "zero_grad") for node in between):
        return ()
    span = source.span(second.statement)
    indent = source.lines[span.line - 1][: span.column - 1]
    keeps = calls[1] is not None and any(one.arg == "retain_graph" for one in calls[1].keywords)
    argument = "retain_graph=True" if keeps else ""
    changes = {
        **blocks.removed(source, first.statement),
        **dict.fromkeys(range(span.line, span.end_line + 1), ""),
        span.line: f"{indent}({losses[0]} + {losses[1]}).backward({argument})",
    }
    return (blocks.fix("sum_losses", blocks.lines_changed(source, changes)),)
