"""Effects of binding a name to a new tensor instead of writing in place."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TypeAlias

from gradsan.heuristics import is_layers_parameter
from gradsan.source.change import Edit
from gradsan.source.flow.aliases import TAKING, is_read_as_whole
from gradsan.source.flow.reaching import is_still_argument, is_tensor_made_here, keeps_binding
from gradsan.source.flow.scopes import arguments_of
from gradsan.source.flow.targets import aliased_expression
from gradsan.source.flow.writing import written_root
from gradsan.source.identifiers import (
    assigned_pairs,
    bindings_in,
    bindings_of,
    binds,
    chain_key,
    constant_key,
    leaf_name,
    local_nodes,
    parameters,
)
from gradsan.source.methods import is_inplace_name
from gradsan.source.tree import FunctionNode, SourceFile, Span

_Loop: TypeAlias = ast.For | ast.AsyncFor | ast.While | ast.comprehension


def can_rebind(source: SourceFile, target: ast.expr) -> bool:
    """Whether ``<target> = …`` is allowed at ``target`` and refers to the same variable.

    Not in a lambda; not for a global or closure variable (the assignment would make it local), an nn.Parameter of a
    module (the module rejects other tensors), or an element that may be a tensor's row.
    """
    function = source.function(target)
    if isinstance(target, ast.Subscript) and _is_of_container(source, target):
        return not isinstance(function, ast.Lambda)
    if isinstance(function, ast.Lambda) or chain_key(target) is None:
        return False
    if isinstance(target, ast.Subscript):
        return isinstance(constant_key(target.slice), str)
    if isinstance(target, ast.Attribute):
        return not _is_parameter(source, target)
    if not isinstance(target, ast.Name) or _is_comprehension_variable(source, target):
        return False
    return function is None or binds(function, target.id) or _is_declared(source, target)


def _is_of_container(source: SourceFile, element: ast.Subscript) -> bool:
    """Whether ``fast[i]`` is an element of a dict, or of a list of new tensors, as its function shows."""
    scope = source.function(element) or source.module
    key = chain_key(element.value)
    if not isinstance(element.slice, ast.Name | ast.Constant) or key is None:
        return False
    for node in local_nodes(scope):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in ("items", "keys", "values"):
            if chain_key(called.value) == key:
                return True
        elif isinstance(node, ast.stmt) and any(
            one.name == key and _makes_container(source, one.value) for one in bindings_of(node)
        ):
            return True
    return False


def _makes_container(source: SourceFile, value: ast.AST | None) -> bool:
    if isinstance(value, ast.ListComp):
        # ``[x, y]`` and ``list(parameters)`` hold tensors that have other names.
        return isinstance(value.elt, ast.Call) and aliased_expression(source, value.elt) is None
    is_call = isinstance(value, ast.Call) and leaf_name(value.func) in ("dict", "OrderedDict")
    return is_call or isinstance(value, ast.Dict | ast.DictComp)


def notes_on_rebinding(source: SourceFile, target: ast.expr) -> tuple[str, ...]:
    """The notes of ``Change`` that apply when ``target`` is rebound instead of written in place."""
    if not isinstance(target, ast.Name):
        return ()
    name = target.id
    function = source.function(target)
    scope = source.module if function is None else function
    notes: list[str] = []
    if _is_argument(source, target) and (not _is_returned(source, scope, name) or _is_read_by_callers(source, target)):
        notes.append("parameter_not_returned")
    if _is_comprehension_variable(source, target) or any(
        isinstance(loop, ast.For | ast.AsyncFor) and name in _names_in(loop.target) for loop in local_nodes(scope)
    ):
        notes.append("loop_variable")
    if _has_alias(source, scope, target):
        notes.append("aliased")
    return tuple(notes)


def is_written_for_others(source: SourceFile, target: ast.expr, operation: ast.expr | ast.stmt) -> bool:
    """Whether ``target`` is a loop variable that the loop's body does not read after ``operation``.

    The write is then meant for the iterable's elements; a rebound name would not be read.
    """
    if not isinstance(target, ast.Name):
        return False
    statement = source.statement(operation)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.ListComp | ast.SetComp):
        # A comprehension run for its effect.
        return any(target.id in _names_in(one.target) for one in statement.value.generators)
    loop = next(
        (
            one
            for one, _ in source.ancestors(operation)
            if isinstance(one, ast.For | ast.AsyncFor) and target.id in _names_in(one.target)
        ),
        None,
    )
    return loop is not None and not _is_read_behind(source, loop.body, target.id, operation)


def is_written_for_caller(source: SourceFile, target: ast.expr, operation: ast.expr | ast.stmt) -> bool:
    """Whether ``target`` is an argument, or a part of one, that its function neither returns nor reads afterwards.

    Or which a caller in the file goes on with, and not with the result.
    """
    while isinstance(target, ast.Subscript):
        target = target.value
    function = source.function(target)
    if not isinstance(target, ast.Name) or not isinstance(function, ast.FunctionDef):
        return False
    user, is_bound = source.parents[operation][0], isinstance(source.statement(operation), ast.Assign)
    is_read = isinstance(operation, ast.Call) and isinstance(user, ast.Attribute) and not is_inplace_name(user.attr)
    if is_read or (is_bound and not isinstance(operation, ast.Subscript)):
        return False  # ``mixed = x.mul_(a)`` and ``log(x.abs_().mean())`` go on with the result
    if not _is_argument(source, target):
        return False
    if isinstance(user, ast.Return) or _is_returned(source, function, target.id):
        return _is_read_by_callers(source, target)
    return not _is_read_behind(source, function.body, target.id, operation)


def _is_read_by_callers(source: SourceFile, written: ast.Name) -> bool:
    """Whether a call in the file drops the result and has what it passed for an argument, or reads that afterwards."""
    function = source.function(written)
    if not isinstance(function, ast.FunctionDef):
        return False
    for call in source.nodes:
        if not isinstance(call, ast.Call) or leaf_name(call.func) != function.name:
            continue
        passed, at = dict(arguments_of(function, call)).get(written.id), source.statement(call)
        if isinstance(at, ast.Expr) and at.value is call and isinstance(passed, ast.Name | ast.Attribute):
            return True
        bound = {one.name for one in bindings_of(at)} if isinstance(at, ast.stmt) else set[str]()
        if isinstance(passed, ast.Name) and passed.id not in bound and is_read_afterwards(source, passed, call):
            return True
    return False


def _is_read_behind(source: SourceFile, body: Sequence[ast.stmt], name: str, operation: ast.expr | ast.stmt) -> bool:
    statement = source.statement(operation)
    inside = set() if statement is None else set(ast.walk(statement))
    end = source.span(operation)
    reads = (node for part in body for node in ast.walk(part) if isinstance(node, ast.Name))
    return any(
        node.id == name
        and isinstance(node.ctx, ast.Load)
        and node not in inside
        and source.span(node) > end
        and (
            (at := source.statement(node)) is None or written_root(at) != name
        )  # not ``x /= x.std()`` after ``x -= m``
        for node in reads
    )


def is_read_afterwards(source: SourceFile, target: ast.expr, operation: ast.expr) -> bool:
    """Whether anything outside of ``operation`` may read ``target`` after it; True where in doubt."""
    if not isinstance(target, ast.Name):
        return True
    statement = source.statement(operation)
    function = source.function(operation)
    inside = set(ast.walk(operation))
    loops = _loops_around(source, operation)
    around = {node for loop in loops for node in ast.walk(loop)}
    other = [one.orelse for one, field in source.ancestors(operation) if isinstance(one, ast.If) and field == "body"]
    inside |= {node for branch in other if not loops for one in branch for node in ast.walk(one)}
    end = source.span(operation)
    is_bound_here = isinstance(statement, ast.Assign) and any(chain_key(one) == target.id for one in statement.targets)
    if not is_bound_here and (is_repeated(source, target, operation) or _is_declared(source, target)):
        return True
    for node in source.nodes if function is None else ast.walk(function):
        if not isinstance(node, ast.Name) or node.id != target.id or node in inside:
            continue
        is_here, owner = source.statement(node) is statement, source.function(node)
        is_parameter = owner is not None and owner is not function and node.id in parameters(owner)
        if is_parameter or not isinstance(node.ctx, ast.Load):
            continue
        if owner is not function or (is_here and source.span(node) > end):
            return True
        if not is_bound_here and not is_here and (source.span(node) > end or node in around):
            return True
    return False


def _loops_around(source: SourceFile, operation: ast.expr) -> list[_Loop]:
    return [
        parent
        for parent, _ in source.ancestors(operation)
        if isinstance(parent, ast.For | ast.AsyncFor | ast.While | ast.comprehension)
    ]


def is_repeated(source: SourceFile, target: ast.Name, operation: ast.expr) -> bool:
    """Whether loops around ``operation`` run it again on the same value of the name."""
    loops = _loops_around(source, operation)
    return bool(loops) and not _is_renewed(source, target, operation, loops)


def _is_renewed(source: SourceFile, target: ast.Name, operation: ast.expr, loops: Sequence[_Loop]) -> bool:
    """Whether every iteration of the loops around ``operation`` surely rebinds the name before it."""
    if any(not isinstance(loop, ast.While) and target.id in _names_in(loop.target) for loop in loops):
        return True
    return any(
        isinstance(node, ast.Assign)
        and source.parents[node][0] in loops
        and source.span(node) < source.span(operation)
        and any(chain_key(one) == target.id for one in node.targets)
        for loop in loops
        for node in ast.walk(loop)
    )


def _is_declared(source: SourceFile, target: ast.Name) -> bool:
    function = source.function(target)
    declarations = [] if function is None else local_nodes(function)
    return any(isinstance(node, ast.Global | ast.Nonlocal) and target.id in node.names for node in declarations)


def _is_comprehension_variable(source: SourceFile, target: ast.Name) -> bool:
    return any(
        target.id in _names_in(part.target)
        for parent, _ in source.ancestors(target)
        for part in getattr(parent, "generators", ())
    )


def _is_parameter(source: SourceFile, target: ast.Attribute) -> bool:
    """Whether the attribute is an nn.Parameter as far as the file shows: made here, inherited, or of a submodule."""
    is_layers = is_layers_parameter(target.attr)
    if is_layers and isinstance(target.value, ast.Attribute | ast.Subscript):
        return True
    key = chain_key(target)
    nodes = list(ast.walk(source.owner_class(target) or source.module))
    assigned = [one.value for one in bindings_in(nodes) if one.name == key and one.replaces]
    registered = [
        constant_key(node.args[0])
        for node in nodes
        if isinstance(node, ast.Call) and leaf_name(node.func) == "register_parameter" and node.args
    ]
    if is_layers and not assigned and isinstance(target.value, ast.Name):
        return target.value.id == "self"
    is_made = any(isinstance(value, ast.Call) and leaf_name(value.func) == "Parameter" for value in assigned)
    return is_made or target.attr in registered


def _is_returned(source: SourceFile, scope: ast.AST, name: str) -> bool:
    for node in ast.walk(scope):
        value = node.value if isinstance(node, ast.Return | ast.Yield) else None
        parts = value.elts if isinstance(value, ast.Tuple | ast.List) else [value]
        for part in parts:
            aliased = None if part is None else aliased_expression(source, part)
            if isinstance(aliased, ast.Name) and aliased.id == name:
                return True
    return False


def _is_argument(source: SourceFile, target: ast.Name) -> bool:
    """Whether ``target`` is a parameter that still holds the caller's object."""
    function, statement = source.function(target), source.statement(target)
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or statement is None:
        return function is not None and target.id in parameters(function)
    return target.id in parameters(function) and is_still_argument(function.body, statement, target.id)


def _has_alias(source: SourceFile, scope: FunctionNode | ast.Module, written: ast.Name) -> bool:
    """Whether another name stands for the same tensor and is, or may be, read after the write."""
    for node in local_nodes(scope):
        value, bound = getattr(node, "value", None), source.statement(node)
        if isinstance(value, ast.Call) and bound is not None and written.id in _names_bound(node):
            # ``keep, move = self.parts(x)``: a new ``move`` is no part of ``x`` any more.
            is_view = aliased_expression(source, value) is not None
            is_taken = leaf_name(value.func) in TAKING
            if is_taken or ((not is_view or node is not bound) and is_read_as_whole(source, bound, value, written)):
                return True
        for target, value in assigned_pairs(node) if isinstance(node, ast.Assign) else ():
            root = aliased_expression(source, value)
            names = chain_key(target), None if root is None else chain_key(root)
            if root is None or names[0] == names[1] or written.id not in names:
                continue
            other = root if names[0] == written.id else target
            if isinstance(other, ast.Subscript) and other is target and is_tensor_made_here(scope, other.value):
                continue  # ``rows[i] = x`` copies the numbers
            if not isinstance(other, ast.Name):
                return True
            is_same = keeps_binding(scope, other.id, node, source.statement(written))
            is_same = is_same or _views_itself(source, scope, other.id)
            if is_same and _may_be_read_after(source, scope, other.id, written):
                return True
    return False


def _names_bound(node: ast.AST) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign | ast.NamedExpr) else targets
    return {name for target in targets for name in _names_in(target)}


def _views_itself(source: SourceFile, scope: FunctionNode | ast.Module, name: str) -> bool:
    """Whether a name is bound to a view of itself: ``y = y.view(-1)`` is the same memory still."""
    nodes = (node for node in local_nodes(scope) if isinstance(node, ast.Assign))
    pairs = (pair for node in nodes for pair in assigned_pairs(node))
    roots = (aliased_expression(source, value) for target, value in pairs if chain_key(target) == name)
    return any(root is not None and chain_key(root) == name for root in roots)


def _may_be_read_after(source: SourceFile, scope: FunctionNode | ast.Module, name: str, written: ast.Name) -> bool:
    statement = source.statement(written)
    loops = [
        parent for parent, _ in source.ancestors(written) if isinstance(parent, ast.For | ast.AsyncFor | ast.While)
    ]
    around = {inner for loop in loops for inner in ast.walk(loop)}
    end = source.span(statement) if statement is not None else source.span(written)
    return any(
        isinstance(node, ast.Name)
        and node.id == name
        and isinstance(node.ctx, ast.Load)
        and (source.span(node) > end or node in around or source.function(node) is not source.function(written))
        and source.statement(node) is not statement
        for node in ast.walk(scope)
    )


def _names_in(target: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def bound_to_result(source: SourceFile, top: ast.Call, target: ast.expr, name: str) -> list[Edit] | None:
    """The edits that bind ``name`` to the value of ``top``; empty where the name is not read afterwards."""
    parent, _ = source.parents[top]
    span = source.span(top)
    if isinstance(parent, ast.Expr):
        head = source.indent(span)
        column = len(head) - len(head.lstrip(" \t")) + 1 if not head.strip(" \t(") else span.column
        return [Edit.insert(span.line, column, f"{name} = ")] if can_rebind(source, target) else None
    if isinstance(parent, ast.Assign):
        if any(chain_key(one) == chain_key(target) for one in parent.targets):
            return []
        if not is_read_afterwards(source, target, top):
            return []
        last = source.span(parent.targets[-1])
        between = source.slice(Span(last.end_line, last.end_column, span.line, span.column))
        if not can_rebind(source, target) or between.strip() != "=":
            return None
        return [Edit.before(span, f"{name} = ")]
    comprehensions = [around for around, _ in source.ancestors(top) if hasattr(around, "generators")]
    if any(isinstance(source.parents[around][0], ast.Expr) for around in comprehensions):
        return None  # a comprehension run for its effect alone would have none left
    if not is_read_afterwards(source, target, top):
        return []
    is_once = not any(isinstance(around, ast.Lambda | ast.ClassDef) for around, _ in source.ancestors(top))
    if not isinstance(target, ast.Name) or not is_once or comprehensions or not can_rebind(source, target):
        return None
    if _is_read_before(source, top, target) or _runs_first(source, top):
        return None
    return [Edit.before(span, f"({name} := "), Edit.after(span, ")")]


def bound_ahead(source: SourceFile, top: ast.Call, target: ast.expr, value: str) -> list[Edit] | None:
    """``x = x.exp()`` in a line before the statement ``z = x.exp_() + y``, which then reads ``x``."""
    statement = source.statement(top)
    if statement is None or not _runs_first(source, top) or not can_rebind(source, target):
        return None
    whole, name = source.span(statement), source.text(target)
    indent = source.indent(whole)
    if indent.strip() or _is_read_before(source, top, target):
        return None
    return [Edit.before(whole, f"{name} = {value}\n{indent}"), Edit(source.span(top), name)]


_NOT_ONCE = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.NamedExpr, ast.JoinedStr)
"""What need not evaluate all of its parts, or binds some of them itself."""


def _runs_first(source: SourceFile, top: ast.Call) -> bool:
    """Whether nothing else of the statement is called before ``top``, which runs once in it, whatever happens."""
    statement = source.statement(top)
    around, inside = [parent for parent, _ in source.ancestors(top)], set(ast.walk(top))
    if not isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr | ast.Return):
        return False
    if any(isinstance(one, _NOT_ONCE) or hasattr(one, "generators") for one in around):
        return False
    calls = (one for one in ast.walk(statement) if isinstance(one, ast.Call | ast.Await | ast.NamedExpr))
    return all(one in inside or one in around or source.span(one) > source.span(top) for one in calls)


def _is_read_before(source: SourceFile, top: ast.Call, target: ast.expr) -> bool:
    """Whether the statement reads the target before the write, and so sees the written values through that reference.

    An assignment to a part of it comes after the write.
    """
    statement, name = source.statement(top), source.text(target)
    inside = set(ast.walk(top))
    return statement is not None and any(
        isinstance(node, type(target))
        and source.text(node) == name
        and node not in inside
        and source.span(node) < source.span(top)
        for node in ast.walk(statement)
    )
