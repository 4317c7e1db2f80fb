"""Values computed from changed parameters, computed again after the change; a view taken again before it is written."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from itertools import pairwise

from gradsan.heuristics import class_names, draws_batch
from gradsan.model import Frame, Lines
from gradsan.source.change import Change, insert_before
from gradsan.source.flow.reaching import reaching
from gradsan.source.flow.writing import definition_of
from gradsan.source.identifiers import assigned_pairs, bindings_of, chain_key, leaf_name
from gradsan.source.locate import statement_at
from gradsan.source.rewrite.given import networks_of
from gradsan.source.rewrite.moving import (
    blocks_around,
    functions_of,
    is_whole_lines,
    names_bound,
    names_exposed,
    names_read,
    until_apart,
)
from gradsan.source.tree import SourceFile, header_nodes


def computed_before_rounds(frame: Frame) -> tuple[str, Frame] | None:
    """The loss that ``autograd.grad`` at ``frame`` differentiates in a loop, and where it was computed before the loop.

    None unless the loop binds what the gradient is asked for anew, after that call: from its second round on, the loss
    was computed from other tensors.
    """
    statement = statement_at(frame)
    calls = [] if statement is None else [one for one in header_nodes(statement.node) if isinstance(one, ast.Call)]
    asked = [one for one in calls if leaf_name(one.func) == "grad" and one.args]
    if statement is None or len(asked) != 1 or not statement.loops:
        return None
    loss, inputs = asked[0].args[0], [*asked[0].args[1:2], *(one.value for one in asked[0].keywords)]
    loop, made = statement.loops[-1], definition_of(frame, chain_key(loss) or "")
    later = [one for one in loop.body if isinstance(one, ast.Assign) and one.lineno > statement.node.lineno]
    wanted = {one.id for value in inputs for one in ast.walk(value) if isinstance(one, ast.Name)}
    if made is None or made.is_loop or not wanted & {name for one in later for name in names_bound([one])}:
        return None
    return None if loop.lineno <= made.frame.line else (ast.unparse(loss), made.frame)


def run_again(
    saved: Sequence[Frame] | None,
    written: Sequence[Sequence[Frame]],
    used: Sequence[Frame],
) -> list[Lines]:
    """The changed lines that repeat, after the last of the writes, the statements that the backward's loss depends on.

    First the assignments from the save on that depend on its values: inputs and random numbers drawn before
    are kept. Then all assignments of the block. All are stacks of the user's frames, outermost first. Where one
    statement both saves and writes, and a function that it calls computes the loss and steps: what that one goes on to
    read. Empty where the writes and the backward are not in one block, in this order, or where random numbers would
    be drawn again.
    """
    place = _behind_writes(written, used)
    if place is None:
        return []
    source, block, last, backward = place
    if saved is not None and any(node is block[last] for _, _, node in blocks_around(saved)):
        inner = [_behind_writes([saved], one) for one in written]
        first, *others = inner
        if first is None or any(one is None or one[1] is not first[1] for one in others):
            return []
        source, block = first[:2]
        last = max(one[3] for one in inner if one is not None)
        if not any(leaf_name(one.func) == "step" for one in ast.walk(block[last]) if isinstance(one, ast.Call)):
            return []
        return _repeated(source, block, last, block[last + 1 :], saved, written)
    after = [*block[last + 1 : backward], *_until(block[backward], used)]
    return _repeated(source, block, last, after, saved, written)


def _repeated(
    source: SourceFile,
    block: list[ast.stmt],
    last: int,
    after: list[ast.stmt],
    saved: Sequence[Frame] | None,
    written: Sequence[Sequence[Frame]],
) -> list[Lines]:
    """The changed lines that repeat, behind the statement at ``last``, what ``after`` reads of those before it."""
    if not is_whole_lines(source, block[last]):
        return []
    roots = [] if saved is None else [node for _, other, node in blocks_around(saved) if other is block][:1]
    savers = {part for one in roots for part in ast.walk(one)}
    if roots:
        # What else was computed by the updated networks on the way to the loss.
        steps = [node for stack in written for _, other, node in blocks_around(stack) if other is block]
        owners = {owner for node in steps for owner in _stepping(node)}
        networks = set[str]().union(*(networks_of(source, one) for one in owners))
        roots += [node for node in block[:last] if _runs_one_of(source, node, networks)]
    found: list[Lines] = []
    for first, only_from in ((min(map(block.index, roots), default=last), set(roots)), (0, None)):
        if first >= last:
            continue
        again = _slice(source, block[first:last], after, only_from)
        drawn = [] if only_from is None else _draws_of(again)
        if not again or _draws(again, saved or (), {call for _, call in drawn}):
            continue
        if savers and savers.isdisjoint(again):
            # The loss leads to what was saved by a path that is not seen here: an attribute of an object, a closure.
            continue
        rows = {node: source.lines[(at := source.span(node)).line - 1 : at.end_line] for node in again}
        copies = {node: "\n".join(own) for node, own in rows.items()}
        kept_whole = {node for node, _ in drawn}
        for at_node, node in enumerate(again):
            if node not in kept_whole and (part := _needed_part(source, node, [*again[at_node + 1 :], *after])):
                copies[node] = f"{source.indent(source.span(node))}{part}"
        changes = dict[int, str]()
        for number, (node, call) in enumerate(drawn):
            # What a call is given by chance is drawn before it, once for both.
            raw, name, at = (
                source.slice(source.span(call)),
                fresh_name(source, f"drawn{number or ''}"),
                source.span(node),
            )
            before = changes.get(at.line, copies[node]).removesuffix(copies[node])
            copies[node] = copies[node].replace(raw, name, 1)
            changes.update(dict.fromkeys(range(at.line, at.end_line + 1), ""))
            changes[at.line] = f"{before}{source.indent(at)}{name} = {raw}\n{copies[node]}"
        end = source.span(block[last]).end_line
        changes[end] = "\n".join([source.lines[end - 1], *copies.values()])
        lines = tuple((source.file, line, text) for line, text in sorted(changes.items()))
        if lines not in found:
            found.append(lines)
    return found


def _needed_part(source: SourceFile, node: ast.stmt, later: list[ast.stmt]) -> str | None:
    """``b = g(x)`` of ``a, b = f(x), g(x)`` where only ``b`` is read later; None where all of it is needed."""
    pairs = list(assigned_pairs(node)) if isinstance(node, ast.Assign) and len(node.targets) == 1 else []
    read = names_exposed(later) - _only_logged(source, later)
    needed = [(to, value) for to, value in pairs if not isinstance(to, ast.Name) or to.id in read]
    if not 0 < len(needed) < len(pairs):
        return None
    sides = zip(*((source.text(to), source.text(value)) for to, value in needed), strict=True)
    return " = ".join(", ".join(side) for side in sides)


def _stepping(node: ast.stmt) -> set[str]:
    """The names of optimizers that a statement may step: ``opt`` of ``opt.step()`` and ``with training(opt):``."""
    calls = [one for one in header_nodes(node) if isinstance(one, ast.Call)]
    owners = [one.func.value for one in calls if isinstance(one.func, ast.Attribute)]
    given = [part for one in calls for part in (*one.args, *(named.value for named in one.keywords))]
    return {ast.unparse(one) for one in (*owners, *given) if isinstance(one, ast.Name | ast.Attribute)}


def _runs_one_of(source: SourceFile, node: ast.stmt, networks: set[str]) -> bool:
    """Whether an assignment calls one of the networks, a part of one or its method, itself or by a function it calls.

    A function of the file: ``self.score(x)``, which returns ``self.critic(x)``.
    """
    functions, entered = functions_of(source), set[str]()
    waiting: list[ast.stmt] = [node] if isinstance(node, ast.Assign) else []
    while waiting:
        for call in (one for one in ast.walk(waiting.pop()) if isinstance(one, ast.Call)):
            if any(f"{ast.unparse(call.func)}.".startswith(f"{one}.") for one in networks):
                return True
            name = leaf_name(call.func) or ""
            if name in functions and name not in entered:
                entered.add(name)
                waiting.append(functions[name])
    return False


_DRAWING = frozenset(
    {
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "multinomial", "poisson"),
        *("normal", "normal_", "uniform", "uniform_", "bernoulli", "bernoulli_", "random_", "exponential_"),
        *("sample", "rsample", "choice", "next"),
    }
)


def _draws_of(again: list[ast.stmt]) -> list[tuple[ast.stmt, ast.Call]]:
    """The calls of ``torch.randn`` and its like that are an argument of another call, with their statements."""
    values = [(one, part) for one in again if isinstance(one, ast.Assign) for part in ast.walk(one.value)]
    if any(isinstance(part, _LATER) for _, part in values):
        return []
    calls = [(one, part) for one, part in values if isinstance(part, ast.Call) and part is not one.value]
    return [(one, call) for one, call in calls if leaf_name(call.func) in _FACTORIES]


_LATER = (ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp, ast.IfExp, ast.BoolOp)
"""Expressions of which a part may be evaluated later, often, or not at all."""
_FACTORIES = frozenset({"rand", "randn", "randint", "rand_like", "randn_like"})


def _draws(again: list[ast.stmt], saved: Sequence[Frame], but: set[ast.Call]) -> bool:
    """Whether the statements draw random numbers or a batch, or their functions on the stack ``saved`` do."""
    nodes: list[ast.AST] = [part for one in again for part in ast.walk(one) if part not in but]
    for above, below in pairwise(saved):
        at, inner = statement_at(above), statement_at(below)
        if at is not None and inner is not None and inner.function is not None and at.node in nodes:
            nodes += ast.walk(inner.function)
    return draws_again(nodes)


def draws_again(nodes: Iterable[ast.AST]) -> bool:
    """Whether one of the nodes is a call that draws random numbers or a batch, and would draw others if run again."""
    names = [leaf_name(one.func) or "" for one in nodes if isinstance(one, ast.Call)]
    return any(name in _DRAWING or draws_batch(name) for name in names)


def run_again_for_next_round(
    saved: Sequence[Frame], written: Sequence[Sequence[Frame]], used: Sequence[Frame]
) -> list[Lines]:
    """The same for the backward of the next round, which stands before the writes, in the loop around them.

    Values carried into the next round (``value = next_value``) are computed once more by the updated parameters. Empty
    where nothing is carried over after the last of the writes.
    """
    for source, block, use in blocks_around(used):
        loop = source.parents[use][0]
        starts = [block.index(node) for _, other, node in blocks_around(saved) if other is block]
        ends = [block.index(node) for one in written for _, other, node in blocks_around(one) if other is block]
        if not isinstance(loop, ast.For | ast.While) or not starts or len(ends) != len(written):
            continue
        last = max(ends)
        if not block.index(use) < min(ends) or starts[0] >= last or not is_whole_lines(source, block[last]):
            return []
        carried, bound = set[str](), set[str]()
        for node in (*block[last + 1 :], *block[: block.index(use) + 1]):
            carried |= names_read([node]) - bound
            bound |= names_bound([node])
        between = block[starts[0] : last]
        computed = set().union(*(names_bound([node]) for node in between)) & carried
        taken = [node for node in block[last + 1 :] if names_read([node]) & computed and names_bound([node])]
        again = _slice(source, between, taken, set(between[:1])) if taken else []
        if not again:
            return []
        copies = [line for one in map(source.span, again) for line in source.lines[one.line - 1 : one.end_line]]
        end = source.span(block[last]).end_line
        return [((source.file, end, "\n".join([source.lines[end - 1], *copies])),)]
    return []


def run_again_for_state(name: str, bound: Frame, updated: Sequence[Frame]) -> tuple[str, Lines] | None:
    """The value carried into the next round as ``name``, computed once more after the update, and the lines.

    ``value = next_value`` of a round that computed ``next_value = critic(state)``. None where the value depends on one
    carried over before (a hidden state, a running sum), where it is written into a part of a memory, or where the
    source does not show how it was computed.
    """
    own = statement_at(bound)
    places = [] if own is None else [(block, node) for _, block, node in blocks_around(updated) if own.node in block]
    value = (
        None
        if own is None
        else next((one.value for one in bindings_of(own.node) if one.name == name and one.replaces), None)
    )
    if own is None or not places or not isinstance(value, ast.Name):
        return None
    source, (block, update) = own.source, places[0]
    before = block[: block.index(update)]
    computed = [node for node in before if value.id in names_bound([node])]
    again = computed[-1:] if update is not own.node else []
    behind = [*again, *([own.node] if own.node in before else [])]
    if not again or not all(is_whole_lines(source, one) for one in (*behind, update)):
        return None
    made = again[0]
    if not isinstance(made, ast.Assign) or [ast.unparse(one) for one in made.targets] != [value.id]:
        return None
    has_call = any(isinstance(one, ast.Call) for one in ast.walk(made))
    if not has_call or {name, value.id} & {chain_key(one) for one in ast.walk(made.value)}:
        return None
    copies = [line for one in map(source.span, behind) for line in source.lines[one.line - 1 : one.end_line]]
    end = source.span(update).end_line
    return value.id, ((source.file, end, "\n".join([source.lines[end - 1], *copies])),)


def _behind_writes(
    written: Sequence[Sequence[Frame]], used: Sequence[Frame]
) -> tuple[SourceFile, list[ast.stmt], int, int] | None:
    """The innermost block in which each write and the backward are two statements; the indices of both (last write)."""
    found: list[tuple[SourceFile, list[ast.stmt], int, int]] = []
    for stack in written:
        above, below = until_apart(stack, used)
        own = [(block, node) for _, block, node in blocks_around(above)]
        pair = next(
            (
                (source, block, block.index(node), block.index(use))
                for source, block, use in blocks_around(below)
                for other, node in own
                if other is block and node is not use
            ),
            None,
        )
        if pair is None or pair[2] >= pair[3]:
            return None
        found.append(pair)
    return max(found, key=lambda one: one[2]) if found else None


def _until(statement: ast.stmt, used: Sequence[Frame]) -> list[ast.stmt]:
    """The statements of a branch up to the backward; what only comes after it (a log) needs no new values."""
    body = [*statement.body, *statement.orelse] if isinstance(statement, ast.If) else []
    lines = {frame.line for frame in used}
    for index, node in enumerate(body):
        if any(node.lineno <= line <= (node.end_lineno or node.lineno) for line in lines):
            test = ast.Expr(statement.test) if isinstance(statement, ast.If) else statement
            return [test, *body[:index], *_until(node, used)]
    return [statement]


def _slice(
    source: SourceFile, between: list[ast.stmt], after: list[ast.stmt], only_from: set[ast.stmt] | None
) -> list[ast.stmt]:
    """The assignments that ``after`` depends on; of these only ``only_from`` and what depends on them, if given."""
    hanging: set[ast.stmt] = set()
    tainted: set[str] = set()
    for node in between:
        if only_from is None or node in only_from or names_read([node]) & tainted:
            hanging.add(node)
            tainted |= names_bound([node])
    needed = names_exposed(after) - _only_logged(source, after)
    again: list[ast.stmt] = []
    for node in reversed(between):
        if isinstance(node, ast.FunctionDef) and node.name in needed:
            # It reads the enclosing variables at the time of its call.
            needed |= names_read([node]) - {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
            continue
        bound = names_bound([node])
        if not bound & needed or node not in hanging or constructs(source, node):
            continue
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not is_whole_lines(source, node):
            return []
        again.append(node)
        needed = (needed - bound) | names_read([node])
    return again[::-1]


def _only_logged(source: SourceFile, nodes: list[ast.stmt]) -> set[str]:
    """The names of which the statements read only ``name.item()``: a log shows the value that was learnt from."""
    names = [one for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)]
    above = [(one.id, source.parents.get(one, (None, ""))[0]) for one in names]
    read = {name for name, parent in above if not (isinstance(parent, ast.Attribute) and parent.attr == "item")}
    return {one.id for one in names} - read


def fresh_name(source: SourceFile, name: str) -> str:
    """``name``, with underscores appended while the file has a variable of that name."""
    known = {node.id for node in source.nodes if isinstance(node, ast.Name)}
    known |= {node.arg for node in source.nodes if isinstance(node, ast.arg)}
    while name in known:
        name += "_"
    return name


def constructs(source: SourceFile, node: ast.stmt) -> bool:
    """Whether something is constructed that exists once: a model, an optimizer, a data set. A second one would differ.

    Classes begin with a capital letter; so do some variables (``D(fake)``), which the file binds.
    """
    names = {leaf_name(call.func) or "" for call in ast.walk(node) if isinstance(call, ast.Call)}
    capital = class_names(names)
    return bool(capital - _bound_anywhere(source)) if capital else False


def _bound_anywhere(source: SourceFile) -> set[str]:
    """The last parts of all names and attributes that the file binds, arguments included."""
    nodes = list(source.nodes)
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    return {name for node in stored if (name := leaf_name(node))} | {
        node.arg for node in nodes if isinstance(node, ast.arg)
    }


def view_again(frame: Frame, name: str) -> Change | None:
    """A line ``top = out[:2]`` before the statement at ``frame``, which writes the view ``name`` made so earlier.

    None where the base of the view has since been rebound or written by its name: that would be another view.
    """
    statement, made = statement_at(frame), definition_of(frame, name)
    if statement is None or made is None or made.is_loop or made.elements or not name.isidentifier():
        return None
    value = ast.parse(made.value, mode="eval").body
    first = statement_at(made.frame)
    if first is None or first.function is not statement.function or first.scope is None:
        return None
    then, now = (reaching(first.scope.body, one.node) for one in (first, statement))
    if any(then.get(one.id) != now.get(one.id) for one in ast.walk(value) if isinstance(one, ast.Name)):
        return None
    is_method = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    is_own = any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(value))
    if not (isinstance(value, ast.Subscript) or is_method) or is_own:
        return None
    return insert_before(statement.source, statement.node, f"{name} = {made.value}", "view_again")
