"""Lists that grow in every round: the line that clears them when the round is over, and the values that they keep."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeGuard

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited
from gradsan.source.flow.rounds import after_round, deque_made
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
from gradsan.source.methods import CONTAINERS, LIST_ADDS, TAKING_OUT
from gradsan.source.tree import SourceFile, read_source


def forget_collected(frames: Sequence[Frame], name: str) -> tuple[Change, str] | None:
    """A line after the round of ``frames`` that clears the list ``name``, and its text.

    That is a call of the method with which the list's own class clears it, else a ``del`` of its elements and of those
    of the lists that are filled beside it and read where the round's function reads this one. None where nothing in the
    file adds to the list, where a round begins with a new one, for a deque of bounded length, which keeps values, and
    where a round reads what others have left: a state, an average of the last losses.
    """
    statement = statement_at(frames[0])
    if statement is None:
        return None
    source, (owner, _, last) = statement.source, name.rpartition(".")
    adding = list(_additions(source, last))
    if not adding or _is_bounded(source, name) or _is_renewed(source, name, owner) or _is_state(source, last, adding):
        return None
    scope = statement.function or source.module
    read = {chain_key(node) for node in ast.walk(scope) if isinstance(node, ast.Name | ast.Attribute)}
    beside = (f"{owner}.{other}" if owner else other for call in adding for other in _beside(source, call))
    others = [*beside, *(_needed_beside(statement, owner, last) if owner else ())]
    names = [name, *dict.fromkeys(one for one in others if one != name and one in read)]
    method = next(_emptying(source, last), None) if owner else None
    text = f"{owner}.{method}()" if method else f"del {', '.join(f'{one}[:]' for one in names)}"
    if not method and any(deque_made(source, one) is not None for one in names):
        text = "; ".join(f"{one}.clear()" for one in names)
    change = after_round(frames, text, "forget_collected")
    return None if change is None else (change, text)


def detach_collected(file: str, paths: Iterable[str]) -> tuple[Change, tuple[str, ...]] | None:
    """``.detach()`` at the appended values that ``paths`` lead to, and the expressions of those values.

    For ``replay.memory[3][1]`` it is ``h`` of ``self.memory.append((obs, h))``, or of the only call of the method that
    appends its argument. None where the file adds to lists of that name in several places, or adds something else.
    Only for a list with a bound on its length, and for a value that the round received: what a round computes (the
    probability of its action) is kept for training, and an unbounded list may be one to be cleared.
    """
    source = read_source(file)
    values = [] if source is None else [_collected(source, _steps(path)) for path in paths]
    chosen = list(dict.fromkeys(one for one in values if one is not None))
    if source is None or not chosen:
        return None
    change = edited(source, [Edit.after(source.span(one), ".detach()") for one in chosen], "detach")
    return None if change is None else (change, tuple(dict.fromkeys(source.text(one) for one in chosen)))


def _collected(source: SourceFile, steps: list[str | int]) -> ast.Name | ast.Attribute | None:
    """The value appended at the element and part that ``steps`` lead to: attribute names, an index, and the part."""
    *outer, last = steps
    names = [one for one in outer if isinstance(one, str)]
    if not names or len(names) != len(outer) - 1 or isinstance(outer[-1], str):
        return None
    added = list(_additions(source, names[-1]))
    if len(added) != 1 or len(added[0].args) != 1 or leaf_name(added[0].func) == "extend":
        return None
    if not _is_bounded(source, names[-1]):
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
        call = calls[0]
        given = call.args[position] if position is not None and position < len(call.args) else None
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


def _was_given(source: SourceFile, call: ast.Call, value: ast.expr | None) -> bool:
    """Whether an earlier call in the function of ``call`` also takes the variable: it is a state, not a result."""
    key = None if value is None else chain_key(value)
    scope = source.function(call) or source.module
    return key is not None and any(
        isinstance(one, ast.Call) and one.lineno < call.lineno and any(chain_key(part) == key for part in one.args)
        for one in ([] if isinstance(scope, ast.Lambda) else local_nodes(scope))
    )


def _is_bounded(source: SourceFile, name: str) -> bool:
    """Whether it is a deque with a maximal length, or the file removes its oldest elements."""
    made, last = deque_made(source, name), name.rpartition(".")[2]
    if made is not None and (len(made.args) > 1 or any(one.arg == "maxlen" for one in made.keywords)):
        return True
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and leaf_name(node.func.value) == last
        and (
            node.func.attr == "popleft"
            or (node.func.attr == "pop" and [ast.unparse(one) for one in node.args] == ["0"])
        )
        for node in source.nodes
    )


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
        keys = {one.value: value for one, value in zip(added.keys, added.values, strict=True) if _is_text(one)}
        return keys.get(step)
    if isinstance(added, ast.Call):
        named = {one.arg: one.value for one in added.keywords}
        if isinstance(step, int) and step < len(added.args) and not added.keywords:
            return added.args[step]
        return named.get(step) if isinstance(step, str) else None
    return None


def _is_text(key: ast.expr | None) -> TypeGuard[ast.Constant]:
    return isinstance(key, ast.Constant) and isinstance(key.value, str)


def _is_call_of(node: ast.AST, method: str) -> bool:
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method
    return is_method and not any(isinstance(one, ast.Starred) for one in getattr(node, "args", ()))


def _additions(source: SourceFile, last: str) -> Iterator[ast.Call]:
    for node in source.nodes:
        if isinstance(node, ast.Call) and _adds_to(node) == last:
            yield node


def _adds_to(node: ast.AST) -> str | None:
    """``xs`` of ``self.xs.append(…)``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LIST_ADDS | {"extend"}:
        return leaf_name(node.func.value)
    return None


def _beside(source: SourceFile, call: ast.Call) -> Iterator[str]:
    """The lists that the statements of the same block add to."""
    statement = source.statement(call)
    parent, field = source.parents[statement] if statement is not None else (source.module, "body")
    for node in getattr(parent, field):
        other = _adds_to(node.value) if isinstance(node, ast.Expr) else None
        if other is not None:
            yield other


def _needed_beside(statement: Statement, owner: str, last: str) -> Iterator[str]:
    """The other lists of the same object from which the round's function computes the loss: rewards of log-probs.

    Emptied alone, one would no longer be as long as the others.
    """
    source = statement.source
    scope = statement.function or source.module
    nodes = [one for one in local_nodes(scope) if isinstance(one, ast.stmt)]
    needed, known = set(consumed_names(statement)), -1
    while known < len(needed):
        known = len(needed)
        for node in nodes:
            call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
            adds = call is not None and _adds_to(call) in needed
            if adds or any(one.name in needed for one in bindings_of(node)):
                needed |= set(consumed_names(node))
    for one in sorted(needed):
        holder, _, other = one.rpartition(".")
        adding = list(_additions(source, other)) if holder == owner and other != last else []
        is_other = _is_bounded(source, one) or _is_renewed(source, one, owner) or _is_state(source, other, adding)
        if adding and not is_other:
            yield one


def _is_state(source: SourceFile, last: str, adding: Sequence[ast.Call]) -> bool:
    """Whether an element at a fixed place is read (``self.states[-1]``), or others before a function adds its own."""
    reads = (one for one in source.nodes if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Load))
    if any(leaf_name(one.value) == last and constant_key(one.slice) is not None for one in reads):
        return True
    scopes = [(local_nodes(one), call.lineno) for call in adding if (one := source.function(call)) is not None]
    earlier = (one for nodes, line in scopes for one in nodes if getattr(one, "lineno", line) < line)
    read = [source.parents[one][0] for one in earlier if leaf_name(one) == last]
    return any(
        isinstance(one, ast.For | ast.comprehension) or (isinstance(one, ast.Call) and leaf_name(one.func) != "len")
        for one in read
    )


def _is_renewed(source: SourceFile, name: str, owner: str) -> bool:
    """Whether a loop binds the list's name anew; not for a plain name (no ``owner``) that a function binds first."""
    for node in source.nodes:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(chain_key(target) == name for target in targets):
            inside = [around for around, _ in source.ancestors(node)]
            if any(isinstance(around, ast.For | ast.While) for around in inside):
                return True
            if not owner and any(isinstance(around, ast.FunctionDef) for around in inside):
                return False
    return False


def _emptying(source: SourceFile, last: str) -> Iterator[str]:
    """The methods without arguments with which the class that adds to ``self.<last>`` clears it."""
    for owner in (node for node in source.nodes if isinstance(node, ast.ClassDef)):
        if not any(_adds_to(node) == last for node in ast.walk(owner)):
            continue
        for method in (node for node in owner.body if isinstance(node, ast.FunctionDef)):
            required = len(method.args.posonlyargs + method.args.args) - len(method.args.defaults)
            if not method.name.startswith("__") and required == 1 and any(_empties(one, last) for one in method.body):
                yield method.name


def _empties(node: ast.stmt, last: str) -> bool:
    name = f"self.{last}"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        return isinstance(function, ast.Attribute) and function.attr == "clear" and chain_key(function.value) == name
    if isinstance(node, ast.Delete):
        return any(isinstance(one, ast.Subscript) and chain_key(one.value) == name for one in node.targets)
    if not isinstance(node, ast.Assign):
        return False
    pairs = [(target, node.value) for target in node.targets]
    for target, value in list(pairs):
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs += zip(target.elts, value.elts, strict=True)
    return any(chain_key(target) == name and isinstance(value, ast.List) and not value.elts for target, value in pairs)


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
        bound = [one for node in inside if not isinstance(node, ast.AugAssign) for one in bindings_of(node)]
        anew = {one.name for one in bound if one.replaces}
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

    A list that is written as ``[self.read(t) for t in times]`` is a loop of its own.
    """
    made = statement.node.value if isinstance(statement.node, ast.Assign) else None
    if isinstance(made, ast.ListComp) and keeper in assigned_names(statement):
        yield [statement.node], made.elt
    for loop in reversed(statement.loops):
        inside = [node for node in statements if node is loop or is_inside(node, loop)]
        for node, name in itertools.product(inside, assigned_names(statement)):
            kept = _list_that_keeps(node, name)
            if kept is not None and kept[0] == keeper:
                yield inside, kept[1]


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
    call = node.value if isinstance(node, ast.Expr) else None
    keeper: ast.expr
    if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.List):
        keeper, given = node.target, [*node.value.elts]
    elif isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in LIST_ADDS:
        keeper, given = call.func.value, call.args[-1:]
    else:
        return None
    name, part = chain_key(keeper), _written_part(given, written)
    return None if name is None or part is None else (name, part)


def _dict_that_keeps(
    node: ast.stmt, written: str, loop: ast.stmt, statements: list[ast.stmt]
) -> tuple[str, ast.expr] | None:
    """``out`` and ``pos`` of ``out[key] = pos``, where ``out`` was made as a dict or list and the key changes."""
    target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
    if not isinstance(node, ast.Assign) or not isinstance(target, ast.Subscript) or chain_key(target) is not None:
        return None
    name, part = chain_key(target.value), _written_part([node.value], written)
    rounds = {one for inner in ast.walk(loop) if isinstance(inner, ast.stmt) for one in assigned_names(inner)}
    made = [
        one.value for statement in statements for one in bindings_of(statement) if one.name == name and one.replaces
    ]
    is_container = bool(made) and all(map(_is_container, made))
    is_another = bool(rounds & set(consumed_names(ast.Expr(target.slice))))
    return (name, part) if name is not None and part is not None and is_container and is_another else None


def _is_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, ast.Mult) and _is_container(value.left)
    is_called = isinstance(value, ast.Call) and leaf_name(value.func) in CONTAINERS
    return is_called or isinstance(value, ast.Dict | ast.List | ast.DictComp | ast.ListComp)


def _written_part(given: Sequence[ast.expr | None], written: str) -> ast.expr | None:
    """The written tensor itself among ``given``, or among the elements of tuples, lists and dicts in it."""
    for one in given:
        if isinstance(one, ast.Tuple | ast.List):
            found = _written_part(one.elts, written)
        elif isinstance(one, ast.Dict):
            found = _written_part(one.values, written)
        else:
            found = one if one is not None and chain_key(one) == written else None
        if found is not None:
            return found
    return None
