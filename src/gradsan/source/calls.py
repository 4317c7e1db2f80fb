"""What a value of one function is called in the function that called it."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from gradsan.model import Frame
from gradsan.source.chains import binds, leaf_name, local_nodes
from gradsan.source.flow import is_still_argument, reaching
from gradsan.source.hooks import hooked_expression
from gradsan.source.locate import expression_at, statement_at
from gradsan.source.names import bindings_of
from gradsan.source.targets import aliased_expression
from gradsan.source.tree import SourceFile

__all__ = ["alias_of", "callers_expression", "dies_with_call"]

# A module's forward is reached by calling the module itself.
_CALLED_AS_OBJECT = frozenset({"forward", "__call__"})


def callers_expression(name: str, inner: Frame, outer: Frame, between: Sequence[Frame] = ()) -> str | None:
    """What ``name``, as the function of ``inner`` says, is called at ``outer``, which called that function.

    ``q`` of ``t`` where ``rotate(q, cos)`` called ``def rotate(t, cos)``; ``model.state`` of ``self.state`` where
    ``model(x)`` did; ``h`` of ``inputs[0]`` where ``model(h)`` ran a hook. ``between`` are the frames of libraries from
    ``outer`` to ``inner``, where known. None where the name is no parameter (or was bound anew), or the call does not
    show the argument.
    """
    root, rest = _split(name)
    statement, call = statement_at(inner), expression_at(outer)
    if statement is None or call is None or not isinstance(call.node, ast.Call):
        return None
    function = statement.function
    if isinstance(function, ast.Lambda):
        return hooked_expression(statement.source, function, (root, rest), outer, between)
    if function is None or not is_still_argument(function.body, statement.node, root):
        return None
    hooked = hooked_expression(statement.source, function, (root, rest), outer, between)
    if hooked is not None:
        return hooked
    if _is_super(call.node.func):
        return name if root == "self" else None
    argument = _argument(statement.source, function, root, call.node)
    aliased = None if argument is None else aliased_expression(call.source, argument)
    return None if aliased is None else call.source.text(aliased) + rest


def alias_of(frame: Frame, name: str) -> str | None:
    """What ``name`` is another handle on at ``frame``: ``hidden`` of ``left`` after ``left = hidden[:, :3]``.

    None where the name was not bound just so, or not in this function.
    """
    statement = statement_at(frame)
    if statement is None or isinstance(statement.function, ast.Lambda):
        return None
    body = statement.source.module.body if statement.function is None else statement.function.body
    found = reaching(body, statement.node, lambda name: False).get(name, frozenset())
    values = [
        binding.value
        for definition in found
        for binding in (bindings_of(definition.statement) if definition.statement is not None else ())
        if binding.name == name and binding.replaces and not isinstance(binding.statement, ast.AugAssign)
    ]
    if len(values) != 1 or values[0] is None:
        return None
    aliased = aliased_expression(statement.source, values[0])
    text = None if aliased is None else statement.source.text(aliased)
    return None if text == name else text


def dies_with_call(frame: Frame, name: str) -> bool:
    """Whether ``name`` is a plain local variable of the function at ``frame``: gone when the call ends."""
    statement = statement_at(frame)
    if statement is None or statement.function is None or not name.isidentifier():
        return False
    function = statement.function
    declared = (node for node in local_nodes(function) if isinstance(node, ast.Global | ast.Nonlocal))
    return binds(function, name) and not any(name in node.names for node in declared)


def _split(name: str) -> tuple[str, str]:
    end = re.search(r"[.\[]", name)
    return (name[: end.start()], name[end.start() :]) if end else (name, "")


def _is_super(callee: ast.expr) -> bool:
    made_by = callee.value if isinstance(callee, ast.Attribute) else None
    return isinstance(made_by, ast.Call) and leaf_name(made_by.func) == "super"


def _argument(
    source: SourceFile, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str, call: ast.Call
) -> ast.expr | None:
    """The expression that ``call`` gives for the parameter ``name`` of ``function``."""
    positional = [argument.arg for argument in [*function.args.posonlyargs, *function.args.args]]
    callee = leaf_name(call.func)
    owner = source.parents[function][0]
    decorators = {leaf_name(decorator) for decorator in function.decorator_list}
    is_method = isinstance(owner, ast.ClassDef) and "staticmethod" not in decorators
    if is_method and positional:
        receiver: ast.expr | None = None
        if callee == function.name and isinstance(call.func, ast.Attribute):
            receiver = call.func.value
        elif function.name in _CALLED_AS_OBJECT:
            receiver = call.func
        if receiver is None:
            return None
        if name == positional[0]:
            return None if "classmethod" in decorators else receiver
        positional = positional[1:]
    elif callee != function.name:
        return None
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in keywords:
        return keywords[name]
    if name not in positional:
        return None
    index = positional.index(name)
    before = call.args[: index + 1]
    if len(before) <= index or any(isinstance(argument, ast.Starred) for argument in before):
        return None
    return call.args[index]
