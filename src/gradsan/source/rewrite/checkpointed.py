"""Functions given to ``checkpoint`` that read values from outside: bound early, or passed as arguments."""

from __future__ import annotations

import ast

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited
from gradsan.source.identifiers import bindings_of, chain_key, local_nodes, parameters
from gradsan.source.locate import statement_at
from gradsan.source.rewrite.functions import frame_in, function_at
from gradsan.source.tree import FunctionNode, SourceFile

_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def bind_early(definition: Frame, call: Frame, name: str, value: str) -> Change | None:
    """A default argument ``<name>=<value>`` for the function defined at ``definition`` and passed on at ``call``.

    Only for a function that is created anew for each call: a lambda, or a ``def`` in the same block. ``self.scale`` is
    read as ``scale`` in it.
    """
    found, statement = function_at(definition), statement_at(call)
    if found is None or statement is None:
        return None
    source, function = found
    edits = list[Edit]()
    if not name.isidentifier():
        inside = [one for one in ast.walk(function) if isinstance(one, ast.Attribute) and chain_key(one) == name]
        name = name.rpartition(".")[2]
        known = {one.id for one in ast.walk(function) if isinstance(one, ast.Name)}
        if not inside or name in known or not name.isidentifier():
            return None
        edits = [Edit(source.span(one), name) for one in inside if isinstance(one.ctx, ast.Load)]
        if len(edits) < len(inside):
            return None
    if source.file != statement.source.file or _block(source, function) is not _block(source, statement.node):
        return None
    arguments = function.args
    if name in parameters(function) or arguments.vararg or arguments.kwarg or arguments.kwonlyargs:
        return None
    positional = [*arguments.posonlyargs, *arguments.args]
    if not positional:
        return None
    last = max(map(source.span, [*positional, *arguments.defaults]), key=lambda span: (span.end_line, span.end_column))
    return edited(source, [Edit.after(last, f", {name}={value}"), *edits], "bind_early")


def rebound_at(call: Frame, path: str, until: Frame | None) -> tuple[Frame, ...]:
    """The statements that bind ``path`` (``i``, ``self.scale``) to another value between ``call`` and ``until``."""
    statement = statement_at(call)
    if statement is None:
        return ()
    source, node = statement.source, statement.node
    outer = [parent for parent, _ in source.ancestors(node) if isinstance(parent, _LOOPS)]
    scopes: list[FunctionNode | ast.Module] = [source.module]
    scopes += [one for one, _ in source.ancestors(node) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = []
    for other in (inner for scope in scopes for inner in local_nodes(scope) if isinstance(inner, ast.stmt)):
        if not any(binding.name == path and binding.replaces for binding in bindings_of(other)):
            continue
        again = any(loop is other or any(parent is loop for parent, _ in source.ancestors(other)) for loop in outer)
        is_late = until is not None and until.file == call.file and other.lineno > until.line
        if again or (other.lineno > node.lineno and not is_late):
            found.append(frame_in(source, other, call.file))
    return tuple(dict.fromkeys(found))


def passed_to_method(definition: Frame, call: Frame, name: str) -> tuple[Change, ...]:
    """``checkpoint(self.part, x, self.mask)`` and ``def part(self, x, mask)``, for a method that reads ``self.mask``.

    ``name`` is any path to the attribute. Empty where the method has other callers, takes more than it is given, or
    sets the attribute.
    """
    found, statement, attribute = function_at(definition), statement_at(call), name.rpartition(".")[2]
    if found is None or statement is None or not isinstance(found[1], ast.FunctionDef) or found[1].args.vararg:
        return ()
    source, method = found[0], found[1]
    own, reads = next(iter(parameters(method)), ""), list[ast.Attribute]()
    for one in ast.walk(method):
        if isinstance(one, ast.Attribute) and chain_key(one) == f"{own}.{attribute}":
            reads.append(one)
    named = [one for one in source.nodes if isinstance(one, ast.Attribute) and one.attr == method.name]
    holder = source.parents[named[0]][0] if len(named) == 1 else None
    given = [] if not isinstance(holder, ast.Call) else holder.args
    is_plain = not (method.args.defaults or method.args.kwonlyargs or method.args.kwarg or method.args.posonlyargs)
    names = {one.id for one in ast.walk(method) if isinstance(one, ast.Name)} | set(parameters(method))
    if (
        source.file != statement.source.file
        or not (isinstance(holder, ast.Call) and source.statement(holder) is statement.node and named[0] in given)
        or not (is_plain and len(given) == len(method.args.args) and reads and attribute not in names)
        or not all(isinstance(one.ctx, ast.Load) for one in reads)
    ):
        return ()
    called = edited(
        source, [Edit.after(source.span(given[-1]), f", {source.text(named[0].value)}.{attribute}")], "bind_early"
    )
    last = Edit.after(source.span(method.args.args[-1]), f", {attribute}")
    changed = edited(source, [last, *(Edit(source.span(one), attribute) for one in reads)], "bind_early")
    return () if called is None or changed is None else (called, changed)


def _block(source: SourceFile, node: ast.AST) -> ast.AST | None:
    """The innermost loop or function around a node (itself left out), or the module."""
    kinds = (*_LOOPS, ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)
    return next((parent for parent, _ in source.ancestors(node) if isinstance(parent, kinds)), None)
