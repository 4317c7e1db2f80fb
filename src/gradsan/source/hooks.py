"""What the parameters of a module's hook are in the words of the line that called the module.

How the hook was registered lies anywhere in the program; what it was given stands in torch's own source, at the frame
that called it: ``hook(self, args)``, ``hook(self, args, kwargs, result)``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from gradsan.model import Frame
from gradsan.source.chains import leaf_name, local_nodes
from gradsan.source.change import Change
from gradsan.source.locate import expression_at, statement_at
from gradsan.source.results import bound_name
from gradsan.source.targets import aliased_expression
from gradsan.source.tree import FunctionNode, SourceFile

__all__ = ["called_as_hook", "hooked_expression", "returned_by_hook"]

_MODULE_FILE = "/torch/nn/modules/module.py"
_POSITION = re.compile(r"\[(\d+)\]")
_KEYWORD = re.compile(r"""\[(['"])(\w+)\1\]""")


def hooked_expression(
    source: SourceFile, function: FunctionNode, name: tuple[str, str], outer: Frame, between: Sequence[Frame]
) -> str | None:
    """What ``name`` (a parameter and what follows it: ``inputs``, ``[0]``) of a hook is called at ``outer``.

    ``h`` of ``inputs[0]`` where ``self.main(h)`` ran the hook; ``o`` of ``output`` where ``o = self.main(h)`` did.
    ``between`` are the frames from ``outer`` to the hook's own, both exclusive. None where they are not torch's way
    from a module's call to its hook, and where the line does not tell.
    """
    given = _given(between)
    parameters = _positional(source, function)
    root, rest = name
    if root not in parameters or parameters.index(root) >= len(given):
        return None
    called = expression_at(outer)
    if called is None or not isinstance(called.node, ast.Call):
        return None
    part = given[parameters.index(root)]
    if part == "self":
        return called.source.text(called.node.func) + rest
    if part == "result":
        bound = bound_name([outer])
        return None if bound is None else bound[0] + rest
    found = _argument(called.node, part, rest)
    if found is None:
        return None
    value, rest = found
    aliased = aliased_expression(called.source, value)
    return None if aliased is None else called.source.text(aliased) + rest


def called_as_hook(between: Sequence[Frame]) -> bool:
    """Whether ``between``, the frames above a function, are torch's way from a module's call to its hook."""
    return bool(_given(between[-1:]))


def returned_by_hook(frame: Frame, between: Sequence[Frame], name: str, change: Change) -> Change | None:
    """``change`` with a ``return`` of ``name`` at the end of the forward hook that ``frame`` is in.

    A hook that binds its result anew and returns nothing changes nothing. None where ``name`` is not the module's
    result as the hook was given it, or the hook returns something already.
    """
    statement = statement_at(frame)
    if statement is None or not isinstance(statement.function, ast.FunctionDef):
        return None
    source, function, given = statement.source, statement.function, _given(between[-1:])
    parameters = _positional(source, function)
    if name not in parameters or given[parameters.index(name) : parameters.index(name) + 1] != ["result"]:
        return None
    if any(isinstance(node, ast.Return) and node.value is not None for node in local_nodes(function)):
        return None
    first, last = source.span(function.body[0]), source.span(function.body[-1])
    indent = source.lines[first.line - 1][: first.column - 1]
    replaced = len(change.old.split("\n")) if change.old else 0
    rest = source.lines[change.line - 1 + replaced : last.end_line]
    old = source.lines[change.line - 1 : last.end_line]
    if indent.strip() or change.line > last.end_line or last.end_line < change.line - 1 + replaced:
        return None
    new = "\n".join([change.new, *rest, f"{indent}return {name}"])
    return Change(change.line, "\n".join(old), new, change.kind)


def _given(between: Sequence[Frame]) -> list[str]:
    """The names of what torch gave the hook, as its own source calls them; none where it was no hook that was called.

    A container's frames stand between where the hook is one of an inner module: its arguments are then not the line's.
    """
    if not between or not all(frame.file.replace("\\", "/").endswith(_MODULE_FILE) for frame in between):
        return []
    found = expression_at(between[-1])
    if found is None or not isinstance(found.node, ast.Call) or leaf_name(found.node.func) != "hook":
        return []
    return [leaf_name(argument) or "" for argument in found.node.args]


def _positional(source: SourceFile, function: FunctionNode) -> list[str]:
    names = [argument.arg for argument in [*function.args.posonlyargs, *function.args.args]]
    decorators = {leaf_name(decorator) for decorator in getattr(function, "decorator_list", ())}
    is_method = isinstance(source.parents[function][0], ast.ClassDef) and "staticmethod" not in decorators
    return names[1:] if is_method else names


def _argument(call: ast.Call, part: str, rest: str) -> tuple[ast.expr, str] | None:
    """The argument of ``call`` that an element of the hook's arguments is, and what of ``rest`` is left."""
    if part == "args" and (position := _POSITION.match(rest)):
        given = call.args[: int(position[1]) + 1]
        if len(given) > int(position[1]) and not any(isinstance(one, ast.Starred) for one in given):
            return given[-1], rest[position.end() :]
    elif part == "kwargs" and (keyword := _KEYWORD.match(rest)):
        for one in call.keywords:
            if one.arg == keyword[2]:
                return one.value, rest[keyword.end() :]
    return None
