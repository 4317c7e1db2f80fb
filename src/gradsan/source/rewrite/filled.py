"""Tensors that a loop fills by parts, with the graph of what is stored, for rounds that come later."""

from __future__ import annotations

import ast

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited
from gradsan.source.identifiers import assigned_names, chain_key, consumed_names, local_nodes
from gradsan.source.locate import statement_at

_STEPS_BACK = 2


def detach_behind_loop(filling: Frame, used: Frame, name: str) -> Change | None:
    """A line that detaches ``name`` behind the loop that fills it at a frame, and what the same statement fills.

    ``used`` is in rounds that do not run this loop again: they read a rollout, a memory, the advantages.
    """
    own, other = statement_at(filling), statement_at(used)
    if own is None or other is None or own.function is not other.function:
        return None
    loops = [loop for loop in own.loops if loop not in other.loops]
    if not loops or all(loop in own.loops for loop in other.loops):
        return None
    names = [name for target in getattr(own.node, "targets", ()) for name in _filled(target)]
    if name not in names:
        return None
    source, span = own.source, own.source.span(loops[0])
    each = list(dict.fromkeys(names))
    text = f"{', '.join(each)} = {', '.join(f'{one}.detach()' for one in each)}"
    line = f"\n{source.indent(span)}{text}"
    return edited(source, [Edit.insert(span.end_line, span.end_column, line)], "detach")


def reads_filled(bound_at: Frame) -> bool:
    """Whether the value bound at a frame is of a tensor that a loop has filled by parts: ``flat = values.reshape(-1)``.

    A rollout: to compute it anew is to collect it anew. Definitions of the same function are followed some steps back.
    """
    own = statement_at(bound_at)
    scope = None if own is None else own.scope
    if own is None or scope is None:
        return False
    before = [one for one in local_nodes(scope) if isinstance(one, ast.Assign) and one.lineno < own.node.lineno]
    read = set(consumed_names(own.node))
    for _ in range(_STEPS_BACK):
        read |= {name for one in before if read & set(assigned_names(one)) for name in consumed_names(one)}
    loops = [one for one in local_nodes(scope) if isinstance(one, ast.For | ast.While) and one not in own.loops]
    within = [one for one in before if any(loop.lineno < one.lineno <= (loop.end_lineno or 0) for loop in loops)]
    return any(read & set(_filled(target)) for one in within for target in one.targets)


def _filled(target: ast.expr) -> list[str]:
    """``S`` and ``A`` of the targets ``S[i], A[i]``."""
    if isinstance(target, ast.Tuple | ast.List):
        return [name for one in target.elts for name in _filled(one)]
    key = chain_key(target.value) if isinstance(target, ast.Subscript) else None
    return [] if key is None else [key]
