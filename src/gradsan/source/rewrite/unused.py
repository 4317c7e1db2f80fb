"""Updates by gradients of which some may be missing: what has none stays as it is."""

from __future__ import annotations

import ast

from gradsan.model import Frame, Lines
from gradsan.source.change import Edit, edited_lines, with_keyword
from gradsan.source.identifiers import leaf_name
from gradsan.source.locate import expressions_at, statement_at
from gradsan.source.tree import SourceFile


def kept_without_gradient(frame: Frame) -> Lines:
    """``allow_unused=True`` in the call of ``autograd.grad`` at ``frame``, and ``p if g is None else p - lr * g``.

    Where the gradients are read in one loop or comprehension over ``zip(…)`` alone, and there in one such difference.
    """
    statement = statement_at(frame)
    calls = {
        place.node
        for place in expressions_at(frame)
        if isinstance(place.node, ast.Call) and leaf_name(place.node.func) == "grad"
    }
    if statement is None or len(calls) != 1:
        return ()
    source, call = statement.source, calls.pop()
    argument = with_keyword(source, call, "allow_unused", "True")
    update = _update_of(source, statement.node, call)
    if argument is None or update is None:
        return ()
    difference, kept, gradient = update
    text = f"{kept} if {gradient} is None else {source.text(difference)}"
    return edited_lines(source, [argument, Edit(source.span(difference), text)])


def _update_of(source: SourceFile, node: ast.stmt, call: ast.Call) -> tuple[ast.expr, str, str] | None:
    """The difference, and the names of what is updated and of its gradient."""
    given: ast.expr = call
    scope: ast.AST = source.function(node) or source.module
    if isinstance(node, ast.Assign) and node.value is call:
        if len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
            return None
        name = node.targets[0].id
        reads = [one for one in ast.walk(scope) if isinstance(one, ast.Name) and one.id == name and one is not given]
        reads = [one for one in reads if isinstance(one.ctx, ast.Load)]
        if len(reads) != 1:
            return None
        given = reads[0]
    pairs = source.parents[given][0]
    if not isinstance(pairs, ast.Call) or leaf_name(pairs.func) != "zip" or given not in pairs.args:
        return None
    around = source.parents[pairs][0]
    if not isinstance(around, ast.comprehension | ast.For) or around.iter is not pairs:
        return None
    target = around.target
    if not isinstance(target, ast.Tuple) or len(target.elts) != len(pairs.args):
        return None
    gradient = target.elts[pairs.args.index(given)]
    if not isinstance(gradient, ast.Name):
        return None
    inside = source.parents[around][0] if isinstance(around, ast.comprehension) else around
    reads = [
        one
        for one in ast.walk(inside)
        if isinstance(one, ast.Name) and one.id == gradient.id and isinstance(one.ctx, ast.Load)
    ]
    others = {one.id for one in ast.walk(target) if isinstance(one, ast.Name)} - {gradient.id}
    if len(reads) != 1:
        return None
    difference = source.parents[reads[0]][0]
    while isinstance(difference, ast.BinOp) and isinstance(difference.op, ast.Mult):
        difference = source.parents[difference][0]
    if not isinstance(difference, ast.BinOp) or not isinstance(difference.op, ast.Sub):
        return None
    kept, place = difference.left, source.parents[difference][0]
    is_alone = isinstance(place, ast.ListComp | ast.GeneratorExp | ast.DictComp | ast.Call | ast.Assign)
    if not isinstance(kept, ast.Name) or kept.id not in others or not is_alone or not _is_value(place, difference):
        return None
    return difference, kept.id, gradient.id


def _is_value(place: ast.AST, difference: ast.expr) -> bool:
    """Whether the difference is all that ``place`` binds, collects or is made of."""
    if isinstance(place, ast.DictComp):
        return place.value is difference
    if isinstance(place, ast.ListComp | ast.GeneratorExp):
        return place.elt is difference
    if isinstance(place, ast.Call):
        return difference in place.args and leaf_name(place.func) == "append"
    return isinstance(place, ast.Assign) and place.value is difference
