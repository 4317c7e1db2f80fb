"""Lists that grow in every round: the calls that add to them, and the values that they keep."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator, Sequence

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited
from gradsan.source.flow.aliases import viewed
from gradsan.source.flow.rounds import deque_made
from gradsan.source.identifiers import (
    assigned_names,
    bindings_of,
    chain_key,
    constant_key,
    consumed_names,
    leaf_name,
    local_nodes,
)
from gradsan.source.locate import Statement, statement_at
from gradsan.source.methods import BLANK, CONTAINERS, LIST_ADDS, TAKING_OUT
from gradsan.source.tree import SourceFile, read_source

_UPDATES = frozenset({"add_", "sub_", "mul_", "div_", "addcmul_", "clamp_", "neg_", "pow_"})


def detach_collected(
    file: str, paths: Iterable[str], *, of_any_length: bool = False
) -> tuple[Change, tuple[str, ...]] | None:
    """``.detach()`` at the appended values that ``paths`` lead to, and the expressions of those values.

    For ``replay.memory[3][1]`` it is ``h`` of ``self.memory.append((obs, h))``, or of the only call of the method that
    appends its argument. None where the file adds to lists of that name in several places, or adds something else.
    Only for a list with a bound on its length, unless ``of_any_length``, and for a value that the round received: what
    a round computes (the probability of its action) is kept for training, and an unbounded list may be one to be
    cleared.
    """
    source = read_source(file)
    values = [] if source is None else [_collected(source, _steps(path), of_any_length) for path in paths]
    chosen = list(dict.fromkeys(one for one in values if one is not None))
    if source is None or not chosen:
        return None
    change = edited(source, [Edit.after(source.span(one), ".detach()") for one in chosen], "detach")
    return None if change is None else (change, tuple(dict.fromkeys(source.text(one) for one in chosen)))


def _collected(source: SourceFile, steps: list[str | int], of_any_length: bool) -> ast.Name | ast.Attribute | None:
    """The value appended at the element and part that ``steps`` lead to: attribute names, an index, and the part."""
    *outer, last = steps
    names = [one for one in outer if isinstance(one, str)]
    if not names or len(names) != len(outer) - 1 or isinstance(outer[-1], str):
        return None
    added = list(adding_calls(source, names[-1]))
    if len(added) != 1 or len(added[0].args) != 1 or leaf_name(added[0].func) == "extend":
        return None
    if not of_any_length and not is_bounded(source, names[-1]):
        return None
    call, value = added[0], _part(added[0].args[0], last)
    function = source.function(call)
    given = value
    if isinstance(function, ast.FunctionDef) and function.args.args and source.owner_class(function) is not None:
        calls = [one for one in source.nodes if _is_call_of(one, function.name)]
        if len(calls) != 1 or not isinstance(calls[0], ast.Call):
            return None
        added_value = call.args[0]
        if value is None and isinstance(added_value, ast.Call) and isinstance(last, str):
            # ``Step(*args)``: the field's position among them.
            fields = _fields(source, leaf_name(added_value.func) or "")
            starred = added_value.args[0] if len(added_value.args) == 1 else None
            if isinstance(starred, ast.Starred) and last in fields:
                added_value, last = starred.value, fields.index(last)
        position = _parameter(function, added_value, value, last)
        call, keyword = calls[0], _keyword(function, added_value, value, last)
        given = call.args[position] if position is not None and position < len(call.args) else None
        given = given or next((one.value for one in call.keywords if one.arg == keyword), None)
        value = given if value is None else value
    is_kept = isinstance(value, ast.Name | ast.Attribute) and _was_given(source, call, given)
    return value if is_kept and isinstance(value, ast.Name | ast.Attribute) else None


def _fields(source: SourceFile, name: str) -> list[str]:
    """The fields of a record of the file: ``namedtuple("Step", "obs hidden")``, or a class with annotations."""
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return [ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)]
        made = node.value if isinstance(node, ast.Assign) and assigned_names(node) == [name] else None
        if isinstance(made, ast.Call) and leaf_name(made.func) == "namedtuple" and len(made.args) > 1:
            given = made.args[1]
            texts = [one.value for one in ast.walk(given) if isinstance(one, ast.Constant)]
            return [field for text in texts for field in str(text).replace(",", " ").split()]
    return []


def _parameter(function: ast.FunctionDef, added: ast.expr, value: ast.expr | None, last: str | int) -> int | None:
    """The position among the arguments of a method's call of the value that the method appends as ``value``."""
    names, variable = [one.arg for one in function.args.args[1:]], function.args.vararg
    if value is None:
        is_variable = isinstance(added, ast.Name) and variable is not None and variable.arg == added.id
        return len(names) + last if is_variable and isinstance(last, int) else None
    key = chain_key(value)
    if key in names:
        return names.index(key)
    taken = [
        node.value.id
        for node in local_nodes(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and key in assigned_names(node)
    ]
    return names.index(taken[0]) if len(taken) == 1 and taken[0] in names else None


def _keyword(function: ast.FunctionDef, added: ast.expr, value: ast.expr | None, last: str | int) -> str | None:
    """The name by which a call may give it: that of the parameter, or the key in the ``**row`` that is appended."""
    if value is not None:
        key = chain_key(value)
        return key if key in {one.arg for one in (*function.args.args, *function.args.kwonlyargs)} else None
    keywords = function.args.kwarg
    is_whole = isinstance(added, ast.Name) and keywords is not None and keywords.arg == added.id
    return last if is_whole and isinstance(last, str) else None


def _was_given(source: SourceFile, call: ast.Call, value: ast.expr | None) -> bool:
    """Whether the variable is a state, and no result: not bound in the round so far, or taken by an earlier call."""
    key = None if value is None else chain_key(value)
    scope = source.function(call) or source.module
    if key is None or isinstance(scope, ast.Lambda):
        return False
    loops = (one for one, _ in source.ancestors(call) if isinstance(one, ast.For | ast.While) or one is scope)
    begun = getattr(next(loops, scope), "lineno", 0)
    earlier = [one for one in local_nodes(scope) if getattr(one, "lineno", call.lineno) < call.lineno]
    bound = {
        name for one in earlier if isinstance(one, ast.stmt) and one.lineno > begun for name in assigned_names(one)
    }
    calls = (one for one in earlier if isinstance(one, ast.Call))
    return key not in bound or any(chain_key(part) == key for one in calls for part in one.args)


def is_bounded(source: SourceFile, name: str) -> bool:
    """Whether it is a deque with a maximal length, or the file removes its oldest elements."""
    made, last = deque_made(source, name), name.rpartition(".")[2]
    if made is not None and (len(made.args) > 1 or any(one.arg == "maxlen" for one in made.keywords)):
        return True
    calls = [one for one in source.nodes if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)]
    taken = (ast.unparse(one) for one in calls if leaf_name(getattr(one.func, "value", one)) == last)
    return any(one.endswith((".popleft()", ".pop(0)")) for one in taken)


def _steps(path: str) -> list[str | int]:
    """``["replay", "memory", 3, 1]`` of ``replay.memory[3][1]``."""
    try:
        node: ast.expr = ast.parse(path, mode="eval").body
    except SyntaxError:
        return [""]
    steps: list[str | int] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            steps.append(node.attr)
        elif isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str | int):
            steps.append(node.slice.value)
        else:
            return [""]
        node = node.value
    return [*steps, node.id][::-1] if isinstance(node, ast.Name) else [""]


def _part(added: ast.expr, step: str | int) -> ast.expr | None:
    """The part of a tuple, list, dict or record, as spelled out in the source."""
    if isinstance(added, ast.Tuple | ast.List):
        return added.elts[step] if isinstance(step, int) and step < len(added.elts) else None
    if isinstance(added, ast.Dict):
        pairs = zip(added.keys, added.values, strict=True)
        return next((one for key, one in pairs if key and constant_key(key) == step), None)
    if isinstance(added, ast.Call):
        named = {one.arg: one.value for one in added.keywords}
        if isinstance(step, int) and step < len(added.args) and not added.keywords:
            return added.args[step]
        return named.get(step) if isinstance(step, str) else None
    return None


def _is_call_of(node: ast.AST, method: str) -> bool:
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method
    return is_method and not any(isinstance(one, ast.Starred) for one in getattr(node, "args", ()))


def adding_calls(source: SourceFile, last: str) -> Iterator[ast.Call]:
    """The calls that add to a list of that name, of whatever object."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and adds_to(node) == last:
            yield node


def adds_to(node: ast.AST) -> str | None:
    """``xs`` of ``self.xs.append(…)``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LIST_ADDS | {"extend"}:
        return leaf_name(node.func.value)
    return None


def is_kept_each_round(frame: Frame, written: str) -> bool:
    """Whether a loop around the statement at ``frame`` keeps the written tensor itself in a list or dict."""
    statement = statement_at(frame)
    scope = None if statement is None else statement.scope
    if statement is None or scope is None:
        return False
    statements = [node for node in local_nodes(scope) if isinstance(node, ast.stmt)]
    return any(True for _ in keepers(statement, written, statements))


def keepers(
    statement: Statement, written: str, statements: list[ast.stmt]
) -> Iterator[tuple[list[ast.stmt], ast.stmt, str, ast.expr]]:
    """A loop's statements, the one that keeps the written tensor in every round, its container, and the kept value."""
    for loop in reversed(statement.loops):
        inside = [node for node in statements if node is loop or is_inside(node, loop)]
        anew = bound_anew(inside)
        if written in anew:
            return
        for node in inside:
            kept = _list_that_keeps(node, written) or _dict_that_keeps(node, written, loop, statements)
            if kept is not None and kept[0] not in anew:
                yield inside, node, *kept


def result_keepers(
    statement: Statement, keeper: str, statements: list[ast.stmt]
) -> Iterator[tuple[list[ast.stmt], ast.expr]]:
    """A loop's statements, and the results of ``statement`` that the list ``keeper`` keeps there in every round.

    A list that is written as ``[self.read(t) for t in times]`` is a loop of its own, and so is ``list(frames())``.
    """
    made = statement.node.value if isinstance(statement.node, ast.Assign) else None
    if keeper in assigned_names(statement):
        if isinstance(made, ast.ListComp | ast.DictComp):
            yield [statement.node], made.elt if isinstance(made, ast.ListComp) else made.value
        elif isinstance(made, ast.Call) and leaf_name(made.func) in ("list", "tuple") and len(made.args) == 1:
            yield [statement.node], made
    for inside in _loops_at(statement, statements):
        for node, name in itertools.product(inside, assigned_names(statement)):
            kept = _list_that_keeps(node, name)
            if kept is not None and kept[0] == keeper:
                yield inside, kept[1]


def part_keepers(
    statement: Statement, statements: list[ast.stmt]
) -> Iterator[tuple[list[ast.stmt], ast.stmt, str, ast.expr]]:
    """As ``keepers``, of a list that gets the part which the statement fills: ``seen.append(ring[t % 4])``.

    Or a name that the loop binds to that part. Its index is the same in all rounds, or starts again after some.
    """
    targets = statement.node.targets if isinstance(statement.node, ast.Assign) else []
    filled = targets[0] if len(targets) == 1 and isinstance(targets[0], ast.Subscript) else None
    if filled is None or not _comes_again(filled.slice):
        return
    part = ast.unparse(filled)
    for loop in reversed(statement.loops):
        inside = [node for node in statements if node is loop or is_inside(node, loop)]
        if chain_key(filled.value) in bound_anew(inside):
            return
        named = {
            name
            for node in inside
            if isinstance(node, ast.Assign) and ast.unparse(viewed(node.value)) == part
            for name in assigned_names(node)
        }
        for node in inside:
            added = _added(node)
            if added is None or added[0] in bound_anew(inside) or is_emptied(inside, added[0]):
                continue
            if not is_bounded(statement.source, added[0]):
                kept = [one for one in added[1] if ast.unparse(viewed(one)) == part or chain_key(viewed(one)) in named]
                yield from ((inside, node, added[0], one) for one in kept)


def _comes_again(index: ast.expr) -> bool:
    """``-1`` and ``t % 4``; not ``t``."""
    names = [one for one in ast.walk(index) if isinstance(one, ast.Name | ast.Attribute | ast.Call)]
    return not names or any(isinstance(one, ast.Mod) for one in ast.walk(index))


def any_keepers(
    statement: Statement, keeper: str, statements: list[ast.stmt]
) -> Iterator[tuple[list[ast.stmt], ast.expr]]:
    """A loop's statements, and what they add to the list or dict ``keeper``, which they never bind anew."""
    for inside in _loops_at(statement, statements):
        if keeper in bound_anew(inside):
            return
        for node in inside:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            added = _added(node)
            if isinstance(node, ast.Assign) and isinstance(target, ast.Subscript) and chain_key(target.value) == keeper:
                yield inside, node.value
            elif added is not None and added[0] == keeper and added[1]:
                yield inside, added[1][0]


def _loops_at(statement: Statement, statements: list[ast.stmt]) -> list[list[ast.stmt]]:
    """Those in the loops around a statement, innermost first; in itself, where a generator runs as it walks over it."""
    loops = [*([statement.node] if isinstance(statement.node, ast.For) else []), *reversed(statement.loops)]
    return [[node for node in statements if node is loop or is_inside(node, loop)] for loop in loops]


def bound_anew(inside: list[ast.stmt]) -> set[str]:
    """The names that some of these statements bind to other values."""
    bound = [one for node in inside if not isinstance(node, ast.AugAssign) for one in bindings_of(node)]
    return {one.name for one in bound if one.replaces}


def kept_before(statement: Statement, written: str) -> tuple[ast.stmt, str, ast.expr] | None:
    """The statement that puts a value into a list before the write, with both: ``skips.append(h); h += shift``.

    Both stand in one block, which has computed the value: memory that is blank or a copy is made to be filled.
    """
    node = statement.node
    called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    is_update = isinstance(node, ast.AugAssign) or (isinstance(called, ast.Attribute) and called.attr in _UPDATES)
    before = statement.source.ahead(node) if is_update else []
    kept: tuple[ast.stmt, str, ast.expr] | None = None
    for one in reversed(before):
        found = _list_that_keeps(one, written)
        if found is not None:
            kept = (one, *found)
        elif written in assigned_names(one):
            made = one.value if isinstance(one, ast.Assign) else None
            is_call = isinstance(made, ast.Call) and leaf_name(made.func) not in BLANK | {"clone", "copy", "deepcopy"}
            return kept if is_call or isinstance(made, ast.BinOp) else None
    return None


def is_emptied(inside: list[ast.stmt], name: str) -> bool:
    """Whether one of the statements takes something out of a list: ``xs.pop``, ``del xs[0]``, ``xs[:] = …``."""
    nodes = list(itertools.chain.from_iterable(map(ast.walk, inside)))
    parts = [one for one in nodes if isinstance(one, ast.Subscript) and not isinstance(one.ctx, ast.Load)]
    taken = [one.value for one in parts if isinstance(one.ctx, ast.Del) or isinstance(one.slice, ast.Slice)]
    taken += [one.value for one in nodes if isinstance(one, ast.Attribute) and one.attr in TAKING_OUT]
    return any(chain_key(one) == name for one in taken)


def is_inside(node: ast.stmt, loop: ast.stmt) -> bool:
    """Whether the lines of ``node`` are within those of ``loop``."""
    return loop.lineno <= node.lineno and (node.end_lineno or 0) <= (loop.end_lineno or 0) and node is not loop


def _list_that_keeps(node: ast.stmt, written: str) -> tuple[str, ast.expr] | None:
    """``traj`` and ``pos`` of ``traj.append(pos)`` and ``traj += [pos]``, or of a tuple or dict with ``pos``."""
    added = _added(node)
    part = None if added is None else _written_part(added[1], written)
    return None if added is None or part is None else (added[0], part)


def _added(node: ast.stmt) -> tuple[str, list[ast.expr]] | None:
    """``traj`` of ``traj.append(pos)`` and ``traj += [pos]``, and what is added to it."""
    call = node.value if isinstance(node, ast.Expr) else None
    keeper: ast.expr
    if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.List):
        keeper, given = node.target, [*node.value.elts]
    elif isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in LIST_ADDS:
        keeper, given = call.func.value, call.args[-1:]
    else:
        return None
    name = chain_key(keeper)
    return None if name is None else (name, given)


def _dict_that_keeps(
    node: ast.stmt, written: str, loop: ast.stmt, statements: list[ast.stmt]
) -> tuple[str, ast.expr] | None:
    """``out`` and ``pos`` of ``out[key] = pos``, where ``out`` was made as a dict or list and the key changes."""
    target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
    if not isinstance(node, ast.Assign) or not isinstance(target, ast.Subscript) or chain_key(target) is not None:
        return None
    name, part = chain_key(target.value), _written_part([node.value], written)
    rounds = {one for inner in ast.walk(loop) if isinstance(inner, ast.stmt) for one in assigned_names(inner)}
    bound = itertools.chain.from_iterable(map(bindings_of, statements))
    made = [one.value for one in bound if one.name == name and one.replaces]
    is_container = bool(made) and all(map(_is_container, made))
    is_another = bool(rounds & set(consumed_names(ast.Expr(target.slice))))
    return (name, part) if name is not None and part is not None and is_container and is_another else None


def _is_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, ast.Mult) and _is_container(value.left)
    is_called = isinstance(value, ast.Call) and leaf_name(value.func) in CONTAINERS
    return is_called or isinstance(value, ast.Dict | ast.List | ast.DictComp | ast.ListComp)


def _written_part(given: Sequence[ast.expr | None], written: str) -> ast.expr | None:
    """The written tensor, or a view of all of it, among ``given``, or among the elements of tuples and lists in it."""
    for one in given:
        if isinstance(one, ast.Tuple | ast.List):
            found = _written_part(one.elts, written)
        elif isinstance(one, ast.Dict):
            found = _written_part(one.values, written)
        else:
            found = one if one is not None and chain_key(viewed(one)) == written else None
        if found is not None:
            return found
    return None
