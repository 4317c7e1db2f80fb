"""Tensors that a loop fills by parts, with the graph of what is stored, for rounds that come later."""

from __future__ import annotations

import ast

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited
from gradsan.source.identifiers import chain_key
from gradsan.source.locate import statement_at


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


def _filled(target: ast.expr) -> list[str]:
    """``S`` and ``A`` of the targets ``S[i], A[i]``."""
    if isinstance(target, ast.Tuple | ast.List):
        return [name for one in target.elts for name in _filled(one)]
    key = chain_key(target.value) if isinstance(target, ast.Subscript) else None
    return [] if key is None else [key]
