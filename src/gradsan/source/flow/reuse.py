"""Further uses of a value that is changed in place: under a second name, or as an argument read again."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gradsan.model import Frame
from gradsan.source.flow.aliases import bound_parts, overlap, unconverted, viewed
from gradsan.source.flow.collected import is_emptied, is_inside, keepers, kept_before, part_keepers
from gradsan.source.flow.reaching import Definition, State, are_compared, reaching
from gradsan.source.flow.scopes import as_key
from gradsan.source.identifiers import (
    assigned_names,
    bindings_of,
    chain_key,
    constant_key,
    is_name,
    leaf_name,
    local_nodes,
    parameters,
)
from gradsan.source.locate import Statement, expression_at, statement_at
from gradsan.source.methods import BLANK, LIST_ADDS, METADATA, is_inplace_method, is_inplace_name
from gradsan.source.tree import ScopeNode, SourceFile, Span

_FACTS = METADATA | {"item", "tolist"}
"""Attributes and functions unaffected by a write of values, or used for display: they reach no loss."""
_LOOKS = frozenset({"float", "int", "len", "isinstance", "type", "id", "print", "repr", "str"})
_COUNTS = LIST_ADDS | {"backward", "extend", "save_for_backward"}
"""Methods whose calls are bare statements and still contribute to a loss; others only display something."""


_Bound = Literal["name", "compared", "converted", "slice", "result"]
Kind = Literal[_Bound, "list", "part", "argument", "twice", "returned", "gradient", "default"]


@dataclass(frozen=True, slots=True)
class SecondName:
    """Another name of a written tensor: ``name``, bound at the line ``bound`` and read at the line ``read``.

    ``kind`` is ``name`` where both names are read after the write, as if they were two values, ``converted`` where that
    is so unless ``clean.float()``, or ``copy(graph)``, has copied, ``compared`` where one
    is subtracted from the other or compared with it, ``slice`` where both are overlapping slices, ``result`` where the
    second is the result of an in-place method (``noisy = clean.add_(noise)``), ``list`` where each iteration of a loop
    adds the value to the list ``name``, ``part`` where it adds a part that the statement fills, ``returned`` where one
    function has returned it twice, and ``argument`` where the line ``bound`` passes it to a function that writes into
    it, and ``twice`` where it is another argument of that function, too. ``gradient`` is a gradient that a later
    backward adds to (``gradients.py``). ``value`` is the expression that the line ``bound`` binds or passes, None where
    it does not show it.
    """

    name: str
    kind: Kind
    bound: int
    read: int
    value: Span | None


def second_name(frame: Frame, written: str) -> SecondName | None:
    """The other name of the tensor that the statement at ``frame`` changes in place as ``written``; else None."""
    statement = statement_at(frame)
    scope = None if statement is None else statement.scope
    if statement is None or scope is None:
        return None
    statements = statements_of(scope)
    # What else may bind an attribute is not known; a list keeps it whatever its name.
    by_name = _by_name(statement, written, scope, statements) if written.isidentifier() else None
    by_name = by_name or _by_slice(statement, written, scope, statements)
    return by_name or _by_list(statement, written, statements)


def argument_read_later(call: Frame, name: str, is_second_name: bool = False) -> SecondName | None:
    """The later read of ``name``, an argument of the call at ``call``, with its earlier binding; None without one.

    A state that is carried through the rounds is written on purpose, except where the function gave it a second name
    (``is_second_name``) and returns that, and both are read.
    """
    statement, expression = statement_at(call), expression_at(call)
    node = None if expression is None else expression.node
    scope = None if statement is None else statement.scope
    if statement is None or not isinstance(node, ast.Call) or scope is None:
        return None
    arguments = [*node.args, *(one.value for one in node.keywords)]
    # ``prepare(batch)`` is given ``batch['x']``, too.
    name, whole = as_key(name), name.partition("[")[0]
    given = next((one for one in arguments if is_name(one, whole)), None)
    is_read_beside = _is_read_beside(statement.source, node, name)
    if given is None or (isinstance(statement.node, ast.Return) and not is_read_beside):
        return None
    at = definitions_at(scope, statement.node)
    statements = statements_of(scope)
    if not _is_data_of_round(statement, _whole(at, name)):
        results = set(assigned_names(statement.node)) - {name} if is_second_name else ()
        is_second = any(read_after(statement, one, frozenset((statement.node,)), scope, statements) for one in results)
        if not is_second or _are_blank(_whole(at, name)):
            return None
    read = None if is_read_beside else read_after(statement, name, _whole(at, name), scope, statements)
    read = statement.node.lineno if is_read_beside else read
    if read is None:
        return None
    value = statement.source.span(given) if name == whole else None
    return SecondName(name, "argument", statement.node.lineno, read, value)


def is_made_in_round(call: Frame, name: str) -> bool:
    """Whether ``name`` is neither a state carried through the rounds of the loop around ``call`` nor blank memory."""
    statement = statement_at(call)
    scope = None if statement is None else statement.scope
    if statement is None or scope is None:
        return True
    root = re.split(r"[.\[]", name, maxsplit=1)[0]
    return _is_data_of_round(statement, _whole(definitions_at(scope, statement.node), root))


def statements_of(scope: ScopeNode) -> list[ast.stmt]:
    """The statements of a function or module itself, in the order of their lines."""
    statements = [node for node in local_nodes(scope) if isinstance(node, ast.stmt)]
    return sorted(statements, key=lambda node: (node.lineno, node.col_offset))


def _by_name(statement: Statement, written: str, scope: ScopeNode, statements: list[ast.stmt]) -> SecondName | None:
    result = _result_of_write(statement.node, written)
    if result is not None:
        name, value = result
        known = {name: frozenset[Definition](), **definitions_at(scope, statement.node)}
        read = _read_of_both(statement, written, name, known, scope, statements)
        span = statement.source.span(value)
        return None if read is None else SecondName(name, "result", statement.node.lineno, read, span)
    at: State | None = None
    for alias in statements:
        if not isinstance(alias, ast.Assign) or alias.lineno >= statement.node.lineno:
            continue
        for other, source in _pairs(alias, written):
            at = at or definitions_at(scope, statement.node)
            target = other if source == written else written
            if _whole(at, target) != {alias}:
                continue
            given = _whole(at, source)
            if given != _whole(definitions_at(scope, alias), source):
                continue
            read = _read_of_both(statement, written, other, at, scope, statements)
            if read is None and _reads_other_elements(statement, alias, written, other):
                read = statement.node.lineno
            if read is None:
                continue
            later = (one for one in statements if one.lineno == read)
            is_compared = any(are_compared(one, written, other) for one in later)
            # A view of another shape may be made to write into the whole; a statement that reads both tells them apart.
            if _is_shaped(alias.value) and not _read_together(statement, written, other, statements):
                continue
            if is_compared or _is_of_round(statement, alias, given):
                kind: Kind = "compared" if is_compared else "name"
                kind = kind if unconverted(alias.value) is viewed(alias.value) else "converted"
                return SecondName(other, kind, alias.lineno, read, statement.source.span(alias.value))
    return None


def _reads_other_elements(statement: Statement, alias: ast.stmt, written: str, other: str) -> bool:
    """``out[i] += x[j]`` in a loop, where ``out = x`` before it: the next round reads elements that this one wrote.

    An element is read to be replaced, by a statement that names no other.
    """
    node = statement.node
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    if not isinstance(target, ast.Subscript) or not is_name(target.value, written) or other == written:
        return False
    if not statement.loops or is_inside(alias, statement.loops[-1]):
        return False
    own = ast.dump(target.slice)
    parts = {
        id(one.value): ast.dump(one.slice)
        for one in ast.walk(node)
        if isinstance(one, ast.Subscript) and one is not target and isinstance(one.ctx, ast.Load)
    }
    reads = (one for one in ast.walk(node) if is_name(one, other) and _is_read(statement.source, one))
    return any(parts.get(id(one)) not in (None, own) for one in reads)


def _by_slice(statement: Statement, written: str, scope: ScopeNode, statements: list[ast.stmt]) -> SecondName | None:
    """``target`` of ``inputs, target = seq[:, :-1], seq[:, 1:]``, where ``inputs`` is written and both are read."""
    earlier = [one for one in statements if isinstance(one, ast.Assign) and one.lineno < statement.node.lineno]
    parts = [(one, name.id, value) for one in earlier for name, value in bound_parts(one)]
    at: State = definitions_at(scope, statement.node) if parts else {}
    own = next((value for one, name, value in reversed(parts) if name == written and _whole(at, name) == {one}), None)
    for one, name, value in parts if own is not None else ():
        if name != written and own is not None and _whole(at, name) == {one} and overlap(own, value):
            read = read_after(statement, name, frozenset((one,)), scope, statements)
            if read is not None and _read_together(statement, written, name, statements):
                return SecondName(name, "slice", one.lineno, read, statement.source.span(value))
    return None


def _result_of_write(node: ast.stmt, written: str) -> tuple[str, ast.expr] | None:
    """``noisy`` and ``clean`` of ``noisy = clean.mul_(0.9).add_(noise)``, whose result is the written tensor itself."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
        return None
    value = node.value
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and is_inplace_method(value.func.attr):
        value = value.func.value
    target = node.targets[0].id
    return (target, value) if value is not node.value and is_name(value, written) and target != written else None


def _is_of_round(statement: Statement, alias: ast.stmt, given: frozenset[ast.stmt | None]) -> bool:
    """Whether the round that binds the second name has computed the value: a state is updated on purpose."""
    loop = next((one for one in reversed(statement.loops) if is_inside(alias, one)), None)
    return loop is None or all(one is loop or (one is not None and is_inside(one, loop)) for one in given)


def _is_data_of_round(statement: Statement, given: frozenset[ast.stmt | None]) -> bool:
    """Whether a round has computed the argument of a call in it, and not as blank memory, which is to be filled."""
    return not _are_blank(given) and _is_of_round(statement, statement.node, given)


def _are_blank(given: frozenset[ast.stmt | None]) -> bool:
    """Whether a value was allocated as blank memory, which is to be filled."""
    return bool(given) and all(isinstance(one, ast.Assign) and _is_blank(one.value) for one in given)


def _is_blank(value: ast.expr) -> bool:
    """``torch.zeros(3)``, ``h.new_zeros(3).to(device)``."""
    while isinstance(value, ast.Call):
        if leaf_name(value.func) in BLANK:
            return True
        value = value.func.value if isinstance(value.func, ast.Attribute) else value.func
    return False


def _pairs(alias: ast.Assign, written: str) -> Iterator[tuple[str, str]]:
    """Pairs of the other name and of the one of both that the assignment reads."""
    targets = [one.id for one in alias.targets if isinstance(one, ast.Name)]
    value = unconverted(alias.value)
    # ``batch['x']`` is an element of a dict; ``table[0]`` may be a part that is to be written.
    is_name = isinstance(value, ast.Name) or (
        isinstance(value, ast.Subscript) and isinstance(constant_key(value.slice), str)
    )
    key = chain_key(value) if is_name else None
    if key == written:
        yield from ((one, written) for one in targets if one != written)
    elif key is not None and written in targets:
        yield key, key


def definitions_at(scope: ScopeNode, at: ast.stmt) -> State:
    """The definitions that reach a statement of a function or module, those of its parameters among them."""
    given = [] if isinstance(scope, ast.Module) else parameters(scope)
    return reaching(scope.body, at, given=given)


def _is_shaped(value: ast.expr) -> bool:
    """Whether a value is a view by another method than ``detach``: ``x.view(-1)``, ``x[None]``."""
    is_detached = isinstance(value, ast.Call) and leaf_name(value.func) == "detach"
    return viewed(value) is not value and not is_detached and leaf_name(value) != "data"


def _read_together(statement: Statement, written: str, other: str, statements: list[ast.stmt]) -> bool:
    """Whether one statement behind the write reads both values."""
    later = [one for one in statements if one.lineno > (statement.node.end_lineno or statement.node.lineno)]
    return any(all(reads_value(statement.source, one, name) for name in (written, other)) for one in later)


def _whole(state: State, name: str) -> frozenset[ast.stmt | None]:
    """The definitions of a name that bind it to another value: neither in-place writes nor writes to a part."""
    return frozenset(one.statement for one in _defined(state, name) if not _is_written_in(one.statement, name))


def _defined(state: State, name: str) -> frozenset[Definition]:
    """The definitions of a name; of ``batch['x']`` where nothing binds that, those of ``batch``."""
    return state.get(name) or state.get(name.partition("[")[0], frozenset())


def _is_written_in(statement: ast.stmt | None, name: str) -> bool:
    if statement is None:
        return False
    if isinstance(statement, ast.AugAssign):
        target = statement.target
        return chain_key(target.value if isinstance(target, ast.Subscript) else target) == name
    own = [one for one in bindings_of(statement) if one.name == name]
    return bool(own) and not any(one.replaces for one in own)


def _read_of_both(
    statement: Statement, written: str, other: str, at: State, scope: ScopeNode, statements: list[ast.stmt]
) -> int | None:
    """The line of the first read of ``other`` after the write; None where one of the two names is not read again."""
    own = frozenset((statement.node,))
    lines = [read_after(statement, name, _whole(at, name) | own, scope, statements) for name in (written, other)]
    return None if None in lines else lines[1]


def read_after(
    statement: Statement,
    name: str,
    bound: frozenset[ast.stmt | None],
    scope: ScopeNode,
    statements: list[ast.stmt],
) -> int | None:
    """The line of the first read of ``name`` after a statement, as ``bound`` or as written in place since."""
    last = statement.node.end_lineno or statement.node.lineno
    for node in statements:
        if node.lineno <= last or not reads_value(statement.source, node, name):
            continue
        if not _may_follow(statement.source, statement.node, node):
            continue
        now = {one.statement for one in _defined(definitions_at(scope, node), name)}
        if now and now <= bound | {one for one in now if _is_written_in(one, name)}:
            return node.lineno
    return None


def _may_follow(source: SourceFile, first: ast.stmt, later: ast.stmt) -> bool:
    """Whether ``later``, further down, may run after ``first``: no return in between, and not in exclusive branches."""
    around = dict(source.ancestors(later))
    child: ast.AST = first
    for parent, part in source.ancestors(first):
        if parent in around:
            return not isinstance(parent, ast.If) or around[parent] == part
        block = getattr(parent, part)
        rest = block[block.index(child) :] if isinstance(block, list) else []
        if any(isinstance(one, ast.Return | ast.Raise) for one in rest):
            return False
        child = parent
    return True


def _by_list(statement: Statement, written: str, statements: list[ast.stmt]) -> SecondName | None:
    parts: Literal["list", "part"] = "list"
    for found in (keepers(statement, written, statements), part_keepers(statement, statements)):
        for inside, node, name, part in found:
            read = list_read_after(inside, name, statement.source, statements, is_whole=parts == "part")
            if read is not None:
                return SecondName(name, parts, node.lineno, read.lineno, statement.source.span(part))
        parts = "part"
    kept = kept_before(statement, written)
    later = [one for one in statements if kept is not None and one.lineno > statement.node.lineno]
    reads = (one.lineno for one in later if kept is not None and reads_value(statement.source, one, kept[1]))
    read_at, source = next(reads, None), statement.source
    if kept is None or read_at is None or not any(reads_value(source, one, written) for one in later):
        return None
    return SecondName(f"{kept[1]}[-1]", "name", kept[0].lineno, read_at, source.span(kept[2]))


def list_read_after(
    inside: list[ast.stmt], name: str, source: SourceFile, statements: list[ast.stmt], *, is_whole: bool = False
) -> ast.stmt | None:
    """The first statement behind a loop, or in a loop that takes nothing out of the list ``name``, that reads it.

    If ``is_whole``, not by some of its elements: ``seen[-4:]`` may be those that are still as they were.
    """
    later = [one for one in statements if one not in inside and one.lineno > inside[0].lineno]
    rest: list[ast.stmt] = [] if is_emptied(inside, name) else inside
    for one in (*later, *rest):
        parts = {id(node.value) for node in ast.walk(one) if is_whole and isinstance(node, ast.Subscript)}
        names = (node for node in ast.walk(one) if is_name(node, name))
        if reads_value(source, one, name) and any(id(node) not in parts for node in names):
            return one
    return None


def reads_value(source: SourceFile, statement: ast.stmt, name: str) -> bool:
    """Whether a statement itself reads values by ``name``, other than to write, bind, print, or ask for its shape."""
    alone = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(alone, ast.Call) and leaf_name(alone.func) not in _COUNTS:
        return False
    return any(
        isinstance(node, ast.Name | ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and chain_key(node) == name
        and _is_read(source, node)
        for part in ast.iter_child_nodes(statement)
        if not isinstance(part, ast.stmt | ast.excepthandler | ast.match_case)
        for node in ast.walk(part)
    )


def _is_read_beside(source: SourceFile, call: ast.Call, name: str) -> bool:
    """Whether the expression around a call reads ``name`` after it: ``mse(x, f(x))`` does, ``x.mean() + f(x)`` not."""
    inner: ast.expr | ast.keyword = call
    for outer, _ in source.ancestors(call):
        if isinstance(outer, ast.BinOp | ast.Call):
            for part in ast.iter_child_nodes(outer):
                if part is inner or not isinstance(part, ast.expr | ast.keyword):
                    continue
                whole: ast.expr = part.value if isinstance(part, ast.keyword) else part
                # A method is looked up before its arguments are computed, and called after that.
                if isinstance(outer, ast.Call) and part is outer.func and isinstance(part, ast.Attribute):
                    whole = part.value
                is_later = (part.lineno, part.col_offset) > (inner.lineno, inner.col_offset)
                read = ast.walk(part) if is_later else (whole,)
                if any(is_name(one, name) and _is_read(source, one) for one in read):
                    return True
        elif not isinstance(outer, ast.Attribute | ast.UnaryOp | ast.keyword):
            return False
        inner = outer
    return False


def _is_read(source: SourceFile, node: ast.AST) -> bool:
    parent = next((one for one, _ in source.ancestors(node)), None)
    if isinstance(parent, ast.Attribute):
        return parent.attr not in _FACTS and parent.attr not in LIST_ADDS and not is_inplace_name(parent.attr)
    if isinstance(parent, ast.Subscript):
        return isinstance(parent.ctx, ast.Load) or parent.value is not node
    if isinstance(parent, ast.Call):
        return not (isinstance(parent.func, ast.Name) and parent.func.id in _LOOKS)
    if isinstance(parent, ast.Compare):
        return not any(isinstance(one, ast.Is | ast.IsNot) for one in parent.ops)
    return not isinstance(parent, ast.Assign | ast.Delete | ast.FormattedValue)
