"""Values that the program keeps: in a list, a sum, an attribute, an optimizer or a cache.

Expressions are compared as ``ast.unparse`` spells them, so that ``self.log['loss']`` and ``self.log["loss"]`` are
equal.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradsan.model import Frame
from gradsan.source.change import Change, insert_after
from gradsan.source.flow.modules import constructors
from gradsan.source.flow.scopes import arguments_of
from gradsan.source.identifiers import assigned_names, bindings_in, chain_key, leaf_name, local_nodes
from gradsan.source.locate import Statement, at_span, statement_at
from gradsan.source.methods import CONTAINERS
from gradsan.source.tree import SourceFile, header_nodes, read_source

_NAMING = frozenset({"named_parameters", "named_modules", "named_children"})


def assignments(frame: Frame, path: str) -> tuple[tuple[str, Frame], ...]:
    """The statements in the file of ``frame`` that bind ``path`` or an object that contains it, innermost part first.

    ``path`` may say ``net.0.weight`` for ``net[0].weight``. Each comes with the part that it binds. A call
    ``net.load(x)`` counts, too, where a class of the file has a method of that name which binds the part.
    """
    source = read_source(frame.file)
    if source is None:
        return ()
    found = []
    for part in _parts(path):
        for node in source.nodes:
            if isinstance(node, ast.stmt) and any(ast.unparse(target) == part for target in _targets(node)):
                found.append((part, frame_at_node(source, frame, node)))
        owner, _, attribute = part.rpartition(".")
        methods = _binding_methods(source, attribute) if owner not in ("", "self") else frozenset()
        for node in source.nodes if methods else ():
            call = node.value if isinstance(node, ast.Expr) else None
            if not isinstance(node, ast.Expr) or not isinstance(call, ast.Call):
                continue
            if isinstance(call.func, ast.Attribute) and call.func.attr in methods:
                found += [(part, frame_at_node(source, frame, node))] if ast.unparse(call.func.value) == owner else []
    return tuple(found)


def is_bound_by_choice(frame: Frame, path: str) -> bool:
    """Whether the file binds ``path`` by a condition: ``b = deepcopy(a) if c else a``, or in both branches of an if.

    A branch that has ``frame`` in it is another matter: ``buf = p.grad`` in the first round, ``buf.add_(p.grad)`` in
    the others.
    """
    here = statement_at(frame)
    for part, place in assignments(frame, path):
        found = statement_at(place)
        if found is None or part != path:
            continue
        if isinstance(getattr(found.node, "value", None), ast.IfExp | ast.BoolOp):
            return True
        around = set() if here is None else {id(outer) for outer, _ in here.source.ancestors(here.node)}
        for outer, _ in found.source.ancestors(found.node):
            branches = (outer.body, outer.orelse) if isinstance(outer, ast.If) and id(outer) not in around else ()
            if branches and all(any(_binds(one, part) for one in branch) for branch in branches):
                return True
    return False


def _binds(statement: ast.stmt, part: str) -> bool:
    nodes = (node for node in ast.walk(statement) if isinstance(node, ast.stmt))
    return any(ast.unparse(target) == part for node in nodes for target in _targets(node))


def _binding_methods(source: SourceFile, attribute: str) -> frozenset[str]:
    """The methods of the file's classes, except ``__init__``, that bind ``self.<attribute>``."""
    methods = (
        one
        for owner in source.nodes
        if isinstance(owner, ast.ClassDef)
        for one in owner.body
        if isinstance(one, ast.FunctionDef) and one.name != "__init__"
    )
    return frozenset(
        method.name
        for method in methods
        for node in local_nodes(method)
        if isinstance(node, ast.stmt) and any(ast.unparse(target) == f"self.{attribute}" for target in _targets(node))
    )


def added_to_optimizer(made: Frame, stepped: Frame, holder: str, options: Sequence[str]) -> Change | None:
    """``holder.add_param_group({…})`` for all ``options`` after the statement at ``made``; None without an optimizer.

    The optimizer must have been made before, in the same function or at module level, under the name of its step.
    """
    statement, step = statement_at(made), statement_at(stepped)
    if statement is None or step is None or statement.source is not step.source:
        return None
    source = statement.source
    for node in source.nodes:
        if not isinstance(node, ast.stmt) or node.lineno >= statement.span.line:
            continue
        named = [one for to in _targets(node) for one in (to.elts if isinstance(to, ast.Tuple) else [to])]
        is_made = any(ast.unparse(target) == holder for target in named)
        if is_made and source.function(node) in (None, statement.function):
            calls = [f"{holder}.add_param_group({{{one}}})" for one in options]
            text = f"\n{source.indent(statement.span)}".join(calls)
            return insert_after(source, statement.node, text, "give_to_optimizer")
    return None


def chooses_parameters(frame: Frame) -> bool:
    """Whether the function at ``frame`` iterates over a model's parameters and selects some by name.

    That is an ``if`` over ``named_parameters()`` or ``named_modules()`` that does not test ``requires_grad``.
    """
    statement = statement_at(frame)
    scope = None if statement is None else statement.scope
    if statement is None or scope is None:
        return False
    for node in ast.walk(scope):
        loops: list[tuple[ast.expr, list[ast.expr]]] = []
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            loops = [(one.iter, one.ifs) for one in node.generators]
        elif isinstance(node, ast.For):
            loops = [(node.iter, [one.test for one in ast.walk(node) if isinstance(one, ast.If)])]
        for over, tests in loops:
            calls = [leaf_name(one.func) for one in ast.walk(over) if isinstance(one, ast.Call)]
            read = [{getattr(node, "attr", "") for node in ast.walk(test)} for test in tests]
            if any(name in _NAMING for name in calls) and any("requires_grad" not in one for one in read):
                return True
    return False


def is_computed_in_rounds(bound_at: Frame, used_at: Frame) -> bool:
    """Whether a loop around ``used_at`` computes the very expression, with a call, that is bound at ``bound_at``."""
    bound, used = statement_at(bound_at), statement_at(used_at)
    value = getattr(None if bound is None else bound.node, "value", None)
    if bound is None or used is None or not isinstance(value, ast.expr) or bound.source is not used.source:
        return False
    if not any(isinstance(one, ast.Call) for one in ast.walk(value)):
        return False
    known, kind = ast.dump(value), type(value)
    rounds = [loop for loop in used.loops if loop not in bound.loops]
    return any(isinstance(node, kind) and ast.dump(node) == known for loop in rounds for node in ast.walk(loop))


def are_later_rounds(bound_at: Frame, used_at: Frame, updated: Sequence[Frame]) -> bool:
    """Whether one loop contains ``used_at`` and one of ``updated``, and ``bound_at`` precedes it."""
    return any(True for _ in _updates_in_rounds(bound_at, used_at, updated))


def are_updated_alike(bound_at: Frame, used_at: Frame, updated: Sequence[Frame]) -> bool:
    """Whether that update is the same in every round of the loop: ``opt.step()``, not that of ``for opt in opts``."""
    for loop, update in _updates_in_rounds(bound_at, used_at, updated):
        roots = {node.id for node in header_nodes(update.node) if isinstance(node, ast.Name)}
        if roots.isdisjoint(one.name for one in bindings_in(ast.walk(loop))):
            return True
    return False


def _updates_in_rounds(
    bound_at: Frame, used_at: Frame, updated: Sequence[Frame]
) -> Iterator[tuple[ast.AST, Statement]]:
    bound, used = statement_at(bound_at), statement_at(used_at)
    if bound is None or used is None or bound.source is not used.source or bound.function is not used.function:
        return
    updates = [one for frame in updated if (one := statement_at(frame)) is not None]
    for loop in (loop for loop in used.loops if loop not in bound.loops):
        yield from ((loop, one) for one in updates if loop in one.loops)


_LOSSES = frozenset(
    {
        *("binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "gaussian_nll_loss"),
        *("huber_loss", "kl_div", "l1_loss", "mse_loss", "nll_loss", "poisson_nll_loss", "smooth_l1_loss"),
    }
)
"""Functions of torch.nn.functional whose second argument is called ``target``."""


def is_target_in_rounds(bound_at: Frame, used_at: Frame, name: str) -> bool:
    """Whether a loop around ``used_at`` passes ``name``, bound before it, to a loss of PyTorch's as the target.

    The other argument must be computed in the loop: the two are often passed in the wrong order.
    """
    bound, used = statement_at(bound_at), statement_at(used_at)
    if bound is None or used is None or bound.source is not used.source:
        return False
    rounds = [node for loop in used.loops if loop not in bound.loops for node in ast.walk(loop)]
    computed = {name for node in rounds if isinstance(node, ast.Assign) for name in assigned_names(node)}
    for call in rounds:
        made = constructors(used.source, call.func) if isinstance(call, ast.Call) else []
        if not isinstance(call, ast.Call) or not call.args or not _is_loss(call, made):
            continue
        given = [*call.args[1:2], *(one.value for one in call.keywords if one.arg == "target")]
        is_given = any(chain_key(part) == name for one in given for part in ast.walk(one))
        if is_given and any(isinstance(one, ast.Call) or chain_key(one) in computed for one in ast.walk(call.args[0])):
            return True
    return False


def _is_loss(call: ast.Call, made: Sequence[ast.expr]) -> bool:
    kinds = (leaf_name(one.func) or "" for one in made if isinstance(one, ast.Call))
    return leaf_name(call.func) in _LOSSES or any(one.endswith("Loss") for one in kinds)


def as_python(path: str) -> str | None:
    """The expression as ``ast.unparse`` spells it; None where it is none."""
    try:
        return ast.unparse(ast.parse(path, mode="eval"))
    except SyntaxError:
        return None


def _parts(path: str) -> Iterator[str]:
    """``net[0].weight``, ``net[0]`` and ``net`` of ``net.0.weight`` or ``net[0].weight``."""
    text = as_python(re.sub(r"\.(\d+)", r"[\1]", path))
    node = None if text is None else ast.parse(text, mode="eval").body
    while node is not None and ast.unparse(node) != "self":
        yield ast.unparse(node)
        node = node.value if isinstance(node, ast.Attribute | ast.Subscript) else None


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) and node.value is not None else []


def frame_at_node(source: SourceFile, like: Frame, node: ast.AST) -> Frame:
    """The frame of a node in the file of ``like``."""
    span = source.span(node)
    function = source.scope_name(node) if isinstance(node, ast.stmt) else like.function
    place = statement_at(replace(like, line=span.line, column=span.column))
    if place is not None and isinstance(node, ast.expr):
        function = source.scope_name(place.node)
    return Frame(like.file, span.line, function, span.column, span.end_line, span.end_column, True)


def is_filled_once(frame: Frame) -> bool:
    """Whether the statement at ``frame`` computes a missing value once: ``if key not in cache: cache[key] = …``."""
    statement = statement_at(frame)
    guard = None if statement is None else statement.source.parents[statement.node][0]
    if statement is None or not isinstance(guard, ast.If) or guard.orelse:
        return False
    kept = kept_since(guard)
    return kept is not None and is_kept_here(statement.source, guard, kept)


def kept_since(guard: ast.If) -> ast.expr | None:
    """The target (``self.x``, ``cache[key]``) that the condition tests and the body assigns, doing nothing else."""
    test = ast.unparse(guard.test)
    for node in guard.body:
        if not isinstance(node, ast.Assign) or node.lineno == guard.lineno:
            return None
        for target in node.targets:
            text = ast.unparse(target)
            questions = [f"{text} is None"]
            if isinstance(target, ast.Attribute):
                questions.append(f"not hasattr({ast.unparse(target.value)}, {target.attr!r})")
            elif isinstance(target, ast.Subscript):
                questions.append(f"{ast.unparse(target.slice)} not in {ast.unparse(target.value)}")
            if test in questions:
                return target
    return None


def is_kept_here(source: SourceFile, guard: ast.If, kept: ast.expr) -> bool:
    """Whether only the body binds ``kept``; a value that is updated from itself again and again is a state."""
    texts = {ast.unparse(kept), ast.unparse(kept.value) if isinstance(kept, ast.Subscript) else ""}
    inner = set(ast.walk(guard))
    is_own = ast.unparse(kept).startswith("self.")
    for node in ast.walk((is_own and source.owner_class(guard)) or source.module):
        stored = isinstance(node, ast.Attribute | ast.Subscript | ast.Name) and not isinstance(node.ctx, ast.Load)
        if not stored or node in inner or not ({ast.unparse(node), ast.unparse(getattr(node, "value", node))} & texts):
            continue
        statement = source.statement(node)
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or not _is_nothing(statement.value):
            return False
    return True


def _is_nothing(value: ast.expr | None) -> bool:
    """``None``, an empty container, or several of them."""
    if isinstance(value, ast.Tuple | ast.List):
        return all(map(_is_nothing, value.elts))
    if isinstance(value, ast.Call):
        return leaf_name(value.func) in CONTAINERS and not value.args
    return value is None or isinstance(value, ast.Constant) or (isinstance(value, ast.Dict) and not value.keys)


def averaged_array(frame: Frame) -> tuple[str, str] | None:
    """``avg[n]`` and ``p`` of ``avg[n] += 0.1 * p.detach().numpy()`` after ``avg[n] *= 0.9``.

    Or of ``avg += 0.1 * (p.numpy() - avg)``; None for other sums: ``w -= rate * w.numpy()`` is a decay.
    """
    statement = statement_at(frame)
    node = None if statement is None else statement.node
    if statement is None or not isinstance(node, ast.AugAssign) or not isinstance(node.op, ast.Add):
        return None
    target, parts = ast.unparse(node.target), list(ast.walk(node.value))
    taken = [one for one in parts if isinstance(one, ast.Call) and leaf_name(one.func) == "numpy"]
    value: ast.expr | None = taken[0] if len(taken) == 1 else None
    while (isinstance(value, ast.Call | ast.Attribute) and chain_key(value) is None) or _is_alias(value):
        value = value.func if isinstance(value, ast.Call) else value.value if isinstance(value, ast.Attribute) else None
    before = next(reversed(statement.source.ahead(node)), None)
    is_product = isinstance(before, ast.AugAssign) and isinstance(before.op, ast.Mult)
    is_mixed = is_product and isinstance(before, ast.AugAssign) and ast.unparse(before.target) == target
    is_difference = any(
        isinstance(one, ast.BinOp) and isinstance(one.op, ast.Sub) and ast.unparse(one.right) == target for one in parts
    )
    return (target, ast.unparse(value)) if value is not None and (is_mixed or is_difference) else None


def _is_alias(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Attribute) and value.attr in ("data", "detach", "cpu", "numpy")


def set_by_call(frame: Frame, path: str) -> Frame | None:
    """The statement ``begin(net)`` that sets ``net.head``, in the file of ``frame``: ``def begin(m): m.head = …``.

    None where no function does, or several, or the file calls it at several places or reads its result.
    """
    source = read_source(frame.file)
    functions = [one for one in ([] if source is None else source.nodes) if isinstance(one, ast.FunctionDef)]
    places = [(one, at) for one in functions if source and (at := _only_call(source, one)) is not None]
    found = [at for one, at in places if path in _set_for(one, at)]
    if source is None or len(found) != 1:
        return None
    span, caller = source.span(found[0]), source.function(found[0])
    return replace(at_span(frame, span), function=getattr(caller, "name", "<module>"))


def _only_call(source: SourceFile, function: ast.FunctionDef) -> ast.Expr | None:
    calls = [one for one in source.nodes if isinstance(one, ast.Call) and leaf_name(one.func) == function.name]
    at = source.statement(calls[0]) if len(calls) == 1 else None
    is_alone = isinstance(at, ast.Expr) and at.value is calls[0] and isinstance(calls[0].func, ast.Name)
    return at if isinstance(at, ast.Expr) and is_alone else None


def _set_for(function: ast.FunctionDef, at: ast.Expr) -> set[str]:
    """The attributes of arguments that the function sets, as its caller calls them."""
    passed = (
        {name: chain_key(value) for name, value in arguments_of(function, at.value)}
        if isinstance(at.value, ast.Call)
        else {}
    )
    bound = (one.name.partition(".") for one in bindings_in(local_nodes(function)))
    parts = [(passed.get(root), rest) for root, dot, rest in bound if dot]
    return {f"{owner}.{rest}" for owner, rest in parts if owner is not None}
