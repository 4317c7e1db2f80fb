"""Results of a function that are kept while the function is called again: ``a, b = embed(x), embed(y)``."""

from __future__ import annotations

import ast

from gradsan.model import Frame
from gradsan.source.flow.collected import any_keepers, result_keepers
from gradsan.source.flow.kept import assignments
from gradsan.source.flow.reaching import dropped_updates
from gradsan.source.flow.reuse import (
    SecondName,
    definitions_at,
    list_read_after,
    read_after,
    reads_value,
    statements_of,
)
from gradsan.source.flow.rounds import walked_over
from gradsan.source.identifiers import assigned_names, bindings_of, chain_key, leaf_name, local_nodes, parameters
from gradsan.source.locate import Expression, Statement, expression_at, statement_at
from gradsan.source.methods import LIST_ADDS
from gradsan.source.tree import ScopeNode, read_source


def computed_defaults(frame: Frame) -> dict[str, int]:
    """The arguments of the function at ``frame`` whose default is a call, which is computed once; and their lines."""
    statement = statement_at(frame)
    function = None if statement is None else statement.function
    if function is None:
        return {}
    given = function.args
    named = [*given.posonlyargs, *given.args]
    pairs = [*zip(reversed(named), reversed(given.defaults), strict=False)]
    pairs += [(one, value) for one, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value is not None]
    return {one.arg: value.lineno for one, value in pairs if isinstance(value, ast.Call)}


_NUMBERS = frozenset({"item", "tolist", "float", "int", "bool", "len", "str", "print"})


def lines_reading(frame: Frame, name: str) -> tuple[frozenset[int], bool]:
    """The lines of the function at ``frame`` that compute with ``name`` or with what was assigned from it.

    Also whether the function returns such a value. Numbers and texts made of it do not count.
    """
    statement = statement_at(frame)
    if statement is None or statement.function is None or statement.scope is None:
        return frozenset(), False
    names, lines, is_returned = {name}, set[int](), False
    for node in statements_of(statement.scope):
        is_block = hasattr(node, "body")
        if node is statement.node or is_block or names.isdisjoint(_names_read(node)):
            continue
        lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        names |= {*assigned_names(node)}
        is_returned |= isinstance(node, ast.Return)
    return frozenset(lines), is_returned


def is_running_state(frame: Frame, name: str, defaults: frozenset[str]) -> bool:
    """Whether the write to ``name`` at ``frame`` looks like that of a counter or of running statistics.

    It adds a number of its own (``calls += 1``) or what is computed from the old value (``mean += (x - mean) / n``), or
    the function adds to another of the ``defaults``, too (a total and a count).
    """
    statement = statement_at(frame)
    if statement is None or statement.scope is None:
        return True
    node = statement.node
    call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    added = [node.value] if isinstance(node, ast.AugAssign) else [] if call is None else call.args
    read = set().union(*map(_names_read, added))
    adds = [one for one in statements_of(statement.scope) if isinstance(one, ast.AugAssign)]
    others = {chain_key(one.target) for one in adds} & (defaults - {name})
    return name in read or not read or bool(others)


def _names_read(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Call) and leaf_name(node.func) in _NUMBERS:
        return set()
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    return set().union(*map(_names_read, ast.iter_child_nodes(node)))


def is_in_loop(frame: Frame) -> bool:
    """Whether one call of the function at ``frame`` may run that statement several times."""
    statement = statement_at(frame)
    return statement is None or bool(statement.loops)


def parameter_names(frame: Frame) -> list[str]:
    """The names of the parameters of the function at ``frame``, in their order."""
    statement = statement_at(frame)
    return [] if statement is None or statement.function is None else parameters(statement.function)


def read_behind(frame: Frame, name: str) -> int | None:
    """The line behind the statement at ``frame`` that reads ``name``, neither bound nor written since; or None."""
    statement = statement_at(frame)
    if statement is None or statement.scope is None:
        return None
    scope, statements = statement.scope, statements_of(statement.scope)
    bound = definitions_at(scope, statement.node).get(name, frozenset())
    line = read_after(statement, name, frozenset(one.statement for one in bound), scope, statements)
    later = (definitions_at(scope, one).get(name, frozenset()) for one in statements if one.lineno == line)
    return line if bound and next(later, None) == bound else None


def collected_result(frame: Frame, keeper: str) -> SecondName | None:
    """The list ``keeper``, read later, to which a loop around ``frame`` adds in each iteration.

    What is added is the result of the call at ``frame``, or anything else if the list is read as a whole: use it where
    the elements are known to be one.
    """
    statement = statement_at(frame)
    if statement is None or statement.scope is None:
        return None
    source, statements = statement.source, statements_of(statement.scope)
    for keepers, is_whole in ((result_keepers, False), (any_keepers, True)):
        for inside, part in keepers(statement, keeper, statements):
            read = list_read_after(inside, keeper, source, statements, is_whole=is_whole)
            if read is not None:
                value = None if part is getattr(statement.node, "value", None) else source.span(part)
                return SecondName(keeper, "list", part.lineno, read.lineno, value)
    return None


def dropped_update(frame: Frame, of_parameters: bool = False) -> tuple[str, str | None] | None:
    """``p`` where the statement at ``frame`` is ``p = p - lr * p.grad`` in a loop over ``p``, and nothing reads it.

    With the value of :func:`dropped_updates`. ``of_parameters``: only the variable of a loop over ``….parameters()``.
    """
    statement = statement_at(frame)
    loop = statement.loops[-1] if statement is not None and statement.loops else None
    if (
        statement is None
        or not isinstance(loop, ast.For)
        or (of_parameters and "parameters()" not in ast.unparse(loop.iter))
    ):
        return None
    for one, held in dropped_updates(loop, statement.function or statement.source.module).items():
        if one is statement.node and isinstance(target := one.targets[0], ast.Name):
            return None if of_parameters and held else (target.id, held)
    return None


def names_unpacked(file: str) -> set[tuple[str, ...]]:
    """The names that a statement of the file binds together: ``a, b = (grads_of(one) for one in losses)``."""
    parsed = read_source(file)
    tuples = [node.targets[0] for node in (parsed.nodes if parsed else ()) if isinstance(node, ast.Assign)]
    names = (
        tuple(one.id for one in node.elts if isinstance(one, ast.Name))
        for node in tuples
        if isinstance(node, ast.Tuple)
    )
    return {one for one in names if len(one) > 1}


def line_adding(frame: Frame, keeper: str) -> int | None:
    """The line of the only statement in the file of ``frame`` that puts something into the list or dict ``keeper``."""
    parsed, name = read_source(frame.file), keeper.rpartition(".")[2]
    lines = set[int]()
    for node in () if parsed is None else parsed.nodes:
        held: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LIST_ADDS:
            held = node.func.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            held = node.targets[0].value
        elif isinstance(node, ast.AugAssign):
            held = node.target
        if held is not None and leaf_name(held) == name:
            lines.add(node.lineno)  # type: ignore[attr-defined]
    return lines.pop() if len(lines) == 1 else None


def earlier_result(call: Frame) -> SecondName | None:
    """``a`` of ``a = embed(x)`` before the call ``b = embed(y)``, if both are read after it; else None.

    Both may be in one statement, ``a, b = embed(x), embed(y)``. Or ``last`` of ``last = b``, by which a loop has the
    result of the iteration before.
    """
    statement, expression = statement_at(call), expression_at(call)
    if statement is None or statement.scope is None:
        return None
    scope, statements = statement.scope, statements_of(statement.scope)
    beside = _taken_beside(statement, expression, scope, statements)
    if beside is not None:
        return beside
    result, callee = _taken(statement.node)
    if callee is None or expression is None or expression.node is not getattr(statement.node, "value", None):
        return _last_result(statement, statements)
    if read_after(statement, result, frozenset((statement.node,)), scope, statements) is None:
        return None
    at = definitions_at(scope, statement.node)
    given = {node.id for node in ast.walk(expression.node) if isinstance(node, ast.Name)}
    for earlier in statements:
        name, other = _taken(earlier)
        # A result passed to the later call is an argument of that call: see `reuse.argument_read_later`.
        is_meant = other == callee and name not in (result, *given) and earlier.lineno < statement.node.lineno
        if not is_meant or any(one.statement is not earlier or one.carried for one in at.get(name, ())):
            continue
        read = read_after(statement, name, frozenset((earlier,)), scope, statements)
        if isinstance(earlier, ast.Assign) and read is not None:
            return SecondName(name, "returned", earlier.lineno, read, statement.source.span(earlier.value))
    return _last_result(statement, statements)


def _last_result(statement: Statement, statements: list[ast.stmt]) -> SecondName | None:
    loop = statement.node if isinstance(statement.node, ast.For) else next(reversed(statement.loops), None)
    results = {one.name for one in bindings_of(statement.node)}
    inside = set() if loop is None else set(ast.walk(loop))
    body = [one for one in statements if one in inside and one.lineno > statement.node.lineno]
    for later in (one for one in body if isinstance(one, ast.Assign)):
        name, value = chain_key(later.targets[0]) or "", later.value
        parts = value.elts if isinstance(value, ast.Tuple) else [value]
        is_kept = name not in results and not results.isdisjoint(map(chain_key, parts))
        before = [one for one in body if one.lineno < later.lineno and reads_value(statement.source, one, name)]
        if is_kept and before and [one for one in body if name in assigned_names(one)] == [later]:
            return SecondName(name, "returned", later.lineno, before[0].lineno, None)
    return None


def _taken_beside(
    statement: Statement, expression: Expression | None, scope: ScopeNode, statements: list[ast.stmt]
) -> SecondName | None:
    """``a`` of ``a, b = embed(x), embed(y)`` at the second call."""
    match statement.node, None if expression is None else expression.node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)), ast.Call(func=callee) as call:
            if len(names) != len(values) or call not in values:
                return None
        case _:
            return None
    at, own = values.index(call), frozenset((statement.node,))
    read = [
        None if not isinstance(one, ast.Name) else read_after(statement, one.id, own, scope, statements)
        for one in names[: at + 1]
    ]
    for name, value, line in zip(names[:at], values[:at], read, strict=False):
        is_same = isinstance(value, ast.Call) and ast.unparse(value.func) == ast.unparse(callee)
        if is_same and isinstance(name, ast.Name) and line is not None and read[-1] is not None:
            return SecondName(name.id, "returned", statement.node.lineno, line, statement.source.span(value))
    return None


def _taken(node: ast.stmt) -> tuple[str, str | None]:
    """``a`` and ``embed`` of ``a = embed(x)``."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=callee)):
            return name, ast.unparse(callee)
    return "", None


def element_named(frame: Frame) -> str | None:
    """``force`` of ``force = -grads[0]`` after the statement at ``frame`` that binds ``grads``, a tuple of a call."""
    statement = statement_at(frame)
    node = None if statement is None else statement.node
    if statement is None or statement.scope is None or not isinstance(node, ast.Assign):
        return None
    whole = chain_key(node.targets[0]) if isinstance(node.value, ast.Call) else None
    for one in statements_of(statement.scope):
        value = one.value if isinstance(one, ast.Assign) and one.lineno > node.lineno else None
        value = value.operand if isinstance(value, ast.UnaryOp) else value
        if whole is not None and isinstance(value, ast.Subscript) and chain_key(value.value) == whole:
            return next(iter(assigned_names(one)), None)
    return None


def cached_function(frame: Frame) -> str | None:
    """The name of the function around ``frame``, where a decorator of the standard library keeps its results."""
    statement = statement_at(frame)
    function = None if statement is None else statement.scope
    if not isinstance(function, ast.FunctionDef):
        return None
    names = {leaf_name(one.func if isinstance(one, ast.Call) else one) for one in function.decorator_list}
    return function.name if names & {"cache", "lru_cache", "cached_property"} else None


def times_in_list(place: Frame, key: str) -> str | None:
    """``n`` of ``key = [tensor] * n`` at ``place``, in a function that gives no element of the list a new value."""
    statement = statement_at(place)
    if statement is None or statement.scope is None:
        return None
    nodes = [one for one in local_nodes(statement.scope) if isinstance(one, ast.Subscript)]
    stored = [one for one in nodes if isinstance(one.ctx, ast.Store) and chain_key(one.value) == key]
    if any(isinstance(statement.source.parents[one][0], ast.Assign | ast.Tuple | ast.For) for one in stored):
        return None
    match getattr(statement.node, "value", None):
        case ast.BinOp(left=ast.List(elts=[_]), op=ast.Mult(), right=number):
            return ast.unparse(number)
        case ast.BinOp(left=number, op=ast.Mult(), right=ast.List(elts=[_])):
            return ast.unparse(number)
    return None


def one_many_times(frame: Frame, written: str) -> Frame | None:
    """The statement that has made the list of the written element by ``[tensor] * n``, or by a function that does."""
    key, bracket, _ = written.partition("[")
    key = key if bracket else walked_over(frame, written)[0]
    for part, place in assignments(frame, key) if key != written else ():
        found = statement_at(place)
        value = None if found is None or part != key else getattr(found.node, "value", None)
        if found is not None and isinstance(value, ast.Call):
            functions = [one for one in found.source.nodes if isinstance(one, ast.FunctionDef)]
            called = [one for one in functions if one.name == leaf_name(value.func)]
            nodes = local_nodes(called[0]) if len(called) == 1 else []
            results = [one.value for one in nodes if isinstance(one, ast.Return)]
            value = results[0] if len(results) == 1 else None
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
            return place if any(isinstance(one, ast.List) for one in (value.left, value.right)) else None
    return None
