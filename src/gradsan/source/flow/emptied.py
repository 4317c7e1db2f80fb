"""Lists that grow in every round and are emptied when it is over, with those that the loss reads beside them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from gradsan.model import Frame
from gradsan.source.change import Change
from gradsan.source.flow.collected import adding_calls, adds_to, is_bounded
from gradsan.source.flow.rounds import after_round, deque_made
from gradsan.source.identifiers import (
    assigned_pairs,
    bindings_of,
    chain_key,
    constant_key,
    consumed_names,
    leaf_name,
    local_nodes,
)
from gradsan.source.locate import Statement, statement_at
from gradsan.source.tree import FunctionNode, SourceFile, header_nodes


def forget_collected(frames: Sequence[Frame], name: str) -> tuple[Change | None, str] | None:
    """A line after the round of ``frames`` that clears the list ``name``, and its text.

    That is a call of the method with which the list's own class clears it, else a ``del`` of its elements and of those
    of the lists that are filled beside it and read where the round's function reads this one. None where nothing in the
    file adds to the list, where a round begins with a new one, for a deque of bounded length, which keeps values, and
    where a round reads what others have left: a state, an average of the last losses. No line where one of the lists
    beside it is read when the rounds are over: a report of all rewards.
    """
    statement = statement_at(frames[0])
    if statement is None:
        return None
    source, (owner, _, last) = statement.source, name.rpartition(".")
    adding = list(adding_calls(source, last))
    if not is_of_one_round(source, name):
        return None
    scope = statement.function or source.module
    read = {chain_key(node) for node in ast.walk(scope) if isinstance(node, ast.Name | ast.Attribute)}
    beside = (f"{owner}.{other}" if owner else other for call in adding for other in _beside(source, call))
    others = [*beside, *(_needed_beside(statement, owner, last) if owner else ())]
    drawn = _drawn_from(scope)
    names = [name, *dict.fromkeys(one for one in others if one != name and one in read and one not in drawn)]
    method = next(_emptying(source, last), None) if owner else None
    if not method and any(_is_read_at_the_end(source, scope, one) for one in names[1:]):
        return None, f"del {name}[:]"
    text = f"{owner}.{method}()" if method else f"del {', '.join(f'{one}[:]' for one in names)}"
    if not method and any(deque_made(source, one) is not None for one in names):
        text = "; ".join(f"{one}.clear()" for one in names)
    change = after_round(frames, text, "forget_collected")
    return None if change is None else (change, text)


def is_of_one_round(source: SourceFile, name: str) -> bool:
    """Whether the file adds to a list which it neither begins anew in a loop nor reads as a state or a replay."""
    owner, _, last = name.rpartition(".")
    adding = list(adding_calls(source, last))
    is_kept = is_bounded(source, name) or _is_renewed(source, name, owner) or _is_state(source, last, adding)
    return bool(adding) and not is_kept


def is_drawn_by_chance(frame: Frame, name: str) -> bool:
    """Whether the function of ``frame`` takes some elements of the list by chance: a replay."""
    statement = statement_at(frame)
    return statement is not None and name in _drawn_from(statement.function or statement.source.module, by_chance=True)


def _beside(source: SourceFile, call: ast.Call) -> Iterator[str]:
    """The lists that the statements of the same block add to."""
    statement = source.statement(call)
    for node in [] if statement is None else source.block(statement):
        other = adds_to(node.value) if isinstance(node, ast.Expr) else None
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
            adds = call is not None and adds_to(call) in needed
            if adds or any(one.name in needed for one in bindings_of(node)):
                needed |= set(consumed_names(node))
    for one in sorted(needed):
        holder, _, other = one.rpartition(".")
        is_beside = holder == owner and other != last and _is_gone_through(source, nodes, one)
        adding = list(adding_calls(source, other)) if is_beside else []
        is_other = is_bounded(source, one) or _is_renewed(source, one, owner) or _is_state(source, other, adding)
        if adding and not is_other:
            yield one


def _is_read_at_the_end(source: SourceFile, scope: FunctionNode | ast.Module, name: str) -> bool:
    """Whether code outside of the round's function, and of all loops, reads a list by the name that it has there."""
    reads = (one for one in source.nodes if chain_key(one) == name and isinstance(getattr(one, "ctx", None), ast.Load))
    for node in () if name.startswith("self.") else reads:
        parent, _ = source.parents[node]
        is_counted = isinstance(parent, ast.Call) and leaf_name(parent.func) == "len"
        statement = source.statement(node)
        place = None if is_counted or statement is None else _in_no_loop(source, statement)
        if place is not None and place is not scope:
            return True
    return False


def _in_no_loop(source: SourceFile, node: ast.AST) -> ast.AST | None:
    """The function or module that a node belongs to; None inside a loop of it, or of a class."""
    while not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
        if isinstance(node, ast.For | ast.While | ast.ClassDef):
            return None
        node = source.parents[node][0]
    return node


def _drawn_from(scope: FunctionNode | ast.Module, *, by_chance: bool = False) -> set[str | None]:
    """The lists of which a function takes some elements by chance, or by an index: a replay, which is to stay."""
    nodes = [one for node in local_nodes(scope) for one in ast.walk(node)]
    calls = (one for one in nodes if isinstance(one, ast.Call) and leaf_name(one.func) in _DRAWING)
    picked = (
        one.value
        for one in nodes
        if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Load) and not isinstance(one.slice, ast.Slice)
    )
    given = [one for call in calls for one in call.args]
    return {chain_key(one) for one in (given if by_chance else (*given, *picked))}


_DRAWING = frozenset({"choice", "choices", "sample", "shuffle"})


def _is_gone_through(source: SourceFile, nodes: Iterable[ast.stmt], name: str) -> bool:
    """Whether every read of a list takes its elements in turn: ``for r in xs[::-1]``, ``zip(xs, ys)``; no sample."""
    expressions = (one for node in nodes for one in header_nodes(node) if isinstance(one, ast.expr))
    reads = [one for one in expressions if chain_key(one) == name]
    return bool(reads) and all(_takes_in_turn(source, one) for one in reads)


def _takes_in_turn(source: SourceFile, node: ast.AST) -> bool:
    parent, field = source.parents[node]
    if isinstance(parent, ast.For | ast.comprehension):
        return field == "iter"
    is_slice = isinstance(parent, ast.Subscript) and field == "value" and isinstance(parent.slice, ast.Slice)
    is_passed = isinstance(parent, ast.Call) and leaf_name(parent.func) in ("enumerate", "list", "reversed", "zip")
    return (is_slice or is_passed) and (is_passed or _takes_in_turn(source, parent))


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
        if not any(adds_to(node) == last for node in ast.walk(owner)):
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
    bound = (value for target, value in assigned_pairs(node) if chain_key(target) == name)
    return any(isinstance(one, ast.List) and not one.elts for one in bound)
