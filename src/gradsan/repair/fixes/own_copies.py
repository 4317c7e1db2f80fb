"""Copies where an alias was made: an average, backup or momentum that aliases the parameter itself (GS216).

Both the written name and the read name are followed back through loops, attributes and arguments to the
expression that keeps the tensors of another object.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradsan.model import Diagnosis, Fix, Lines
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Edit, changed_lines, edited
from gradsan.source.flow.reuse import second_name
from gradsan.source.flow.scopes import Live, Scope, definitions_of, scope_at
from gradsan.source.identifiers import chain_key, constant_key, imported_as, leaf_name, local_nodes
from gradsan.source.locate import expression_at
from gradsan.source.rewrite.copied import copy_second_name
from gradsan.source.tree import SourceFile

_DEEPEST = 8
_GIVING = frozenset({"parameters", "buffers", "state_dict", "named_parameters", "named_buffers", "items", "values"})
_OF_MODULES = _GIVING - {"items", "values"}
_NAMED = frozenset({"state_dict", "named_parameters", "named_buffers"})


def copy_where_made(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """A copy at each place at which one of the two names became an alias of the other's memory."""
    advice = blocks.advice(diagnosis, "copy_second_name")
    at = blocks.first(diagnosis, "written") or blocks.first(diagnosis, "saved")
    if advice is None or advice.summary.key != "help.own_operand" or at is None:
        return ()
    frames = blocks.user_frames(at)
    scope = scope_at(frames, [Live()] * len(frames), len(frames) - 1)
    found: list[Fix] = []
    if scope is None:
        return ()
    names = [str(advice.summary.values.get(one)) for one in ("written", "name")]
    # The side that was meant as a copy comes first.
    for name in sorted(names, key=lambda one: diagnosis.tensor is None or one != diagnosis.tensor.name):
        try:
            node = ast.parse(name, mode="eval").body
        except SyntaxError:
            continue
        for source, value, is_module in _makers(node, scope, _is_asked_for_tensors(scope, node), set()):
            lines, kept = _copied(source, value, is_module)
            if lines and all(lines != one.lines for one in found):
                other = next((one for one in names if one != name), name)
                values = {**advice.summary.values, "written": name, "name": other, "value": source.text(kept)}
                found.append(blocks.fix("copy_second_name", lines, "copy_where_made", **values))
    return tuple(found)


def second_names_copied(faults: Sequence[Diagnosis]) -> Lines:
    """The lines that bind the second name of a written leaf to a copy: without it, the program compares one tensor."""
    found: list[tuple[str, int, str]] = []
    for fault in faults:
        written = blocks.first(fault, "written") if fault.cause == "leaf_written" else None
        if written is not None and fault.tensor is not None and fault.tensor.name:
            second = second_name(written.frame, fault.tensor.name)
            found += changed_lines(written.frame.file, copy_second_name(written.frame, second))
    return tuple(dict.fromkeys(found))


def _is_asked_for_tensors(scope: Scope, node: ast.expr) -> bool:
    """Whether ``node`` is a module by what the function calls: ``for p, q in zip(a.parameters(), b.parameters())``."""
    function, key = scope.source.function(scope.at) or scope.source.module, chain_key(node)
    called = (one.func for one in ast.walk(function) if isinstance(one, ast.Call))
    asked = (one.value for one in called if isinstance(one, ast.Attribute) and one.attr in _OF_MODULES)
    return key is not None and any(chain_key(one) == key for one in asked)


def copy_state_where_taken(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """A copy of each tensor where ``best = model.state_dict()`` keeps the module's own; of an optimizer's, of all."""
    advice, taken = blocks.advice(diagnosis, "copy_second_name"), blocks.first(diagnosis, "note")
    found = None if taken is None else expression_at(taken.frame)
    keys = ("help.state_copied", "help.optimizer_state_copied")
    if advice is None or advice.summary.key not in keys or found is None:
        return ()
    parent, field = found.source.parents[found.node]
    # Where the frame has no columns of the call, the position is that of ``net.state_dict``.
    value = parent if field == "func" else found.node
    if not isinstance(value, ast.Call) or leaf_name(value.func) != "state_dict" or _handed_out(value) is None:
        return ()
    lines, _ = _copied(found.source, value, False, is_nested=advice.summary.key == keys[1])
    values = {**advice.summary.values, "value": found.source.text(value)}
    return (blocks.fix("copy_second_name", lines, "copy_state", **values),) if lines else ()


def _makers(
    node: ast.expr, scope: Scope, is_module: bool, seen: set[tuple[object, ...]], is_dict: bool = False
) -> Iterator[tuple[SourceFile, ast.expr, bool]]:
    """The expressions that may define the memory of ``node``, or of a container's elements; whether it is a module.

    ``is_dict``: its elements are accessed by name, so that it is no tensor itself. ``seen`` are the names that have
    been followed: statements of a loop define one another, and each round of it has the same ones.
    """
    while isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr in ("data", "grad")):
        is_dict = is_dict or (isinstance(node, ast.Subscript) and isinstance(constant_key(node.slice), str))
        node = node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _GIVING:
        yield from _makers(node.func.value, scope, node.func.attr in _OF_MODULES, seen)
        return
    key = chain_key(node)
    mark = (key, id(scope.at), id(scope.given), is_module, is_dict)
    if key is None or scope.depth > _DEEPEST or mark in seen:
        return
    seen.add(mark)
    inner = replace(scope, depth=scope.depth + 1)
    local = list(definitions_of(scope, key))
    bound = local or list(_bound_in_class(scope, key))
    for statement, value in bound:
        part: ast.expr | None = value
        if isinstance(statement, ast.For) and value is statement.iter:
            part = _part(statement.target, statement.iter, key)
        elif _puts_into(statement, key) or (
            (not local or _lasts(scope, statement)) and not (is_dict and isinstance(value, ast.Name | ast.Attribute))
        ):
            yield scope.source, value, is_module
        if isinstance(part, ast.Name | ast.Attribute | ast.Subscript | ast.Call):
            yield from _makers(part, replace(inner, at=statement), is_module, seen, is_dict)
    if not bound and key in scope.given:
        value, outer = scope.given[key]
        if isinstance(value, ast.Name | ast.Attribute | ast.Subscript | ast.Call):
            yield from _makers(value, replace(outer, depth=scope.depth + 1), is_module, seen, is_dict)


def _lasts(scope: Scope, statement: ast.stmt) -> bool:
    """Whether the binding of ``statement`` outlives a round: a loop runs around its readers, but not around it.

    A name that a round gives to something kept (``v = self.velocity[p]``) is an alias made to write into it.
    """
    loops = [one for one, _ in scope.source.ancestors(scope.at) if isinstance(one, ast.For | ast.While)]
    return any(statement not in ast.walk(loop) for loop in loops)


def _puts_into(statement: ast.stmt, key: str) -> bool:
    """Whether a statement stores into the container ``key``, or into one that it contains."""
    for one in statement.targets if isinstance(statement, ast.Assign) else []:
        part: ast.expr = one
        while isinstance(part, ast.Subscript):
            part = part.value
            if chain_key(part) == key:
                return True
    return False


def _bound_in_class(scope: Scope, key: str) -> Iterator[tuple[ast.stmt, ast.expr]]:
    """The values bound to ``key``, or stored in it, by the class's methods, or in the whole file for a plain name."""
    around = scope.source.owner_class(scope.at) if key.startswith("self.") else scope.source.module
    for node in ast.walk(around) if around is not None else ():
        if isinstance(node, ast.Assign):
            if _puts_into(node, key) or any(chain_key(target) == key for target in node.targets):
                yield node, node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            statement = scope.source.statement(node)
            if chain_key(node.func.value) == key and len(node.args) == 1 and statement is not None:
                yield statement, node.args[0]


def _part(target: ast.expr, walked: ast.expr, key: str) -> ast.expr | None:
    """The part of ``walked`` that the loop variable ``key`` iterates over: ``xs`` of ``for x, y in zip(xs, ys)``."""
    if chain_key(target) == key:
        return walked
    names = target.elts if isinstance(target, ast.Tuple) else []
    call = walked if isinstance(walked, ast.Call) else None
    if call is not None and leaf_name(call.func) == "zip" and len(call.args) == len(names):
        parts = (_part(one, given, key) for one, given in zip(names, call.args, strict=True))
        return next((one for one in parts if one is not None), None)
    if call is not None and leaf_name(call.func) == "enumerate" and len(names) == 2 and call.args:
        return _part(names[1], call.args[0], key)
    return walked if any(chain_key(one) == key for one in names) else None


def _copied(source: SourceFile, value: ast.expr, is_module: bool, *, is_nested: bool = False) -> tuple[Lines, ast.expr]:
    """The line of ``value`` with a copy, and with an import if needed, and the copied expression.

    Empty where the source shows no alias.
    """
    kept = value
    while isinstance(kept, ast.ListComp | ast.GeneratorExp | ast.DictComp):
        kept = kept.value if isinstance(kept, ast.DictComp) else kept.elt
    if kept is not value:
        edit = _cloned(source, kept)
    elif isinstance(value, ast.Call) and leaf_name(value.func) == "copy" and imported_as(source, "copy"):
        edit = Edit(source.span(value.func), f"{imported_as(source, 'copy')}.deepcopy")
    elif (given := _handed_out(value)) is not None and not is_nested:
        text = source.text(given)
        named = leaf_name(given.func) in _NAMED
        items = f"{text}.items()" if leaf_name(given.func) == "state_dict" else text
        anew = (
            f"{{key: one.detach().clone() for key, one in {items}}}"
            if named
            else f"[one.detach().clone() for one in {text}]"
        )
        edit = Edit(source.span(value), anew)
    elif isinstance(value, ast.Call) and (returned := _returned(source, value)) is not None:
        edit = _copied_of_function(source, value, returned)
    elif is_nested or (is_module and isinstance(value, ast.Name | ast.Attribute | ast.Subscript)):
        edit = Edit(source.span(value), f"{imported_as(source, 'copy') or 'copy'}.deepcopy({source.text(value)})")
    else:
        edit = _cloned(source, value)
    change = None if edit is None else edited(source, [edit], "copy_second_name")
    lines = changed_lines(source.file, change)
    return lines, kept


def _returned(source: SourceFile, call: ast.Call) -> ast.expr | None:
    """The value returned by the one function of the file that a call runs, if it has a single ``return``."""
    functions = [one for one in source.nodes if isinstance(one, ast.FunctionDef) and one.name == leaf_name(call.func)]
    returns = [one.value for function in functions for one in local_nodes(function) if isinstance(one, ast.Return)]
    return returns[0] if len(functions) == len(returns) == 1 else None


def _copied_of_function(source: SourceFile, call: ast.Call, returned: ast.expr) -> Edit | None:
    """Copies of the result of ``self.snapshot()`` at the call: other callers may need the tensors themselves."""
    text = source.text(call)
    given = _handed_out(returned)
    if isinstance(returned, ast.DictComp) and _is_array(returned.value):
        return Edit(source.span(call), f"{{key: one.copy() for key, one in {text}.items()}}")
    if isinstance(returned, ast.ListComp) and _is_array(returned.elt):
        return Edit(source.span(call), f"[one.copy() for one in {text}]")
    if isinstance(returned, ast.DictComp) or (given is not None and leaf_name(given.func) == "state_dict"):
        return Edit(source.span(call), f"{{key: one.detach().clone() for key, one in {text}.items()}}")
    if isinstance(returned, ast.ListComp) or (given is not None and leaf_name(given.func) not in _NAMED):
        return Edit(source.span(call), f"[one.detach().clone() for one in {text}]")
    return None


def _handed_out(value: ast.expr) -> ast.Call | None:
    """``net.parameters()`` of ``list(net.parameters())``; ``net.state_dict()`` as it is."""
    inner = value.args[0] if isinstance(value, ast.Call) and len(value.args) == 1 and not value.keywords else value
    is_container = isinstance(value, ast.Call) and leaf_name(value.func) in ("list", "tuple", "dict")
    if (
        not (is_container or value is inner)
        or not isinstance(inner, ast.Call)
        or not isinstance(inner.func, ast.Attribute)
    ):
        return None
    gives = inner.func.attr in _OF_MODULES and (value is not inner or inner.func.attr == "state_dict")
    return inner if gives and not inner.args else None


def _is_array(value: ast.expr) -> bool:
    """Whether an expression is ``x.numpy()``."""
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "numpy"


def _cloned(source: SourceFile, value: ast.expr) -> Edit | None:
    """``.detach().clone()`` on a variable or attribute, or on an expression that is detached already.

    An array is copied as such.
    """
    if _is_array(value):
        return Edit.after(source.span(value), ".copy()")
    is_cut = isinstance(value, ast.Attribute) and value.attr == "data"
    if isinstance(value, ast.Call):
        is_cut = isinstance(value.func, ast.Attribute) and value.func.attr == "detach"
        if not is_cut:
            return None
    elif not isinstance(value, ast.Name | ast.Attribute | ast.Subscript):
        return None
    span = source.span(value)
    return Edit.after(span, ".clone()" if is_cut else ".detach().clone()")
