"""Gradients in the source: whether they are kept, a hook returns one, and terms that no loss takes."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from gradsan.model import Frame
from gradsan.source.flow.collected import is_inside
from gradsan.source.flow.reaching import reaching
from gradsan.source.flow.reuse import SecondName, definitions_at, reads_value, statements_of
from gradsan.source.identifiers import assigned_names, chain_key, consumed_names, leaf_name, local_nodes, walks
from gradsan.source.intent.flags import is_gradient_read
from gradsan.source.locate import Statement, at_line, statement_at
from gradsan.source.methods import ADDING, FUNCTIONS_MAKING_NEW, MAKING_NEW
from gradsan.source.tree import ScopeNode, header_nodes, read_source

_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


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
    return any(is_gradient_read(statement.source, node) for node in nodes)


def is_loss_read_elsewhere(frame: Frame) -> bool:
    """Whether a name in the statement of a backward is read by another statement, to print it perhaps; True in doubt.

    A statement that binds the name anew, as ``loss = loss / parts``, does not count; another function may read an
    attribute. ``optimizer.step`` without its call says as well that the loss was to train.
    """
    statement = statement_at(frame)
    if statement is None:
        return True
    source, inside = statement.source, set(ast.walk(statement.node))
    scope = source.nodes if statement.function is None else tuple(ast.walk(statement.function))
    if any(isinstance(one, ast.Expr) and getattr(one.value, "attr", None) == "step" for one in scope):
        return True
    names = [(one, leaf_name(one)) for one in scope if isinstance(one, ast.Name | ast.Attribute)]
    bound = {name for one, name in names if isinstance(one.ctx, ast.Store)}
    names += [(one, one.attr) for one in source.nodes if isinstance(one, ast.Attribute)]
    own = bound & {name for one, name in names if one in inside}
    read = [(one, name) for one, name in names if name in own and one not in inside and isinstance(one.ctx, ast.Load)]
    return any((at := source.statement(one)) is None or name not in _last_parts(at) for one, name in read)


def _last_parts(statement: ast.stmt) -> set[str]:
    return {name.rpartition(".")[2] for name in assigned_names(statement)}


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


def holders(statement: ast.stmt) -> Iterator[str]:
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
        adds = [node for node in inside if name in holders(node) and _gradient_in(node) is not None]
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
    found = (next((one.lineno for one in some), None) for some in (taken_again, summed))
    for again, node in ((again, node) for again in found if again is not None for node in statements):
        is_later = node.lineno > last and node.lineno >= again
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


_OUT_OF_PLACE = frozenset({"clamp", "clip", "mul", "div", "neg", "add", "sub", "nan_to_num", "masked_fill", "where"})
_NO_STRAIGHT_CODE = (
    *(ast.For, ast.While, ast.Lambda, ast.comprehension),
    *(ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal),
)


def unreturned_gradient(file: str, line: int, name: str, position: int) -> int | None:
    """The line of a hook that computes a gradient which nothing reads or returns; None where it is not sure.

    The hook is the function ``name`` at a line of ``file``; its gradient is the parameter at ``position``.
    """
    source = read_source(file)
    functions = (one for one in source.nodes if isinstance(one, ast.FunctionDef)) if source is not None else ()
    named = (one for one in functions if one.name == name)
    hook = next((one for one in named if line in (one.lineno, *(at.lineno for at in one.decorator_list))), None)
    given = hook.args.args[position : position + 1] if hook is not None else []
    if hook is None or not given:
        return None
    nodes, gradient = list(ast.walk(hook)), given[0].arg
    has_result = any(isinstance(one, ast.Return) and one.value is not None for one in nodes)
    if has_result or any(isinstance(one, _NO_STRAIGHT_CODE) for one in nodes):
        return None
    reads = [one for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)]
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if not isinstance(node, ast.Assign | ast.Expr) or not _is_new_gradient(node.value, gradient):
            continue
        last = node.end_lineno or node.lineno
        bound = [one.id for one in targets if isinstance(one, ast.Name)]
        if len(bound) == len(targets) and not any(one.id in bound and one.lineno > last for one in reads):
            return node.lineno
    return None


def _is_new_gradient(value: ast.expr, gradient: str) -> bool:
    """Whether an expression is arithmetic with a gradient, or one of some operations on it, out of place.

    Its product with itself, ``grad @ grad.t()``, is no gradient.
    """

    def reads(part: ast.expr) -> bool:
        return any(isinstance(one, ast.Name) and one.id == gradient for one in ast.walk(part))

    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.MatMult) and reads(value.left) and reads(value.right):
        return False
    has_gradient = reads(value)
    is_call = isinstance(value, ast.Call) and leaf_name(value.func) in _OUT_OF_PLACE
    return has_gradient and (is_call or isinstance(value, ast.BinOp | ast.UnaryOp))


def is_summed_with_gradient(node: ast.stmt, name: str) -> bool:
    """Whether a statement adds ``name``, or a loop over ``zip(…, name)`` its item, to some ``.grad``; or subtracts."""
    names, parts = {name}, [] if not isinstance(node, ast.For) else list(ast.walk(node.iter))
    if isinstance(node, ast.For) and any(chain_key(one) == name for one in parts):
        names = {chain_key(one) or "" for one, of in walks(node.target, node.iter) if chain_key(of) == name}
    sums = (one for one in ast.walk(node) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Add | ast.Sub))
    for left, right in ((one.left, one.right) for one in sums):
        for one, other in ((left, right), (right, left)):
            has_gradient = any(isinstance(part, ast.Attribute) and part.attr == "grad" for part in ast.walk(one))
            if has_gradient and any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(other)):
                return True
    return False


def steps_in_some_rounds(frame: Frame) -> bool:
    """Whether an ``if`` after the backward at ``frame``, before the next one, decides on the step of an optimizer."""
    statement = statement_at(frame)
    if statement is None or statement.scope is None:
        return True
    scope = statement.loops[-1] if statement.loops else statement.scope
    calls = [one for one in ast.walk(scope) if isinstance(one, ast.Call)]
    ends = [one.lineno for one in calls if leaf_name(one.func) == "backward" and one.lineno > statement.node.lineno]
    for node in (one for one in ast.walk(scope) if isinstance(one, ast.If)):
        is_after = statement.node.lineno < node.lineno < min(ends, default=node.lineno + 1)
        inside = (part for one in (*node.body, *node.orelse) for part in ast.walk(one))
        if is_after and any(isinstance(one, ast.Call) and leaf_name(one.func) == "step" for one in inside):
            return True
    return False


def left_out(frame: Frame, names: Iterable[str]) -> Iterator[tuple[str, Frame | None]]:
    """Yield those of ``names`` that the function at ``frame`` binds once, by themselves, and never reads.

    Or it reads them for a value alone that is bound anew before anything reads it, ``loss = a + penalty; loss = a``:
    the place of that value comes with the name.
    """
    statement = statement_at(frame)
    if statement is None or statement.scope is None:
        return
    scope = statement.scope
    loads, bound = Counter[str](), Counter[str]()
    for node in ast.walk(scope):
        if isinstance(node, ast.Name):
            (loads if isinstance(node.ctx, ast.Load) else bound)[node.id] += 1
        elif isinstance(node, ast.AugAssign):
            loads[chain_key(node.target) or ""] += 1
    if any(loads[one] for one in ("eval", "exec", "globals", "locals", "vars")):
        return
    outer = {name for one in ast.walk(scope) if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names}
    statements = [one for one in local_nodes(scope) if isinstance(one, ast.stmt)]
    alone = {chain_key(one.targets[0]) for one in statements if isinstance(one, ast.Assign) and _is_of_one_name(one)}
    for name in (one for one in names if bound[one] == 1 and one in alone - outer):
        if not loads[name]:
            yield name, None
        else:
            reading = [one for one in statements if isinstance(one, ast.Assign) and name in consumed_names(one)]
            inside = (part for one in reading for part in ast.walk(one) if isinstance(part, ast.Name))
            is_all = sum(part.id == name and isinstance(part.ctx, ast.Load) for part in inside) == loads[name]
            is_sum = not any(chain_key(one.targets[0]) in outer or _is_passed_on(one.value, name) for one in reading)
            if reading and is_all and is_sum and all(_is_bound_for_nothing(scope, statements, one) for one in reading):
                yield name, at_line(frame, reading[0].lineno)


def _is_passed_on(value: ast.expr, name: str) -> bool:
    """Whether a call that does more than compute with tensors may get the value of ``name``, and keep it."""
    for call in (one for one in ast.walk(value) if isinstance(one, ast.Call)):
        function = call.func
        known = leaf_name(function) in MAKING_NEW | FUNCTIONS_MAKING_NEW | {"sum"}
        # ``bag.add(term)`` is no sum of tensors for sure.
        is_function = not isinstance(function, ast.Attribute) or chain_key(function.value) in ("torch", "F")
        given = (*call.args, *(one.value for one in call.keywords))
        inside = {one.id for it in given for one in ast.walk(it) if isinstance(one, ast.Name)}
        if name in inside and not (known and is_function):
            return True
        of = {one.id for one in ast.walk(function) if isinstance(one, ast.Name)}
        if name in of and not known:
            return True
    return False


def _is_bound_for_nothing(scope: ScopeNode, statements: list[ast.stmt], node: ast.Assign) -> bool:
    """Whether an assignment to a name that is read elsewhere reaches none of these reads."""
    name = chain_key(node.targets[0])
    if not _is_of_one_name(node) or name is None:
        return False
    reads = [one for one in statements if name in consumed_names(one) or _adds_to(one, name)]
    inner = (one for one in ast.walk(scope) if isinstance(one, _INNER) and one is not scope)
    if any(isinstance(part, ast.Name) and part.id == name for one in inner for part in ast.walk(one)):
        return False
    states = (reaching(scope.body, one).get(name, frozenset()) for one in reads)
    return bool(reads) and not any(each.statement is node for state in states for each in state)


def _is_of_one_name(node: ast.Assign) -> bool:
    return len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)


def _adds_to(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.AugAssign) and chain_key(node.target) == name
