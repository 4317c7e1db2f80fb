"""Variables that share memory with what an expression returns: views, pieces, and results of functions of the file."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from gradsan.model import Frame
from gradsan.source.flow.reaching import Definition, reaching
from gradsan.source.flow.scopes import arguments_of
from gradsan.source.flow.targets import aliased_expression, operand_expressions
from gradsan.source.identifiers import (
    assigned_names,
    assigned_pairs,
    bindings_in,
    chain_key,
    consumed_names,
    dotted_path,
    leaf_name,
    local_nodes,
    parameters,
)
from gradsan.source.locate import Statement, expression_at, statement_at
from gradsan.source.methods import CONVERSIONS, FUNCTIONS_MAKING_NEW, LIST_ADDS, MAKING_NEW, PIECES
from gradsan.source.tree import FunctionNode, SourceFile, read_source

_DEPTH = 3
_SHOWS_ALL = frozenset({"detach", "squeeze", "t", "unsqueeze", "view", "view_as"})


def read_as_before(name: str, call: Frame, read: Frame) -> str | None:
    """The name by which ``read`` reads the value that the call at ``call`` received as ``name`` and has changed.

    That is ``name``, or a name bound to it before (``identity = x``). None where the two are not in one function, for a
    call whose result is dropped (it is made for its write), and for a name that is rebound in between.
    """
    here, there = statement_at(call), statement_at(read)
    if here is None or there is None or here.function is not there.function or isinstance(here.node, ast.Expr):
        return None
    if here.scope is None:
        return None
    names = {name, *_bound_to(name, here)}
    if here.node is there.node:
        return _read_beside(names, call, read)
    if not here.node.lineno < there.node.lineno:
        return None
    names -= set(assigned_names(here))
    read_here = [name for one in consumed_names(there) for name in (one, one.partition("[")[0])]
    if isinstance(there.node, ast.AugAssign):
        read_here.append(chain_key(there.node.target) or "")
    last = here.node.end_lineno or here.node.lineno
    anew = {
        bound
        for node in local_nodes(here.scope)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.For) and last < node.lineno < there.node.lineno
        for bound in assigned_names(node)
    }
    return next((one for one in read_here if one in names - anew), None)


def _read_beside(names: set[str], call: Frame, read: Frame) -> str | None:
    """The one of ``names`` that the later operation at ``read`` takes beside the call: ``x`` of ``x + fc(act(x))``."""
    inner, outer = expression_at(call), expression_at(read)
    if inner is None or outer is None or any(node is outer.node for node in ast.walk(inner.node)):
        return None
    return next((one for one in operand_expressions(read) if one in names), None)


def _bound_to(name: str, before: Statement) -> set[str]:
    """The names bound to just ``name`` before a statement, or lists that contain it, while neither is rebound."""
    found: set[str] = set()
    assert before.scope is not None
    bindings = [node for node in local_nodes(before.scope) if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr)]
    for node in sorted(bindings, key=lambda one: one.lineno):
        if node.lineno >= before.node.lineno:
            break
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in LIST_ADDS:
            found |= {chain_key(call.func.value) or ""} if any(chain_key(one) == name for one in call.args) else set()
        bound = set(assigned_names(node))
        if name in bound:
            found.clear()
        found -= bound
        if isinstance(node, ast.Assign) and chain_key(node.value) == name:
            found |= bound
    return found


def shared_names(source: SourceFile, value: ast.expr, depth: int = _DEPTH) -> frozenset[str]:
    """The variables whose memory ``value``, or a part of a tuple, may be: ``x`` of ``x.chunk(2)`` and ``halves(x)``.

    A function counts where the file has one of that name: what it returns is followed through its assignments.
    """
    if isinstance(value, ast.Tuple | ast.List):
        return frozenset().union(*(shared_names(source, one, depth) for one in value.elts))
    if isinstance(value, ast.IfExp):
        return shared_names(source, value.body, depth) | shared_names(source, value.orelse, depth)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in PIECES:
        return shared_names(source, value.func.value, depth)
    if isinstance(value, ast.Call) and depth:
        functions = _functions_called(source, value.func)
        found: frozenset[str] = frozenset()
        for file, called in functions:
            given, names = dict(arguments_of(called, value)), _returned(file, called, depth - 1)
            passed = (given[name] for name in names if name in given)
            found = found.union(
                (one for one in names if "." in one), *(shared_names(source, one, depth - 1) for one in passed)
            )
        if functions:
            return found
    root = aliased_expression(source, value)
    key = None if root is None else chain_key(root)
    return frozenset() if key is None else frozenset({key})


@functools.lru_cache(maxsize=64)
def _returned(source: SourceFile, function: FunctionNode, depth: int) -> frozenset[str]:
    """The parameters, and attributes of ``self``, that a function returns itself, or views of which it returns."""
    if isinstance(function, ast.Lambda):
        return shared_names(source, function.body, depth) & frozenset(parameters(function))
    nodes = local_nodes(function)
    found = frozenset[str]().union(
        *(shared_names(source, one.value, depth) for one in nodes if isinstance(one, ast.Return) and one.value)
    )
    bound = [(name, value) for node in nodes for name, value in _bindings(node)]
    for _ in range(len(bound)):
        more = frozenset[str]().union(*(shared_names(source, value, depth) for name, value in bound if name in found))
        if more <= found:
            break
        found |= more
    return found & frozenset(parameters(function)) | {name for name in found if name.startswith("self.")}


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for target in node.targets if isinstance(node, ast.Assign) else ():
        names = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        values = node.value.elts if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) else []
        for at, name in enumerate(names):
            if isinstance(name, ast.Name) and isinstance(node, ast.Assign):
                yield name.id, values[at] if len(values) == len(names) else node.value


def _functions_called(source: SourceFile, function: ast.expr) -> list[tuple[SourceFile, FunctionNode]]:
    """The functions of that name: of the file, also those that it binds to the name, and of a file beside it."""
    name, owner = leaf_name(function), chain_key(function.value) if isinstance(function, ast.Attribute) else None
    found: list[tuple[SourceFile, FunctionNode]] = []
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            found.append((source, node))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            found += [(source, node.value) for one in node.targets if leaf_name(one) == name]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = {one.asname or one.name: one.name for one in node.names}
            module = names.get(owner or "") if isinstance(node, ast.Import) else node.module
            wanted = name if isinstance(node, ast.Import) else names.get(name or "")
            path = Path(source.file).parent / f"{(module or '').replace('.', '/')}.py"
            beside = read_source(str(path)) if wanted and module else None
            defined = [] if beside is None else [(beside, one) for one in beside.nodes]
            found += [(file, one) for file, one in defined if isinstance(one, ast.FunctionDef) and one.name == wanted]
    return found


def share_memory(source: SourceFile, at: ast.stmt, one: str, other: str) -> bool:
    """Whether two variables of the function around a statement are, or are parts of, one: bound as views of a third."""
    scope = source.function(at) or source.module
    nodes = [] if isinstance(scope, ast.Lambda) else local_nodes(scope)
    bound = [pair for node in nodes for pair in _bindings(node)]

    def reached(name: str) -> frozenset[str]:
        found = frozenset({name})
        for _ in range(_DEPTH):
            found = found.union(*(shared_names(source, value) for target, value in bound if target in found))
        return found

    return not reached(one).isdisjoint(reached(other))


TAKING = frozenset({"getattr", "get", "setdefault"})
"""Functions and methods that return what an object or a dict goes on to hold."""


def set_back(source: SourceFile, target: ast.expr) -> str | None:
    """``setattr(part, name, x)`` where ``x = getattr(part, name)`` is the function's only binding of ``x``."""
    scope, name = source.function(target) or source.module, chain_key(target)
    if isinstance(scope, ast.Lambda):
        return None
    nodes = (one for one in local_nodes(scope) if not isinstance(one, ast.AugAssign))
    bound = [one.value for one in bindings_in(nodes, name)]
    value = bound[0] if isinstance(target, ast.Name) and len(bound) == 1 else None
    if not isinstance(value, ast.Call) or leaf_name(value.func) != "getattr" or len(value.args) != 2:
        return None
    return f"setattr({', '.join(map(source.text, value.args))}, {name})"


def is_read_as_whole(source: SourceFile, binding: ast.stmt, value: ast.expr, written: ast.Name) -> bool:
    """Whether the variable of which ``written`` is a part, of ``value``, is read after the write, as it was then.

    ``binding`` is the statement that takes the part. An attribute may be read anywhere.
    """
    statement, scope = source.statement(written), source.function(written) or source.module
    if statement is None or isinstance(scope, ast.Lambda):
        return False
    later = [
        node
        for node in local_nodes(scope)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and source.span(node) > source.span(statement)
    ]
    for name in shared_names(source, value) - {written.id}:
        if "." in name:
            return True
        held = _definitions(scope, binding, name)
        at = (source.statement(node) for node in later if node.id == name)
        if any(one is not None and not held.isdisjoint(_definitions(scope, one, name)) for one in at):
            return True
    return False


def _definitions(scope: FunctionNode | ast.Module, at: ast.stmt, name: str) -> frozenset[ast.stmt | None]:
    """The statements that may have bound a name; None for what was there before the function's body."""
    body = scope.body if isinstance(scope.body, list) else []
    found: frozenset[Definition] = reaching(body, at).get(name, frozenset())
    return frozenset(one.statement for one in found) or frozenset({None})


def is_read_whole_after(source: SourceFile, statement: ast.stmt, written: ast.expr) -> bool:
    """Whether ``written``, of which ``statement`` writes a part, is read after it, or again in a loop, as a whole.

    Or anything that it is a view of is, or another view of that whole; or the same part of it.
    """
    scope, text = source.function(statement) or source.module, source.text(written)
    loops = [parent for parent, _ in source.ancestors(statement) if isinstance(parent, ast.For | ast.While)]
    again = {one for loop in loops for one in ast.walk(loop)}
    own = set(ast.walk(statement))
    bound = [pair for node in ast.walk(scope) if node is not statement for pair in _bindings(node)]
    parts = {source.text(one) for one in own if isinstance(one, ast.Subscript)}
    wholes = {text}
    for _ in range(_DEPTH):
        above = {name for target, value in bound if target in wholes for name in shared_names(source, value)}
        beside = {target for target, value in bound if _is_whole(value) and shared_names(source, value) & wholes}
        wholes |= above | beside
    return any(
        isinstance(getattr(node, "ctx", None), ast.Load)
        and node not in own
        and (node in again or node.lineno > statement.lineno)
        and (not isinstance(around := source.parents[node][0], ast.Subscript) or source.text(around) in parts)
        and source.text(node) in wholes
        and not (isinstance(at := source.statement(node), ast.Assign) and _is_view_of(source, at.value, wholes))
        for node in ast.walk(scope)
        if isinstance(node, ast.Name | ast.Attribute)
    )


def _is_whole(value: ast.expr) -> bool:
    return not any(isinstance(one, ast.Subscript) for one in ast.walk(value))


def _is_view_of(source: SourceFile, value: ast.expr, wholes: set[str]) -> bool:
    """Whether a statement only takes a view: what reads that is looked for itself."""
    return _is_whole(value) and bool(shared_names(source, value) & wholes)


def is_just_made(source: SourceFile, node: ast.expr) -> bool:
    """Whether an expression gives a new tensor: arithmetic, or what always makes one."""
    if isinstance(node, ast.BinOp):
        return True
    if not isinstance(node, ast.Call) or any(keyword.arg in ("out", "inplace") for keyword in node.keywords):
        return False
    is_torch = (dotted_path(source, node.func) or "").startswith("torch.")
    if is_torch:
        return leaf_name(node.func) in MAKING_NEW | FUNCTIONS_MAKING_NEW
    # ``self.norm(x)`` is a module's or a method of the user's own.
    is_method = isinstance(node.func, ast.Attribute) and leaf_name(node.func.value) != "self"
    return is_method and leaf_name(node.func) in MAKING_NEW


def bound_parts(node: ast.Assign) -> Iterator[tuple[ast.Name, ast.Subscript]]:
    """Names with the elements of something else that an assignment binds them to."""
    for one, value in assigned_pairs(node):
        if isinstance(one, ast.Name) and isinstance(value, ast.Subscript):
            yield one, value


def overlap(one: ast.Subscript, other: ast.Subscript) -> bool:
    """``seq[:, :-1]`` and ``seq[:, 1:]``: one leaves out some of the first elements, the other some of the last."""
    if chain_key(one.value) is None or chain_key(one.value) != chain_key(other.value):
        return False
    indices = [one.slice.elts if isinstance(one.slice, ast.Tuple) else [one.slice] for one in (one, other)]
    pairs = [pair for pair in zip(*indices, strict=False) if ast.unparse(pair[0]) != ast.unparse(pair[1])]
    if len(indices[0]) != len(indices[1]) or len(pairs) != 1:
        return False
    ends = [ast.unparse(part) for part in pairs[0]]
    return any(re.fullmatch(r":-\d+", a) and re.fullmatch(r"\d+:", b) for a, b in (ends, ends[::-1]))


def unconverted(value: ast.expr) -> ast.expr:
    """``clean`` of ``clean.float().contiguous()``, of ``torch.as_tensor(clean)``, and of a view."""
    while isinstance(inner := viewed(value), ast.Call) and (name := leaf_name(inner.func)) in CONVERSIONS:
        is_method = isinstance(inner.func, ast.Attribute) and name not in ("as_tensor", "asarray")
        given = [inner.func.value] if isinstance(inner.func, ast.Attribute) and is_method else inner.args
        if not given:
            break
        value = given[0]
    return viewed(value)


def viewed(value: ast.expr) -> ast.expr:
    """``pos`` of ``pos.view(1, -1)``, ``pos.detach()`` and ``pos[None]``, which are the same memory."""
    while True:
        called = value.func if isinstance(value, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in _SHOWS_ALL:
            value = called.value
        elif isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant) and value.slice.value is None:
            value = value.value
        else:
            return value.value if isinstance(value, ast.Attribute) and value.attr == "data" else value
