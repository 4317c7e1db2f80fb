"""Rounds of a training loop: the end of one, and the calls of ``backward`` in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from gradsan.model import Frame
from gradsan.source.change import Change, add_keyword, checked, insert_after, insert_before
from gradsan.source.flow.modules import Shape, detached_form, object_cut, shape_in_source
from gradsan.source.flow.reaching import runs_more_often
from gradsan.source.flow.targets import aliased_expression
from gradsan.source.identifiers import (
    assigned_names,
    bindings_in,
    bindings_of,
    binds,
    chain_key,
    consumed_names,
    leaf_name,
    local_nodes,
    walks,
)
from gradsan.source.locate import frame_of, scope_of, statement_at
from gradsan.source.methods import ADDING, is_inplace_method
from gradsan.source.tree import FunctionNode, SourceFile, header_nodes, read_source

_LEAVING = (ast.Return, ast.Continue, ast.Break, ast.Raise)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def frames_between(first: Frame, last: Frame) -> list[Frame]:
    """The statements of one function from ``first`` to ``last``, both included, as frames in source order.

    Where ``last`` stands before ``first``, the path between them passes the end of a loop: the statements after
    ``first`` and those before ``last``. Empty where the two are not in the same function, or the source is missing.
    """
    source = read_source(first.file)
    if source is None or not in_same_function(first, last):
        return []
    begin, end = statement_at(first), statement_at(last)
    if begin is None or end is None or begin.function is not end.function:
        return []
    low, high = begin.span.line, end.span.line
    found = [
        node
        for node in (source.nodes if begin.function is None else ast.walk(begin.function))
        if isinstance(node, ast.stmt)
        and source.function(node) is begin.function
        and scope_of(first) in ("", source.scope_name(node))
        and (low <= node.lineno <= high if low <= high else not high < node.lineno < low)
    ]
    return [frame_of(source, node, first) for node in sorted(found, key=source.span)]


def clears_between(first: Frame, last: Frame) -> bool:
    """Whether ``zero_grad()`` is called after ``first`` and before ``last``; in its function, if it is another one."""
    end = statement_at(last)
    if end is None:
        return False
    frames = frames_between(first, last)[1:-1]
    places = [one.node for frame in frames if (one := statement_at(frame)) is not None]
    if not in_same_function(first, last):
        nodes = end.source.nodes if end.function is None else ast.walk(end.function)
        places = [node for node in nodes if isinstance(node, ast.stmt) and node.lineno < end.node.lineno]
    calls = (node for place in places for node in header_nodes(place) if isinstance(node, ast.Call))
    return any(leaf_name(call.func) == "zero_grad" for call in calls)


def bound_each_round(file: str, line: int) -> frozenset[str]:
    """The variables that the function at ``line`` binds before it reads them, in every iteration of its loop there.

    Of each loop around the line, unless one further out reads them, too; for a function without one, which each round
    calls again, all that it binds; for a module without one nothing.
    """
    source = read_source(file)
    statements = [] if source is None else [one for one in source.nodes if isinstance(one, ast.stmt)]
    at = max(
        (one for one in statements if one.lineno <= line <= (one.end_lineno or 0)),
        key=lambda one: one.lineno,
        default=None,
    )
    if source is None or at is None:
        return frozenset()
    function = source.function(at)
    around = [one for one, _ in source.ancestors(at) if source.function(one) is function]
    loops = [one for one in around if isinstance(one, _LOOPS)]
    if not loops:
        body = getattr(function, "body", [])
        return _bound_before_read(body if isinstance(body, list) else [])
    found = frozenset[str]()
    for loop in loops:
        own = set(ast.walk(loop))
        elsewhere = [one for one in ast.walk(loops[-1]) if one not in own and isinstance(one, ast.Name)]
        found |= _bound_before_read(loop.body) - {one.id for one in elsewhere if isinstance(one.ctx, ast.Load)}
    return found


def _bound_before_read(body: Sequence[ast.stmt]) -> frozenset[str]:
    bound, read = set[str](), set[str]()
    for node in body:
        read |= _names_read(node) - bound
        for target in node.targets if isinstance(node, ast.Assign) else ():
            bound |= _names(target, ast.Store) - read
    return frozenset(bound)


def _names_read(statement: ast.AST) -> set[str]:
    """The names that a statement reads, the target of an ``x += …`` among them."""
    added = [one.target for one in ast.walk(statement) if isinstance(one, ast.AugAssign)]
    return _names(statement) | {one.id for one in added if isinstance(one, ast.Name)}


def in_same_function(first: Frame, second: Frame) -> bool:
    """Whether two frames belong to the same function, as far as file and name show (qualified or not)."""
    return first.file == second.file and scope_of(first) == scope_of(second)


def in_same_loops(*frames: Frame) -> bool:
    """Whether all frames are in the same loops of one function, or in no loop: a round runs them one after another."""
    places = [statement_at(frame) for frame in frames]
    known = {(one.function, *one.loops) for one in places if one is not None}
    return len(known) == 1 and None not in places and all(in_same_function(frames[0], one) for one in frames)


def in_one_loop(first: Frame, last: Frame) -> bool:
    """Whether a loop of their function contains both."""
    places = [statement_at(first), statement_at(last)]
    loops = [set(one.loops) for one in places if one is not None]
    return len(loops) == 2 and in_same_function(first, last) and not loops[0].isdisjoint(loops[1])


def is_read_between(name: str, bound_at: Frame, used_at: Frame) -> bool:
    """Whether ``name`` may be read after ``bound_at`` up to and at ``used_at``; True where in doubt.

    Where a loop that ends before ``used_at`` binds it, or ``used_at`` is under a condition, the next iteration may.
    """
    frames = frames_between(bound_at, used_at)
    if not frames or bound_at.line > used_at.line or not name.isidentifier():
        return True
    if runs_more_often(bound_at, used_at):
        return True
    statements = [statement_at(frame) for frame in frames if frame.line > bound_at.line]
    return any(
        statement is None or any(read.replace("[", ".").split(".")[0] == name for read in consumed_names(statement))
        for statement in statements
    )


def detach_after_round(frames: Sequence[Frame], carried: Mapping[str, Shape]) -> Change | None:
    """A line that detaches the names, at the end of the innermost block that contains all of ``frames``.

    The frames, of one function, must run before it: the backward and the update of a round.
    ``carried`` says what kind of value each name holds. None where the block is ambiguous.
    """
    first = statement_at(frames[0])
    text = None if first is None or not carried else _cuts(first.source, carried)
    return None if text is None else after_round(frames, text, "detach", carried)


def _hands_out(loop: ast.stmt, names: Collection[str]) -> bool:
    """Whether the loop itself binds all the names, and no statement in it binds one of them again."""
    own = set(assigned_names(loop)) if isinstance(loop, ast.For) else set()
    inner = [one for one in ast.walk(loop) if isinstance(one, ast.stmt) and one is not loop]
    return set(names) <= own and not any(own & set(assigned_names(one)) & set(names) for one in inner)


def after_round(frames: Sequence[Frame], text: str, kind: str, names: Collection[str] = ()) -> Change | None:
    """``text``, a statement, at the end of the innermost block around all of ``frames``, of one function.

    Where a loop hands the ``names`` out, which the text binds, it is the beginning of that loop: the end of a round
    would come too late for what this one was handed, and the next one is handed others.
    """
    statements = [statement_at(frame) for frame in frames]
    known = [statement for statement in statements if statement is not None]
    if not known or len(known) < len(statements):
        return None
    source = known[0].source
    is_once = known[0].function is None and not any(one.loops for one in known)  # a call in a module runs the rounds
    if is_once or any(one.source is not source or one.function is not known[0].function for one in known):
        return None
    loop = next((one for one in reversed(known[0].loops) if names and _hands_out(one, names)), None)
    if loop is not None and loop.body[0].lineno > loop.lineno:
        text = text.replace("\n", f"\n{source.indent(source.span(loop.body[0]))}")
        return insert_before(source, loop.body[0], text, kind)
    block = _common_block(source, [one.node for one in known])
    if not block:
        return None
    last = block[-1]
    text = text.replace("\n", f"\n{source.indent(source.span(last))}")
    if isinstance(last, _LEAVING):
        return insert_before(source, last, text, kind)
    return _insert_behind(source, last, text, kind)


def detach_after(frame: Frame, carried: Mapping[str, Shape]) -> Change | None:
    """A line right after the statement at ``frame`` that detaches the names."""
    statement = statement_at(frame)
    text = None if statement is None or not carried else _cuts(statement.source, carried)
    return None if statement is None or text is None else _insert_behind(statement.source, statement.node, text)


def shape_bound_at(frame: Frame, name: str) -> Shape | None:
    """The kind of value that ``name``, bound by the statement at ``frame``, holds, as far as the file shows."""
    statement = statement_at(frame)
    if statement is None:
        return None
    for binding in bindings_of(statement.node):
        if binding.name == name:
            known = shape_in_source(statement.source, binding)
            adds = known is None and binding.method in ADDING
            return "list" if adds and deque_made(statement.source, name) is None else known
    return None


def is_read_afterwards(frame: Frame) -> bool:
    """Whether a later statement of the same function reads a name that the statement at ``frame`` writes."""
    written = statement_at(frame)
    if written is None or written.function is None or isinstance(written.function, ast.Lambda):
        return False
    names = {one.name for one in bindings_of(written.node)}
    later = (one for one in local_nodes(written.function) if isinstance(one, ast.stmt))
    return any(names & set(consumed_names(one)) for one in later if one.lineno > written.span.end_line)


def reads_what_it_binds(frame: Frame, *, times: int = 1) -> bool:
    """Whether a value is computed with itself: ``total += x``, ``total.add_(x)``; twice, ``mean += (x - mean) / n``."""
    statement = statement_at(frame)
    node = None if statement is None else statement.node
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr):
        return False
    bindings, value = bindings_of(node), node.value
    if isinstance(node, ast.Expr) and not any(is_inplace_method(one.method or "") for one in bindings):
        return False
    names = {one.name for one in bindings}
    reads = [one for one in ast.walk(value) if chain_key(one) in names] if value is not None else []
    return len(reads) + isinstance(node, ast.AugAssign) >= times


def is_item_of_loop(frame: Frame, name: str) -> bool:
    """Whether the statement at ``frame`` binds ``name`` to an item of an enclosing loop's iterable, or to a view of it.

    That is data of the round, as ``token = word.view(1)`` in ``for word in sentence``, not a result of an earlier
    round.
    """
    statement = statement_at(frame)
    if statement is None:
        return False
    for binding in bindings_of(statement.node):
        root = None if binding.value is None else aliased_expression(statement.source, binding.value)
        if binding.name == name and isinstance(root, ast.Name):
            targets = [loop.target for loop in statement.loops if not isinstance(loop, ast.While)]
            return any(isinstance(node, ast.Name) and node.id == root.id for one in targets for node in ast.walk(one))
    return False


def is_target_of_loop(frame: Frame, name: str, made: Frame) -> bool:
    """Whether a ``for`` loop around the statement at ``frame`` binds ``name`` (or its root) to items made beside it.

    That is: no loop around that one is without the statement at ``made``, which computed them.
    """
    statement, maker = statement_at(frame), statement_at(made)
    if statement is None or maker is None:
        return False
    for loop in statement.loops:
        targets = () if isinstance(loop, ast.While) else ast.walk(loop.target)
        if any(isinstance(node, ast.Name) and node.id == re.split(r"[.\[]", name)[0] for node in targets):
            around = [one for one in statement.loops if one is not loop and loop in ast.walk(one)]
            return set(around) <= {*maker.loops}
    return False


def walked_over(frame: Frame, name: str) -> tuple[str, bool]:
    """``anchor`` of the ``a`` in ``for p, a in zip(model.parameters(), anchor)`` at ``frame``; else the name itself.

    The result of a method is named by its receiver: ``model`` for ``p``. The second value says whether it is.
    """
    statement = statement_at(frame)
    inner = [] if statement is None else [one for one in ast.walk(statement.node) if isinstance(one, ast.comprehension)]
    outer = () if statement is None else (one for one in statement.loops if not isinstance(one, ast.While))
    for loop in (*inner, *reversed(tuple(outer))):
        for one, given in walks(loop.target, loop.iter):
            if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(one)):
                asked = given.func if isinstance(given, ast.Call) else None
                owner = asked.value if isinstance(asked, ast.Attribute) else None
                return chain_key(owner or given) or name, owner is not None
    return name, False


def _common_block(source: SourceFile, nodes: Sequence[ast.stmt]) -> list[ast.stmt]:
    blocks = [_blocks_around(source, node) for node in nodes]
    shared = [block for block in blocks[0] if all(any(block is other for other in one) for one in blocks[1:])]
    return shared[0] if shared else []


def _blocks_around(source: SourceFile, node: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks that contain ``node``, innermost first, up to its function or module."""
    found: list[list[ast.stmt]] = []
    inner: ast.AST = node
    for parent, name in source.ancestors(node):
        block = getattr(parent, name)
        if isinstance(block, list) and inner in block and isinstance(inner, ast.stmt):
            found.append(block)
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            break
        inner = parent
    return found


def _cuts(source: SourceFile, carried: Mapping[str, Shape]) -> str | None:
    targets: list[str] = []
    values: list[str] = []
    for name, shape in carried.items():
        cut = ([name], [_cut(source, name, shape)]) if shape != "object" else object_cut(source, name)
        if cut is None:
            return None
        targets += cut[0]
        values += cut[1]
    return f"{', '.join(targets)} = {', '.join(values)}"


def _cut(source: SourceFile, name: str, shape: Shape) -> str:
    made = deque_made(source, name)
    if made is not None:
        return f"{source.text(made.func)}((s.detach() for s in {name}), {name}.maxlen)"
    return detached_form(source, name, shape).format(name)


def deque_made(source: SourceFile, name: str) -> ast.Call | None:
    """The call of ``deque`` by which ``name``, or an attribute of that name, is made; None where it is no deque."""
    last = name.rpartition(".")[2]
    made = (one.value for one in bindings_in(source.nodes) if one.name.rpartition(".")[2] == last)
    return next((one for one in made if isinstance(one, ast.Call) and leaf_name(one.func) == "deque"), None)


def _insert_behind(source: SourceFile, statement: ast.stmt, text: str, kind: str = "detach") -> Change | None:
    """``text`` after a statement, also after a compound one: after its block, at the statement's indentation."""
    if not hasattr(statement, "body"):
        return insert_after(source, statement, text, kind)
    span = source.span(statement)
    head = source.indent(span)
    change = Change(span.end_line + 1, "", head + text, kind)
    return None if head.strip() else checked(source, change)


def keep_graph(frame: Frame) -> Change | None:
    """The line of ``frame``, a call of ``backward`` or ``grad``, with ``retain_graph=True``; None if it is there."""
    return add_keyword(frame, "retain_graph", "True", instead_of="False")


def of_one_round(file: str, line: int) -> frozenset[str]:
    """The variables that every round at ``line`` binds before it reads them, and that it alone reads, in every round.

    Others are read after the loop, by a function defined here, under a condition, by the caller, or by what a statement
    hands them to, which may do so in some rounds only: ``report(step, out)``.
    """
    source, bound = read_source(file), bound_each_round(file, line)
    if source is None or not bound:
        return bound
    statements = [one for one in source.nodes if isinstance(one, ast.stmt)]
    around = [one for one in statements if one.lineno <= line <= (one.end_lineno or 0)]
    at = max(around, key=lambda one: one.lineno)
    function = source.function(at)
    scope = list(source.nodes if function is None else ast.walk(function))
    loops = [one for one in around if isinstance(one, _LOOPS) and source.function(one) is function]
    end = max((one.end_lineno or 0 for one in loops), default=None)
    own = [one for one in scope if source.function(one) is function and end is not None]
    later = {name for one in own if isinstance(one, ast.expr) and one.lineno > (end or 0) for name in _names(one)}
    return bound - later - _read_at_times(source, function, scope)


def _read_at_times(source: SourceFile, function: FunctionNode | None, scope: Iterable[ast.AST]) -> set[str]:
    found = set[str]()
    for node in scope:
        if isinstance(node, _FUNCTIONS) and node is not function:
            inner = [one for one in ast.walk(node) if isinstance(one, _FUNCTIONS)]
            found |= {name for name in _names(node) if not any(binds(one, name) for one in inner)}
        if source.function(node) is not function:
            continue
        if isinstance(node, ast.If | ast.ExceptHandler):
            for block in (node.body, getattr(node, "orelse", [])):
                bound = set().union(*(_names(one, ast.Store) for one in block))
                found |= set().union(*map(_names, block)) - bound
        elif isinstance(node, ast.Return | ast.Yield):
            found |= _names(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            given = [*node.value.args, *(one.value for one in node.value.keywords)]
            if leaf_name(node.value.func) not in ADDING | {"print"}:
                found |= set().union(*map(_names, given))
    return found


def _names(node: ast.AST, context: type[ast.expr_context] = ast.Load) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, context)}
