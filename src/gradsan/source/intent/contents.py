"""Contents of a write: noise, a constant put into data, signs and rounded values, a value detached as if copied."""

from __future__ import annotations

import ast
import builtins
import re

from gradsan.heuristics import is_step_function
from gradsan.model import Frame
from gradsan.source.flow.reaching import binding_at, reaching
from gradsan.source.identifiers import Binding, assigned_pairs, binds, chain_key, consumed_names, leaf_name, local_nodes
from gradsan.source.locate import Statement, at_line, expression_at, statement_at
from gradsan.source.methods import METADATA
from gradsan.source.tree import FunctionNode, SourceFile, header_nodes

_CHOICES = frozenset({"random", "randrange", "choice", "choices", "sample", "randperm", "multinomial"})
_DRAWS = frozenset(
    {
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "normal", "normal_", "uniform_"),
        *("bernoulli", "bernoulli_", "poisson", "standard_normal", "uniform", "laplace", "exponential_"),
    }
)
"""Functions of torch and NumPy that draw random numbers."""


def adds_noise(frame: Frame) -> bool:
    """Whether the write at ``frame`` is by random numbers alone, perhaps scaled or compared: ``x *= rand(3) > 0.1``."""
    found, statement = expression_at(frame), statement_at(frame)
    node = found.node if found is not None else None if statement is None else statement.node
    operand = node.args[0] if isinstance(node, ast.Call) and node.args else getattr(node, "value", None)
    return isinstance(operand, ast.expr) and _is_noise(operand, frame)


def _is_noise(node: ast.expr, frame: Frame, followed: frozenset[str] = frozenset()) -> bool:
    """``followed`` are the names whose bindings led here: ``x = x.detach()`` is bound by itself."""
    match node:
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=right):
            return _is_noise(left, frame, followed) or _is_noise(right, frame, followed)
        case (
            ast.BinOp(left=part, op=ast.Add() | ast.Sub(), right=ast.Constant())
            | ast.BinOp(left=ast.Constant(), op=ast.Add() | ast.Sub(), right=part)
        ):
            return _is_noise(part, frame, followed)
        case ast.UnaryOp(operand=operand) | ast.Compare(left=operand):
            return _is_noise(operand, frame, followed)
        case ast.Call(func=func):
            is_draw = leaf_name(func) in _DRAWS
            return is_draw or (isinstance(func, ast.Attribute) and _is_noise(func.value, frame, followed))
        case ast.Name(id=name) if name not in followed:
            bound = binding_at(frame, name)
            value = None if bound is None else bound.value
            return value is not None and _is_noise(value, frame, followed | {name})
    return False


def is_labelled(frame: Frame, name: str) -> bool:
    """Whether ``name`` was bound together with a value that what is computed from it is compared with: a label.

    ``x, y = xs[i], ys[i]`` or ``for x, y in rows``, with ``loss(net(x), y)`` or ``net(x) - y``.
    """
    bound, statement = binding_at(frame, name), statement_at(frame)
    if bound is None or statement is None or statement.scope is None:
        return False
    value = getattr(bound.statement, "value", None)
    if isinstance(value, ast.Tuple) and not all(isinstance(one, ast.Subscript) for one in value.elts):
        return False
    tuples = (one for one in header_nodes(bound.statement) if isinstance(one, ast.Tuple))
    together = ({part.id for part in one.elts if isinstance(part, ast.Name)} for one in tuples)
    labels = {label for names in together if name in names for label in names - {name}}
    for node in local_nodes(statement.scope) if labels else ():
        parts: list[ast.expr] = []
        if isinstance(node, ast.Call):
            parts = node.args
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            parts = [node.left, node.right]
        has_label = any(isinstance(one, ast.Name) and one.id in labels for one in parts)
        if has_label and not any(isinstance(one, ast.Name) and one.id == name for one in parts) and len(parts) > 1:
            return True
    return False


def writes_at_random(frame: Frame) -> bool:
    """Whether the element write at ``frame`` chooses its elements by random numbers: ``x[torch.rand(n) < 0.1] = 0``."""
    statement = statement_at(frame)
    if statement is None or statement.scope is None:
        return False
    targets = [one for one in getattr(statement.node, "targets", ()) if isinstance(one, ast.Subscript)]
    call = expression_at(frame)
    given = call.node.args[:1] if call is not None and isinstance(call.node, ast.Call) else []
    waiting: list[tuple[ast.stmt, ast.expr]] = [(statement.node, one.slice) for one in targets]
    waiting += [(statement.node, one) for one in given if not targets]
    seen = set[ast.expr]()
    while waiting:
        at, value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        if any(leaf_name(one.func) in _DRAWS | _CHOICES for one in ast.walk(value) if isinstance(one, ast.Call)):
            return True
        found = reaching(statement.scope.body, at)
        bound = (one.statement for name in consumed_names(value) for one in found.get(name, ()))
        waiting += [(one, one.value) for one in bound if isinstance(one, ast.Assign)]
    return False


_REDUCES = frozenset({"amax", "amin", "max", "mean", "median", "min", "norm", "std", "sum", "vector_norm"})
_OPERATORS = {ast.Add: "__iadd__", ast.Sub: "__isub__", ast.Mult: "__imul__", ast.Div: "__itruediv__"}


def elements_updated_by(frame: Frame) -> str | None:
    """The operation of ``boxes[:, [0, 2]] /= width`` at ``frame``, of which PyTorch sees an assignment to elements."""
    statement = statement_at(frame)
    node = None if statement is None else statement.node
    is_update = isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript)
    return _OPERATORS.get(type(node.op)) if is_update and isinstance(node, ast.AugAssign) else None


def is_shifted_by_neighbours(frame: Frame) -> bool:
    """Whether the update at ``frame`` is by other parts of its target, and no statistic: ``x[1:] -= x[:-1] / 2``."""
    statement = statement_at(frame)
    node = None if statement is None else statement.node
    if not isinstance(node, ast.AugAssign) or not isinstance(node.target, ast.Subscript):
        return False
    whole, target = ast.dump(node.target.value).replace("Store()", "Load()"), ast.unparse(node.target)
    inside = list(ast.walk(node.value))
    parts = [one for one in inside if isinstance(one, ast.Subscript) and ast.dump(one.value) == whole]
    reduces = any(isinstance(one, ast.Call) and leaf_name(one.func) in _REDUCES for one in inside)
    named = sum(isinstance(one, ast.expr) and ast.dump(one) == whole for one in inside)
    return not reduces and named == len(parts) > 0 and all(ast.unparse(one) != target for one in parts)


def operand_given(frame: Frame | None) -> str | None:
    """The source of the only operand of a write at ``frame``: ``gain`` of ``x /= gain`` and ``x.div_(gain)``."""
    statement = None if frame is None else statement_at(frame)
    node = None if statement is None else statement.node
    if isinstance(node, ast.AugAssign):
        return ast.unparse(node.value)
    call = node.value if isinstance(node, ast.Expr) else None
    is_one = isinstance(call, ast.Call) and len(call.args) == 1 and not call.keywords
    return ast.unparse(call.args[0]) if is_one and isinstance(call, ast.Call) else None


def makes_discrete(frame: Frame) -> bool:
    """Whether the statement at ``frame`` rounds or takes signs, so that its result has no derivative of its own.

    A random factor independent of the scaled tensor, as in ``x *= torch.bernoulli(keep)``, makes nothing discrete; nor
    does a sign of what is multiplied by it, ``sign(x) * (x.abs() - 0.1)``.
    """
    statement = statement_at(frame)
    if statement is None:
        return False
    scaled = _scaled_name(statement.node)
    calls = [one for one in header_nodes(statement.node) if isinstance(one, ast.Call)]
    named = [(leaf_name(one.func), one) for one in calls]
    found = [one for name, one in named if name is not None and is_step_function(name)]
    return any(
        (scaled is None or scaled in _names_read(one)) and not _is_of_factor(statement.source, one) for one in found
    )


def _is_of_factor(source: SourceFile, call: ast.Call) -> bool:
    """Whether a call is multiplied by elements of what it reads, and not just by their mean or norm."""
    parent, field = source.parents[call]
    if not isinstance(parent, ast.BinOp) or not isinstance(parent.op, ast.Mult):
        return False
    other = parent.right if field == "left" else parent.left
    called = {leaf_name(one.func) for one in ast.walk(other) if isinstance(one, ast.Call)}
    return called.isdisjoint(_REDUCES) and not _names_read(other).isdisjoint(_names_read(call))


def _scaled_name(statement: ast.stmt) -> str | None:
    """``x`` of ``x *= …``, ``x.mul_(…)`` and ``x.data.mul_(…).div_(…)``."""
    target: ast.expr | None = None
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Mult):
        target = statement.target
    elif isinstance(statement, ast.Expr):
        target = statement.value
        while isinstance(target, ast.Call):
            called = target.func
            target = called.value if isinstance(called, ast.Attribute) and called.attr in ("mul_", "div_") else None
    if isinstance(target, ast.Attribute) and target.attr == "data":
        target = target.value
    return None if target is None else chain_key(target)


def _names_read(node: ast.AST) -> set[str]:
    """The names whose values an expression reads, except those used only for a size or for memory like theirs."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute) and (node.attr in METADATA or node.attr.startswith("new_")):
        return set()
    name = leaf_name(node.func) if isinstance(node, ast.Call) else None
    if name is not None and name.endswith("_like"):
        return set()
    whole = chain_key(node) if isinstance(node, ast.Attribute) else None
    return {name for child in ast.iter_child_nodes(node) for name in _names_read(child)} | ({whole} if whole else set())


_EMPTY = frozenset({"zeros", "ones", "empty", "full"})
_STEPS_BACK = 3
_FILLED = frozenset({"ones", "ones_like", "new_ones", "full", "full_like", "new_full"})
_EMPTY |= {f"{one}_like" for one in _EMPTY} | {f"new_{one}" for one in _EMPTY}
_SHARED = frozenset({"numpy", "copyto", "readinto", "frombuffer", "memmap", "open_memmap"})
_SHARING = frozenset({"from_numpy", "from_dlpack", "as_tensor", "asarray"})


def is_state_of_loader(origin: Frame, held: str) -> bool:
    """Whether what is ``held`` at ``origin`` was filled with one number, as weights are, or NumPy may refill it.

    Samples that the code of a data loader scales on purpose are numbers of its own: a curriculum, a noise level.
    """
    there = statement_at(origin)
    if there is None:
        return False
    source, root = there.source, _root_of(there, held)
    for node in source.nodes:
        for target, value in assigned_pairs(node) if isinstance(node, ast.Assign) else ():
            names = {leaf_name(one.func) for one in ast.walk(value) if isinstance(one, ast.Call)}
            if chain_key(target) == root and not _FILLED.isdisjoint(names):
                return True
    return _has_refilled_arrays(source)


def _has_refilled_arrays(source: SourceFile) -> bool:
    """Whether the elements of an array that shares its memory with a tensor are set."""
    calls_of_file = [one for one in source.nodes if isinstance(one, ast.Call)]
    arrays = {chain_key(it) for one in calls_of_file if leaf_name(one.func) in _SHARING for it in one.args[:1]} - {None}
    stored = (one for one in source.nodes if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Store))
    return any(chain_key(one.value) in arrays for one in stored)


def _root_of(there: Statement, held: str) -> str | None:
    """The name of what ``held`` is a part of, or of what it is taken from."""
    value = ast.parse(held, mode="eval").body
    bound = reaching(there.scope.body, there.node) if isinstance(value, ast.Name) and there.scope is not None else {}
    for one in bound.get(held, ()):
        given = getattr(one.statement, "iter", None) or getattr(one.statement, "value", None)
        value = given if isinstance(given, ast.expr) else value
    while isinstance(value, ast.Subscript | ast.Call):
        value = value.value if isinstance(value, ast.Subscript) else value.func
        value = value.value if isinstance(value, ast.Attribute) and value.attr in ("narrow", "select") else value
    return chain_key(value)


def spoils_data(place: Frame, origin: Frame, held: str) -> bool:
    """Whether the element write at ``place`` puts a constant into data that is ``held`` at ``origin``.

    Not into what was made empty, which is a state or a buffer, nor where NumPy may refill it unseen. What gets values
    that were computed is a state as well: spins that are turned, samples that are replaced.
    """
    statement, there = statement_at(place), statement_at(origin)
    if statement is None or there is None or not _puts_constant(statement.source, statement.function, statement.node):
        return False
    source, root = there.source, _root_of(there, held)
    for node in source.nodes:
        if isinstance(node, ast.Assign) and any(chain_key(one) == root for one in node.targets):
            calls = {leaf_name(one.func) for one in ast.walk(node.value) if isinstance(one, ast.Call)}
            if not _EMPTY.isdisjoint(calls):
                return False
    if _has_refilled_arrays(source):
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


def detached_for_copy(frame: Frame, name: str) -> tuple[Frame, str, tuple[str, ...]] | None:
    """What the function of ``name -= ...`` at ``frame`` has detached, and where, if it keeps what ``name`` gives.

    With what it has detached beside that.

    Whoever means to change the caller's tensor has no use for the new values, and needs no ``detach()``, unless the
    tensor has a graph. A measure is computed from that and something else which was detached as well.
    """
    statement = statement_at(frame)
    node = None if statement is None else statement.node
    if statement is None or statement.scope is None or not isinstance(node, ast.AugAssign):
        return None
    bound = binding_at(frame, name)
    value = None if bound is None else bound.value
    if bound is None or not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)):
        return None
    detached = chain_key(value.func.value)
    if detached is None or value.func.attr != "detach" or chain_key(node.target) != name:
        return None
    later = (one for one in local_nodes(statement.scope) if isinstance(one, ast.stmt) and one.lineno > node.lineno)
    kept = [consumed_names(one) for one in later if _is_outlived(one, name)]
    others = {other for one in kept if name in one for other in one if other != name}
    beside = tuple(one for one in sorted(others) if _is_detached(binding_at(frame, one)))
    place = at_line(frame, bound.statement.lineno)
    return (place, detached, beside) if beside else None


def is_left_to_caller(frame: Frame, names: set[str], *, is_write: bool) -> bool:
    """Whether the function at ``frame`` has no use for a value of its caller that it writes there, as ``names``.

    Then the write is made for the caller: ``targets.copy_(mixed)`` with no ``targets`` afterwards. Where a function
    that is called there writes it (not ``is_write``), its name may stand there once.
    """
    statement = statement_at(frame)
    if statement is None or statement.scope is None:
        return False
    node, roots = statement.node, {re.split(r"[.\[]", name, maxsplit=1)[0] for name in names}
    is_bare = isinstance(node, ast.Expr | ast.AugAssign) or isinstance(
        getattr(node, "targets", [None])[0], ast.Subscript
    )
    first = node.lineno if not statement.loops else statement.loops[0].lineno
    uses = [
        one
        for one in local_nodes(statement.scope)
        if isinstance(one, ast.Name) and one.id in roots and one.lineno >= first
    ]
    inside = {one for one in ast.walk(node) if isinstance(one, ast.Name) and one.id in roots}
    return all(one in inside for one in uses) and (is_bare if is_write else len(inside) == 1)


def is_computed_by_program(frame: Frame, expression: str) -> bool:
    """Whether a call of the program's own, as of a network, computes what is ``expression`` at ``frame``."""
    statement = statement_at(frame)
    waiting: list[ast.expr] = [ast.parse(expression, mode="eval").body]
    imported = set() if statement is None else _imported(statement.source)
    for _ in range(_STEPS_BACK):
        calls = [one for value in waiting for one in ast.walk(value) if isinstance(one, ast.Call)]
        for call in calls:
            root, _, rest = (chain_key(call.func) or "?").partition(".")
            is_own = root in ("self", "cls") or (root not in imported and not rest and root not in vars(builtins))
            if is_own and root != "?":
                return True
        names = {one.id for value in waiting for one in ast.walk(value) if isinstance(one, ast.Name)}
        bound = (binding_at(frame, one) for one in names)
        waiting = [one.value for one in bound if one is not None and one.value is not None]
    return False


def _imported(source: SourceFile) -> set[str]:
    imports = (one for one in source.nodes if isinstance(one, ast.Import | ast.ImportFrom))
    return {(one.asname or one.name).partition(".")[0] for node in imports for one in node.names}


def _is_detached(bound: Binding | None) -> bool:
    value = None if bound is None else bound.value
    return isinstance(value, ast.Call) and leaf_name(value.func) == "detach"


def _is_outlived(statement: ast.stmt, name: str) -> bool:
    """Whether what a statement computes outlives the call: it is returned, stored, or passed to another object."""
    match statement:
        case ast.Assign(targets=targets):
            return any(isinstance(one, ast.Attribute | ast.Subscript) and chain_key(one) != name for one in targets)
        case ast.AugAssign(target=target):
            return isinstance(target, ast.Attribute | ast.Subscript)
        case ast.Return():
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner))):
            return chain_key(owner) != name
    return False
