"""Statements in the abstract interpreter: blocks, branches, loop iterations, assignments, and writes by operators."""

from __future__ import annotations

import ast
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace

from gradsan.heuristics import excludes_training
from gradsan.lint.engine.assignments import Assignments, is_none_value
from gradsan.lint.engine.base import EnoughError, Loop, LoopEntry
from gradsan.lint.engine.expressions import is_instance
from gradsan.lint.engine.state import State
from gradsan.lint.engine.values import (
    OPEN_SIDE,
    Bag,
    Branches,
    Choice,
    ClassValue,
    Dictionary,
    Function,
    Memory,
    Path,
    Plain,
    Sequence,
    Tensor,
    Value,
)

_RAISING = frozenset({"raises", "assertRaises", "assertRaisesRegex", "assertWarns", "suppress"})
_HOOKING = frozenset({"save_on_cpu", "saved_tensors_hooks", "allow_mutation_on_saved_tensors"})
_ROUNDS = 2


class Statements(Assignments):
    """Interpreter of statements."""

    def __init__(self, module: ast.Module) -> None:
        super().__init__(module)
        self._repeating: dict[ast.AST, bool] = {}
        self._asked: dict[ast.AST, frozenset[int]] = {}

    def block(self, body: Many[ast.stmt], state: State) -> State | None:
        current: State | None = state
        for statement in body:
            if current is None:
                break
            self.statements_left -= 1
            if self.statements_left < 0:
                raise EnoughError
            self.statement = statement
            handler = _HANDLERS.get(type(statement))
            if handler is not None:
                current = handler(self, statement, current)
        return current

    # -- leaving

    def _return(self, node: ast.Return, state: State) -> State | None:
        value: Value = Plain(None, True) if node.value is None else self.evaluate(node.value, state)
        frame = self.frames[-1]
        frame.returned.append((value, state, self.site(node)))
        if frame.is_root:
            self.root_returns(value, node, state)
        return None

    def root_returns(self, value: Value, node: ast.Return, state: State) -> None:
        """Handle a return of a function that is analysed by itself. See :class:`Program`."""

    def _raise(self, node: ast.Raise, state: State) -> State | None:
        return None

    def _break(self, node: ast.Break, state: State) -> State | None:
        if self.frames[-1].loops:
            self.frames[-1].loops[-1].breaks.append(state)
        return None

    def _continue(self, node: ast.Continue, state: State) -> State | None:
        if self.frames[-1].loops:
            self.frames[-1].loops[-1].continues.append(state)
        return None

    # -- choices

    def _if(self, node: ast.If, state: State) -> State | None:  # type: ignore[override]
        known = self.truth(node.test, state)
        if known is not None:
            return self.block(node.body if known else node.orelse, state)
        branches = state.branches
        there = state.copy()
        there.branches = (*branches, (id(node), 0))
        state.branches = (*branches, (id(node), 1))
        self._narrow(node.test, there, True)
        self._narrow(node.test, state, False)
        quiet = state.quiet
        self._hush(node.test, there, state)
        one = self.block(node.body, there)
        other = self.block(node.orelse, state)
        if one is None or other is None:
            left = one if other is None else other
            if left is not None:
                left.branches = branches
        else:
            left = self.join(other, one, branches)
        if left is not None:
            left.quiet = quiet
        return left

    def _hush(self, test: ast.expr, holds: State, fails: State) -> None:
        """Report nothing in code that runs without training (``if inference_params is not None``)."""
        names = [str(getattr(one, "id", getattr(one, "attr", ""))) for one in ast.walk(test)]
        if isinstance(test, ast.Call) or not excludes_training(names):
            return
        is_negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is):
            is_negated = isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value is None
        (fails if is_negated else holds).quiet = True

    def _narrow(self, test: ast.expr, state: State, holds: bool) -> None:
        """Narrow ``x`` in the branches of ``if x is None`` and ``isinstance(x, A)``, where it is no choice any more."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._narrow(test.operand, state, not holds)
            return
        asked = self.asked_class(test, state)
        if asked is not None:
            value = self.evaluate(asked[0], state)
            if isinstance(value, Choice) and isinstance(asked[0], ast.Name | ast.Attribute):
                fitting = [one for one in value.values if is_instance(one, asked[1]) in (None, holds)]
                if len(fitting) == 1:
                    self.assign(asked[0], fitting[0], state)
            return
        target, is_none = test, not holds
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            right = test.comparators[0]
            if not (isinstance(right, ast.Constant) and right.value is None):
                return
            target = test.left
            is_none = isinstance(test.ops[0], ast.Is) == holds
        if not isinstance(target, ast.Name | ast.Attribute):
            return
        value = self.evaluate(target, state)
        if not isinstance(value, Choice):
            return
        fitting = [one for one in value.values if is_none_value(one) == is_none]
        if len(fitting) == 1:
            self.assign(target, fitting[0], state)

    def _match(self, node: ast.Match, state: State) -> State | None:
        self.evaluate(node.subject, state)
        branches = state.branches
        left: State | None = None
        for index, case in enumerate(node.cases):
            there = state.copy()
            there.branches = (*branches, (id(node), index))
            end = self.block(case.body, there)
            left = end if left is None else self.join(left, end, branches)
        return left

    def _try(self, node: ast.Try, state: State) -> State | None:
        after = self.block(node.body, state)
        if after is not None and node.orelse:
            after = self.block(node.orelse, after)
        return self.block(node.finalbody, after) if after is not None else None

    def _with(self, node: ast.With | ast.AsyncWith, state: State) -> State | None:
        before, hooked = state.grad, state.hooked
        for item in node.items:
            call = item.context_expr
            name = call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""
            if name in _RAISING:
                return state
            if name in _HOOKING or (isinstance(call, ast.Call) and getattr(call.func, "id", "") in _HOOKING):
                state.hooked = True
            switch = self.grad_switch(call, state)
            value = self.evaluate(call, state) if switch is None else Plain()
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value, state)
            if switch is not None:
                state.grad = switch
        after = self.block(node.body, state)
        if after is not None:
            after.grad, after.hooked = before, hooked
        return after

    # -- loops

    def _for(self, node: ast.For | ast.AsyncFor, state: State) -> State | None:
        over = self.evaluate(node.iter, state)
        items = self.rounds_of(over, node.iter, state)
        if not items and isinstance(over, Sequence | Dictionary):
            return state
        if not isinstance(over, Sequence | Bag) and self._only_repeats(node):
            items = items[-1:]
        return self._rounds(node, items or [self.fresh(), self.fresh()], state)

    def _only_repeats(self, node: ast.For | ast.AsyncFor | ast.While) -> bool:
        """Whether all backward calls of a loop are in an inner loop, which shows what an iteration carries over."""
        known = self._repeating.get(node)
        if known is None:
            inner = [one for one in ast.walk(node) if one is not node and isinstance(one, ast.For | ast.While)]
            inside = {call for loop in inner for call in ast.walk(loop) if _is_backward(call)}
            calls = [call for call in ast.walk(node) if _is_backward(call)]
            known = bool(calls) and all(call in inside for call in calls)
            self._repeating[node] = known
        return known

    def _while(self, node: ast.While, state: State) -> State | None:
        if self.truth(node.test, state) is False:
            return state
        return self._rounds(node, [None] * _ROUNDS, state)

    def _rounds(
        self, node: ast.For | ast.AsyncFor | ast.While, items: Many[Value | None], state: State
    ) -> State | None:
        loop = Loop()
        frame = self.frames[-1]
        frame.loops.append(loop)
        branches = state.branches
        self._loops.append(LoopEntry(node, self.clock, len(self.frames)))
        current: State | None = state
        held: set[Memory] = set()
        for index, item in enumerate(items):
            if current is None:
                break
            if index:
                self.round_ended(node, current)
                held = {memory for value in current.names.values() for memory in _memories_of(value)}
            if item is not None and isinstance(node, ast.For | ast.AsyncFor):
                self.assign(node.target, item, current)
            loop.continues = []
            current = self.block(node.body, current)
            for other in loop.continues:
                current = self.join(current, other, branches)
            if current is not None:
                current.branches = branches
        self._loops.pop()
        frame.loops.pop()
        if current is None and loop.breaks:
            current = loop.breaks[-1]
            current.branches = branches
        elif current is not None and node.orelse:
            current = self.block(node.orelse, current)
        if current is not None:
            if held:
                if node not in self._asked:
                    self._asked[node] = _asked_of_element(node)
                _leave_choices(current, held, branches, self._asked[node])
            self.loop_ended(node, current)
        return current

    def round_ended(self, node: ast.AST, state: State) -> None:
        """Handle the end of a loop's iteration."""

    def loop_ended(self, node: ast.AST, state: State) -> None:
        """Handle the end of a loop. See :class:`Sums`."""

    # -- definitions

    def _import(self, node: ast.Import, state: State) -> State:
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            state.names[self.frames[-1].number, name] = Path(alias.name if alias.asname else name)
        return state

    def _import_from(self, node: ast.ImportFrom, state: State) -> State:
        base = "." * node.level + (node.module or "")
        for alias in node.names:
            state.names[self.frames[-1].number, alias.asname or alias.name] = Path(f"{base}.{alias.name}")
        return state

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, state: State) -> State:
        state.names[self.frames[-1].number, node.name] = Function(node, self.frames[-1].chain)
        return state

    def _class(self, node: ast.ClassDef, state: State) -> State:
        bases = tuple(self.evaluate(one, state) for one in node.bases)
        made = ClassValue(node, bases)
        for one in node.body:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                made.functions[one.name] = Function(one, self.frames[-1].chain, made)
            elif isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
                made.attributes[one.targets[0].id] = self.evaluate(one.value, state)
        made.is_module = any(self._is_module_base(one, made) for one in bases)
        state.names[self.frames[-1].number, node.name] = made
        return state

    def _is_module_base(self, base: Value, kind: ClassValue) -> bool:
        if isinstance(base, ClassValue):
            return base.is_module
        name = base.name if isinstance(base, Path) else ""
        if name.startswith("torch.autograd"):
            return False
        if name.rpartition(".")[2] in ("Parameter", "UninitializedParameter", "Buffer"):
            return False
        return name.startswith("torch.nn.") or name.endswith("Module") or (bool(name) and "forward" in kind.functions)

    # -- assignments

    def _delete(self, node: ast.Delete, state: State) -> State:
        for target in node.targets:
            if isinstance(target, ast.Name):
                state.names.pop((self.frames[-1].number, target.id), None)
            elif isinstance(target, ast.Subscript):
                self._delete_items(target, state)
        return state

    def _delete_items(self, target: ast.Subscript, state: State) -> None:
        """Interpret ``del saved[:]``, which leaves nothing; after any other index the content is unknown."""
        owner = self.evaluate(target.value, state)
        if isinstance(owner, Sequence):
            part = target.slice
            if isinstance(part, ast.Slice) and part.lower is None and part.upper is None:
                state.heap[owner, "@items"] = ()
            else:
                state.heap.pop((owner, "@items"), None)
        elif isinstance(owner, Dictionary):
            held, key = state.heap.get((owner, "@entries")), self._key(target.slice, state)
            entries = held if isinstance(held, dict) else {}
            state.heap[owner, "@entries"] = {name: one for name, one in entries.items() if key not in (name, ...)}

    def _expression(self, node: ast.Expr, state: State) -> State:
        if not isinstance(node.value, ast.Constant):
            self.evaluate(node.value, state)
        return state

    def _declared(self, node: ast.Global | ast.Nonlocal, state: State) -> State:
        frame = self.frames[-1]
        for name in node.names:
            outer = frame.chain[1:] if isinstance(node, ast.Nonlocal) else frame.chain[-1:]
            for number in outer:
                if (number, name) in state.names or number == frame.chain[-1]:
                    frame.outer_names[name] = number
                    break
        return state

    def _assert(self, node: ast.Assert, state: State) -> State:
        self.truth(node.test, state)
        return state


def _memories_of(value: Value) -> tuple[Memory, ...]:
    if isinstance(value, Choice):
        return tuple(memory for one in value.values for memory in _memories_of(one))
    return value.memories if isinstance(value, Tensor) else ()


def _asked_of_element(node: ast.For | ast.AsyncFor | ast.While) -> frozenset[int]:
    """The choices in a loop that its element decides (``if i < n - 1``): the last round may take either side."""
    if isinstance(node, ast.While):
        return frozenset()
    bound = {one.id for one in ast.walk(node.target) if isinstance(one, ast.Name)}
    choices = (one for one in ast.walk(node) if isinstance(one, ast.If | ast.IfExp))
    return frozenset(id(one) for one in choices if any(getattr(n, "id", "") in bound for n in ast.walk(one.test)))


def _leave_choices(state: State, held: set[Memory], branches: Branches, asked: frozenset[int]) -> None:
    """After a loop, take what some round binds (``if i == layer: kept = x``) for that of a round before the last.

    ``held`` are the memories that names had when the last round began, ``branches`` the choices around the loop, and
    ``asked`` those in it that its element decides: after the loop they hold no more than any other.
    """
    for name, value in state.names.items():
        state.names[name] = _left_earlier(value, held, len(branches), asked)


def _left_earlier(value: Value, held: set[Memory], depth: int, asked: frozenset[int]) -> Value:
    if isinstance(value, Choice):
        parts = tuple(_left_earlier(one, held, depth, asked) for one in value.values)
        return value if parts == value.values else replace(value, values=parts)
    if not isinstance(value, Tensor) or not value.branches_of:
        return value
    earlier = tuple(one for one in value.memories if one in held or len(value.branches_of.get(one, ())) <= depth)
    if earlier and earlier != value.memories:
        return replace(value, memories=earlier)
    lies = {
        memory: tuple((one, OPEN_SIDE if one in asked else side) for one, side in there)
        for memory, there in value.branches_of.items()
    }
    return value if lies == value.branches_of else replace(value, branches_of=lies)


def _is_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"


_HANDLERS: dict[type[ast.stmt], Callable[..., State | None]] = {
    ast.Assign: Statements._assign_statement,
    ast.AnnAssign: Statements._annotated,
    ast.AugAssign: Statements._augment,
    ast.Expr: Statements._expression,
    ast.If: Statements._if,
    ast.For: Statements._for,
    ast.AsyncFor: Statements._for,
    ast.While: Statements._while,
    ast.With: Statements._with,
    ast.AsyncWith: Statements._with,
    ast.Try: Statements._try,
    ast.Match: Statements._match,
    ast.Return: Statements._return,
    ast.Raise: Statements._raise,
    ast.Break: Statements._break,
    ast.Continue: Statements._continue,
    ast.Import: Statements._import,
    ast.ImportFrom: Statements._import_from,
    ast.FunctionDef: Statements._function,
    ast.AsyncFunctionDef: Statements._function,
    ast.ClassDef: Statements._class,
    ast.Delete: Statements._delete,
    ast.Global: Statements._declared,
    ast.Nonlocal: Statements._declared,
    ast.Assert: Statements._assert,
}
