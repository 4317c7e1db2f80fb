"""Identifiers: dotted names and the objects that they refer to, and the names that a statement binds and reads.

Names are chains: ``h``, ``self.state``, ``d['k']``, ``xs[0]``.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from gradsan.source.locate import Expression, Statement
from gradsan.source.methods import ADDING, CHANGING_METADATA, OVERWRITING, is_inplace_method
from gradsan.source.tree import FunctionNode, SourceFile

Standing = Literal["namespace", "value", "unknown"]
# Notebooks import in one cell and use in another, so these names get their conventional meaning.
_CONVENTIONAL = {"torch", "nn", "F", "init", "functional"}


def chain_key(node: ast.AST) -> str | None:
    """``h``, ``self.state``, ``d['k']``, ``xs[-1]``: a chain of names, attributes and constant keys; else None."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = chain_key(node.value)
        return None if base is None else f"{base}.{node.attr}"
    if isinstance(node, ast.Subscript):
        base, key = chain_key(node.value), constant_key(node.slice)
        return None if base is None or key is None else f"{base}[{key!r}]"
    return None


def constant_key(node: ast.expr) -> str | int | None:
    """The value of a constant string or integer index, else None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -node.operand.value if isinstance(node.operand.value, int) else None
    return None


def is_name(node: ast.AST, name: str) -> bool:
    """Whether ``node`` is the variable ``name``."""
    return isinstance(node, ast.Name) and node.id == name


def leaf_name(node: ast.AST) -> str | None:
    """The last name of a chain: ``act`` of ``self.net.act``; None where there is none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def standing_of(source: SourceFile, node: ast.expr) -> Standing:
    """Whether a dotted name is a namespace (module or class of torch, imported module), a value, or undecided."""
    path = _dotted(node)
    if path is None:
        return "value"
    root = path[0]
    if root in ("self", "cls") or binds(source.function(node), root):
        return "value"
    imported = _imports(source).get(root)
    if imported is None:
        return "namespace" if root in _CONVENTIONAL and root not in _bound_anywhere(source) else "value"
    if imported[0].split(".")[0] in ("torch", "operator"):
        return "namespace"
    full = ".".join([imported[0], *path[1:]])
    if imported[1] == "module" and (len(path) == 1 or full in _import_names(source)):
        return "namespace"
    if imported[1] == "module" or root in _CONVENTIONAL:
        return "unknown"
    return "unknown" if len(path) == 1 else "value"


def imported_as(source: SourceFile, module: str) -> str | None:
    """The name to which this file imports ``module`` as a whole, None where it does not."""
    return next((name for name, (path, _) in _imports(source).items() if path == module), None)


def dotted_path(source: SourceFile, node: ast.expr) -> str | None:
    """``torch.nn.functional.relu_`` for ``F.relu_``, by this file's imports; None where it is not a dotted name."""
    path = _dotted(node)
    if path is None:
        return None
    conventional = {"F": "torch.nn.functional", "nn": "torch.nn", "init": "torch.nn.init"}
    imported = _imports(source).get(path[0])
    root = imported[0] if imported is not None else conventional.get(path[0], path[0])
    return ".".join([root, *path[1:]])


def parameters(function: FunctionNode) -> list[str]:
    """The names of all parameters of ``function``."""
    args = function.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
    return [arg.arg for arg in named]


def binds(function: FunctionNode | None, name: str) -> bool:
    """Whether ``name`` is a parameter or a local variable of ``function``."""
    if function is None:
        return False
    return name in parameters(function) or name in bound_in(function)


def local_nodes(scope: FunctionNode | ast.Module) -> list[ast.AST]:
    """All nodes of the body of ``scope`` except those inside the functions, classes and comprehensions it defines."""
    found: list[ast.AST] = []
    pending: list[ast.AST] = list(scope.body) if isinstance(scope.body, list) else [scope.body]
    while pending:
        node = pending.pop()
        found.append(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            pending.extend(node.decorator_list)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            pending.append(node.generators[0].iter)
            pending.extend(inner for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr))
        elif not isinstance(node, ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))
    return found


@functools.lru_cache(maxsize=16)
def _bound_anywhere(source: SourceFile) -> frozenset[str]:
    return frozenset(filter(None, map(_bound_name, source.nodes)))


@functools.lru_cache(maxsize=64)
def bound_in(function: FunctionNode) -> frozenset[str]:
    """The names that the body of ``function`` binds."""
    return frozenset(filter(None, map(_bound_name, local_nodes(function))))


def _bound_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return None if isinstance(node.ctx, ast.Load) else node.id
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    return None


def _dotted(node: ast.expr) -> list[str] | None:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return None if base is None else [*base, node.attr]
    return None


@functools.lru_cache(maxsize=16)
def _imports(source: SourceFile) -> dict[str, tuple[str, str]]:
    """Local name -> (dotted path, ``module`` or ``from``)."""
    found = {name: (name, "module") for name in starred(source, "torch")}
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                path = alias.name if alias.asname else alias.name.split(".")[0]
                found[alias.asname or path] = (path, "module")
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = (f"{'.' * node.level}{node.module or ''}.{alias.name}", "from")
    return found


def starred(source: SourceFile, *names: str) -> list[str]:
    """Those of ``names`` that the file reads, where a star import may have bound them."""
    if not any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in source.nodes):
        return []
    read = {node.id for node in source.nodes if isinstance(node, ast.Name)}
    return [name for name in names if name in read]


@functools.lru_cache(maxsize=16)
def _import_names(source: SourceFile) -> set[str]:
    """Every dotted path named by an ``import`` statement, with all its parents."""
    statements = [node for node in source.nodes if isinstance(node, ast.Import)]
    paths = [alias.name.split(".") for node in statements for alias in node.names]
    return {".".join(path[:count]) for path in paths for count in range(1, len(path) + 1)}


# These detach the tensor from its earlier graph.
_FORGETTING = (OVERWRITING - {"copy_"}) | {"detach_"}


@dataclass(frozen=True, slots=True)
class Binding:
    """A binding of ``name`` by ``statement``; ``value`` is its expression where there is one for this name alone.

    ``replaces`` is False where the old content stays in part: ``xs.append(h)``, ``mem[i] = h``, ``h.copy_(new)``.
    ``computed`` is False for names bound without a computation: imports, definitions, loop variables.
    ``method`` is the binding method, where it was a method call.
    """

    name: str
    statement: ast.stmt
    value: ast.expr | None
    replaces: bool = True
    computed: bool = True
    method: str | None = None


def assigned_pairs(node: ast.Assign | ast.AnnAssign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The targets of an assignment with their values: two of ``top, best = score, x``."""
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        elif node.value is not None:
            yield target, node.value


def walks(target: ast.expr, walked: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each target of a loop with what gives its values, inside ``zip`` and ``enumerate``."""
    called = leaf_name(walked.func) if isinstance(walked, ast.Call) else None
    if isinstance(walked, ast.Call) and isinstance(target, ast.Tuple) and called in ("zip", "enumerate"):
        targets = target.elts if called == "zip" else target.elts[1:]
        for one, given in zip(targets, walked.args, strict=False):
            yield from walks(one, given)
    else:
        yield target, walked


def assigned_names(statement: Statement | ast.stmt) -> list[str]:
    """The names ``statement`` itself (not its blocks) binds, in source order, attributes and constant keys included."""
    node = statement if isinstance(statement, ast.stmt) else statement.node
    bindings = [binding for binding in bindings_of(node) if binding.replaces and not isinstance(node, ast.Delete)]
    return list(dict.fromkeys(binding.name for binding in bindings))


def consumed_names(place: Statement | Expression | ast.stmt | ast.expr) -> list[str]:
    """The names ``place`` reads, in source order; for a compound statement those of its header.

    For ``self.rnn(x, h)`` these are ``self``, ``x`` and ``h``: the callee is read only to find the function.
    """
    node = place.node if isinstance(place, Statement | Expression) else place
    return list(dict.fromkeys(_reads(node)))


def bindings_of(statement: ast.stmt) -> list[Binding]:
    """All bindings by ``statement`` itself (not its blocks), whole or in part."""
    found: list[Binding] = []
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            found.extend(_bind_target(target, statement, statement.value))
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign) and statement.value is not None:
        found.extend(_bind_target(statement.target, statement, statement.value))
    elif isinstance(statement, ast.For | ast.AsyncFor):
        found.extend(_bind_target(statement.target, statement, None, computed=False))
    elif isinstance(statement, ast.With | ast.AsyncWith):
        for item in statement.items:
            if item.optional_vars is not None:
                found.extend(_bind_target(item.optional_vars, statement, None, computed=False))
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        names = [alias.asname or alias.name.split(".")[0] for alias in statement.names]
        found.extend(Binding(name, statement, None, computed=False) for name in names)
    elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        found.append(Binding(statement.name, statement, None, computed=False))
    elif isinstance(statement, ast.Delete):
        for target in statement.targets:
            found.extend(_bind_target(target, statement, None, computed=False))
    found.extend(_bound_inside(statement))
    return found


def bindings_in(nodes: Iterable[ast.AST], name: str | None = None) -> list[Binding]:
    """The bindings by the statements among ``nodes`` themselves; of ``name`` alone, where it is given."""
    found = (one for node in nodes if isinstance(node, ast.stmt) for one in bindings_of(node))
    return [one for one in found if name in (None, one.name)]


def _bind_target(
    target: ast.expr, statement: ast.stmt, value: ast.expr | None, computed: bool = True
) -> Iterator[Binding]:
    if isinstance(target, ast.Tuple | ast.List):
        has_star = any(isinstance(element, ast.Starred) for element in target.elts)
        is_pairwise = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts) and not has_star
        for index, element in enumerate(target.elts):
            part = value.elts[index] if is_pairwise and isinstance(value, ast.Tuple | ast.List) else None
            yield from _bind_target(element, statement, part, computed)
        return
    if isinstance(target, ast.Starred):
        yield from _bind_target(target.value, statement, None, computed)
        return
    key = chain_key(target)
    if key is not None:
        yield Binding(key, statement, value, computed=computed)
        return
    if isinstance(target, ast.Subscript) and (base := chain_key(target.value)) is not None:
        yield Binding(base, statement, value, replaces=False, computed=computed)


def _bound_inside(statement: ast.stmt) -> Iterator[Binding]:
    """Names bound by expressions: the walrus, methods that add to a container or write in place, patterns."""
    for node in _own_expressions(statement):
        if isinstance(node, ast.NamedExpr):
            yield Binding(node.target.id, statement, node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            key = chain_key(_written_by_chain(node.func.value))
            # ``hs.add(h)`` alone fills a set; ``y = x.add(h)`` is arithmetic.
            adds = node.func.attr in ADDING and isinstance(statement, ast.Expr) and statement.value is node
            writes = is_inplace_method(node.func.attr) and node.func.attr not in CHANGING_METADATA
            value = next((one for one in reversed(node.args) if not isinstance(one, ast.Constant)), None)
            # A step of a chain that takes a number adds nothing to what the chain computes with.
            is_step = isinstance(node.func.value, ast.Call)
            if key is not None and (adds or writes) and not (is_step and value is None):
                value = value or next(iter(node.args), None)
                forgets = node.func.attr in _FORGETTING
                yield Binding(key, statement, value, forgets, not forgets, node.func.attr)
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name is not None:
            yield Binding(node.name, statement, None, replaces=False, computed=False)


def _written_by_chain(node: ast.expr) -> ast.expr:
    """``x`` of ``x.mul_(2)``, which returns it."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_inplace_method(node.func.attr):
        node = node.func.value
    return node


def _own_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    pending = [child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt)]
    while pending:
        node = pending.pop(0)
        yield node
        if not isinstance(node, ast.Lambda):
            pending.extend(child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt))


def _reads(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        yield from _reads_of_chain(node)
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            yield from _reads(node.func.value)
        elif not isinstance(node.func, ast.Name):
            yield from _reads(node.func)
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            yield from _reads(argument)
    elif isinstance(node, ast.AugAssign):
        if (key := chain_key(node.target)) is not None:
            yield key
        for part in [node.target, node.value]:
            yield from _reads(part)
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        own = {inner.id for part in node.generators for inner in ast.walk(part.target) if isinstance(inner, ast.Name)}
        inside = [name for child in ast.iter_child_nodes(node) for name in _reads(child)]
        yield from (name for name in inside if name.replace("[", ".").split(".")[0] not in own)
    elif isinstance(node, ast.Lambda):
        yield from (name for name in _reads(node.body) if name not in {arg.arg for arg in node.args.args})
    elif isinstance(node, ast.Assign):
        for part in [node.value, *node.targets]:
            yield from _reads(part)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        for decorator in node.decorator_list:
            yield from _reads(decorator)
    else:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.stmt):
                yield from _reads(child)


def _reads_of_chain(node: ast.Name | ast.Attribute | ast.Subscript) -> Iterator[str]:
    is_read = isinstance(node.ctx, ast.Load)
    key = chain_key(node)
    if key is not None:
        if is_read:
            yield key
        return
    if isinstance(node, ast.Subscript):
        # ``mem[i] = v`` looks ``mem`` up but reads none of its values.
        if is_read or chain_key(node.value) is None:
            yield from _reads(node.value)
        yield from _reads(node.slice)
    elif isinstance(node, ast.Attribute):
        yield from _reads(node.value)
