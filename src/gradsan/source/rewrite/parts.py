"""Views of one call, written in a loop or by their names: computed out of place instead, and joined again."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeGuard

from gradsan.model import Frame, Lines
from gradsan.source.change import changed_lines
from gradsan.source.flow.writing import writing_at
from gradsan.source.identifiers import is_name, leaf_name
from gradsan.source.imports import torch_name
from gradsan.source.locate import frame_of, statement_at
from gradsan.source.methods import METADATA
from gradsan.source.rewrite.out_of_place import out_of_place
from gradsan.source.rewrite.renewing import fresh_name
from gradsan.source.tree import SourceFile

_JOINS = {"unbind": "stack", "chunk": "cat", "split": "cat", "tensor_split": "cat"}
"""The functions that return several views, and what joins the parts again."""

_LOOPS = (ast.For, ast.While)
_LEAVES = (ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.Await)


class Collected(NamedTuple):
    """The changed lines, and what they do to the gradients: a shorter iterable in ``zip`` may leave out some parts."""

    lines: Lines
    meaning: Literal["preserved", "changed"]


class _Views(NamedTuple):
    """What a loop walks over: the parts of ``whole`` along ``dimension``, which the function ``join`` puts together."""

    whole: ast.expr
    dimension: str
    join: str


def parts_collected(frame: Frame, name: str) -> Collected | None:
    """``for part in x.chunk(n): part += y`` with each part computed anew, and ``x`` joined of them after the loop.

    None where the source does not show how, where nothing reads ``x`` afterwards, or where the loop itself does, and so
    what it has written. The statement at ``frame`` writes the part called ``name``.
    """
    place = statement_at(frame)
    loop = next((one for one in reversed(place.loops) if _binds(one, name)), None) if place is not None else None
    if place is None or not isinstance(loop, ast.For) or loop.orelse or place.node not in loop.body:
        return None
    source, torch = place.source, torch_name(place.source)
    views = next(_walked(loop.target, loop.iter, name), None)
    if views is None or any(isinstance(one, _LEAVES) for one in ast.walk(loop)):
        return None
    whole = source.text(views.whole)
    is_read_inside = any(source.text(one) == whole for node in loop.body for one in ast.walk(node) if _may_be(one))
    if is_read_inside or not _is_read_outside(source, views.whole, loop):
        return None
    changes = dict[int, str]()
    for node in loop.body:
        if lines := _out_of_place(source, node, frame, name):
            changes |= {line: text for _, line, text in lines}
        elif _writes(node, name):
            return None
    first, last = source.span(loop.body[0]), source.span(loop.body[-1])
    head = source.span(loop)
    if first.line == head.line or not changes:
        return None
    parts, outer, inner = fresh_name(source, "parts"), source.indent(loop), source.indent(first)
    along = "" if views.dimension == "0" else f", dim={views.dimension}"
    joined = f"{outer}{whole} = {torch}.{views.join}({parts}{along})"
    end = last.end_line
    # A statement of several lines is replaced as a whole at its first one.
    at = last.line if last.line in changes else end
    text = changes.get(at, source.lines[at - 1])
    changes[at] = f"{text}\n{inner}{parts}.append({name})\n{joined}"
    changes[head.line] = f"{outer}{parts} = []\n{changes.get(head.line, source.lines[head.line - 1])}"
    changed = tuple((source.file, line, one) for line, one in sorted(changes.items()))
    is_zipped = any(isinstance(one, ast.Name) and one.id == "zip" for one in ast.walk(loop.iter))
    return Collected(changed, "changed" if is_zipped else "preserved")


def named_parts_joined(frame: Frame, name: str) -> Collected | None:
    """``a, b = x.chunk(2); a *= 2`` with ``a`` computed anew, and ``x`` joined of both behind the last such write.

    None where the source does not show how, where nothing reads ``x`` afterwards, or where it is read in between. The
    statement at ``frame`` writes the part called ``name``; writes of the other parts that follow are changed too.
    """
    place = statement_at(frame)
    if place is None:
        return None
    source = place.source
    made = next((one for one in reversed(source.ahead(place.node)) if name in _names_bound(one)), None)
    views = next(_views_of(made.value), None) if isinstance(made, ast.Assign) else None
    if (
        not isinstance(made, ast.Assign)
        or views is None
        or not isinstance(made.value, ast.Call)
        or not isinstance(views.whole, ast.Name)
    ):
        return None
    names, changes = _names_bound(made), dict[int, str]()
    last: ast.stmt = made
    for node in source.behind(made):
        if any(is_name(one, views.whole.id) for one in ast.walk(node)):
            break
        written = {line: text for one in names for _, line, text in _out_of_place(source, node, frame, one)}
        if not written and any(_writes(node, one) for one in names):
            break
        if written:
            changes |= written
            last = node
    span = source.span(last)
    if span.line not in changes or place.node.lineno not in changes or not _is_read_outside(source, views.whole, made):
        return None
    along = "" if views.dimension == "0" else f", dim={views.dimension}"
    torch = torch_name(source)
    joined = f"{source.indent(last)}{views.whole.id} = {torch}.{views.join}(({', '.join(names)}){along})"
    changes[span.line] = f"{changes[span.line]}\n{joined}"
    return Collected(tuple((source.file, line, text) for line, text in sorted(changes.items())), "preserved")


def _names_bound(node: ast.stmt) -> list[str]:
    """``a``, ``b`` of ``a, b = ...``; empty for any other statement."""
    target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
    names = [one.id for one in target.elts if isinstance(one, ast.Name)] if isinstance(target, ast.Tuple) else []
    is_whole = isinstance(target, ast.Tuple) and len(set(names)) == len(target.elts)
    return names if is_whole else []


def _binds(loop: ast.AST, name: str) -> bool:
    return isinstance(loop, ast.For) and any(is_name(one, name) for one in ast.walk(loop.target))


def _may_be(node: ast.AST) -> TypeGuard[ast.expr]:
    return isinstance(node, ast.Name | ast.Attribute)


def _is_read_outside(source: SourceFile, whole: ast.expr, loop: ast.stmt) -> bool:
    """Whether something may read ``whole`` behind a statement: an attribute, a name read there or in a loop around."""
    if not isinstance(whole, ast.Name):
        return True
    inside, end = set(ast.walk(loop)), source.span(loop).end_line
    around = {one for other, _ in source.ancestors(loop) if isinstance(other, _LOOPS) for one in ast.walk(other)}
    scope = source.function(loop) or source.module
    return any(
        isinstance(one, ast.Name) and one.id == whole.id and isinstance(one.ctx, ast.Load)
        for one in ast.walk(scope)
        if one not in inside
        and (one in around or getattr(one, "lineno", 0) > end)
        and getattr(source.parents.get(one, (None, ""))[0], "attr", None) not in METADATA
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


def _out_of_place(source: SourceFile, node: ast.stmt, frame: Frame, name: str) -> Lines:
    """The lines of a statement that writes the part, which bind it anew instead."""
    at = frame_of(source, node, frame)
    written = writing_at(at)
    return changed_lines(source.file, out_of_place(at, written.op)) if written and written.target == name else ()


def _writes(node: ast.stmt, name: str) -> bool:
    """Whether a statement binds the part, or writes into it, otherwise."""
    for one in ast.walk(node):
        stored = isinstance(one, ast.Name | ast.Subscript | ast.Attribute) and isinstance(one.ctx, ast.Store)
        if stored and any(is_name(inner, name) for inner in ast.walk(one)):
            return True
        method = one.func if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) else None
        is_write = method is not None and method.attr.endswith("_")
        if method is not None and is_write and any(is_name(inner, name) for inner in ast.walk(method.value)):
            return True
    return False
