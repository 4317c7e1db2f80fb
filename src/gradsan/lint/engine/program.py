"""Abstract interpretation of a file: first the module as if run, then every function that was not called by it."""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections.abc import Callable

from gradsan.lint._findings import Hit
from gradsan.lint.engine.base import EnoughError, Frame
from gradsan.lint.engine.order import NOT_CALLED, asks_for_error, in_vain, named_in_vain
from gradsan.lint.engine.state import State
from gradsan.lint.engine.statements import Statements
from gradsan.lint.engine.values import (
    MAYBE,
    NO,
    YES,
    Choice,
    ClassValue,
    Dictionary,
    Function,
    Node,
    Object,
    Path,
    Plain,
    Sequence,
    Site,
    Tensor,
    Value,
)
from gradsan.source.flow.reaching import dropped_updates

_MODULE_STATEMENTS = 4_000
_FUNCTION_STATEMENTS = 1_200
_FILE_STATEMENTS = 30_000


class Program(Statements):
    """Interpreter of a file."""

    def __init__(self, module: ast.Module, triggers: tuple[int, ...], proofs: tuple[int, ...]) -> None:
        """Set up; ``triggers`` are the lines at which a fault may begin; see :func:`read`."""
        super().__init__(module)
        self.triggers = triggers
        self.proofs = proofs
        self.left = _FILE_STATEMENTS
        self.root_level = MAYBE
        self.sums: dict[ast.AST, tuple[Site, Node, str, str, Node]] = {}

    def read(self) -> list[Hit]:
        """All findings of the file."""
        state = State()
        frame = Frame(0, "<module>", (0,))
        self.frames.append(frame)
        end = self._run(lambda: self.block(self.module.body, state), _MODULE_STATEMENTS)
        self._end_of_root(end or state)
        after = state if end is None else end
        after.grad, after.branches = True, ()
        self._functions(self.module.body, after)
        self._needless()
        self._without_effect(self.module.body, self.module)
        return list(self.hits.values())

    def _needless(self) -> None:
        for kept in self.retained.needless():
            values: dict[str, object] = {"name": kept.name}
            level = YES if kept.is_sure else MAYBE
            self.report("GS705", "retained_needlessly", kept.site, State(), level, values, [("used", kept.site)])

    def _without_effect(self, body: list[ast.stmt], scope: ast.AST, is_asked: bool = False) -> None:
        """Report what has no effect.

        Updates that only bind the variable of a loop over parameters, ``zero_grad``, ``step`` and ``backward`` without
        their call (unless ``is_asked``, whether they exist), and gradients cleared before their step or clipped before
        their backward.
        """
        for call in in_vain(body, self.module):
            site = self.site(call.call)
            self.report(call.code, call.slug, site, State(), YES, call.values, [("written", site)])
        for statement, named in () if is_asked else named_in_vain(body, self.module):
            code, slug = NOT_CALLED[named.attr]
            self._report_idle(code, slug, statement, ast.unparse(named), "call")
        for node in body:
            if isinstance(node, ast.For) and ".parameters()" in ast.unparse(node.iter):
                for one in dropped_updates(node, scope):
                    self._report_idle("GS420", "update_dropped", one, ast.unparse(one.targets[0]))
            inner = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else scope
            for block in ("body", "orelse", "finalbody", "handlers"):
                self._without_effect(getattr(node, block, None) or [], inner, asks_for_error(node))

    def _report_idle(self, code: str, slug: str, node: ast.AST, name: str, fix: str = "") -> None:
        site = self.site(node)
        self.report(code, slug, site, State(), YES, {"name": name}, [("written", site)], fix)

    def _run(self, work: Callable[[], State | None], statements: int) -> State | None:
        allowed = min(statements, self.left)
        self.statements_left = allowed
        depth = len(self.frames)
        try:
            return work()
        except (EnoughError, RecursionError):
            self.retained.handed_on()
            return None
        finally:
            del self.frames[depth:]
            self._loops.clear()
            self.left -= allowed - max(self.statements_left, 0)

    def _functions(self, body: list[ast.stmt], state: State) -> None:
        for node in body:
            if self.left <= 0:
                return
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                value = state.names.get((0, node.name))
                if isinstance(value, Function) and value.node is node:
                    self._root(value, state.copy(), None, MAYBE)
            elif isinstance(node, ast.ClassDef):
                value = state.names.get((0, node.name))
                if isinstance(value, ClassValue) and value.node is node:
                    self._class_root(value, state)
            elif isinstance(node, ast.If | ast.Try | ast.With):
                self._functions(node.body, state)

    def _is_triggered(self, node: ast.AST, level: int = YES) -> bool:
        """Whether a function contains a line of ``triggers``, or of ``proofs`` for a ``level`` below YES."""
        first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", 1)
        lines = self.triggers if level == YES else self.proofs
        place = bisect_left(lines, first)
        return place < len(lines) and lines[place] <= last

    def _class_root(self, kind: ClassValue, state: State) -> None:
        if not self._is_triggered(kind.node) or _is_custom_function(kind):
            return
        waiting = [one for one in kind.functions.values() if self._is_awaited(one, kind)]
        if not waiting:
            return
        here = state.copy()
        made: list[Object] = []

        def make() -> State:
            value = self.make_object(kind, [], {}, kind.node, here)
            if isinstance(value, Object):
                made.append(value)
            return here

        self._run(make, _FUNCTION_STATEMENTS)
        if not made:
            return
        self._forget_beginnings(made[0], here, _set_later(kind))
        order = sorted(waiting, key=lambda one: getattr(one.node, "name", "") not in _FIRST)
        for function in order:
            if function.node not in self.functions_run:
                self._root(function, here.copy(), made[0], self._level_of(function, kind))

    def _level_of(self, function: Function, kind: ClassValue) -> int:
        """The certainty that a method's result goes through backward."""
        name = getattr(function.node, "name", "")
        return YES if kind.is_module and (name in _FIRST or name.startswith("forward")) else MAYBE

    def _is_awaited(self, function: Function, kind: ClassValue) -> bool:
        name = getattr(function.node, "name", "")
        if function.node in self.functions_run or (name.startswith("__") and name != "__call__"):
            return name == "__init__" and self._is_triggered(function.node, MAYBE)
        if name == "forward" and kind.is_module and self._is_triggered(kind.node, MAYBE):
            return True
        return self._is_triggered(function.node, self._level_of(function, kind))

    def _forget_beginnings(self, me: Object, state: State, later: frozenset[str]) -> None:
        """Make empty containers and Nones from ``__init__`` unknown: the other methods of the class fill them.

        ``later`` are the attributes that they set.
        """
        names = state.heap.get((me, "@names"))
        for name in names if isinstance(names, tuple) else ():
            value = state.heap.get((me, str(name)))
            if isinstance(value, Sequence):
                if not state.heap.get((value, "@items")):
                    state.heap.pop((value, "@items"), None)
            elif isinstance(value, Dictionary) and not state.heap.get((value, "@entries")):
                state.heap.pop((value, "@entries"), None)
            elif isinstance(value, Plain) and value.known and value.value is None:
                state.heap[me, str(name)] = Choice((value, self.fresh(text=f"self.{name}")))
            elif isinstance(value, Plain) and value.known and name in later:
                state.heap[me, str(name)] = self.fresh(text=f"self.{name}")

    def _root(self, function: Function, state: State, me: Value | None, level: int) -> None:
        node = function.node
        if node in self.functions_run or isinstance(node, ast.Lambda):
            return
        if getattr(node, "name", "").startswith("__") and getattr(node, "name", "") != "__call__":
            return
        if me is None and not self._is_triggered(node, level):
            return
        state.grad, state.branches = True, ()
        self.root_level = level

        def run() -> State:
            self._read_root(function, state, me)
            return state

        self._run(run, _FUNCTION_STATEMENTS)

    def _read_root(self, function: Function, state: State, me: Value | None) -> None:
        # Like a call with unknown arguments, whose result's graph is examined at the end.
        self.next_is_root = True
        try:
            self.run_function(function, [], {}, state, me)
        finally:
            self.next_is_root = False
        if self.retained.any():
            # Attributes of objects outlive the call.
            self.hand_on([one for one in state.heap.values() if isinstance(one, Tensor)], state)
        self._end_of_root(state)

    def root_returns(self, value: Value, node: ast.Return, state: State) -> None:
        """See :class:`Statements`."""
        self.escape(value, node, state, self.root_level)
        self.hand_on([value], state)

    # -- sums that keep their graphs

    def added(self, node: ast.stmt, target: ast.expr, term: ast.expr, total: Value, value: Value, state: State) -> None:
        """See :class:`Statements`."""
        tensor = self.tensor_of(total)
        added = self.tensor_of(value)
        if isinstance(node, ast.AugAssign) and not isinstance(node.op, ast.Add):
            return
        if tensor is None or added is None or not self._loops:
            return
        graph, grad = self.graph_of(added, state)
        whole = self.graph_of(tensor, state)[0]
        if graph is None or whole is None or grad == NO:
            return
        # An earlier round has added to it, and the losses themselves go through backward.
        if not _made_at(whole, node, whole.clock):
            return
        self.sums[node] = (self.site(node), whole, ast.unparse(target), ast.unparse(term), graph)
        state.heap[graph, "summed"] = 1

    def _note_terms(self, graph: Node) -> None:
        for key, (_, whole, _, _, term) in list(self.sums.items()):
            if _reaches(graph, whole.site.node):
                self.sums[key] = (Site(key, "used"), whole, "", "", term)

    def _end_of_root(self, state: State) -> None:
        for site, _, name, value, term in self.sums.values():
            if name and self._is_loss(term):
                values: dict[str, object] = {"name": name, "value": value}
                self.report("GS422", "graph_grows", site, state, YES, values, [("bridge", site)], fix="detach")
        self.sums.clear()

    def _is_loss(self, term: Node) -> bool:
        """Whether backward was called on a term of a sum, or on what it is computed from."""
        roots = {root for _, root, _, _ in self.backwards if root is not None}
        pending, seen = [term], {term}
        while pending and len(seen) < 200:
            one = pending.pop()
            if one in roots:
                return True
            if one.is_opaque and not one.saved:
                # ``to_scalar(loss)`` of another file need not return a tensor.
                continue
            for parent in one.parents:
                if isinstance(parent, Node) and parent not in seen:
                    seen.add(parent)
                    pending.append(parent)
        return False


_FIRST = frozenset({"forward", "training_step", "train_step", "__call__", "loss", "compute_loss"})


def _set_later(kind: ClassValue) -> frozenset[str]:
    """The attributes that functions of a class other than ``__init__`` set, of any object."""
    found: set[str] = set()
    pending: list[ast.AST] = [one.node for name, one in kind.functions.items() if name != "__init__"]
    while pending:
        node = pending.pop()
        # Statements only: most nodes of a syntax tree are expressions.
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, part, None)
            pending += inner if isinstance(inner, list) else ()
        targets: list[ast.AST] = list(getattr(node, "targets", ()))
        targets += [getattr(node, "target", node)]
        for target in targets:
            elements = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            found.update(one.attr for one in elements if isinstance(one, ast.Attribute))
    return frozenset(found)


def _made_at(whole: Node, node: ast.AST, clock: int) -> bool:
    # In ``total = total + loss`` the value is the sum; in ``total += loss`` it is the term, which every round makes.
    sum_node = node.value if isinstance(node, ast.Assign) else None
    pending, seen = list(whole.parents), 0
    while pending and seen < 60:
        one = pending.pop()
        seen += 1
        if isinstance(one, Node):
            if one.clock < clock and (one.site.node is node or one.site.node is sum_node):
                return True
            pending.extend(one.parents)
    return False


def _reaches(graph: Node, node: ast.AST) -> bool:
    pending, seen = [graph], {graph}
    while pending and len(seen) < 400:
        one = pending.pop()
        if one.site.node is node:
            return True
        for parent in one.parents:
            if isinstance(parent, Node) and parent not in seen:
                seen.add(parent)
                pending.append(parent)
    return False


def _is_custom_function(kind: ClassValue) -> bool:
    return any(isinstance(one, Path) and one.name.startswith("torch.autograd") for one in kind.bases)


def read(module: ast.Module, triggers: tuple[int, ...], proofs: tuple[int, ...] | None = None) -> list[Hit]:
    """The faults of a module; ``triggers`` are the lines at which one may begin.

    ``proofs`` are those at which a function with unknown arguments may have a certain one; None analyses every
    function, for possible faults, too.
    """
    return Program(module, triggers, triggers if proofs is None else proofs).read()
