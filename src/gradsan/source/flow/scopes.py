"""Scope of an expression: its function, the variables alive there, the arguments passed, and the functions called."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from gradsan.model import Frame
from gradsan.source.flow.reaching import reaching
from gradsan.source.identifiers import bindings_of, binds, chain_key, leaf_name, local_nodes, parameters
from gradsan.source.locate import expression_at, statement_at
from gradsan.source.tree import FunctionNode, SourceFile, read_source

_Known = TypeVar("_Known")


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


def is_in_function_forward(frame: Frame) -> bool:
    """Whether a frame is in the ``forward`` of a custom Function: a static method beside a static ``backward``."""
    statement = statement_at(frame)
    function = None if statement is None else statement.function
    if statement is None or not isinstance(function, ast.FunctionDef) or function.name != "forward":
        return False
    owner = statement.source.parents[function][0]
    if not isinstance(owner, ast.ClassDef):
        return False
    own = [one for one in owner.body if isinstance(one, ast.FunctionDef)]
    methods = {one.name: one for one in own if "staticmethod" in map(leaf_name, one.decorator_list)}
    return methods.get("forward") is function and "backward" in methods


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


def parts_known(known: Mapping[str, _Known], callee: ast.expr, scope: Scope) -> dict[str, _Known]:
    """What is known of the parts of a module that is called, by the names its method has for them: ``self.head``."""
    key = chain_key(callee) or ""
    owner = f"{key if key in scope.live.requires_grad else key.rpartition('.')[0]}."
    return {f"self.{name.removeprefix(owner)}": one for name, one in known.items() if name.startswith(owner)}


def flag_owner(node: ast.stmt) -> ast.expr | None:
    """``x`` of ``x.requires_grad = …`` and of ``x.requires_grad_(…)``; None for any other statement."""
    flag: ast.expr | None = None
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        flag = node.targets[0]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        flag = node.value.func
    wanted = "requires_grad" if isinstance(node, ast.Assign) else "requires_grad_"
    return flag.value if isinstance(flag, ast.Attribute) and flag.attr == wanted else None


def set_later(scope: Scope, key: str) -> list[ast.stmt]:
    """The statements of the function that set ``key.requires_grad``, in order."""
    body: FunctionNode | ast.Module = scope.source.module if scope.function is None else scope.function
    nodes = (one for one in local_nodes(body) if isinstance(one, ast.stmt))
    found = [one for one in nodes if (owner := flag_owner(one)) is not None and chain_key(owner) == key]
    return sorted(found, key=lambda node: node.lineno)


def is_global_here(frame: Frame, name: str) -> bool:
    """Whether the function at ``frame`` reads the module's variable ``name``, not one of its own."""
    statement = statement_at(frame)
    function = None if statement is None else statement.function
    if statement is None or not isinstance(function, ast.FunctionDef):
        return False
    nodes = local_nodes(function)
    is_declared = any(isinstance(one, ast.Global) and name in one.names for one in nodes)
    is_read = any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(function))
    return is_read and (is_declared or not binds(function, name))


def as_key(text: str) -> str:
    """``batch['x']`` of ``batch["x"]``: an expression as :func:`chain_key` has it, where it is such a chain."""
    try:
        return chain_key(ast.parse(text, mode="eval").body) or text
    except SyntaxError:
        return text
