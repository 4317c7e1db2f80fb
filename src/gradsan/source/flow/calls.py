"""Calls: names of one value in caller and callee, arguments read again later, and module hooks.

A hook may be registered anywhere in the program; torch's own source, at the frame that calls it, shows its arguments:
``hook(self, args)``, ``hook(self, args, kwargs, result)``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from gradsan.model import Frame
from gradsan.source.change import Change
from gradsan.source.flow.bindings import bound_name
from gradsan.source.flow.reaching import binding_at, is_still_argument, reaching
from gradsan.source.flow.reuse import reads_value
from gradsan.source.flow.targets import aliased_expression, operand_expressions
from gradsan.source.identifiers import (
    assigned_names,
    bindings_of,
    binds,
    bound_in,
    chain_key,
    constant_key,
    leaf_name,
    local_nodes,
    parameters,
)
from gradsan.source.locate import Statement, call_at, expression_at, statement_at
from gradsan.source.tree import FunctionNode, SourceFile, read_source

# A module's forward is reached by calling the module itself.
_CALLED_AS_OBJECT = frozenset({"forward", "__call__"})


def callers_expression(name: str, inner: Frame, outer: Frame, between: Sequence[Frame] = ()) -> str | None:
    """The expression at ``outer``, a caller of the function of ``inner``, for the value called ``name`` there.

    ``q`` for ``t`` where ``rotate(q, cos)`` called ``def rotate(t, cos)``; ``model.state`` for ``self.state`` where
    ``model(x)`` did; ``h`` for ``inputs[0]`` where ``model(h)`` ran a hook. ``between`` are the library frames from
    ``outer`` to ``inner``, where known. None where the name is not a parameter (or was rebound), or the call does not
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
    argument = _argument(statement.source, function, root, _past_checkpoint(call.node))
    aliased = None if argument is None else aliased_expression(call.source, argument)
    return None if aliased is None else call.source.text(aliased) + rest


_OF_CHECKPOINT = frozenset(
    {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"}
)


def _past_checkpoint(call: ast.Call) -> ast.Call:
    """``block(x)`` for ``checkpoint(block, x)``; any other call unchanged."""
    if leaf_name(call.func) != "checkpoint" or not call.args:
        return call
    return ast.Call(call.args[0], call.args[1:], [one for one in call.keywords if one.arg not in _OF_CHECKPOINT])


def called_expression(frame: Frame) -> str | None:
    """The callee of the call at ``frame``, ``self.final`` of ``self.final(x)``; None where there is not exactly one."""
    found = call_at(frame)
    return None if found is None else found[0].text(found[1].func)


def first_argument(frame: Frame) -> str | None:
    """``x`` of ``self.relu(x)`` at ``frame``; None where it has no name."""
    found = expression_at(frame)
    call = found.node if found is not None else None
    return chain_key(call.args[0]) if isinstance(call, ast.Call) and call.args else None


def index_expressions(frame: Frame, position: int) -> list[str]:
    """``i`` of ``table[:, i]`` at ``frame`` for position 1: the name of that index; none where it has none."""
    found = expression_at(frame)
    if found is None or not isinstance(found.node, ast.Subscript):
        return []
    given = found.node.slice
    parts = given.elts if isinstance(given, ast.Tuple) else [given]
    # ``...`` and ``None`` are no dimensions of the tensor.
    is_shifted = any(isinstance(one, ast.Constant) and one.value in (None, ...) for one in parts)
    name = None if is_shifted or position >= len(parts) else chain_key(parts[position])
    return [] if name is None else [name]


def made_by_call(frame: Frame, name: str) -> tuple[int, frozenset[str]]:
    """The line of the call whose result ``name`` is at ``frame``, and the names given to it: p of ``q, r = f(p, 1)``.

    (0, none) where it is no result of one call, or is not bound in this function.
    """
    binding = binding_at(frame, name)
    call = binding.statement.value if binding is not None and isinstance(binding.statement, ast.Assign) else None
    if not isinstance(call, ast.Call):
        return 0, frozenset()
    given = [*call.args, *(one.value for one in call.keywords)]
    return call.lineno, frozenset(key for one in given if (key := chain_key(one)) is not None)


def alias_of(frame: Frame, name: str) -> str | None:
    """The expression that ``name`` is an alias or view of at ``frame``: ``hidden`` after ``left = hidden[:, :3]``.

    None where ``name`` has no such binding, or none in this function.
    """
    binding, source = binding_at(frame, name), read_source(frame.file)
    if binding is None or binding.value is None or source is None:
        return None
    aliased = aliased_expression(source, binding.value)
    text = None if aliased is None else source.text(aliased)
    return None if text == name else text


def dies_with_call(frame: Frame, name: str, *, given_stays: bool = False) -> bool:
    """Whether ``name`` is a plain local variable of the function at ``frame``, which does not outlive the call.

    With ``given_stays``, the object passed for a parameter that the function never binds anew outlives it. A generator
    keeps the variables of a loop that yields.
    """
    statement = statement_at(frame)
    if statement is None or statement.function is None or not name.isidentifier() or yielding_loop(statement):
        return False
    function = statement.function
    declared = (node for node in local_nodes(function) if isinstance(node, ast.Global | ast.Nonlocal))
    if given_stays and name in parameters(function) and name not in bound_in(function):
        return False
    return binds(function, name) and not any(name in node.names for node in declared)


def yielding_loop(statement: Statement) -> ast.stmt | None:
    """The innermost loop around a statement of a generator in which it yields."""
    loops = reversed(statement.loops)
    return next((loop for loop in loops if any(isinstance(one, ast.Yield) for one in ast.walk(loop))), None)


def _split(name: str) -> tuple[str, str]:
    end = re.search(r"[.\[]", name)
    return (name[: end.start()], name[end.start() :]) if end else (name, "")


def _is_super(callee: ast.expr) -> bool:
    made_by = callee.value if isinstance(callee, ast.Attribute) else None
    return isinstance(made_by, ast.Call) and leaf_name(made_by.func) == "super"


def _argument(
    source: SourceFile, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str, call: ast.Call
) -> ast.expr | None:
    """The expression that ``call`` passes for the parameter ``name`` of ``function``."""
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


def reads_again(name: str, call: Frame, read: Frame) -> bool:
    """Whether the operation at ``read`` reads ``name`` with the binding it had at ``call``, in the same function.

    False where it reads the result of the call, as ``fc(h)`` after ``h = norm(x)`` does, or ``fc(x)`` after ``x =
    norm(x)``: code that uses the result expects the new values, though they are in the same memory. Without columns,
    the reading statement must contain that name and none of the result's.
    """
    if call.column is None or read.column is None:
        return _statement_reads_again(_split(name)[0], statement_at(call), statement_at(read))
    meant = {name, alias_of(call, name) or name}
    texts = operand_expressions(read)
    read_names = {*texts, *(alias_of(read, text) or text for text in texts)}
    roots = {
        _split(one)[0] for one in meant for other in read_names if _is_within(one, other) or _is_within(other, one)
    }
    before, after = statement_at(call), statement_at(read)
    if before is None or after is None:
        return False
    # ``batch["ids"], labels = mask(batch["ids"])``: what reads the element later reads the result.
    is_rebound = before.node is not after.node and name.replace('"', "'") in assigned_names(before)
    return not is_rebound and any(_keeps(root, before, after) for root in roots)


def _statement_reads_again(name: str, before: Statement | None, after: Statement | None) -> bool:
    if before is None or after is None or before.node is after.node:
        return False
    results = {_split(one.name)[0] for one in bindings_of(before.node)} - {name}
    is_of_result = any(isinstance(node, ast.Name) and node.id in results for node in ast.walk(after.node))
    return not is_of_result and reads_value(after.source, after.node, name) and _keeps(name, before, after)


def _keeps(name: str, before: Statement, after: Statement) -> bool:
    """Whether a binding of ``name`` that reaches the first statement also reaches the second."""
    if before.node is after.node:
        return True
    return bool(_bindings(name, before) & (_bindings(name, after) - {before.node}))


def _bindings(name: str, statement: Statement) -> set[ast.stmt | None]:
    if statement.scope is None:
        return set()
    found = reaching(statement.scope.body, statement.node).get(name, frozenset())
    return {definition.statement for definition in found} or {None}


def _is_within(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith((f"{outer}.", f"{outer}["))


_MODULE_FILE = "/torch/nn/modules/module.py"
_POSITION = re.compile(r"\[(\d+)\]")
_KEYWORD = re.compile(r"""\[(['"])(\w+)\1\]""")


def hooked_expression(
    source: SourceFile, function: FunctionNode, name: tuple[str, str], outer: Frame, between: Sequence[Frame]
) -> str | None:
    """The expression at ``outer`` for ``name``, a hook's parameter and its suffix (``inputs``, ``[0]``).

    ``h`` for ``inputs[0]`` where ``self.main(h)`` ran the hook; ``o`` for ``output`` where ``o = self.main(h)`` did.
    ``between`` are the frames from ``outer`` to the hook's own, both exclusive. None where they are not torch's frames
    from a module call to its hook, and where the line is ambiguous.
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
    found = _hook_argument(called.node, part, rest)
    if found is None:
        return None
    value, rest = found
    aliased = aliased_expression(called.source, value)
    return None if aliased is None else called.source.text(aliased) + rest


def called_as_hook(between: Sequence[Frame]) -> bool:
    """Whether ``between``, the frames above a function, are torch's frames from a module call to its hook."""
    return bool(_given(between[-1:]))


def returned_by_hook(frame: Frame, between: Sequence[Frame], name: str, change: Change) -> Change | None:
    """``change`` with a ``return`` of ``name`` at the end of the hook that contains ``frame``.

    A hook that rebinds its result and returns nothing has no effect. None where ``name`` is neither the module's result
    in a forward hook, nor the arguments or one of them in a pre-hook, or where the hook has a return value already.
    """
    statement = statement_at(frame)
    if statement is None or not isinstance(statement.function, ast.FunctionDef):
        return None
    source, function, given = statement.source, statement.function, _given(between[-1:])
    returned = _returned(source, function, given, name)
    if returned is None:
        return None
    if any(isinstance(node, ast.Return) and node.value is not None for node in local_nodes(function)):
        return None
    first, last = source.span(function.body[0]), source.span(function.body[-1])
    indent = source.indent(first)
    replaced = len(change.old.split("\n")) if change.old else 0
    rest = source.lines[change.line - 1 + replaced : last.end_line]
    old = source.lines[change.line - 1 : last.end_line]
    if indent.strip() or change.line > last.end_line or last.end_line < change.line - 1 + replaced:
        return None
    new = "\n".join([change.new, *rest, f"{indent}return {returned}"])
    return Change(change.line, "\n".join(old), new, change.kind)


def _returned(source: SourceFile, function: ast.FunctionDef, given: list[str], name: str) -> str | None:
    """The hook's return value once ``name`` is rebound: the result, or the arguments with this one replaced."""
    known = dict(zip(_positional(source, function), given, strict=False))
    if known.get(name) == "result" or (known.get(name) == "args" and "result" not in given):
        return name
    arguments = next((one for one, part in known.items() if part == "args"), None)
    taken = [one for node in local_nodes(function) if isinstance(node, ast.Assign) for one in bindings_of(node)]
    values = [one.value for one in taken if one.name == name]
    if arguments is None or "result" in given or len(values) != 1 or not isinstance(values[0], ast.Subscript):
        return None
    position = constant_key(values[0].slice)
    if source.text(values[0].value) != arguments or not isinstance(position, int) or position < 0:
        return None
    before = f"*{arguments}[:{position}], " if position else ""
    return f"({before}{name}, *{arguments}[{position + 1}:])"


def _given(between: Sequence[Frame]) -> list[str]:
    """The names of the values that torch passed to the hook, as torch's source spells them; empty if none was called.

    Frames of a container are in between where the hook belongs to an inner module, whose arguments the line does not
    show.
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


def _hook_argument(call: ast.Call, part: str, rest: str) -> tuple[ast.expr, str] | None:
    """The argument of ``call`` for an element of the hook's arguments, and the remaining part of ``rest``."""
    if part == "args" and (position := _POSITION.match(rest)):
        given = call.args[: int(position[1]) + 1]
        if len(given) > int(position[1]) and not any(isinstance(one, ast.Starred) for one in given):
            return given[-1], rest[position.end() :]
    elif part == "kwargs" and (keyword := _KEYWORD.match(rest)):
        for one in call.keywords:
            if one.arg == keyword[2]:
                return one.value, rest[keyword.end() :]
    return None


def returns_to_several(frame: Frame) -> bool:
    """Whether the statement at ``frame`` binds variables of a function that other callers run, too.

    A module's ``forward``, or a function that the file calls at several places.
    """
    statement = statement_at(frame)
    if statement is None or not isinstance(statement.function, ast.FunctionDef):
        return False
    if not all(name.isidentifier() for name in assigned_names(statement.node)):
        return False
    name = statement.function.name
    calls = [one for one in statement.source.nodes if isinstance(one, ast.Call) and leaf_name(one.func) == name]
    return name in _CALLED_AS_OBJECT or len(calls) > 1
