"""Gradients in the program's source: whether it reads any, and whether it differentiates results computed from them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence

from gradsan.heuristics import is_step_function
from gradsan.model import Frame
from gradsan.source.change import Change, edited, insert_after, insert_before, with_keyword
from gradsan.source.collected import is_inside
from gradsan.source.cuts import cut_of, mode_around, mode_of_decorators
from gradsan.source.flow import is_summed_with_gradient
from gradsan.source.identifiers import (
    Binding,
    assigned_names,
    bindings_of,
    consumed_names,
    leaf_name,
    local_nodes,
)
from gradsan.source.locate import Statement, expression_at, statement_at
from gradsan.source.methods import ADDING, METADATA
from gradsan.source.reuse import SecondName, definitions_at, reads_value, statements_of
from gradsan.source.tree import ScopeNode, SourceFile, header_nodes, read_source
from gradsan.source.writing import definition_of

_CONSTANT = frozenset({"sign", "sgn", "round", "floor", "ceil"})
"""Operations whose derivative is zero: their result is data, too."""
_FIELDS = frozenset({"grad", "data"})


_CLEARS = frozenset({"zero_", "fill_", "detach_", "requires_grad_"})


@functools.lru_cache(maxsize=256)
def reads_gradients(file: str) -> bool:
    """Whether code in ``file`` reads some ``.grad`` other than to clear it or to compare it with None.

    True where the source is not available.
    """
    source = read_source(file)
    return source is None or any(_is_gradient_read(source, node) for node in source.nodes)


def draws_both(frame: Frame) -> bool:
    """Whether the file of a ``sample()`` calls ``rsample``, too, and so knows the difference; True in doubt."""
    source = read_source(frame.file)
    return source is None or any(isinstance(node, ast.Attribute) and node.attr == "rsample" for node in source.nodes)


def reads_gradient_beside(frame: Frame) -> bool:
    """Whether the function around a statement, or the file where there is none, reads some ``.grad``; True in doubt."""
    statement = statement_at(frame)
    if statement is None:
        return True
    nodes = statement.source.nodes if statement.function is None else ast.walk(statement.function)
    return any(_is_gradient_read(statement.source, node) for node in nodes)


def is_loss_read_elsewhere(frame: Frame) -> bool:
    """Whether a name in the statement of a backward is read by another statement, to print it perhaps; True in doubt.

    A statement that binds the name anew, as ``loss = loss / parts``, does not count. ``optimizer.step`` without its
    call says as well that the loss was to train.
    """
    statement = statement_at(frame)
    if statement is None:
        return True
    source, inside = statement.source, set(ast.walk(statement.node))
    scope = source.nodes if statement.function is None else tuple(ast.walk(statement.function))
    if any(isinstance(one, ast.Expr) and getattr(one.value, "attr", None) == "step" for one in scope):
        return True
    names = [one for one in scope if isinstance(one, ast.Name)]
    bound = {one.id for one in names if isinstance(one.ctx, ast.Store)}
    own = bound & {one.id for one in names if one in inside}
    others = (one for one in names if one.id in own and one not in inside and isinstance(one.ctx, ast.Load))
    return any((at := source.statement(one)) is None or one.id not in assigned_names(at) for one in others)


def clears_each_part(cleared: Sequence[Frame], backward: Sequence[Frame], step: Sequence[Frame]) -> bool:
    """Whether a loop divides its loss by the number of iterations per step, yet clears gradients in each iteration.

    ``loss = loss / k``, ``if (i + 1) % k == 0: optimizer.step()``, and a ``zero_grad()`` outside of that ``if``. A
    function without a loop is taken for the body of one. Or a loop of ``k`` parts, with the step after it. What the
    calls of one function lead to counts as in it.
    """
    paths = (cleared, backward, step)
    same = [len({(one.file, one.function) for one in each}) == 1 for each in zip(*paths, strict=False)]
    depth = [*same, False].index(False)
    places = [statement_at(one[depth - 1]) for one in paths if depth]
    clears, runs, steps = places or (None, None, None)
    if clears is None or runs is None or steps is None:
        return False
    loop = steps.loops[-1] if steps.loops else steps.function
    if not isinstance(loop, ast.stmt) or any(one.function is not steps.function for one in (clears, runs)):
        return False
    if not all(is_inside(one.node, loop) for one in (clears, runs)):
        return False
    called = [[at for one in path[depth:] if (at := statement_at(one)) is not None] for path in (backward, step)]
    divisors = {text for one in called[0] if one.function is not None for text in _divisors(one.function)}
    for node in ast.walk(loop):
        if isinstance(node, ast.For) and not is_inside(steps.node, node):
            is_part = is_inside(clears.node, node) and is_inside(runs.node, node)
            if is_part and not _lengths(node.iter).isdisjoint(divisors | _divisors(node)):
                return True
    guards = [node for node in ast.walk(loop) if isinstance(node, ast.If) and is_inside(steps.node, node)]
    guards = [one for one in guards if not is_inside(clears.node, one) and not is_inside(runs.node, one)]
    guards += [one for at in called[1] for one, _ in at.source.ancestors(at.node) if isinstance(one, ast.If)]
    parts = [part for node in guards for part in ast.walk(node.test) if isinstance(part, ast.BinOp)]
    periods = {ast.unparse(part.right) for part in parts if isinstance(part.op, ast.Mod)}
    return not periods.isdisjoint(divisors | _divisors(loop))


def _lengths(iterable: ast.expr) -> set[str]:
    """The spellings of a loop's number of iterations: ``k`` for ``range(k)``, ``len(parts)`` for ``parts``."""
    while (
        isinstance(iterable, ast.Call) and leaf_name(iterable.func) in ("enumerate", "tqdm", "list") and iterable.args
    ):
        iterable = iterable.args[0]
    if isinstance(iterable, ast.Call) and leaf_name(iterable.func) == "range" and len(iterable.args) == 1:
        return {ast.unparse(iterable.args[0])}
    return {f"len({ast.unparse(iterable)})"}


def _divisors(within: ast.AST) -> set[str]:
    return {
        ast.unparse(node.right if isinstance(node, ast.BinOp) else node.value)
        for node in ast.walk(within)
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div)
    }


def _is_gradient_read(source: SourceFile, node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        names = [one.value for one in node.args[1:2] if isinstance(one, ast.Constant)]
        return leaf_name(node.func) == "getattr" and names == ["grad"]
    if not isinstance(node, ast.Attribute) or node.attr not in ("grad", "_grad"):
        return False
    at, (parent, field) = node, source.parents[node]
    if isinstance(node.ctx, ast.Store | ast.Del):
        return isinstance(parent, ast.AugAssign)
    while isinstance(parent, ast.Attribute) and parent.attr in ("data", *_CLEARS):
        at, (parent, field) = parent, source.parents[parent]
    if isinstance(parent, ast.Call) and field == "func":
        # A function of that name, such as ``autograd.grad``; or one that clears the gradient.
        return at is not node and at.attr not in _CLEARS
    return not (isinstance(parent, ast.Compare) and all(isinstance(one, ast.Is | ast.IsNot) for one in parent.ops))


_REDUCES = frozenset({"amax", "amin", "max", "mean", "median", "min", "norm", "std", "sum", "vector_norm"})


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
    return target.id if isinstance(target, ast.Name) else None


def _names_read(node: ast.AST) -> set[str]:
    """The names whose values an expression reads, except those used only for a size or for memory like theirs."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute) and (node.attr in METADATA or node.attr.startswith("new_")):
        return set()
    name = leaf_name(node.func) if isinstance(node, ast.Call) else None
    if name is not None and name.endswith("_like"):
        return set()
    return {name for child in ast.iter_child_nodes(node) for name in _names_read(child)}


def graph_for_gradient(frame: Frame) -> Change | None:
    """The call of ``autograd.grad`` at ``frame`` with ``create_graph=True``, where its result is used with a graph.

    That is a result which is returned, differentiated, or kept on an object without ``detach()``: nothing in
    the source marks it as a constant. None where everything computed from it in this function is
    detached, read as numbers, written under ``no_grad`` or into ``.data`` and ``.grad``.
    """
    place = expression_at(frame)
    call = None if place is None else place.node
    if place is None or not isinstance(call, ast.Call) or leaf_name(call.func) != "grad":
        return None
    edit = with_keyword(place.source, call, "create_graph", "True")
    return None if edit is None or not _is_used(place.source, call) else edited(place.source, [edit], "create_graph")


def _is_used(source: SourceFile, call: ast.Call) -> bool:
    function = source.function(call)
    if function is not None and mode_of_decorators(function) is not None:
        return False
    scope = function if function is not None else source.module
    if isinstance(scope, ast.Lambda):
        return True
    nodes = (node for node in local_nodes(scope) if isinstance(node, ast.stmt))
    statements = sorted(nodes, key=lambda node: (node.lineno, node.col_offset))
    first = source.statement(call)
    names: set[str] = set()
    for statement in statements[statements.index(first) :] if first in statements else ():
        reads = {id(call)} if statement is first else set()
        reads |= {id(node) for node in header_nodes(statement) if isinstance(node, ast.Name) and node.id in names}
        reads -= {id(node) for part in _cut_parts(source, statement) for node in ast.walk(part)}
        if mode_around(source, statement, function) is not None:
            continue
        bound = assigned_names(statement)
        if not any(
            id(node) in reads
            for node in header_nodes(statement)
            if isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        ):
            names.difference_update(() if isinstance(statement, ast.AugAssign) else bound)
            continue
        if isinstance(statement, ast.Return) or _begins_backward(statement, reads):
            return True
        for name in bound:
            field = name.rpartition(".")[2]
            if "." in name and field not in _FIELDS:
                return True
            if "." not in name:
                names.add(name)
        names |= set(_holders(statement))
    return False


def _cut_parts(source: SourceFile, statement: ast.stmt) -> Iterator[ast.expr]:
    """The operands of a statement's detaching operations, and its calls without a derivative."""
    for node in header_nodes(statement):
        if not isinstance(node, ast.expr):
            continue
        kind, operands = cut_of(source, node)
        yield from operands if kind is not None else ()
        if isinstance(node, ast.Call) and leaf_name(node.func) in _CONSTANT:
            yield node


def _begins_backward(statement: ast.stmt, reads: set[int]) -> bool:
    """Whether the statement calls ``backward`` or ``grad`` on a value that it reads."""
    return any(
        isinstance(node, ast.Call)
        and leaf_name(node.func) in ("backward", "grad")
        and any(id(one) in reads for one in ast.walk(node) if one is not node)
        for node in header_nodes(statement)
    )


def _holders(statement: ast.stmt) -> Iterator[str]:
    """``xs`` of ``xs.append(…)``."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    method = call.func if isinstance(call, ast.Call) else None
    if isinstance(method, ast.Attribute) and method.attr in ADDING and isinstance(method.value, ast.Name):
        yield method.value.id


def kept_gradient(backward: Frame, name: str) -> SecondName | None:
    """``name``, which holds a gradient that the backward at ``backward`` accumulates into, used as if it were a copy.

    That is a list to which each iteration of a loop appends the gradient (``task_grads.append(w.grad)``), or a name
    that is read after the backward where the gradient is read a second time, under another name. None for others: a
    handle on the gradients may be kept to look at them after each backward.
    """
    statement = statement_at(backward)
    scope = None if statement is None else statement.scope
    if statement is None or scope is None:
        return None
    return _in_a_list(statement, name, scope) or _taken_twice(statement, name, scope)


def _in_a_list(statement: Statement, name: str, scope: ScopeNode) -> SecondName | None:
    for loop in reversed(statement.loops):
        inside = [node for node in ast.walk(loop) if isinstance(node, ast.stmt) and node is not loop]
        if any(name in assigned_names(node) for node in (loop, *inside) if isinstance(node, ast.Assign | ast.For)):
            return None
        adds = [node for node in inside if name in _holders(node) and _gradient_in(node) is not None]
        last = loop.end_lineno or loop.lineno
        later = (node for node in statements_of(scope) if node.lineno > last)
        read = next((node for node in later if reads_value(statement.source, node, name)), None)
        if adds and read is not None:
            taken = _gradient_in(adds[0])
            return SecondName(name, "gradient", adds[0].lineno, read.lineno, statement.source.span(taken or adds[0]))
    return None


def _taken_twice(statement: Statement, name: str, scope: ScopeNode) -> SecondName | None:
    bound = definitions_at(scope, statement.node).get(name, frozenset())
    keeping = next((one.statement for one in bound), None)
    if len(bound) != 1 or not isinstance(keeping, ast.Assign):
        return None
    statements, last = statements_of(scope), statement.node.end_lineno or statement.node.lineno
    taken_again = (one for one in statements if _takes_again(one, statement.node, keeping))
    summed = (one for one in statements if one.lineno > last and is_summed_with_gradient(one, name))
    again = next((one.lineno for found in (taken_again, summed) for one in found), None)
    for node in statements if again is not None else ():
        is_later = node.lineno > last and node.lineno >= (again or 0)
        # A name rebound in each round does not hold the gradient that an earlier round kept.
        if is_later and reads_value(statement.source, node, name) and definitions_at(scope, node).get(name) == bound:
            taken = _gradient_in(keeping)
            value = None if taken is None else statement.source.span(taken)
            return SecondName(name, "gradient", keeping.lineno, node.lineno, value)
    return None


def _takes_again(node: ast.stmt, backward: ast.stmt, keeping: ast.Assign) -> bool:
    """Whether a statement from the backward on binds the gradient to another name than ``keeping`` does."""
    if not isinstance(node, ast.Assign) or node.lineno < backward.lineno or node is keeping:
        return False
    if set(assigned_names(node)) & set(assigned_names(keeping)):
        return False
    taken, kept = _gradient_in(node), _gradient_in(keeping)
    if taken is not None:
        # Another form is another view of the same gradient: ``flat = w.grad.view(-1)`` beside ``g = w.grad``.
        return kept is None or _form(node, taken) == _form(keeping, kept)
    # The backward runs within the function that gives the gradients: ``g1, g2 = grads(a), grads(b)`` in two lines.
    calls = [one.value for one in (node, keeping) if isinstance(one.value, ast.Call)]
    return node is backward and len(calls) == 2 and leaf_name(calls[0].func) == leaf_name(calls[1].func)


_COPIES = frozenset({"clone", "detach", "data"})


def _form(node: ast.stmt, gradient: ast.Attribute) -> list[str]:
    """The methods and attributes that a statement reads from a gradient, copies left out: ``["view"]``."""
    inner: ast.AST = gradient
    found: list[str] = []
    around = {id(child): one for one in header_nodes(node) for child in ast.iter_child_nodes(one)}
    while isinstance(outer := around.get(id(inner)), ast.Attribute | ast.Call) and inner in (
        getattr(outer, "value", None),
        getattr(outer, "func", None),
    ):
        if isinstance(outer, ast.Attribute):
            found.append(outer.attr)
        inner = outer
    return [one for one in found if one not in _COPIES]


def _gradient_in(node: ast.stmt) -> ast.Attribute | None:
    """``w.grad`` where a statement reads one; a function of that name does not count."""
    called = {id(one.func) for one in header_nodes(node) if isinstance(one, ast.Call)}
    return next(
        (
            one
            for one in header_nodes(node)
            if isinstance(one, ast.Attribute)
            and one.attr == "grad"
            and isinstance(one.ctx, ast.Load)
            and id(one) not in called
        ),
        None,
    )


def wanted_where_bound(frame: Frame, name: str) -> Change | None:
    """A line that makes ``name`` a leaf that requires grad, after the statement that bound what ``frame`` reads by it.

    Of a loop's variable at the start of its body, of an argument at that of the function. A tensor of its own, so that
    one of a data set stays as it is. None where several statements may have bound it.
    """
    statement = statement_at(frame)
    if statement is None or not name.isidentifier() or name not in consumed_names(statement):
        return None
    source, text = statement.source, f"{name} = {name}.detach().requires_grad_()"
    made = definition_of(frame, name)
    bound = None if made is None else statement_at(made.frame)
    if made is not None and bound is not None and bound.function is statement.function:
        if made.is_loop:
            return (
                insert_before(source, bound.node.body[0], text, "wanted") if isinstance(bound.node, ast.For) else None
            )
        return insert_after(source, bound.node, text, "wanted")
    function = statement.function
    if made is None and isinstance(function, ast.FunctionDef) and statement.node in function.body:
        is_given = name in {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
        start = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
        is_bound = any(one.name == name for node in ast.walk(function) for one in _bound_by(node))
        return insert_before(source, start[0], text, "wanted") if is_given and not is_bound and start else None
    return None


def _bound_by(node: ast.AST) -> list[Binding]:
    return bindings_of(node) if isinstance(node, ast.stmt) else []
