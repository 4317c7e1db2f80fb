"""Scope of an expression: its function and ``with`` blocks, the variables alive there, and the arguments passed.

Also the gradient that a hook computes and does not return, and what is kept as the best one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gradsan.model import Frame
from gradsan.source.flow import reaching
from gradsan.source.identifiers import bindings_of, binds, chain_key, leaf_name, local_nodes, parameters
from gradsan.source.locate import expression_at, statement_at
from gradsan.source.methods import CUTTING
from gradsan.source.tree import FunctionNode, SourceFile, read_source

_GRAPHLESS = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)

_OUT_OF_PLACE = frozenset({"clamp", "clip", "mul", "div", "neg", "add", "sub", "nan_to_num", "masked_fill", "where"})
_CLOCKS = frozenset({"time", "perf_counter", "monotonic", "process_time", "now"})
_EMPTY = frozenset({"zeros", "ones", "empty", "full"})
_EMPTY |= {f"{one}_like" for one in _EMPTY} | {f"new_{one}" for one in _EMPTY}
_SHARED = frozenset({"numpy", "copyto", "readinto", "frombuffer", "memmap", "open_memmap"})
_SHARING = frozenset({"from_numpy", "as_tensor", "asarray"})
_NO_STRAIGHT_CODE = (
    *(ast.For, ast.While, ast.Lambda, ast.comprehension),
    *(ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal),
)


@dataclass(frozen=True, slots=True)
class Live:
    """The variables alive at the failure in one function: by name, whether a tensor requires grad (a module: any of its
    parameters), and for callables the (file, first line, name) of the function that they run.
    """

    requires_grad: Mapping[str, bool] = field(default_factory=dict)
    callees: Mapping[str, tuple[str, int, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scope:
    """A function being followed: its source, the position in it, its live variables, and its arguments.

    ``own`` are the names bound by a comprehension around it; ``given`` maps them to their values.
    """

    source: SourceFile
    function: FunctionNode | None
    at: ast.stmt
    live: Live
    given: Mapping[str, tuple[ast.expr, Scope]] = field(default_factory=dict)
    seen: frozenset[tuple[str, int]] = frozenset()
    depth: int = 0
    own: frozenset[str] = frozenset()


def scope_at(frames: Sequence[Frame], live: Sequence[Live], index: int) -> Scope | None:
    """The scope of ``frames[index]``, its parameters bound by the calls of the frames before; None where unreadable."""
    statement = statement_at(frames[index]) if 0 <= index < len(frames) else None
    if statement is None:
        return None
    given: dict[str, tuple[ast.expr, Scope]] = {}
    outer = scope_at(frames, live, index - 1) if index else None
    call = expression_at(frames[index - 1]) if index else None
    if outer is not None and call is not None and isinstance(call.node, ast.Call) and statement.function is not None:
        given = {name: (value, outer) for name, value in arguments_of(statement.function, call.node)}
    return Scope(statement.source, statement.function, statement.node, live[index], given)


def definitions_of(scope: Scope, key: str) -> Iterator[tuple[ast.stmt, ast.expr]]:
    """The statements that may have bound ``key``, each with the expression of its value."""
    body = scope.source.module.body if scope.function is None else scope.function.body
    if not isinstance(body, list):
        return
    state = reaching(body, scope.at, lambda name: scope.function is None)
    for name, found in state.items():
        if key != name and not key.startswith((f"{name}.", f"{name}[")):
            continue
        for definition in found:
            statement = definition.statement
            if statement is None:
                continue
            for binding in bindings_of(statement):
                if binding.name == name:
                    value = binding.value if binding.value is not None else getattr(statement, "value", None)
                    value = statement.iter if isinstance(statement, ast.For) else value
                    if isinstance(value, ast.expr):
                        yield statement, value
                    if isinstance(statement, ast.AugAssign):
                        yield statement, statement.target


def requires(node: ast.expr, scope: Scope) -> bool | None:
    """Whether a live variable requires grad; None where it is not known."""
    key = chain_key(node)
    return None if key is None else scope.live.requires_grad.get(key.replace("'", '"'))


def trains(callee: ast.expr, scope: Scope) -> bool:
    """Whether the callee is known to have parameters that require grad: a module, or a part of one."""
    key = chain_key(callee)
    if key is None:
        return False
    known = scope.live.requires_grad.get(key)
    if known is not None:
        return known
    root = key.replace("[", ".").split(".")[0]
    if root in scope.given:
        value, outer = scope.given[root]
        return trains(value, outer)
    return root != key and scope.live.requires_grad.get(root, False)


def callee_of(call: ast.Call, scope: Scope) -> tuple[SourceFile, FunctionNode] | None:
    """The function that a call runs: the live object's, else a function of that name in the file."""
    key = chain_key(call.func)
    if key is None:
        return None
    known = scope.live.callees.get(key)
    if known is None and key in scope.given and isinstance(scope.given[key][0], ast.Name | ast.Attribute):
        value, outer = scope.given[key]
        known = outer.live.callees.get(chain_key(value) or "")
    if known is not None:
        source = read_source(known[0])
        return None if source is None else _function_in(source, known[2], known[1])
    name = key.split(".")[-1]
    # A method of a variable that is known to be a module, where the file has one of that name.
    if (
        "." in key
        and not key.startswith(("self.", "cls."))
        and not scope.live.requires_grad.get(key.rpartition(".")[0])
    ):
        return None
    return _function_in(scope.source, name, None)


def _function_in(source: SourceFile, name: str, line: int | None) -> tuple[SourceFile, FunctionNode] | None:
    found = [
        node
        for node in source.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name == name.split(".")[-1]
        and (line is None or min([node.lineno, *(one.lineno for one in node.decorator_list)]) <= line <= node.lineno)
    ]
    return (source, found[0]) if len(found) == 1 else None


def arguments_of(function: FunctionNode, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """The parameters that a call binds, each with its expression; ``self`` is left out."""
    names = parameters(function)
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    for name, value in zip(names, call.args, strict=False):
        if isinstance(value, ast.Starred):
            return
        yield name, value
    yield from ((one.arg, one.value) for one in call.keywords if one.arg is not None)


def known_of_file(source: SourceFile, function: FunctionNode, scope: Scope) -> dict[str, bool]:
    """The known ``requires_grad`` values of the file's variables that ``function`` reads wherever it is called from."""
    if source is not scope.source:
        return {}
    roots = {name: re.split(r"[.\[]", name)[0] for name in scope.live.requires_grad}
    return {
        name: known
        for name, known in scope.live.requires_grad.items()
        if not any(binds(one, roots[name]) for one in (function, scope.function)) and roots[name] != "self"
    }


def set_later(scope: Scope, key: str) -> list[ast.stmt]:
    """The statements of the function that set ``key.requires_grad``, in order."""
    body: FunctionNode | ast.Module = scope.source.module if scope.function is None else scope.function
    found: list[ast.stmt] = []
    for node in local_nodes(body):
        if isinstance(node, ast.Assign) and any(chain_key(target) == f"{key}.requires_grad" for target in node.targets):
            found.append(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            if (
                isinstance(function, ast.Attribute)
                and function.attr == "requires_grad_"
                and chain_key(function.value) == key
            ):
                found.append(node)
    return sorted(found, key=lambda node: node.lineno)


def context_around(frames: Sequence[Frame], names: frozenset[str]) -> tuple[Frame, str] | None:
    """The innermost context manager around ``frames`` (outermost first) whose last name is one of ``names``.

    The result is its frame, the expression that makes it, and that name. A ``with`` whose header is executed counts as
    entered, a decorator covers its whole function. None where there is none, and where the source cannot be read.
    """
    for frame in reversed(frames):
        statement = statement_at(frame)
        if statement is None:
            continue
        for node in _entered(statement.source, statement.node):
            name = leaf_name(node.func if isinstance(node, ast.Call) else node)
            if name in names:
                span = statement.source.span(node)
                at = replace(
                    frame, line=span.line, column=span.column, end_line=span.end_line, end_column=span.end_column
                )
                return at, name or ""
    return None


def is_conditional(frame: Frame) -> bool:
    """Whether an ``if`` of its function decides if the statement at ``frame`` runs; also where it cannot be read."""
    statement = statement_at(frame)
    if statement is None:
        return True
    for parent, name in statement.source.ancestors(statement.node):
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return False
        is_script = isinstance(parent, ast.If) and "__name__" in statement.source.text(parent.test)
        if isinstance(parent, ast.If) and name in ("body", "orelse") and not is_script:
            return True
    return False


def compared_scores(frame: Frame) -> frozenset[str]:
    """What an ``if`` around the statement compares by order, where its branch binds one of that anew, as a best score.

    Not where a counter or the time is compared: what is kept then is renewed, and may well be the state of now.
    """
    statement = statement_at(frame)
    for outer, name in () if statement is None else statement.source.ancestors(statement.node):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            break
        compared = (
            [one for one in ast.walk(outer.test) if isinstance(one, ast.Compare)] if isinstance(outer, ast.If) else []
        )
        ordered = [one for one in compared if any(isinstance(op, _ORDERS) for op in one.ops)]
        scores = [one for one in ordered if statement is not None and not _counts(statement.source, one)]
        keys = (chain_key(side) for one in scores for side in (one.left, *one.comparators))
        names = frozenset(one for one in keys if one is not None)
        branch = getattr(outer, name, None)
        bound = {chain_key(it) for one in branch for it in _bound_by(one)} if isinstance(branch, list) else set()
        if not names.isdisjoint(bound):
            return names
    return frozenset()


def _counts(source: SourceFile, compared: ast.Compare) -> bool:
    """Whether a comparison has the number of a round, something that is counted up, or the time."""
    parts = list(ast.walk(compared))
    keys = {chain_key(one) for one in parts if isinstance(one, ast.Name | ast.Attribute)} - {None}
    counted = set[str | None]()
    for node in source.nodes:
        if isinstance(node, ast.For | ast.comprehension):
            counted |= {chain_key(one) for one in _targets_of_rounds(node)}
        elif isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Constant):
            counted.add(chain_key(node.target))
    is_timed = any(isinstance(one, ast.Call) and leaf_name(one.func) in _CLOCKS for one in parts)
    leaves = {str(one).rpartition(".")[2] for one in counted if one is not None and "." in one}
    return is_timed or not keys.isdisjoint(counted) or any(str(one).rpartition(".")[2] in leaves for one in keys)


def _targets_of_rounds(node: ast.For | ast.comprehension) -> Iterator[ast.expr]:
    """The variables that a loop over a range, or the number of an ``enumerate``, counts with."""
    called = leaf_name(node.iter.func) if isinstance(node.iter, ast.Call) else None
    if called in ("range", "trange", "count"):
        yield node.target
    elif called == "enumerate" and isinstance(node.target, ast.Tuple):
        yield node.target.elts[0]


def clears_its_condition(frame: Frame) -> bool:
    """Whether the statement is in the branch of an ``if`` that sets the flag which is tested: it runs once."""
    statement = statement_at(frame)
    parent = None if statement is None else statement.source.parents[statement.node][0]
    if not isinstance(parent, ast.If) or statement is None or statement.node not in parent.body:
        return False
    tested = {chain_key(one) for one in ast.walk(parent.test) if isinstance(one, ast.Attribute | ast.Name)} - {None}
    flags = [one for one in parent.body if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant)]
    return any(chain_key(target) in tested for one in flags for target in one.targets)


def _bound_by(node: ast.stmt) -> Iterator[ast.expr]:
    for target in node.targets if isinstance(node, ast.Assign) else ():
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def is_called_with_graph(file: str, name: str) -> bool:
    """Whether a statement of the file calls ``name`` outside of ``no_grad``, and detaches nothing itself."""
    source = read_source(file)
    calls = [] if source is None else [one for one in source.nodes if isinstance(one, ast.Call)]
    for call in calls:
        statement = source.statement(call) if source is not None else None
        if source is None or statement is None or leaf_name(call.func) != name.rpartition(".")[2]:
            continue
        around = {leaf_name(one.func if isinstance(one, ast.Call) else one) for one in _entered(source, statement)}
        inner = {one.attr for one in ast.walk(statement) if isinstance(one, ast.Attribute)}
        if around.isdisjoint(_GRAPHLESS) and inner.isdisjoint(CUTTING):
            return True
    return False


def _entered(source: SourceFile, statement: ast.stmt) -> Iterator[ast.expr]:
    """The context expressions entered around a statement within its function, innermost first."""
    if isinstance(statement, ast.With | ast.AsyncWith):
        yield from (item.context_expr for item in reversed(statement.items))
    for parent, name in source.ancestors(statement):
        if isinstance(parent, ast.With | ast.AsyncWith) and name == "body":
            yield from (item.context_expr for item in reversed(parent.items))
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef) and name == "body":
            yield from reversed(parent.decorator_list)
            return


def unreturned_gradient(file: str, line: int, name: str, position: int) -> int | None:
    """The line of a hook that computes a gradient which nothing reads or returns; None where it is not sure.

    The hook is the function ``name`` at a line of ``file``; its gradient is the parameter at ``position``.
    """
    source = read_source(file)
    functions = (one for one in source.nodes if isinstance(one, ast.FunctionDef)) if source is not None else ()
    hook = next((one for one in functions if one.name == name and line in _first_lines(one)), None)
    given = hook.args.args[position : position + 1] if hook is not None else []
    if hook is None or not given:
        return None
    nodes, gradient = list(ast.walk(hook)), given[0].arg
    has_result = any(isinstance(one, ast.Return) and one.value is not None for one in nodes)
    if has_result or any(isinstance(one, _NO_STRAIGHT_CODE) for one in nodes):
        return None
    reads = [one for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)]
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if not isinstance(node, ast.Assign | ast.Expr) or not _is_new_gradient(node.value, gradient):
            continue
        last = node.end_lineno or node.lineno
        bound = [one.id for one in targets if isinstance(one, ast.Name)]
        if len(bound) == len(targets) and not any(one.id in bound and one.lineno > last for one in reads):
            return node.lineno
    return None


def _first_lines(function: ast.FunctionDef) -> set[int]:
    return {function.lineno, *(one.lineno for one in function.decorator_list)}


def _is_new_gradient(value: ast.expr, gradient: str) -> bool:
    """Whether an expression is arithmetic with a gradient, or one of some operations on it, out of place.

    Its product with itself, ``grad @ grad.t()``, is no gradient.
    """

    def reads(part: ast.expr) -> bool:
        return any(isinstance(one, ast.Name) and one.id == gradient for one in ast.walk(part))

    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.MatMult) and reads(value.left) and reads(value.right):
        return False
    has_gradient = reads(value)
    is_call = isinstance(value, ast.Call) and leaf_name(value.func) in _OUT_OF_PLACE
    return has_gradient and (is_call or isinstance(value, ast.BinOp | ast.UnaryOp))


def spoils_data(place: Frame, origin: Frame, held: str) -> bool:
    """Whether the element write at ``place`` puts a constant into data that is ``held`` at ``origin``.

    Not into what was made empty, which is a state or a buffer, nor where NumPy may refill it unseen. What gets values
    that were computed is a state as well: spins that are turned, samples that are replaced.
    """
    statement, there = statement_at(place), statement_at(origin)
    if statement is None or there is None or not _puts_constant(statement.source, statement.function, statement.node):
        return False
    source, value = there.source, ast.parse(held, mode="eval").body
    bound = reaching(there.scope.body, there.node) if isinstance(value, ast.Name) and there.scope is not None else {}
    for one in bound.get(held, ()):
        given = getattr(one.statement, "iter", None) or getattr(one.statement, "value", None)
        value = given if isinstance(given, ast.expr) else value
    while isinstance(value, ast.Subscript | ast.Call):
        value = value.value if isinstance(value, ast.Subscript) else value.func
        value = value.value if isinstance(value, ast.Attribute) and value.attr in ("narrow", "select") else value
    root = chain_key(value)
    for node in source.nodes:
        if isinstance(node, ast.Assign) and any(chain_key(one) == root for one in node.targets):
            calls = {leaf_name(one.func) for one in ast.walk(node.value) if isinstance(one, ast.Call)}
            if not _EMPTY.isdisjoint(calls):
                return False
    calls_of_file = [one for one in source.nodes if isinstance(one, ast.Call)]
    arrays = {chain_key(it) for one in calls_of_file if leaf_name(one.func) in _SHARING for it in one.args[:1]} - {None}
    stored = (one for one in source.nodes if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Store))
    if any(chain_key(one.value) in arrays for one in stored):
        return False
    classes = [one for one, _ in source.ancestors(there.node) if isinstance(one, ast.ClassDef)]
    around: ast.AST = classes[-1] if classes else source.module
    return not any(isinstance(one, ast.Call) and leaf_name(one.func) in _SHARED for one in ast.walk(around))


def _puts_constant(source: SourceFile, function: FunctionNode | None, node: ast.stmt) -> bool:
    """Whether a number of the source is written, or a setting: an attribute or a global that holds one."""
    value: ast.expr | None = node.value if isinstance(node, ast.Assign) else None
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
        value = node.value.args[-1]
    value = value.operand if isinstance(value, ast.UnaryOp) else value
    key = None if value is None else chain_key(value)
    if key is None:
        return isinstance(value, ast.Constant)
    if function is not None and isinstance(value, ast.Name) and binds(function, key):
        return False
    given = [
        one.value
        for one in source.nodes
        if isinstance(one, ast.Assign) and any(leaf_name(it) == key.rpartition(".")[2] for it in one.targets)
    ]
    return not any(isinstance(one, ast.Call | ast.Subscript | ast.BinOp) for one in given)
