"""An update of leaves under ``no_grad``: the statement, and the others of the same update."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited, indentation_of
from gradsan.source.flow.reuse import second_name
from gradsan.source.flow.writing import writes_beside, written_root
from gradsan.source.identifiers import assigned_names, leaf_name
from gradsan.source.imports import torch_name
from gradsan.source.locate import statement_at
from gradsan.source.methods import has_attribute
from gradsan.source.rewrite.given import networks_of
from gradsan.source.rewrite.leaves import later_updates_of_same, later_writes_of_same
from gradsan.source.rewrite.moving import (
    blocks_around,
    functions_of,
    gone_through,
    in_one_block,
    is_whole_lines,
    names_bound,
    names_read,
    until_apart,
)
from gradsan.source.tree import SourceFile, Span


def under_no_grad(frame: Frame, leaves: Collection[str] = ()) -> Change | None:
    """The statement at ``frame`` under ``with torch.no_grad():``; None where it shares its lines with others.

    The in-place statements after it that belong to the same update are included: those that write the same variable
    again or another attribute of the same object, or read gradients. So are definitions that only these statements
    read, and the update in place, right before it, of what it copies. Writes of that variable elsewhere in the block,
    of ``leaves``, which PyTorch refuses as well, and those of other loops of the function that go through the same
    leaves get a ``with`` of their own. A second name that is compared with the variable afterwards is bound to a copy.
    """
    statement = statement_at(frame)
    if statement is None or hasattr(statement.node, "body"):
        return None
    source = statement.source
    torch = torch_name(source)
    parent, block = source.parents[statement.node][0], source.block(statement.node)
    if isinstance(parent, ast.For) and _is_one_line(source, parent):
        return edited(source, [_within_no_grad(source, torch, parent, parent)], "no_grad")
    if not _has_own_lines(source, statement.node):
        return None
    edits: list[Edit] = []
    also = {one for one in block if written_root(one) in leaves and _has_own_lines(source, one)}
    beside = {*writes_beside(source, statement.node), *also}
    for node in sorted(beside, key=lambda one: one.lineno):
        first = block.index(node)
        if first >= block.index(statement.node) and (not edits or source.span(node).line > edits[-1].span.end_line):
            last = block[_last_of_update(source, block, first, leaves)]
            while not edits and first > 0 and _prepares(source, block[first - 1], node):
                first -= 1
            edits.append(_within_no_grad(source, torch, block[first], last))
    for other in [
        *later_writes_of_same(source, statement.node, block),
        *later_updates_of_same(source, statement.node, block),
    ]:
        around = getattr(source.parents[other][0], "body", [])
        if other in around and _has_own_lines(source, other) and source.span(other).line > edits[-1].span.end_line:
            edits.append(
                _within_no_grad(source, torch, other, around[_last_of_update(source, around, around.index(other))])
            )
    return edited(source, [*_second_name_copied(frame, written_root(statement.node)), *edits], "no_grad")


def _is_one_line(source: SourceFile, loop: ast.For) -> bool:
    """Whether a loop has its one statement on its own line: ``for p in params: p -= lr * p.grad``."""
    span = source.span(loop)
    return len(loop.body) == 1 and span.line == span.end_line and _has_own_lines(source, loop)


def _second_name_copied(frame: Frame, written: str | None) -> list[Edit]:
    """``w_old = w.detach().clone()`` for ``w_old = w``, where both are read after the write as if they were two."""
    second = None if written is None else second_name(frame, written)
    if second is None or second.kind not in ("name", "compared") or second.value is None:
        return []
    return [Edit.insert(second.value.end_line, second.value.end_column, ".detach().clone()")]


def _prepares(source: SourceFile, before: ast.stmt, write: ast.stmt) -> bool:
    """Whether ``before`` updates in place, from the leaf itself, what ``write`` copies into it: ``s += a * (p - s)``.

    Recorded, its graph would grow with every update.
    """
    kept, leaf = written_root(before), written_root(write)
    if kept is None or leaf is None or kept == leaf or not _has_own_lines(source, before):
        return False
    return kept in set(_read_with_graph(write)) and leaf in set(_read_with_graph(before))


def _within_no_grad(source: SourceFile, torch: str, node: ast.stmt, last: ast.stmt) -> Edit:
    first, end = source.span(node), source.span(last)
    # Lines between, comments among them, go along.
    unit = indentation_of(source)
    within = [f"{unit}{line}" if line.strip() else line for line in source.lines[first.line - 1 : end.end_line - 1]]
    tail = source.lines[end.end_line - 1][: end.end_column - 1]
    text = "\n".join([f"with {torch}.no_grad():", *within, f"{unit}{tail}"])
    return Edit(Span(first.line, first.column, end.end_line, end.end_column), text)


def updated_in_place(frame: Frame) -> Change | None:
    """``w = w - lr * w.grad`` at ``frame``, and the updates of other leaves beside it, in place under ``no_grad``.

    Where the function clears no gradient, an in-place update would accumulate into it: there the new value becomes a
    leaf of its own. None where the statement is no sum or difference of the leaf itself and of a value computed from
    its gradient.
    """
    statement = statement_at(frame)
    if statement is None:
        return None
    source = statement.source
    block = source.block(statement.node)
    is_leaf = not _clears_gradients(statement.function or source.module)
    new = _as_leaves if is_leaf else _update_in_place
    if not new(source, statement.node):
        return None
    first = last = block.index(statement.node)
    while first > 0 and new(source, block[first - 1]):
        first -= 1
    while last + 1 < len(block) and new(source, block[last + 1]):
        last += 1
    if is_leaf:
        edits = [edit for node in block[first : last + 1] for edit in _as_leaves(source, node)]
        return edited(source, edits, "new_leaf")
    texts = [_update_in_place(source, node) for node in block[first : last + 1]]
    begin, end = source.span(block[first]), source.span(block[last])
    text = "\n".join([f"with {torch_name(source)}.no_grad():", *(f"{indentation_of(source)}{one}" for one in texts)])
    indent = source.indent(begin)
    whole = Span(begin.line, begin.column, end.end_line, end.end_column)
    return edited(source, [Edit(whole, text.replace("\n", f"\n{indent}"))], "no_grad")


def _clears_gradients(scope: ast.AST) -> bool:
    """Whether anything in ``scope`` sets or clears some ``.grad``."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Attribute) and node.attr in ("zero_grad", "zero_"):
            return True
        if isinstance(node, ast.Attribute) and node.attr == "grad" and not isinstance(node.ctx, ast.Load):
            return True
    return False


def _as_leaves(source: SourceFile, node: ast.stmt) -> list[Edit]:
    """``w = (w - lr * w.grad).detach().requires_grad_()``, also for each of ``ws = [w - lr * w.grad for w in ws]``."""
    if not isinstance(node, ast.Assign):
        return []
    value, target = node.value, node.targets[0]
    if isinstance(value, ast.ListComp):
        loop = value.generators[0]
        if len(value.generators) != 1 or source.text(loop.iter) != source.text(target):
            return []
        value, target = value.elt, loop.target
    is_update = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Sub | ast.Add)
    if not isinstance(value, ast.BinOp) or not is_update or not has_attribute(node, "grad"):
        return []
    if source.text(value.left) != source.text(target):
        return []
    span = source.span(value)
    before = Edit.before(span, "(")
    return [before, Edit.after(span, ").detach().requires_grad_()")]


def _update_in_place(source: SourceFile, node: ast.stmt) -> str | None:
    """``w -= lr * w.grad`` for ``w = w - lr * w.grad``."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not _has_own_lines(source, node):
        return None
    target, value = node.targets[0], node.value
    sign = {ast.Sub: "-", ast.Add: "+"}.get(type(value.op)) if isinstance(value, ast.BinOp) else None
    if sign is None or not isinstance(value, ast.BinOp) or not isinstance(target, ast.Name | ast.Attribute):
        return None
    name = source.text(target)
    if source.text(value.left) != name or not has_attribute(node, "grad") or source.span(node).line != node.end_lineno:
        return None
    return f"{name} {sign}= {source.text(value.right)}"


def _has_own_lines(source: SourceFile, node: ast.stmt) -> bool:
    # The lines of a string over several lines cannot be indented.
    texts = (one for one in ast.walk(node) if isinstance(one, ast.Constant | ast.JoinedStr))
    return all(one.lineno == one.end_lineno for one in texts) and is_whole_lines(source, node)


def _last_of_update(source: SourceFile, block: list[ast.stmt], first: int, leaves: Collection[str] = ()) -> int:
    """The index of the last statement of ``block`` that belongs to the update which begins at ``first``."""
    root, last = written_root(block[first]), first
    for index in range(first + 1, len(block)):
        node = block[index]
        if not _has_own_lines(source, node):
            break
        other = written_root(node)
        if other is None and not _only_computes(node):
            break
        is_of_update = other is not None and (
            other in leaves or _is_of_layer(other, root) or has_attribute(node, "grad")
        )
        if other is not None and not is_of_update and not _counts(node):
            # It may belong to what is differentiated: ``total += criterion(model(x), y)``.
            break
        if is_of_update and _stays_within(source, block[first : index + 1]):
            last = index
    return last


def _counts(node: ast.stmt) -> bool:
    """Whether the statement adds a number: ``steps += 1``."""
    return isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Constant)


def _is_of_layer(one: str, other: str | None) -> bool:
    """Whether two written expressions are the same, or attributes of one object: ``conv.weight`` and ``conv.bias``."""
    owner = one.rpartition(".")[0]
    return one == other or (owner not in ("", "self") and other is not None and owner == other.rpartition(".")[0])


def _only_computes(node: ast.stmt) -> bool:
    """Whether a statement only binds a variable, and runs no backward for it."""
    if not isinstance(node, ast.Assign) or not all(isinstance(one, ast.Name) for one in node.targets):
        return False
    return not any(isinstance(one, ast.Attribute | ast.Name) and _walks(one) for one in ast.walk(node.value))


def _walks(node: ast.Attribute | ast.Name) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id
    return name in ("backward", "autograd", "closure")


def _stays_within(source: SourceFile, statements: list[ast.stmt]) -> bool:
    """Whether nothing else in the function (or module) reads the names that ``statements`` bind."""
    names = {name for one in statements if isinstance(one, ast.Assign) for name in assigned_names(one)}
    inside = {node for one in statements for node in ast.walk(one)}
    function = source.function(statements[0])
    scope = ast.walk(source.module if function is None else function)
    return not any(
        isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load) and node not in inside
        for node in scope
    )


def steps_again(used: Sequence[Frame], updated: Sequence[Frame]) -> bool:
    """Whether the first step after the backward at ``used`` is another one of the optimizer whose step updated.

    Then the loss is to train that optimizer's parameters, too. Both are stacks of the user's frames, outermost first.
    """
    # Within a shared helper the two stacks belong to two of its calls, with an optimizer each.
    above, below = until_apart(used, updated)
    mine = {text for frame in below if (text := _stepping(frame)) is not None}
    for _, block, node in blocks_around(above):
        for call in (one.value for one in block[block.index(node) + 1 :] if isinstance(one, ast.Expr)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "step":
                return ast.unparse(call.func.value) in mine
    return False


def stands_before_its_backward(used: Sequence[Frame], updated: Sequence[Frame]) -> bool:
    """Whether the step that updated stands before the backward that it belongs to, in one block with it.

    That is the only backward of the file: then the gradients it steps with are those of the same backward in the round
    before. Or the one before which the same optimizer has cleared gradients, while the others clear before they step.
    Both are stacks of the user's frames, outermost first.
    """
    above, below = until_apart(used, updated)
    if not above or not below or _stepping(below[-1]) is None:
        return False
    steps = [(block, node) for _, block, node in blocks_around(below[-1:])][:1]
    for source, block, node in blocks_around(above):
        for other, step in steps:
            if other is block and block.index(step) < block.index(node):
                calls = [one for one in ast.walk(node) if _gives_gradients(one)]
                is_only = [one for one in source.nodes if _gives_gradients(one)] == calls[:1]
                return is_only or (
                    len(calls) == 1 and _is_cleared_for(source, block, (step, node), _stepping(below[-1]) or "")
                )
    return False


def _is_cleared_for(source: SourceFile, block: list[ast.stmt], pair: tuple[ast.stmt, ast.stmt], optimizer: str) -> bool:
    """Whether the optimizer steps, clears, and then lets the backward run, of which no other step takes the gradients.

    The step and the backward are the ``pair``. That is the first backward of the block, and no step comes next. Or all
    others clear before they step, and the loss of an earlier backward reaches the networks of the one that steps next:
    this loss does not, or is a term of that one.
    """
    backward = pair[1]
    first, last = pair[0].lineno, backward.lineno
    calls = [
        (one.lineno, one.func.attr, ast.unparse(one.func.value))
        for node in block
        for one in ast.walk(node)
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)
    ]
    backwards = [line for line, name, _ in calls if name == "backward"]
    stepping = [(line, owner) for line, name, owner in calls if name == "step"]
    cleared = {owner: line for line, name, owner in reversed(calls) if name == "zero_grad"}
    if [owner for _, owner in stepping].count(optimizer) != 1 or any(first < line < last for line in backwards):
        return False
    if not first <= cleared.get(optimizer, 0) <= last:
        return False
    until = min((line for line in backwards if line > last), default=max(line for line, _, _ in calls) + 1)
    following = next((owner for line, owner in stepping if last < line < until), None)
    if min(backwards) == last:
        return following is None
    others = [(line, owner) for line, owner in stepping if owner != optimizer and owner in cleared]
    is_before = bool(others) and all(cleared[owner] <= line for line, owner in others)
    if following is None or not is_before:
        return is_before
    since = cleared.get(following, last)
    fed = [one for one in block if since <= one.lineno < first and any(map(_gives_gradients, ast.walk(one)))]
    networks, own = networks_of(source, following), _reached(source, block, backward)
    earlier = [_reached(source, block, one) for one in fed]
    named = [one for one in ast.walk(backward) if isinstance(one, ast.Attribute) and one.attr == "backward"]
    losses = {ast.unparse(one.value) for one in named}
    is_apart = networks.isdisjoint(own) or any(losses <= names for names in earlier)
    return is_apart and any(not networks.isdisjoint(names) for names in earlier)


def _reached(source: SourceFile, block: list[ast.stmt], backward: ast.stmt) -> set[str]:
    """The names, and attributes of them, that a backward's loss was computed from, undetached.

    In its block, and in the functions of the file that are called for it.
    """
    known = set(_read_with_graph(backward))
    for node in reversed(block[: block.index(backward)]):
        if not known.isdisjoint(names_bound([node])):
            known |= set(_read_with_graph(node))
    functions = [one for one in source.nodes if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    while called := [one for one in functions if any(name.rpartition(".")[2] == one.name for name in known)]:
        functions = [one for one in functions if one not in called]
        known.update(name for one in called for name in _read_with_graph(one))
    return known


def _read_with_graph(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call) and leaf_name(node.func) in ("detach", "no_grad"):
        return
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield ast.unparse(node)
    for child in ast.iter_child_nodes(node):
        yield from _read_with_graph(child)


def _gives_gradients(node: ast.AST) -> bool:
    """Whether ``node`` is ``loss.backward()`` or the like, or sets ``p.grad``."""
    if isinstance(node, ast.Attribute):
        return node.attr == "grad" and isinstance(node.ctx, ast.Store)
    return isinstance(node, ast.Call) and (leaf_name(node.func) or "").endswith("backward")


def _stepping(frame: Frame) -> str | None:
    """``opt`` of the statement ``opt.step()`` at a frame."""
    statement = statement_at(frame)
    call = statement.node.value if statement is not None and isinstance(statement.node, ast.Expr) else None
    is_step = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "step"
    return ast.unparse(call.func.value) if is_step else None  # type: ignore[union-attr]


def is_put_back(written: Sequence[Sequence[Frame]], used: Sequence[Frame]) -> bool:
    """Whether statements after the backward change the same weights back: a perturbation that it alone is to see.

    A climb along the gradient (SAM, an attack on embeddings), or noise. Stacks of the user's frames, outermost first.
    """
    found = in_one_block(written, used)
    if found is None:
        return False
    source, block, first, last, backward = found
    before, behind = (_changed_by_hand(source, part) for part in (block[first : last + 1], block[backward + 1 :]))
    return any(name in behind and ways != behind[name] for name, ways in before.items())


def _changed_by_hand(source: SourceFile, nodes: Sequence[ast.stmt]) -> dict[str, set[str]]:
    """The variables whose tensors statements write, themselves or by functions of this file, and the statements' texts.

    For a loop variable those that the loop goes through, for a method the object that it belongs to.
    """
    functions = functions_of(source)
    found: dict[str, set[str]] = {}
    for node in nodes:
        inner = list(ast.walk(node))
        through: dict[str, set[str]] = {}
        for loop in (one for one in inner if isinstance(one, ast.For)):
            through |= gone_through(loop.target, loop.iter)
        for one in inner:
            root = _root_written(one)
            names = set() if root is None else through.get(root, {root})
            called = functions.get(leaf_name(one.func) or "") if isinstance(one, ast.Call) else None
            if isinstance(one, ast.Call) and called is not None and any(map(_root_written, ast.walk(called))):
                names = names_read([*one.args, *([one.func.value] if isinstance(one.func, ast.Attribute) else [])])
            for name in names:
                found.setdefault(name, set()).add(ast.unparse(one))
    return found


def _root_written(node: ast.AST) -> str | None:
    """``p`` of ``p.mul_(2)`` and of ``p.data = kept``."""
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    if isinstance(target, ast.Attribute) and target.attr == "data" and isinstance(target.value, ast.Name):
        return target.value.id
    root = written_root(node) if isinstance(node, ast.stmt) else None
    return None if root is None else root.partition(".")[0]
