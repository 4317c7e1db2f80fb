"""Views of one call, written one by one in a loop: computed out of place instead, collected, and joined again."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from gradsan.model import Frame, Lines
from gradsan.source.change import Edit, text_with
from gradsan.source.identifiers import leaf_name
from gradsan.source.locate import statement_at
from gradsan.source.rewrite.renewing import fresh_name
from gradsan.source.rewrite.uncut import torch_in
from gradsan.source.tree import SourceFile

_JOINS = {"unbind": "stack", "chunk": "cat", "split": "cat", "tensor_split": "cat"}
"""The functions that return several views, and what joins the parts again."""

_LOOPS = (ast.For, ast.While)
_LEAVES = (ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.Await)


class _Views(NamedTuple):
    """What a loop walks over: the parts of ``whole`` along ``dimension``, which the function ``join`` puts together."""

    whole: ast.expr
    dimension: str
    join: str


def parts_collected(frame: Frame, name: str) -> Lines:
    """``for part in x.chunk(n): part += y`` with each part computed anew, and ``x`` joined of them after the loop.

    Empty where the source does not show how, or nothing reads ``x`` afterwards. The statement at ``frame`` writes the
    part called ``name``.
    """
    place = statement_at(frame)
    loop = next((one for one in reversed(place.loops) if _binds(one, name)), None) if place is not None else None
    if place is None or not isinstance(loop, ast.For) or loop.orelse or place.node not in loop.body:
        return ()
    source, torch = place.source, torch_in(place.source)
    views = next(_walked(loop.target, loop.iter, name), None)
    if views is None or torch is None or any(isinstance(one, _LEAVES) for one in ast.walk(loop)):
        return ()
    if not _is_read_outside(source, views.whole, loop):
        return ()
    changes = dict[int, str]()
    for node in loop.body:
        if (text := _out_of_place(source, node, name)) is not None:
            span = source.span(node)
            changes |= {**dict.fromkeys(range(span.line, span.end_line + 1), ""), span.line: text}
        elif _writes(node, name):
            return ()
    first, last = source.span(loop.body[0]), source.span(loop.body[-1])
    head = source.span(loop)
    if first.line == head.line or not changes:
        return ()
    parts, outer, inner = fresh_name(source, "parts"), source.indent(loop), source.indent(first)
    whole = source.text(views.whole)
    along = "" if views.dimension == "0" else f", dim={views.dimension}"
    joined = f"{outer}{whole} = {torch}.{views.join}({parts}{along})"
    end = last.end_line
    # A statement of several lines is replaced as a whole at its first one.
    at = last.line if last.line in changes else end
    text = changes.get(at, source.lines[at - 1])
    changes[at] = f"{text}\n{inner}{parts}.append({name})\n{joined}"
    changes[head.line] = f"{outer}{parts} = []\n{changes.get(head.line, source.lines[head.line - 1])}"
    return tuple((source.file, line, one) for line, one in sorted(changes.items()))


def _binds(loop: ast.AST, name: str) -> bool:
    return isinstance(loop, ast.For) and any(_is_name(one, name) for one in ast.walk(loop.target))


def _is_read_outside(source: SourceFile, whole: ast.expr, loop: ast.For) -> bool:
    """Whether something may read ``whole`` behind the loop: an attribute, or a name read there or in a loop around."""
    if not isinstance(whole, ast.Name):
        return True
    inside, end = set(ast.walk(loop)), source.span(loop).end_line
    around = {one for other, _ in source.ancestors(loop) if isinstance(other, _LOOPS) for one in ast.walk(other)}
    scope = source.function(loop) or source.module
    return any(
        _is_name(one, whole.id) and isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)
        for one in ast.walk(scope)
        if one not in inside and (one in around or getattr(one, "lineno", 0) > end)
    )


def _walked(target: ast.expr, iterated: ast.expr, name: str) -> Iterator[_Views]:
    """Yield what the loop variable ``name`` is a part of, through ``enumerate`` and ``zip``."""
    if isinstance(target, ast.Name):
        yield from _views_of(iterated) if target.id == name else ()
    elif isinstance(target, ast.Tuple) and isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name):
        function, given = iterated.func.id, iterated.args
        if function == "enumerate" and len(target.elts) == 2 and given:
            yield from _walked(target.elts[1], given[0], name)
        elif function == "zip" and len(target.elts) == len(given):
            for one, value in zip(target.elts, given, strict=True):
                yield from _walked(one, value, name)


def _views_of(value: ast.expr) -> Iterator[_Views]:
    if isinstance(value, ast.Name | ast.Attribute):
        yield _Views(value, "0", "stack")
        return
    function = leaf_name(value.func) if isinstance(value, ast.Call) else None
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or function not in _JOINS:
        return
    given, named = list(value.args), {one.arg: one.value for one in value.keywords}
    is_method = not (isinstance(value.func.value, ast.Name) and value.func.value.id == "torch")
    whole = value.func.value if is_method else given.pop(0) if given else None
    if function != "unbind" and given:
        given.pop(0)  # how many parts, or how large
    along = given[0] if given else named.get("dim")
    if isinstance(whole, ast.Name | ast.Attribute):
        yield _Views(whole, "0" if along is None else ast.unparse(along), _JOINS[function])


def _out_of_place(source: SourceFile, node: ast.stmt, name: str) -> str | None:
    """The lines of ``part += y`` or ``part.add_(y).mul_(z)`` that bind ``part`` anew instead."""
    span, indent = source.span(node), source.indent(node)
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
        operator = _OPERATORS.get(type(node.op))
        value = source.text(node.value)
        value = value if isinstance(node.value, _PRIMARY) else f"({value})"
        return None if operator is None else f"{indent}{name} = {name} {operator} {value}"
    call, edits = node.value if isinstance(node, ast.Expr) else None, list[Edit]()
    while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        method = call.func.attr
        if not method.endswith("_") or method.endswith("__"):
            return None
        end = source.span(call.func)
        edits.append(Edit(type(end)(end.end_line, end.end_column - 1, end.end_line, end.end_column), ""))
        call = call.func.value
    if not edits or not isinstance(call, ast.Name) or call.id != name or span.line != span.end_line:
        return None
    return f"{indent}{name} = {text_with(source, span, edits).strip()}"


_PRIMARY = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant)
_OPERATORS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Pow: "**",
    ast.MatMult: "@",
}


def _writes(node: ast.stmt, name: str) -> bool:
    """Whether a statement binds the part, or writes into it, otherwise."""
    for one in ast.walk(node):
        stored = isinstance(one, ast.Name | ast.Subscript | ast.Attribute) and isinstance(one.ctx, ast.Store)
        if stored and any(_is_name(inner, name) for inner in ast.walk(one)):
            return True
        method = one.func if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) else None
        is_write = method is not None and method.attr.endswith("_")
        if method is not None and is_write and any(_is_name(inner, name) for inner in ast.walk(method.value)):
            return True
    return False


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
