"""Conditions and context managers around a statement: whether it always runs, and what is compared for it.

What is kept under a comparison by order is a best state so far.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from gradsan.heuristics import compares_values
from gradsan.model import Frame, Lines
from gradsan.source.change import Change, Edit, checked, edited_lines
from gradsan.source.flow.aliases import viewed
from gradsan.source.flow.collected import bound_anew, is_inside
from gradsan.source.flow.reuse import SecondName, reads_value, statements_of
from gradsan.source.identifiers import assigned_names, assigned_pairs, chain_key, leaf_name
from gradsan.source.locate import at_line, at_span, statement_at
from gradsan.source.methods import CUTTING
from gradsan.source.tree import SourceFile, Span, header_nodes, read_source

_GRAPHLESS = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_SHARES = frozenset({"detach", "data", "numpy"})
"""What gives a parameter's memory without a copy."""
_CLOCKS = frozenset({"time", "perf_counter", "monotonic", "process_time", "now"})


def context_around(frames: Sequence[Frame], names: frozenset[str]) -> tuple[Frame, str] | None:
    """The innermost context manager around ``frames`` (outermost first) whose last name is one of ``names``.

    The result is its frame, the expression that makes it, and that name. A ``with`` whose header is executed counts as
    entered, a decorator covers its whole function. None where there is none, and where the source cannot be read.
    """
    for frame in reversed(frames):
        statement = statement_at(frame)
        if statement is None:
            continue
        for node in _entered(statement.source, statement.node):
            name = leaf_name(node.func if isinstance(node, ast.Call) else node)
            if name in names:
                return at_span(frame, statement.source.span(node)), name or ""
    return None


def is_checked(frames: Sequence[Frame], path: str) -> bool:
    """Whether a variable is compared for being close to something: what another way of computing it is tested by.

    ``frames`` are those of a statement, outermost first; the variable is a name or a chain of attributes of the last
    one. What a call returns counts in the function of the caller, too.
    """
    for depth, frame in enumerate(reversed(frames)):
        statement = statement_at(frame)
        if statement is None:
            return False
        scope = statement.source.nodes if statement.function is None else tuple(ast.walk(statement.function))
        checks = [one for one in scope if isinstance(one, ast.Call) and compares_values(leaf_name(one.func) or "")]
        read = {chain_key(part) for one in checks for part in ast.walk(one) if isinstance(part, ast.expr)}
        names = set(assigned_names(statement.node)) if depth else {path}
        if not names.isdisjoint(read) or (depth and any(one in checks for one in header_nodes(statement.node))):
            return True
    return False


def is_conditional(frame: Frame) -> bool:
    """Whether an ``if`` of its function decides if the statement at ``frame`` runs; also where it cannot be read."""
    statement = statement_at(frame)
    if statement is None:
        return True
    for parent, name in statement.source.ancestors(statement.node):
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return False
        is_script = isinstance(parent, ast.If) and "__name__" in statement.source.text(parent.test)
        if isinstance(parent, ast.If) and name in ("body", "orelse") and not is_script:
            return True
    return False


def compared_scores(frame: Frame) -> frozenset[str]:
    """What an ``if`` around the statement compares by order, where its branch binds one of that anew, as a best score.

    Not where a counter or the time is compared: what is kept then is renewed, and may well be the state of now.
    """
    statement = statement_at(frame)
    for outer, name in () if statement is None else statement.source.ancestors(statement.node):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            break
        compared = (
            [one for one in ast.walk(outer.test) if isinstance(one, ast.Compare)] if isinstance(outer, ast.If) else []
        )
        ordered = [one for one in compared if any(isinstance(op, _ORDERS) for op in one.ops)]
        scores = [one for one in ordered if statement is not None and not _counts(statement.source, one)]
        keys = (chain_key(side) for one in scores for side in (one.left, *one.comparators))
        names = frozenset(one for one in keys if one is not None)
        branch = getattr(outer, name, None)
        bound = {chain_key(it) for one in branch for it in _bound_by(one)} if isinstance(branch, list) else set()
        if not names.isdisjoint(bound):
            return names
    return frozenset()


def kept_as_best(frame: Frame, written: str) -> SecondName | None:
    """``best`` of ``if score > top: top, best = score, x`` in a loop around ``frame``, which writes ``x`` in place.

    It is read behind the loop, which never binds ``x`` anew.
    """
    statement = statement_at(frame)
    if statement is None or statement.scope is None:
        return None
    source, statements = statement.source, statements_of(statement.scope)
    for loop in reversed(statement.loops):
        inside = [node for node in statements if node is loop or is_inside(node, loop)]
        if written in bound_anew(inside):
            return None
        later = [one for one in statements if one.lineno > (loop.end_lineno or loop.lineno)]
        pairs = [(node, *pair) for node in inside if isinstance(node, ast.Assign) for pair in assigned_pairs(node)]
        for node, target, value in pairs:
            name = chain_key(target)
            read = next((one for one in later if name is not None and reads_value(source, one, name)), None)
            is_kept = name != written and chain_key(viewed(value)) == written
            at = at_line(frame, node.lineno)
            if name is None or read is None or not is_kept or _leaves_loop(source, node):
                continue
            if compared_scores(at):
                return SecondName(name, "name", node.lineno, read.lineno, source.span(value))
    return None


def values_kept_as_best(frame: Frame) -> list[tuple[str, int, int]]:
    """What the function at ``frame`` binds beside the best score so far, in a loop, and reads behind that loop.

    Each with the lines of both. What ``state_dict`` returns is left out, as tensors.
    """
    statement = statement_at(frame)
    if statement is None or statement.scope is None:
        return []
    text, found = statement.source, list[tuple[str, int, int]]()
    for node in statements_of(statement.scope):
        loop = next((one for one, _ in text.ancestors(node) if isinstance(one, ast.For | ast.While)), None)
        if not isinstance(node, ast.Assign) or loop is None or _leaves_loop(text, node):
            continue
        at = at_line(frame, node.lineno)
        scores = compared_scores(at)
        for target, value in assigned_pairs(node) if scores else ():
            name, calls = chain_key(target), {one.attr for one in ast.walk(value) if isinstance(one, ast.Attribute)}
            is_kept = not calls.isdisjoint(_SHARES) and ("state_dict" not in calls or "numpy" in calls)
            if name is None or name in scores or not is_kept:
                continue
            read = (
                one.lineno
                for one in text.nodes
                if isinstance(one, ast.Name | ast.Attribute)
                and isinstance(one.ctx, ast.Load)
                and chain_key(one) == name
                and one.lineno > (loop.end_lineno or loop.lineno)
                and not isinstance(text.parents[one][0], ast.Compare)
            )
            line = min(read, default=None)
            if line is not None:
                found.append((name, node.lineno, line))
    return found


def _leaves_loop(source: SourceFile, node: ast.stmt) -> bool:
    """Whether the block of a statement ends with ``break`` or ``return``: nothing is written after it."""
    return isinstance(source.block(node)[-1], ast.Break | ast.Return | ast.Raise)


def _counts(source: SourceFile, compared: ast.Compare) -> bool:
    """Whether a comparison has the number of a round, something that is counted up, or the time."""
    parts = list(ast.walk(compared))
    keys = {chain_key(one) for one in parts if isinstance(one, ast.Name | ast.Attribute)} - {None}
    counted = set[str | None]()
    for node in source.nodes:
        if isinstance(node, ast.For | ast.comprehension):
            counted |= {chain_key(one) for one in _targets_of_rounds(node)}
        elif isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Constant):
            counted.add(chain_key(node.target))
    is_timed = any(isinstance(one, ast.Call) and leaf_name(one.func) in _CLOCKS for one in parts)
    leaves = {str(one).rpartition(".")[2] for one in counted if one is not None and "." in one}
    return is_timed or not keys.isdisjoint(counted) or any(str(one).rpartition(".")[2] in leaves for one in keys)


def _targets_of_rounds(node: ast.For | ast.comprehension) -> Iterator[ast.expr]:
    """The variables that a loop over a range, or the number of an ``enumerate``, counts with."""
    called = leaf_name(node.iter.func) if isinstance(node.iter, ast.Call) else None
    if called in ("range", "trange", "count"):
        yield node.target
    elif called == "enumerate" and isinstance(node.target, ast.Tuple):
        yield node.target.elts[0]


def clears_its_condition(frame: Frame) -> bool:
    """Whether the statement is in the branch of an ``if`` that sets the flag which is tested: it runs once."""
    statement = statement_at(frame)
    parent = None if statement is None else statement.source.parents[statement.node][0]
    if not isinstance(parent, ast.If) or statement is None or statement.node not in parent.body:
        return False
    tested = {chain_key(one) for one in ast.walk(parent.test) if isinstance(one, ast.Attribute | ast.Name)} - {None}
    flags = [one for one in parent.body if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant)]
    return any(chain_key(target) in tested for one in flags for target in one.targets)


def _bound_by(node: ast.stmt) -> Iterator[ast.expr]:
    for target in node.targets if isinstance(node, ast.Assign) else ():
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def is_called_with_graph(file: str, name: str) -> bool:
    """Whether a statement of the file calls ``name`` outside of ``no_grad``, and detaches nothing itself."""
    source = read_source(file)
    calls = [] if source is None else [one for one in source.nodes if isinstance(one, ast.Call)]
    for call in calls:
        statement = source.statement(call) if source is not None else None
        if source is None or statement is None or leaf_name(call.func) != name.rpartition(".")[2]:
            continue
        around = {leaf_name(one.func if isinstance(one, ast.Call) else one) for one in _entered(source, statement)}
        inner = {one.attr for one in ast.walk(statement) if isinstance(one, ast.Attribute)}
        if around.isdisjoint(_GRAPHLESS) and inner.isdisjoint(CUTTING):
            return True
    return False


def _entered(source: SourceFile, statement: ast.stmt) -> Iterator[ast.expr]:
    """The context expressions entered around a statement within its function, innermost first."""
    if isinstance(statement, ast.With | ast.AsyncWith):
        yield from (item.context_expr for item in reversed(statement.items))
    for parent, name in source.ancestors(statement):
        if isinstance(parent, ast.With | ast.AsyncWith) and name == "body":
            yield from (item.context_expr for item in reversed(parent.items))
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef) and name == "body":
            yield from reversed(parent.decorator_list)
            return


def enter_each_round(used_at: Frame, context: str) -> Lines:
    """``with <context>():`` around loops, entered in every iteration of the innermost loop instead.

    Empty where the block has more than the loop, or there is no such block around ``used_at``.
    """
    used = statement_at(used_at)
    if used is None:
        return ()
    for loop in used.loops:
        block = used.source.parents[loop][0]
        if not isinstance(block, ast.With) or block.body != [loop] or len(block.items) != 1:
            continue
        call = block.items[0].context_expr
        if isinstance(call, ast.Call) and leaf_name(call.func) == context:
            return _entered_in(used.source, block, used.loops[-1])
    return ()


def _entered_in(source: SourceFile, block: ast.With, loop: ast.stmt) -> Lines:
    """``block`` entered in the body of ``loop`` alone: what stands around that body is dedented."""
    assert isinstance(loop, ast.For | ast.AsyncFor | ast.While)
    around, first = source.span(block), source.span(block.body[0])
    head, begin, end = source.span(loop), source.span(loop.body[0]), source.span(loop.body[-1])
    if first.line != around.line + 1 or begin.line == head.line:
        return ()
    moved = {*range(first.line, begin.line), *range(end.end_line + 1, around.end_line + 1)}
    texts = [one for node in ast.walk(block) if (one := _text_on_lines(node)) is not None]
    if any(moved & set(range(one.line, one.end_line + 1)) for one in map(source.span, texts)):
        return ()
    outer, inner = (source.lines[one.line - 1] for one in (around, first))
    deeper = len(inner) - len(inner.lstrip()) - around.column + 1
    indent = source.lines[head.line - 1][: head.column - 1]
    edits = [Edit(Span(around.line, 1, around.line + 1, 1), "")]
    for line in sorted(moved):
        text = source.lines[line - 1]
        if text[:deeper].strip():
            return ()
        edits.append(Edit(Span(line, 1, line, min(deeper, len(text)) + 1), ""))
    edits[:2] = [Edit(Span(around.line, 1, first.line, deeper + 1), "")]
    edits.append(Edit.insert(begin.line, 1, f"{indent}{outer.strip()}\n"))
    return edited_lines(source, edits)


def _text_on_lines(node: ast.AST) -> ast.expr | None:
    """The node where it is text on several lines, whose indentation is part of it."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)):
        return None if node.end_lineno == node.lineno else node
    return None


def enter_once_more(updated_at: Frame, context: str) -> Change | None:
    """``with <context>():`` entered again after the statement at ``updated_at``, which is in such a block itself.

    The rest of the block is then in the second one. None where nothing follows.
    """
    updated = statement_at(updated_at)
    block = None if updated is None else updated.source.parents[updated.node][0]
    if updated is None or not isinstance(block, ast.With) or len(block.items) != 1 or updated.node is block.body[-1]:
        return None
    source, call, outer = updated.source, block.items[0].context_expr, updated.source.span(block)
    head = source.lines[outer.line - 1]
    if not isinstance(call, ast.Call) or leaf_name(call.func) != context or block.body[0].lineno == block.lineno:
        return None
    change = Change(source.span(updated.node).end_line + 1, "", head, "enter_once_more")
    return checked(source, change)
