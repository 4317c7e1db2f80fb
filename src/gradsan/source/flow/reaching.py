"""Reaching definitions: the assignments that may have bound a name to the value that a statement reads.

A small abstract interpreter over the blocks of one function or module. Bindings that a loop's body passes to its
next iteration are marked as carried; so are those that a call leaves in attributes, globals and nonlocals for
the next call of the same function.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from gradsan.model import Frame
from gradsan.source.identifiers import (
    Binding,
    bindings_in,
    bindings_of,
    chain_key,
    consumed_names,
    leaf_name,
    local_nodes,
    parameters,
)
from gradsan.source.locate import statement_at
from gradsan.source.methods import BLANK, is_inplace_name
from gradsan.source.tree import FunctionNode, header_nodes

State = dict[str, frozenset["Definition"]]
_MAX_ROUNDS = 20
# The states of a longer body would take too much memory to keep.
_MOST_STATEMENTS = 100
_COPIES = frozenset({"clone", "copy", "deepcopy", "repeat"})


@dataclass(frozen=True, slots=True)
class Definition:
    """A binding that reaches a statement.

    ``statement`` is None for the value at function entry. ``rounds`` are the loops around the
    reached statement that carried it from one iteration to the next; the body as a whole counts as one.
    """

    name: str
    statement: ast.stmt | None
    rounds: frozenset[ast.AST | None] = frozenset()

    @property
    def carried(self) -> bool:
        """Whether an earlier round made the binding."""
        return bool(self.rounds)


@dataclass(slots=True)
class Flow:
    """The states in which control leaves a block, by the way it leaves."""

    falls: State | None
    breaks: list[State] = field(default_factory=list)
    continues: list[State] = field(default_factory=list)
    leaves: list[State] = field(default_factory=list)


def reaching(
    body: list[ast.stmt], at: ast.stmt, persists: Callable[[str], bool] | None = None, given: Iterable[str] = ()
) -> State:
    """The definitions that may reach ``at``, a statement somewhere in ``body``, by name.

    ``persists`` says which names keep their value from one execution of ``body`` to the next, ``given`` are those
    bound when it begins.
    """
    names = tuple(given)
    is_shared = persists is None and len(body) <= _MOST_STATEMENTS
    states = _of_function(tuple(body), names) if is_shared else _interpret(body, persists or _is_none_kept, names)
    return _join(states.get(at, []))


@functools.lru_cache(maxsize=128)
def _of_function(body: tuple[ast.stmt, ...], given: tuple[str, ...]) -> dict[ast.stmt, list[State]]:
    """The states before every statement: a function that is asked about one of them is asked about others, too."""
    return _interpret(list(body), _is_none_kept, given)


def _is_none_kept(_: str) -> bool:
    return False


def _interpret(
    body: list[ast.stmt], persists: Callable[[str], bool], given: tuple[str, ...]
) -> dict[ast.stmt, list[State]]:
    interpreter = _Interpreter()
    start: State = {name: frozenset({Definition(name, None)}) for name in given}
    for _ in range(_MAX_ROUNDS):
        flow = interpreter.block(body, start)
        end = _join([state for state in [flow.falls, *flow.leaves] if state is not None])
        kept = {name: found for name, found in _mark_carried(end, None).items() if persists(name)}
        following = _join([start, kept])
        if following == start:
            break
        start = following
    return interpreter.states


def is_still_argument(body: list[ast.stmt], at: ast.stmt, name: str, passed: frozenset[ast.stmt] = frozenset()) -> bool:
    """Whether the parameter ``name`` still is the caller's object at ``at``: not rebound, at most changed in place.

    Augmented assignments before it, on other ``passed`` statements, change what they find.
    """
    found = reaching(body, at).get(name, frozenset())
    for one in {definition.statement for definition in found} - passed - {None}:
        if one is None or not any(binding.name == name and binding.replaces for binding in bindings_of(one)):
            continue
        if not isinstance(one, ast.AugAssign) or not is_still_argument(body, one, name, passed | {one}):
            return False
    return True


def keeps_binding(scope: FunctionNode | ast.Module, name: str, first: ast.AST, later: ast.stmt | None) -> bool:
    """Whether ``name`` may be at ``later`` what it was at the statement ``first``, or what that bound it to."""
    if isinstance(scope, ast.Lambda) or not isinstance(first, ast.stmt) or later is None:
        return True
    now = reaching(scope.body, later).get(name, frozenset())
    if not now or any(isinstance(one.statement, ast.AugAssign | ast.Expr) for one in now):
        return True  # changed in place: the same tensor
    if any(one.name == name for one in bindings_of(first)):
        return any(one.statement is first for one in now)
    return bool(now & reaching(scope.body, first).get(name, now))


def is_tensor_made_here(scope: FunctionNode | ast.Module, holder: ast.expr) -> bool:
    """Whether all that ``scope`` binds to a name are tensors that it makes: ``rows = torch.empty(n, d)``."""
    key = chain_key(holder)
    nodes = (one for one in local_nodes(scope) if not isinstance(one, ast.AugAssign))
    calls = [one.value for one in bindings_in(nodes) if one.name == key and one.replaces]
    return bool(calls) and all(isinstance(one, ast.Call) and leaf_name(one.func) in BLANK for one in calls)


def runs_more_often(bound_at: Frame, used_at: Frame) -> bool:
    """Whether a loop may run the statement at ``bound_at`` several times before that at ``used_at``; True in doubt."""
    bound, used = statement_at(bound_at), statement_at(used_at)
    if bound is None or used is None or any(loop not in used.loops for loop in bound.loops):
        return True
    around = {one for one, _ in bound.source.ancestors(bound.node)}
    conditions = {one for one, _ in used.source.ancestors(used.node) if isinstance(one, ast.If)}
    return bool(bound.loops) and not conditions <= around


class _Interpreter:
    def __init__(self) -> None:
        self.states: dict[ast.stmt, list[State]] = {}

    def _reach(self, node: ast.stmt, state: State) -> None:
        self.states.setdefault(node, []).append(state)

    def block(self, statements: list[ast.stmt], state: State) -> Flow:
        flow = Flow(state)
        for statement in statements:
            if flow.falls is None:
                break
            inner = self.statement(statement, flow.falls)
            flow.falls = inner.falls
            flow.breaks += inner.breaks
            flow.continues += inner.continues
            flow.leaves += inner.leaves
        return flow

    def statement(self, node: ast.stmt, state: State) -> Flow:
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            return self.loop(node, state)
        self._reach(node, state)
        after = _bind(state, bindings_of(node))
        if isinstance(node, ast.If):
            return _side_by_side([self.block(node.body, after), self.block(node.orelse, after)])
        if isinstance(node, ast.With | ast.AsyncWith):
            return self.block(node.body, after)
        if isinstance(node, ast.Match):
            return _side_by_side([*(self.block(case.body, after) for case in node.cases), Flow(after)])
        if handlers := getattr(node, "handlers", None):
            return self.guarded(node, handlers, after)
        if isinstance(node, ast.Try):
            return self.then(self.then(self.block(node.body, after), node.orelse), node.finalbody)
        if isinstance(node, ast.Return | ast.Raise):
            return Flow(None, leaves=[after])
        if isinstance(node, ast.Break):
            return Flow(None, breaks=[after])
        if isinstance(node, ast.Continue):
            return Flow(None, continues=[after])
        return Flow(after)

    def guarded(self, node: ast.stmt, handlers: list[ast.ExceptHandler], state: State) -> Flow:
        body: list[ast.stmt] = getattr(node, "body", [])
        flow = self.block(body, state)
        # An exception may come after any binding in the body.
        anywhere = _join([state, *([flow.falls] if flow.falls is not None else []), _everything_bound(body)])
        normal = self.then(flow, getattr(node, "orelse", []))
        caught = [self.block(handler.body, anywhere) for handler in handlers]
        return self.then(_side_by_side([normal, *caught]), getattr(node, "finalbody", []))

    def then(self, flow: Flow, statements: list[ast.stmt]) -> Flow:
        if flow.falls is None or not statements:
            return flow
        after = self.block(statements, flow.falls)
        return Flow(
            after.falls, flow.breaks + after.breaks, flow.continues + after.continues, flow.leaves + after.leaves
        )

    def loop(self, node: ast.For | ast.AsyncFor | ast.While, state: State) -> Flow:
        is_for = isinstance(node, ast.For | ast.AsyncFor)
        if is_for:
            self._reach(node, state)
        top = state
        leaves: list[State] = []
        breaks: list[State] = []
        for _ in range(_MAX_ROUNDS):
            if not is_for:
                self._reach(node, top)
            flow = self.block(node.body, _bind(top, bindings_of(node)))
            leaves += flow.leaves
            breaks += flow.breaks
            rounds = _join([end for end in [flow.falls, *flow.continues] if end is not None])
            following = _join([top, _mark_carried(rounds, node)])
            if following == top:
                break
            top = following
        is_endless = isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and bool(node.test.value)
        end = _leave(top if is_for else _bind(top, bindings_of(node)), node)
        after = Flow(None) if is_endless else self.block(node.orelse, end)
        broken = [_leave(state, node) for state in breaks]
        if broken:
            after.falls = _join([*([after.falls] if after.falls is not None else []), *broken])
        after.leaves += [_leave(state, node) for state in leaves]
        return after


def _bind(state: State, bindings: list[Binding]) -> State:
    if not bindings:
        return state
    after = dict(state)
    for binding in bindings:
        new = frozenset({Definition(binding.name, binding.statement)})
        if binding.replaces:
            for name in [name for name in after if name.startswith((f"{binding.name}.", f"{binding.name}["))]:
                del after[name]
            after[binding.name] = new
        else:
            after[binding.name] = after.get(binding.name, frozenset({Definition(binding.name, None)})) | new
    return after


def _everything_bound(body: list[ast.stmt]) -> State:
    state: State = {}
    for binding in bindings_in(node for outer in body for node in ast.walk(outer)):
        found = frozenset({Definition(binding.name, binding.statement)})
        state[binding.name] = state.get(binding.name, frozenset()) | found
    return state


def _mark_carried(state: State, loop: ast.AST | None) -> State:
    """The state at the back edge to the top of ``loop`` (None for the body as a whole)."""
    inside = None if loop is None else set(ast.walk(loop))
    return {
        name: frozenset(
            replace(found, rounds=found.rounds | {loop})
            if found.statement is not None and (inside is None or found.statement in inside)
            else found
            for found in definitions
        )
        for name, definitions in state.items()
    }


def _leave(state: State, loop: ast.AST) -> State:
    """The state after ``loop``: bindings carried by its iterations count as plain ones."""
    return {
        name: frozenset(replace(found, rounds=found.rounds - {loop}) for found in definitions)
        for name, definitions in state.items()
    }


def _join(states: list[State]) -> State:
    joined: State = {}
    for name in dict.fromkeys(name for state in states for name in state):
        beginning = frozenset({Definition(name, None)})
        joined[name] = frozenset().union(*(state.get(name, beginning) for state in states))
    return joined


def _side_by_side(flows: list[Flow]) -> Flow:
    falls = [flow.falls for flow in flows if flow.falls is not None]
    return Flow(
        _join(falls) if falls else None,
        [state for flow in flows for state in flow.breaks],
        [state for flow in flows for state in flow.continues],
        [state for flow in flows for state in flow.leaves],
    )


def binding_at(frame: Frame, name: str) -> Binding | None:
    """The binding of ``name`` that holds at ``frame``; None if there are several, or none in this function."""
    statement = statement_at(frame)
    if statement is None or statement.scope is None:
        return None
    found = [
        binding
        for definition in reaching(statement.scope.body, statement.node).get(name, frozenset())
        for binding in (bindings_of(definition.statement) if definition.statement is not None else ())
        if binding.name == name and binding.replaces and not isinstance(binding.statement, ast.AugAssign)
    ]
    return found[0] if len(found) == 1 else None


def is_of_copy(frame: Frame, name: str) -> bool:
    """Whether ``name``, or what it is a part of or is taken from in a loop, comes from a copy in its function."""
    statement = statement_at(frame)
    if statement is None or statement.scope is None:
        return True
    waiting, seen = [(statement.node, frozenset({name}))], set[ast.stmt]()
    while waiting:
        at, names = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        found = reaching(statement.scope.body, at)
        for bound in (one.statement for each in names for one in found.get(each, ())):
            value = bound.iter if isinstance(bound, ast.For) else getattr(bound, "value", None)
            if bound is None or not isinstance(value, ast.expr):
                continue
            calls = (part for part in ast.walk(value) if isinstance(part, ast.Call))
            if any(leaf_name(one.func) in _COPIES for one in calls):
                return True
            waiting.append((bound, frozenset(consumed_names(value))))
    return False


_COMPARING = frozenset({"allclose", "dist", "equal", "isclose", "l1_loss", "mse_loss", "sub", "subtract"})


def are_compared(node: ast.stmt, one: str, other: str) -> bool:
    """Whether the statement subtracts or compares two variables: ``(w - w_old).norm()``."""
    for inner in header_nodes(node):
        sides: list[ast.expr] = []
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub):
            sides = [inner.left, inner.right]
        elif isinstance(inner, ast.Compare):
            sides = [inner.left, *inner.comparators]
        elif isinstance(inner, ast.Call) and leaf_name(inner.func) in _COMPARING:
            sides = [*([inner.func.value] if isinstance(inner.func, ast.Attribute) else []), *inner.args]
        names = {(chain_key(side) or ast.unparse(side)).removesuffix(".data") for side in sides}
        if {one, other} <= {name.removesuffix(".detach()") for name in names}:
            return True
    return False


_NEW_VALUES = frozenset({"add", "sub", "mul", "div", "lerp", "clamp", "addcmul", "addcdiv"})


def dropped_updates(loop: ast.For | ast.AsyncFor, scope: ast.AST) -> dict[ast.Assign, str | None]:
    """Assignments to a loop's variable, unread in ``scope``: ``p = p - g``; ``g = g / n`` has ``p.grad`` with it."""
    bound = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    found = dict[ast.Assign, str | None]()
    for node in _of_each_round(loop.body):
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name) and len(node.targets) == 1:
            taken = None if target.id in bound else _taken_from(loop, target.id)
            is_new = (taken or target.id in bound) and _is_new_value(node.value)
            found |= {node: taken} if is_new and not _is_read(target.id, node, loop, scope) else {}
    return found


def _taken_from(loop: ast.For | ast.AsyncFor, name: str) -> str | None:
    """``p.grad`` where a round binds ``name`` to that first, and to one other value later."""
    named = [one for one in ast.walk(loop) if isinstance(one, ast.Name) and one.id == name]
    first = min(named, key=lambda one: (one.lineno, one.col_offset))
    given = (one.value for one in _of_each_round(loop.body) if isinstance(one, ast.Assign) and one.targets == [first])
    held = chain_key(next(given, first)) or ""
    stores = [one for one in named if isinstance(one.ctx, ast.Store)]
    is_deleted = any(isinstance(one.ctx, ast.Del) for one in named)
    return held if len(stores) == 2 and not is_deleted and held.endswith((".grad", ".data")) else None


def _of_each_round(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.With):
            yield from _of_each_round([*node.body, *getattr(node, "orelse", ())])


def _is_new_value(value: ast.expr) -> bool:
    calls = [one for one in ast.walk(value) if isinstance(one, ast.Call)]
    is_new = isinstance(value, ast.BinOp) or (isinstance(value, ast.Call) and leaf_name(value.func) in _NEW_VALUES)
    writes = (
        is_inplace_name(leaf_name(one.func) or "") or any(it.arg == "out" for it in one.keywords) for one in calls
    )
    return is_new and not any(writes)


def _is_read(name: str, node: ast.Assign, loop: ast.For | ast.AsyncFor, scope: ast.AST) -> bool:
    """Whether anything may read ``name`` after ``node``, other than what binds it anew (a loop, a parameter)."""
    nodes, inside = list(ast.walk(scope)), set(ast.walk(loop))
    keeps = any(isinstance(one, ast.Global | ast.Nonlocal) and name in one.names for one in nodes)
    if keeps or any(isinstance(one, ast.FunctionDef | ast.Lambda) for one in inside):
        return True
    apart: set[ast.AST] = set(ast.walk(node.value))
    for one in nodes:
        targets = [part.target for part in (one, *getattr(one, "generators", ())) if isinstance(part, _BINDERS)]
        is_own = isinstance(one, ast.FunctionDef | ast.Lambda) and name in parameters(one)
        if is_own or name in {leaf_name(part) for at in targets for part in ast.walk(at)}:
            apart.update(() if loop in (within := set(ast.walk(one))) else within)
    reads = [one for one in nodes if isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Load)]
    # An outer loop reads in its next iteration what the last one has bound.
    around = [one for one in nodes if isinstance(one, ast.For | ast.AsyncFor | ast.While) and loop in ast.walk(one)]
    again = {part for one in around if one is not loop for part in ast.walk(one)} - inside
    later = (one for one in reads if one.lineno >= node.lineno or one in again)
    return not apart.issuperset(later) or apart.isdisjoint(reads)


_BINDERS = (ast.For, ast.AsyncFor, ast.comprehension)
