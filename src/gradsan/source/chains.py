"""Names as people write them, and what a dotted name stands for."""

from __future__ import annotations

import ast
import functools
from typing import Literal

from gradsan.source.tree import FunctionNode, SourceFile

__all__ = [
    "binds",
    "chain_key",
    "constant_key",
    "dotted_path",
    "imported_as",
    "leaf_name",
    "local_nodes",
    "parameters",
    "standing_of",
]

Standing = Literal["namespace", "value", "unknown"]
# Notebooks import in one cell and use in another, so these names are taken for what they conventionally mean.
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


def leaf_name(node: ast.AST) -> str | None:
    """The last name of a chain: ``act`` of ``self.net.act``; None where there is none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def standing_of(source: SourceFile, node: ast.expr) -> Standing:
    """Whether a dotted name is a namespace (module or class of torch, imported module), a value, or cannot be told."""
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
    """The name by which ``module`` as a whole is imported in this file, None where it is not."""
    return next((name for name, (path, kind) in _imports(source).items() if path == module and kind == "module"), None)


def dotted_path(source: SourceFile, node: ast.expr) -> str | None:
    """``torch.nn.functional.relu_`` of ``F.relu_``, by this file's imports; None for what is no dotted name."""
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
    return name in parameters(function) or name in _bound_in(function)


def local_nodes(scope: FunctionNode | ast.Module) -> list[ast.AST]:
    """All nodes of the body of ``scope`` but those inside the functions, classes and comprehensions it defines."""
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
    return frozenset(filter(None, map(_bound_name, ast.walk(source.module))))


@functools.lru_cache(maxsize=64)
def _bound_in(function: FunctionNode) -> frozenset[str]:
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
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(source.module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                path = alias.name if alias.asname else alias.name.split(".")[0]
                found[alias.asname or path] = (path, "module")
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = (f"{'.' * node.level}{node.module or ''}.{alias.name}", "from")
    return found


@functools.lru_cache(maxsize=16)
def _import_names(source: SourceFile) -> set[str]:
    """Every dotted path named by an ``import`` statement, with all its parents."""
    statements = [node for node in ast.walk(source.module) if isinstance(node, ast.Import)]
    paths = [alias.name.split(".") for node in statements for alias in node.names]
    return {".".join(path[:count]) for path in paths for count in range(1, len(path) + 1)}
