"""Reaching definitions: which assignments may have given a name the value that a statement reads.

A small abstract interpreter over the blocks of one function or module. What a loop's body assigned and the loop
carried into its next round is marked as carried; so is what a call leaves in attributes, globals and nonlocals for
the next call of the same function.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from gradsan.model import Frame
from gradsan.source.identifiers import Binding, bindings_of, consumed_names, leaf_name, local_nodes
from gradsan.source.locate import Statement, expression_at, statement_at

__all__ = ["Definition", "Flow", "changes_anew", "is_still_argument", "last_binding", "plain_name", "reaching"]

Blocks = list[list[ast.stmt]]
State = dict[str, frozenset["Definition"]]
_MAX_ROUNDS = 20
STEPS_BACK = 4
"""Bindings behind each other by which a value is followed back."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A binding that reaches a statement.

    ``statement`` is None for the value the name had when the function began. ``rounds`` are the loops around the
    place it reaches that carried it from one round to the next; the body as a whole counts as one.
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
    """What flows out of a block, by the way it leaves."""

    falls: State | None
    breaks: list[State] = field(default_factory=list)
    continues: list[State] = field(default_factory=list)
    leaves: list[State] = field(default_factory=list)


def reaching(body: list[ast.stmt], at: ast.stmt, persists: Callable[[str], bool], given: Iterable[str] = ()) -> State:
    """The definitions that may reach ``at``, a statement somewhere in ``body``, by name.

    ``persists`` tells the names that keep their value from one execution of ``body`` to the next, ``given`` are those
    that have one when it begins.
    """
    interpreter = _Interpreter(at)
    start: State = {name: frozenset({Definition(name, None)}) for name in given}
    for _ in range(_MAX_ROUNDS):
        flow = interpreter.block(body, start)
        end = _join([state for state in [flow.falls, *flow.leaves] if state is not None])
        kept = {name: found for name, found in _mark_carried(end, None).items() if persists(name)}
        following = _join([start, kept])
        if following == start:
            break
        start = following
    return _join(interpreter.states)


def is_still_argument(body: list[ast.stmt], at: ast.stmt, name: str) -> bool:
    """Whether the parameter ``name`` is at ``at`` what the caller gave: never bound anew, at most changed in place."""
    found = reaching(body, at, lambda name: False).get(name, frozenset())
    return not any(
        binding.replaces and not isinstance(binding.statement, ast.AugAssign)
        for definition in found
        if definition.statement is not None
        for binding in bindings_of(definition.statement)
        if binding.name == name
    )


class _Interpreter:
    def __init__(self, at: ast.stmt) -> None:
        self.at = at
        self.states: list[State] = []

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
        if node is self.at:
            self.states.append(state)
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
        if is_for and node is self.at:
            self.states.append(state)
        top = state
        leaves: list[State] = []
        breaks: list[State] = []
        for _ in range(_MAX_ROUNDS):
            if not is_for and node is self.at:
                self.states.append(top)
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
    for outer in body:
        for node in ast.walk(outer):
            if isinstance(node, ast.stmt):
                for binding in bindings_of(node):
                    found = frozenset({Definition(binding.name, node)})
                    state[binding.name] = state.get(binding.name, frozenset()) | found
    return state


def _mark_carried(state: State, loop: ast.AST | None) -> State:
    """The state after the way back to the top of ``loop`` (None for the body as a whole)."""
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
    """The state after ``loop``: what its rounds carried is now just what it left."""
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


def last_binding(frame: Frame, name: str) -> Binding | None:
    """The last binding of ``name`` before the statement at ``frame``, in its function; None where there is none."""
    statement = statement_at(frame)
    if statement is None or isinstance(statement.function, ast.Lambda):
        return None
    scope = statement.source.module if statement.function is None else statement.function
    found: Binding | None = None
    nodes = [node for node in local_nodes(scope) if isinstance(node, ast.Assign | ast.AnnAssign | ast.For)]
    for node in sorted(nodes, key=lambda one: one.lineno):
        if node.lineno < statement.node.lineno:
            found = next((one for one in bindings_of(node) if one.name == name and one.replaces), found)
    return found


def plain_name(frame: Frame, name: str) -> str:
    """The first name of what is called ``name`` at ``frame``: ``batch`` of ``out`` after ``out = batch``."""
    for _ in range(STEPS_BACK):
        binding = last_binding(frame, name)
        if binding is None or not isinstance(binding.value, ast.Name):
            return name
        name = binding.value.id
    return name


_DRAWS = frozenset(
    {
        *("bernoulli", "binomial", "choice", "choices", "gauss", "multinomial", "normal", "permutation", "poisson"),
        *("rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random", "random_sample", "randperm"),
        *("sample", "shuffle", "standard_normal", "uniform"),
    }
)
_OF_SHAPE = frozenset(
    {"rand_like", "randint_like", "randn_like", "ones_like", "zeros_like", "full_like", "len", "clone"}
)
"""What may be asked of the data itself to change it by something else."""
_SEEDS = frozenset({"manual_seed", "seed", "default_rng", "Generator", "RandomState", "set_state", "set_rng_state"})


def changes_anew(frame: Frame, name: str) -> bool:
    """Whether the write at ``frame`` changes ``name`` by what is drawn anew in each round, or by what it holds itself.

    ``x += 0.1 * torch.randn_like(x)``, ``ids[torch.rand(n) < p] = MASK``, ``out[:, 0] = torch.log1p(out[:, 0])``; not
    what is drawn once for all rounds, or from a seed.
    """
    found, statement = expression_at(frame), statement_at(frame)
    if statement is None or isinstance(statement.function, ast.Lambda):
        return False
    node: ast.AST = statement.node if found is None or isinstance(found.node, ast.Subscript) else found.node
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript):
        target, value = node.targets[0], node.value
        if _is_function_of(value, statement.source.text(target)):
            return True
        is_constant = isinstance(value, ast.Constant | ast.Attribute | ast.UnaryOp)
        if isinstance(value, ast.Name):
            binding = last_binding(frame, value.id)
            is_constant = binding is None or isinstance(binding.value, ast.Constant | ast.Attribute | ast.UnaryOp)
        given: list[ast.AST] = [target.slice] if is_constant else []
        given += [value] if name in consumed_names(value) else []
    elif isinstance(node, ast.AugAssign):
        given = [node.value]
    elif isinstance(node, ast.Call):
        given = [*node.args, *(one.value for one in node.keywords)]
    else:
        return False
    return _is_drawn(statement, given, name)


def _is_function_of(value: ast.expr, own: str) -> bool:
    """Whether a value is a logarithm, power or multiple of what is written as ``own``."""
    if isinstance(value, ast.Call):
        operands = [*value.args[:1], *([value.func.value] if isinstance(value.func, ast.Attribute) else [])]
        bends = ("exp", "expm1", "log", "log10", "log1p", "log2", "pow", "sqrt", "square")
        return leaf_name(value.func) in bends and any(ast.unparse(one) == own for one in operands)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div | ast.Pow):
        factor = value.right.value if isinstance(value.right, ast.Constant) else None
        is_far = isinstance(factor, int | float) and not 0.5 <= abs(factor) <= 2
        return ast.unparse(value.left) == own and (is_far or isinstance(value.op, ast.Pow))
    return False


def _is_drawn(statement: Statement, given: list[ast.AST], name: str) -> bool:
    scope = statement.source.module if statement.function is None else statement.function
    assert not isinstance(scope, ast.Lambda)
    # What is drawn outside of the loops is the same in each round.
    rounds = statement.loops[0] if statement.loops else statement.function
    if rounds is None or any(isinstance(one, ast.Call) and leaf_name(one.func) in _SEEDS for one in ast.walk(rounds)):
        return False
    nodes = [one for one in local_nodes(scope) if isinstance(one, ast.Assign | ast.AnnAssign | ast.AugAssign)]
    is_drawn = False
    for _ in range(STEPS_BACK):
        inside = [one for expression in given for one in ast.walk(expression)]
        calls = [one for one in inside if isinstance(one, ast.Call)]
        drawn = [one for one in calls if leaf_name(one.func) in _DRAWS]
        is_drawn = is_drawn or any(all(key.arg != "generator" for key in one.keywords) for one in drawn)
        if any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in inside) or any(
            name in consumed_names(each) for one in calls if leaf_name(one.func) not in _OF_SHAPE for each in one.args
        ):
            # A state that a function of itself, or a gradient, moves.
            return False
        read = {one.id for one in inside if isinstance(one, ast.Name)} - {name}
        bound = [one for node in nodes for one in bindings_of(node) if one.name in read and one.value is not None]
        given = [one.value for one in bound if one.value is not None and _is_within(one.statement, rounds)]
    return is_drawn


def _is_within(statement: ast.stmt, around: ast.AST) -> bool:
    return any(one is statement for one in ast.walk(around))
