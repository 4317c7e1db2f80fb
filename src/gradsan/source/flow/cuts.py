"""Operations that detach a value from its graph, found by following the value's definitions backwards.

Functions in readable files are followed into their return values, and parameters to their arguments. ``Live`` says
whether live variables require grad now, and which functions they run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gradsan.model import Frame
from gradsan.source.flow.scopes import (
    Live,
    Scope,
    arguments_of,
    callee_of,
    definitions_of,
    known_of_file,
    parts_known,
    requires,
    scope_at,
    set_later,
    trains,
)
from gradsan.source.identifiers import (
    bindings_of,
    chain_key,
    consumed_names,
    dotted_path,
    leaf_name,
    local_nodes,
    standing_of,
)
from gradsan.source.locate import at_span, expression_at, frame_of, statement_at
from gradsan.source.methods import METADATA
from gradsan.source.tree import FunctionNode, SourceFile, header_nodes, read_source

_DEEPEST = 40
_MOST = 4_000
_BINDINGS = 3
_FUNCTION = 0
"""Mark in ``Scope.seen`` of a visited function, in contrast to a name at a statement."""


@dataclass(frozen=True, slots=True)
class Cut:
    """An operation whose result has no graph: its kind, its frame, and its operand as written.

    ``kind``: ``detach``, ``data``, ``item``, ``numpy``, ``index`` (argmax and the like), ``comparison``, ``integer``,
    ``new_tensor``, ``no_grad``, ``inference_mode``, ``grad_mode_off``, ``grad_left_off``, ``set_late`` (requires_grad
    set after the value was used), ``gradient`` (``autograd.grad`` without a graph). ``is_certain``: the operand is
    known to require grad. ``is_covered``: its result is detached once more, ``covered_by`` is the kind and frame of it.
    """

    kind: str
    frame: Frame
    operand: str
    is_certain: bool = False
    is_covered: bool = False
    covered_by: tuple[str, Frame] | None = None


def find_cuts(frames: Sequence[Frame], live: Sequence[Live]) -> tuple[Cut, ...]:
    """The operations that detach a loss from its graph, the likeliest first.

    The innermost of ``frames`` (outermost first) is the call of the loss's ``backward``; ``live`` has an entry for each
    frame. Cuts whose operand is known to require grad come first, then the earliest one.
    """
    scope = scope_at(frames, live, len(frames) - 1)
    found = expression_at(frames[-1]) if frames else None
    if scope is None or found is None or not isinstance(found.node, ast.Call):
        return ()
    return cuts_of_value(_roots(found.node, scope), scope)[1]


def cuts_of_value(roots: Sequence[ast.expr], scope: Scope) -> tuple[bool, tuple[Cut, ...]]:
    """Whether a value in ``scope`` may require grad, and the cuts on the way to it, the likeliest first."""
    walk = _Walk()
    may_require = [walk.follow(root, scope) for root in roots]
    cuts = sorted(walk.cuts, key=lambda item: (not item[1].is_certain, -item[0]))
    return any(may_require), tuple(dict.fromkeys(cut for _, cut in cuts))


def takes_cut(frame: Frame) -> bool:
    """Whether the statement at ``frame`` computes with a value detached there, or where the value was bound.

    Bindings of the same function are followed some steps back.
    """
    return next(cuts_taken(frame), None) is not None


def cuts_taken(frame: Frame) -> Iterator[ast.expr]:
    """The expressions that detach a value used by the statement at ``frame``, found as in ``takes_cut``."""
    statement = statement_at(frame)
    scope = None if statement is None else statement.scope
    if statement is None or scope is None:
        return
    bindings = [one for node in local_nodes(scope) if isinstance(node, ast.Assign) for one in bindings_of(node)]
    waiting, seen = [(statement.node, 0)], set()
    while waiting:
        node, steps = waiting.pop()
        expressions = [one for one in header_nodes(node) if isinstance(one, ast.expr)]
        yield from (one for one in expressions if cut_of(statement.source, one)[0] in ("detach", "data"))
        seen.add(node)
        read = set(consumed_names(node)) if steps < _BINDINGS else set()
        earlier = [one for one in bindings if one.name in read and one.statement.lineno < node.lineno]
        last = {one.name: one.statement for one in sorted(earlier, key=lambda one: one.statement.lineno)}
        waiting += [(one, steps + 1) for one in last.values() if one not in seen]


def _roots(call: ast.Call, scope: Scope) -> list[ast.expr]:
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr == "backward"
    if not is_method or not isinstance(call.func, ast.Attribute) or leaf_name(call.func.value) == "autograd":
        return list(call.args[:1])
    # ``accelerator.backward(loss)``, where no tensor is known by that name.
    is_passed = call.args and chain_key(call.func.value) and requires(call.func.value, scope) is None
    return call.args[:1] if is_passed else [call.func.value]


class _Walk:
    """Collector of the cuts on the way back; deeper ones are earlier in time."""

    def __init__(self) -> None:
        self.cuts: list[tuple[int, Cut]] = []
        self.visited = 0

    def follow(self, node: ast.expr, scope: Scope) -> bool:
        """Follow an expression's definitions; whether any of them may require grad."""
        self.visited += 1
        if self.visited > _MOST or scope.depth > _DEEPEST:
            return True
        kind, operands = cut_of(scope.source, node)
        if kind is None and isinstance(node, ast.Call) and _is_gradient(scope.source, node):
            kind, operands = "gradient", node.args[:1]
        if kind is not None:
            return self._cut(kind, node, operands, scope)
        key = chain_key(node)
        if key is not None and not (isinstance(node, ast.Attribute) and node.attr in METADATA | {"grad"}):
            return self._name(node, key, scope)
        if isinstance(node, ast.Call):
            return self._call(node, scope)
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp):
            return self.follow(node.elt, _within(node, scope))
        if isinstance(node, ast.DictComp):
            return self.follow(node.value, _within(node, scope))
        results = [self.follow(child, scope) for child in _children(node)]
        return any(results)

    def _cut(self, kind: str, node: ast.expr, operands: list[ast.expr], scope: Scope) -> bool:
        first = len(self.cuts)
        behind = [(operand, self.follow(operand, scope)) for operand in operands]
        by = kind, _frame_of(scope, node)
        self.cuts[first:] = [
            (depth, replace(cut, is_covered=True, covered_by=None if cut.is_covered else by))
            for depth, cut in self.cuts[first:]
        ]
        for operand, may_require in behind:
            if may_require:
                known = requires(operand, scope)
                self._add(kind, node, scope, operand, known is True)
        return False

    def _name(self, node: ast.expr, key: str, scope: Scope) -> bool:
        root = key.replace("[", ".").split(".")[0]
        known = None if root in scope.own else requires(node, scope)
        if known:
            late = self._set_late(node, key, scope)
            return late is None
        mark = (f"{scope.source.file}:{key}", id(scope.at))
        if mark in scope.seen:
            return False
        inner = replace(scope, seen=scope.seen | {mark}, depth=scope.depth + 1)
        may_require = False
        definitions = [] if root in scope.own else list(definitions_of(scope, key))
        for statement, value in definitions:
            there = replace(inner, at=statement)
            mode = mode_around(scope.source, statement, scope.function)
            behind = self.follow(value, there)
            if mode is not None and behind:
                self._add(mode[0], mode[1], scope, value, True)
            elif behind:
                may_require = True
        if not definitions and root in scope.given:
            value, outer = scope.given[root]
            return self.follow(value, replace(outer, depth=scope.depth + 1, seen=inner.seen))
        return may_require or (not definitions and known is None and "." in key)

    def _call(self, call: ast.Call, scope: Scope) -> bool:
        arguments = [one.value if isinstance(one, ast.Starred) else one for one in call.args]
        arguments += [keyword.value for keyword in call.keywords]
        target = callee_of(call, scope)
        if target is not None:
            source, function = target
            mark = (f"{source.file}:{getattr(function, 'lineno', 0)}", _FUNCTION)
            if mark not in scope.seen:
                # Each call of this function has its own binding of the name.
                entered = frozenset(one for one in scope.seen if one[1] == _FUNCTION)
                return self._function(source, function, call, scope, entered | {mark})
        results = [self.follow(argument, scope) for argument in arguments]
        if isinstance(call.func, ast.Attribute) and standing_of(scope.source, call.func.value) != "namespace":
            results.append(self.follow(call.func.value, scope))
        return any(results) or trains(call.func, scope)

    def _function(
        self, source: SourceFile, function: FunctionNode, call: ast.Call, scope: Scope, seen: frozenset[tuple[str, int]]
    ) -> bool:
        given = {name: (value, scope) for name, value in arguments_of(function, call)}
        has_parameters = trains(call.func, scope)
        shared = known_of_file(source, function, scope)
        own = parts_known(scope.live.requires_grad, call.func, scope)
        called = parts_known(scope.live.callees, call.func, scope)
        functions = {name: one for name, one in scope.live.callees.items() if "." not in name}
        live = Live({**shared, **own, "self": has_parameters}, functions | called)
        decorator = mode_of_decorators(function)
        may_require = has_parameters
        for node in local_nodes(function):
            value = getattr(node, "value", None)
            if isinstance(node, ast.Return | ast.Yield) and isinstance(value, ast.expr):
                at = node if isinstance(node, ast.stmt) else source.statement(node)
                if at is None:
                    continue
                inner = Scope(source, function, at, live, given, seen, scope.depth + 1)
                behind = self.follow(value, inner)
                mode = mode_around(source, at, function)
                if mode is not None and (behind or has_parameters):
                    self._add(mode[0], mode[1], inner, value, True)
                    behind = False
                may_require = may_require or behind
        if decorator is not None:
            if may_require:
                self._add(
                    decorator[0],
                    decorator[1],
                    replace(scope, source=source, function=function),
                    call.func,
                    has_parameters,
                )
            return False
        return may_require

    def _set_late(self, node: ast.expr, key: str, scope: Scope) -> Cut | None:
        """The cut where ``requires_grad`` was set on a variable only after the value had been computed from it."""
        lines = [one for one in set_later(scope, key) if one.lineno > scope.at.lineno]
        if not lines or scope.depth == 0:
            return None
        self._add("set_late", lines[0], scope, node, True)
        return self.cuts[-1][1]

    def _add(self, kind: str, node: ast.AST, scope: Scope, operand: ast.expr, is_certain: bool) -> None:
        text = scope.source.text(operand) if kind != "no_grad" or chain_key(operand) else ast.unparse(operand)
        self.cuts.append((scope.depth, Cut(kind, _frame_of(scope, node), text, is_certain)))


def _frame_of(scope: Scope, node: ast.AST) -> Frame:
    span = scope.source.span(node)
    name = scope.source.scope_name(node)
    if hasattr(node, "body"):
        return Frame(scope.source.file, span.line, name, None, None, None, True)
    return Frame(scope.source.file, span.line, name, span.column, span.end_line, span.end_column, True)


def _within(node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp, scope: Scope) -> Scope:
    """The scope of the element of a comprehension, with each of its variables bound to its iterable."""
    for one in node.generators:
        parts = one.target.elts if isinstance(one.target, ast.Tuple) else [one.target]
        is_zip = isinstance(one.iter, ast.Call) and leaf_name(one.iter.func) == "zip"
        walked = one.iter.args if isinstance(one.iter, ast.Call) and is_zip else []
        values = walked if len(walked) == len(parts) else [one.iter] * len(parts)
        given = {
            name.id: (value, scope)
            for part, value in zip(parts, values, strict=True)
            for name in ast.walk(part)
            if isinstance(name, ast.Name)
        }
        scope = replace(scope, given={**scope.given, **given}, own=scope.own | given.keys())
    return scope


def _children(node: ast.AST) -> Iterator[ast.expr]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.comprehension):
            yield child.iter
        elif isinstance(child, ast.expr) and not (isinstance(node, ast.Subscript) and child is node.slice):
            yield child


def grad_switched_off(frames: Sequence[Frame]) -> Frame | None:
    """The last call of ``torch.set_grad_enabled(False)`` before the statements of ``frames`` (outermost first)."""
    for frame in reversed(frames):
        statement = statement_at(frame)
        if statement is None:
            continue
        scope: FunctionNode | ast.Module = statement.function or statement.source.module
        calls = [
            node
            for node in local_nodes(scope)
            if isinstance(node, ast.Call) and mode_of(node) == "no_grad" and leaf_name(node.func) == "set_grad_enabled"
        ]
        before = [call for call in calls if call.lineno < frame.line]
        if before:
            return at_span(frame, statement.source.span(max(before, key=lambda call: call.lineno)))
    return None


def grad_left_off(frames: Sequence[Frame]) -> Frame | None:
    """The one ``torch.set_grad_enabled(False)`` in functions that those of ``frames`` call, which stays in force.

    None where these files switch gradients on anywhere, or several functions off.
    """
    found: list[Frame] = []
    called = {name for frame in frames for name in _called_in(frame)}
    for like in {frame.file: frame for frame in frames}.values():
        source = read_source(like.file)
        for node in () if source is None else source.nodes:
            call = node.value if isinstance(node, ast.Expr) else None
            if source is None or not isinstance(call, ast.Call) or leaf_name(call.func) != "set_grad_enabled":
                continue
            if mode_of(call) is None:
                return None
            function = source.function(node)
            if isinstance(function, ast.FunctionDef) and function.name in called and node in function.body:
                found += [] if function.decorator_list else [frame_of(source, node, like)]
    return found[0] if len(found) == 1 else None


def _called_in(frame: Frame) -> Iterator[str]:
    """The names of functions of the program called in the function of ``frame``: not those of modules."""
    place = statement_at(frame)
    nodes = [] if place is None else local_nodes(place.function or place.source.module)
    for function in (node.func for node in nodes if isinstance(node, ast.Call)):
        owner = getattr(function, "value", None)
        if place is not None and (owner is None or standing_of(place.source, owner) == "value"):
            yield leaf_name(function) or ""


def _is_gradient(source: SourceFile, call: ast.Call) -> bool:
    """Whether the call computes gradients without a graph."""
    creates = (keyword.value for keyword in call.keywords if keyword.arg == "create_graph")
    is_constant = all(isinstance(value, ast.Constant) and value.value is False for value in creates)
    return is_constant and bool(call.args) and dotted_path(source, call.func) == "torch.autograd.grad"


CUTTING_METHODS = {
    **dict.fromkeys(("detach", "detach_"), "detach"),
    **dict.fromkeys(("item", "tolist", "__float__"), "item"),
    "numpy": "numpy",
    **dict.fromkeys(("argmax", "argmin", "argsort", "nonzero", "count_nonzero", "bincount", "multinomial"), "index"),
    **dict.fromkeys(("eq", "ne", "gt", "ge", "lt", "le", "isclose", "isnan", "any", "all", "equal"), "comparison"),
    **dict.fromkeys(("long", "int", "short", "byte", "char", "bool"), "integer"),
}
NEW_TENSOR = {"tensor", "as_tensor", "from_numpy", "asarray", "Tensor", "FloatTensor", "DoubleTensor", "LongTensor"}
_BUILTINS = {"float": "item", "int": "item", "round": "item", "bool": "item"}
_INTEGERS = frozenset({"long", "int", "int8", "int16", "int32", "int64", "short", "uint8", "bool", "LongTensor"})
_MODES = {"no_grad": "no_grad", "inference_mode": "inference_mode"}


def cut_of(source: SourceFile, node: ast.expr) -> tuple[str | None, list[ast.expr]]:
    """The kind of cut that an expression is, and its operand."""
    if isinstance(node, ast.Compare):
        return "comparison", [node.left, *node.comparators]
    if isinstance(node, ast.Attribute) and node.attr == "data" and chain_key(node.value) != "self":
        return "data", [node.value]
    if not isinstance(node, ast.Call):
        return None, []
    name = leaf_name(node.func) or ""
    arguments = [one for one in node.args if not isinstance(one, ast.Starred)]
    path = dotted_path(source, node.func) or ""
    if path.startswith("numpy.") and arguments:
        return "numpy", arguments
    if path.startswith("torch.") and name in NEW_TENSOR and arguments and not isinstance(arguments[0], ast.Constant):
        return "new_tensor", arguments[:1]
    if isinstance(node.func, ast.Name) and name in _BUILTINS:
        return _BUILTINS[name], arguments
    if path.startswith("torch.") and name in CUTTING_METHODS:
        return CUTTING_METHODS[name], arguments[:1]
    if isinstance(node.func, ast.Attribute) and not path.startswith(("torch.", "numpy.")):
        if name in CUTTING_METHODS:
            return CUTTING_METHODS[name], [node.func.value]
        if name in ("to", "type") and any(leaf_name(one) in _INTEGERS for one in arguments):
            return "integer", [node.func.value]
    return None, []


def mode_around(source: SourceFile, node: ast.AST, function: FunctionNode | None) -> tuple[str, ast.AST] | None:
    """The ``with`` around ``node``, within its function, under which no graph is recorded: its kind and expression."""
    for parent, name in source.ancestors(node):
        if parent is function:
            break
        if isinstance(parent, ast.With) and name == "body":
            for item in parent.items:
                mode = mode_of(item.context_expr)
                if mode is not None:
                    return mode, item.context_expr
    return None


def mode_of_decorators(function: FunctionNode) -> tuple[str, ast.AST] | None:
    """The decorator under which no graph is recorded: its kind and expression."""
    for decorator in getattr(function, "decorator_list", ()):
        mode = mode_of(decorator)
        if mode is not None:
            return mode, decorator
    return None


def mode_of(node: ast.expr) -> str | None:
    """The mode without a graph that an expression switches on: ``no_grad`` or ``inference_mode``; else None."""
    name = leaf_name(node.func if isinstance(node, ast.Call) else node) or ""
    if name == "set_grad_enabled" and isinstance(node, ast.Call) and node.args:
        value = node.args[0]
        return "no_grad" if isinstance(value, ast.Constant) and value.value is False else None
    return _MODES.get(name)
