"""Loop that writes to the elements of a list or dict, as one that makes them anew."""

from __future__ import annotations

import ast

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited
from gradsan.source.identifiers import Binding, bindings_of, local_nodes
from gradsan.source.modules import shape_in_source
from gradsan.source.rewrite.out_of_place import augmented_value, chain_value
from gradsan.source.rewrite.rebinding import can_rebind
from gradsan.source.rewrite.scatter import whole_of_part
from gradsan.source.targets import target_at
from gradsan.source.tree import SourceFile

__all__ = ["rebuilt_list"]


def rebuilt_list(frame: Frame, op: str, are_results: bool = False) -> Change | None:
    """``for w, g in zip(fast, grads): w -= g`` as ``fast = [w - g for w, g in zip(fast, grads)]``.

    Only where the loop does nothing else, and its elements are results of a computation: the parameters of a module
    are more than a list of them. A run knows (``are_results``), or the function has computed them itself.
    """
    found = target_at(frame, op)
    if found is None or not isinstance(found[1].node, ast.Name):
        return None
    source, statement, name = found[0].source, found[0].statement, found[1].node.id
    loop = _loop_of(source, statement, found[0].node)
    if loop is None:
        return None
    value = _value(source, statement, found[0].node)
    walked = _walked(loop.target, loop.iter, name)
    if value is None or walked is None or source.span(loop.iter).end_line != source.span(loop.target).line:
        return None
    variable, kept = walked
    of_dict = isinstance(kept, ast.Call)
    whole = kept.func.value if isinstance(kept, ast.Call) and isinstance(kept.func, ast.Attribute) else kept
    if not isinstance(whole, ast.Name) or not can_rebind(source, whole):
        return None
    bindings = _bindings(source, loop, whole.id)
    if not are_results and not _are_computed(bindings):
        return None
    head, iterated = source.text(loop.target), source.text(loop.iter)
    if of_dict:
        key = "key" if "key" not in (head + iterated + value) else "key_"
        at, around = source.span(variable), source.span(loop.target)
        start, end = at.column - around.column, at.end_column - around.column
        pair = f"({key}, {name})" if isinstance(loop.target, ast.Tuple) else f"{key}, {name}"
        head = head[:start] + pair + head[end:]
        iterated = iterated.replace(source.text(kept), f"{whole.id}.items()")
        text = f"{whole.id} = {{{key}: {value} for {head} in {iterated}}}"
    else:
        is_tuple = any(shape_in_source(source, one) == "tuple" for one in bindings)
        made = "tuple({})" if is_tuple else "[{}]"
        text = f"{whole.id} = {made.format(f'{value} for {head} in {iterated}')}"
    whole_of_loop = source.span(statement if isinstance(loop, ast.comprehension) else loop)
    return edited(source, [Edit(whole_of_loop, text)], "out_of_place")


def _loop_of(source: SourceFile, statement: ast.stmt, node: ast.AST) -> ast.For | ast.comprehension | None:
    """The loop that does nothing but ``statement``; of ``[w.sub_(g) for w, g in …]`` alone, its ``for``."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.ListComp):
        generators = statement.value.generators
        is_plain = len(generators) == 1 and not generators[0].ifs and not generators[0].is_async
        return generators[0] if is_plain and node in ast.walk(statement.value.elt) else None
    loop = source.parents.get(statement, (None, ""))[0]
    is_alone = isinstance(loop, ast.For) and loop.body == [statement] and not loop.orelse
    return loop if isinstance(loop, ast.For) and is_alone else None


def _value(source: SourceFile, statement: ast.stmt, node: ast.AST) -> str | None:
    part = whole_of_part(source, statement, node)
    if part is not None:
        return part
    if isinstance(statement, ast.AugAssign):
        return augmented_value(source, statement)
    chain = chain_value(source, node) if isinstance(statement, ast.Expr) and isinstance(node, ast.Call) else None
    if chain is None or not isinstance(statement, ast.Expr):
        return None
    whole = statement.value.elt if isinstance(statement.value, ast.ListComp) else statement.value
    return chain[1] if chain[0] is whole else None


def _walked(target: ast.expr, walked: ast.expr, name: str) -> tuple[ast.Name, ast.expr] | None:
    """The variable ``name`` and what it takes its elements from: ``fast``, or ``fast.values()``."""
    if isinstance(target, ast.Name) and target.id == name:
        function = walked.func if isinstance(walked, ast.Call) and not walked.args else None
        is_values = isinstance(function, ast.Attribute) and function.attr == "values"
        return (target, walked) if isinstance(walked, ast.Name) or is_values else None
    if not isinstance(target, ast.Tuple) or not isinstance(walked, ast.Call) or walked.keywords:
        return None
    if not isinstance(walked.func, ast.Name) or walked.func.id != "zip" or len(walked.args) != len(target.elts):
        return None
    found = [_walked(one, value, name) for one, value in zip(target.elts, walked.args, strict=True)]
    return next((one for one in found if one is not None), None)


def _bindings(source: SourceFile, loop: ast.For | ast.comprehension, name: str) -> list[Binding]:
    """What the function of the loop binds to ``name``."""
    scope = source.function(loop)
    nodes = local_nodes(scope) if scope is not None else source.nodes
    return [one for node in nodes if isinstance(node, ast.stmt) for one in bindings_of(node) if one.name == name]


def _are_computed(bindings: list[Binding]) -> bool:
    """Whether the list or dict is made of new values each time: ``[p.clone() for …]``."""
    values = [one.value for one in bindings]
    made = [one.value if isinstance(one, ast.DictComp) else getattr(one, "elt", None) for one in values]
    return bool(made) and all(isinstance(one, ast.Call | ast.BinOp) for one in made)
