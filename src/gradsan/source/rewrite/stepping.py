"""Backwards and steps out of order: a step before the backward whose gradients it is to use; two backwards in one."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import NamedTuple

from gradsan.model import Frame, Lines
from gradsan.source.change import Edit, edited
from gradsan.source.flow.rounds import in_same_function
from gradsan.source.identifiers import leaf_name
from gradsan.source.locate import Expression, at_line, expression_at, statement_at
from gradsan.source.methods import BACKWARDS
from gradsan.source.rewrite.given import networks_of
from gradsan.source.rewrite.moving import (
    functions_of,
    in_one_block,
    is_whole_lines,
    move_behind,
    names_bound,
    names_read,
)
from gradsan.source.tree import SourceFile, header_nodes, read_source


def backward_to_its_step(backward: Frame) -> Lines:
    """The changed lines that put the backward at a frame before the step, or the step behind the backward.

    Where one block clears, steps, and then runs its first backward, which no other step follows. What stands in between
    (an average, a projection) is meant for after the step, so the backward moves; unless it computes the loss. Or where
    an ``if`` of that block steps and clears: the backward accumulates, and goes before it. Or where backwards of others
    that clear and step stand in between.
    """
    statement = statement_at(backward)
    if statement is None:
        return ()
    source, node = statement.source, statement.node
    block = source.block(node)
    at, owners = block.index(node), [_method_of(one) for one in block]
    step = next((index for index in range(at - 1, -1, -1) if _steps(block[index])), None)
    runs = [index for index, one in enumerate(block) if any(map(_is_backward, ast.walk(one)))]
    if runs[:1] != [at] and (empty := _step_without_backward(source, block, at)) is not None:
        return _put_before(source, block, empty, node)
    if step is None or runs[:1] != [at] or any(owner & _steps(block[step]) for owner in map(_steps, block[at:])):
        return ()
    end = at + 1
    while end < len(block) and (owners[end][0] or "").startswith("clip_grad"):
        end += 1
    moving, passed = block[at:end], block[step + 1 : at]
    cleared = [index for index in range(step) if owners[index] == ("zero_grad", owners[step][1])]
    if isinstance(block[step], ast.If):
        if not _clears_what_it_steps(block[step]) or names_bound(block[step:at]) & names_read(moving):
            return ()
        place = source.span(block[step]).line - 1
        moving = [node]
    elif not cleared or any(_may_give_gradients(source, one) for one in block[cleared[-1] : step + 1]):
        return ()
    elif not passed or names_bound(passed) & names_read(moving):
        moving, place = [block[step]], source.span(block[end - 1]).end_line
    else:
        # What reads gradients before the step comes after it.
        is_bound = names_bound(block[cleared[-1] + 1 : step]) & names_read(moving)
        place = source.span(block[step - 1 if is_bound else cleared[-1]]).end_line
    ends = (block[step], block[max(step - 1, 0)], block[end - 1], *(block[one] for one in cleared))
    if place < 1 or not all(is_whole_lines(source, one) for one in (*moving, *ends)):
        return ()
    spans = [source.span(one) for one in moving]
    text = "\n".join("\n".join(source.lines[span.line - 1 : span.end_line]) for span in spans)
    changes = {line: "" for span in spans for line in range(span.line, span.end_line + 1)}
    changes[place] = f"{source.lines[place - 1]}\n{text}"
    return tuple((source.file, line, changed) for line, changed in sorted(changes.items()))


def later_backward_to_its_step(backward: Frame) -> Lines:
    """The changed lines that put a later backward of the block before the step which it missed; none where none did."""
    statement = statement_at(backward)
    for node in [] if statement is None else statement.source.behind(statement.node):
        if _method_of(node)[0] in BACKWARDS and (lines := backward_to_its_step(at_line(backward, node.lineno))):
            return lines
    return ()


def is_only_backward(frame: Frame) -> bool:
    """Whether the file has no other backward than the one at ``frame``, which a loop runs for each of its losses."""
    source = read_source(frame.file)
    found = (
        []
        if source is None
        else [source.span(node).line for node in source.nodes if isinstance(node, ast.Call) and _is_backward(node)]
    )
    return len(found) == 1 and frame.line <= found[0] <= (frame.end_line or frame.line)


def steps_without_backward(step: Frame, backward: Frame) -> bool:
    """Whether each round of a loop computes a loss and steps, and an ``if`` around chooses if any runs the backward.

    Where the file sets some ``.grad`` itself, it may be another gradient. What is chosen round by round, by a counter
    or a loss, may be meant: such a step goes on along the last gradient.
    """
    stepped, filled = statement_at(step), statement_at(backward)
    if stepped is None or filled is None or not stepped.loops or stepped.loops != filled.loops:
        return False
    source, inside = stepped.source, list(ast.walk(stepped.loops[-1]))
    around = {one for one, _ in source.ancestors(stepped.node)}
    chosen = [one for one, _ in source.ancestors(filled.node) if isinstance(one, ast.If) and one not in around]
    apart = {inner for one in chosen if one in inside for inner in ast.walk(one)}
    bound = names_bound([one for one in inside if isinstance(one, ast.Assign) and one not in apart])
    stores = (one.attr for one in source.nodes if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
    is_beside = filled.node in apart and stepped.span.line > filled.span.line and "grad" not in stores
    return is_beside and not bound.isdisjoint(names_read([filled.node])) and _is_of_phase(stepped.loops[-1], chosen)


def _is_of_phase(loop: ast.stmt, chosen: list[ast.If]) -> bool:
    """Whether nothing that decides an ``if`` inside the loop is bound or called there: it is the same in all rounds."""
    tests = [inner for one in chosen for inner in ast.walk(one.test)]
    names = [one for one in ast.walk(loop) if isinstance(one, ast.Name)]
    bound = {one.id for one in names if isinstance(one.ctx, ast.Store)}
    return not any(isinstance(one, ast.Call) or (isinstance(one, ast.Name) and one.id in bound) for one in tests)


def step_by_scaler(step: Frame, backward: Frame) -> Lines:
    """The changed line that has the scaler make the step, and update: ``scaler.step(optimizer)``."""
    stepped, filled = statement_at(step), statement_at(backward)
    name, optimizer = (None, "") if stepped is None else _method_of(stepped.node)
    scaled = (
        None
        if filled is None
        else next(
            (
                ast.unparse(one.func.value)
                for one in ast.walk(filled.node)
                if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr == "scale"
            ),
            None,
        )
    )
    if stepped is None or filled is None or name != "step" or scaled is None or stepped.function is not filled.function:
        return ()
    call = stepped.node.value if isinstance(stepped.node, ast.Expr) else None
    if not is_whole_lines(stepped.source, stepped.node) or not isinstance(call, ast.Call) or call.args or call.keywords:
        return ()
    line = stepped.span.line
    text = stepped.source.lines[line - 1]
    indentation = text[: len(text) - len(text.lstrip())]
    updates = any(isinstance(one, ast.stmt) and _method_of(one) == ("update", scaled) for one in stepped.source.nodes)
    calls = [f"{scaled}.step({optimizer})", *([] if updates else [f"{scaled}.update()"])]
    return ((stepped.source.file, line, "\n".join(f"{indentation}{one}" for one in calls)),)


def _step_without_backward(source: SourceFile, block: list[ast.stmt], at: int) -> int | None:
    """The one step of the block that runs after its ``zero_grad()`` without a backward, if no step uses that at ``at``.

    None where another optimizer steps in between that has not cleared since: it would take both gradients.
    """
    calls = [_method_of(one) for one in block]
    steps = [index for index, (name, _) in enumerate(calls) if name == "step"]
    clearing = [_cleared_by(source, node) for node in block]
    cleared = {
        step: max(
            (index for index in range(step) if not clearing[index].isdisjoint(_owners(source, calls[step][1]))),
            default=-1,
        )
        for step in steps
    }
    empty = [
        step
        for step in steps
        if cleared[step] >= 0 and not any(_may_give_gradients(source, one) for one in block[cleared[step] : step + 1])
    ]
    if len(empty) != 1 or not empty[0] < at or any(cleared[step] < at < step for step in steps):
        return None
    others = [step for step in steps if step != empty[0]]
    if any(calls[step][1] == calls[empty[0]][1] for step in others):
        return None
    return empty[0] if all(cleared[step] > empty[0] or step < empty[0] for step in others) else None


def _owners(source: SourceFile, optimizer: str) -> set[str]:
    """The optimizer, and its network, if it has one alone: ``net.zero_grad()`` clears the same."""
    networks = networks_of(source, optimizer)
    return {optimizer, *(networks if len(networks) == 1 else ())}


def _cleared_by(source: SourceFile, node: ast.stmt) -> set[str]:
    """Whose gradients a statement clears, or a function of the file without arguments that it calls."""
    name, owner = _method_of(node)
    if name == "zero_grad":
        return {owner}
    call = node.value if isinstance(node, ast.Expr) else None
    called = None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
        called = functions_of(source).get(call.func.id)
    inner = [] if called is None else [_method_of(one) for one in called.body]
    return {owner for name, owner in inner if name == "zero_grad"}


def _may_give_gradients(source: SourceFile, node: ast.stmt) -> bool:
    """Whether a statement runs a backward, sets a gradient, steps by a closure, or calls what does so in the file."""
    functions, waiting, entered = functions_of(source), list[ast.AST]([node]), set[str]()
    while waiting:
        for one in ast.walk(waiting.pop()):
            if isinstance(one, ast.Attribute) and one.attr == "grad" and isinstance(one.ctx, ast.Store):
                return True
            name = leaf_name(one.func) or "" if isinstance(one, ast.Call) else ""
            if name.endswith("backward") or (isinstance(one, ast.Call) and name == "step" and one.args):
                return True
            if name in functions and name not in entered:
                entered.add(name)
                waiting.append(functions[name])
    return False


def _put_before(source: SourceFile, block: list[ast.stmt], place: int, moved: ast.stmt) -> Lines:
    """The changed lines that put a statement of the block before another; none where it reads what is bound between."""
    between = block[place : block.index(moved)]
    if names_bound(between) & names_read([moved]) or not all(
        is_whole_lines(source, one) for one in (block[place], moved)
    ):
        return ()
    first, own = source.span(block[place]).line, source.span(moved)
    text = "\n".join(source.lines[own.line - 1 : own.end_line])
    changes = dict.fromkeys(range(own.line, own.end_line + 1), "")
    return (
        (source.file, first, f"{text}\n{source.lines[first - 1]}"),
        *((source.file, *one) for one in changes.items()),
    )


def _steps(node: ast.stmt) -> set[str]:
    """The optimizers that a statement, or an ``if`` without ``else``, steps."""
    inner = node.body if isinstance(node, ast.If) and not node.orelse else [node]
    return {owner for name, owner in map(_method_of, inner) if name == "step"}


def _clears_what_it_steps(node: ast.stmt) -> bool:
    calls = [_method_of(one) for one in node.body] if isinstance(node, ast.If) else []
    return all(("zero_grad", owner) in calls for owner in _steps(node))


def _method_of(node: ast.stmt) -> tuple[str | None, str]:
    """``("step", "opt")`` of the statement ``opt.step()``."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return None, ""
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    return leaf_name(call.func), owner


def _is_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and leaf_name(node.func) in BACKWARDS


def called_step_behind(updated: Sequence[Sequence[Frame]], used: Sequence[Frame]) -> Lines:
    """The statement whose functions step (a callback, a handler), moved behind the backward that it stands before.

    Only where that backward is the only one of the files: then the step uses the gradients of the round before. Stacks
    of the user's frames, outermost first.
    """
    # A step over a graph that lives is told before any backward: there is no use yet.
    if not updated or not used or not all(len(stack) > 1 and _steps_at(stack[-1]) for stack in updated):
        return ()
    moved, statement = move_behind(updated, used), statement_at(used[-1])
    found = in_one_block(updated, used)
    if moved is None or found is None or statement is None or found[1][found[4]] is not statement.node:
        return ()
    files = dict.fromkeys(frame.file for stack in (*updated, used) for frame in stack)
    sources = [source for file in files if (source := read_source(file)) is not None]
    calls = [node for source in sources for node in source.nodes if _is_backward(node)]
    is_only = len(sources) == len(files) and len(calls) == 1
    is_within = any(one in ast.walk(statement.node) for one in calls)
    return moved.lines if is_only and is_within and isinstance(statement.node, ast.Expr) else ()


def _steps_at(frame: Frame) -> bool:
    statement = statement_at(frame)
    return statement is not None and bool(_steps(statement.node))


_TOUCHING_GRADIENTS = frozenset(
    {"zero_grad", "step", "backward", "clip_grad_norm_", "clip_grad_value_", "grad", "requires_grad_", "requires_grad"}
)


def backward_of_sum(first: Frame, second: Frame) -> Lines:
    """``Fix.lines`` that join ``a.backward()`` and ``b.backward()``, two lines of one block, in ``(a + b).backward()``.

    A library may be what calls both (``accelerator.backward(a)``). Empty where the calls have other arguments, but for
    a ``retain_graph`` of the first, or anything between them reads or changes gradients.
    """
    call, other_call = expression_at(first), expression_at(second)
    loss = None if call is None else _plain_loss(call, frozenset({"retain_graph"}))
    added = None if other_call is None else _plain_loss(other_call, frozenset())
    if not in_same_function(first, second) or loss is None or added is None:
        return ()
    if (loss.before, loss.behind) != (added.before, added.behind) or loss.text == added.text:
        return ()
    one, other = statement_at(first), statement_at(second)
    if one is None or other is None or one.span.line == other.span.line:
        return ()
    source = one.source
    between = _between(source, one.node, other.node)
    if between is None or any(_touches_gradients(node) for node in between):
        return ()
    if names_bound(between) & names_read([one.node]):
        return ()
    if one.span.line != one.span.end_line or other.span.line != other.span.end_line:
        return ()
    change = edited(source, [Edit(other.span, f"{loss.before}({loss.text} + {added.text}){loss.behind}")], "sum_losses")
    is_alone = source.lines[one.span.line - 1].strip() == one.text
    if change is None or not is_alone:
        return ()
    return (first.file, one.span.line, ""), (second.file, other.span.line, change.new)


class _Loss(NamedTuple):
    """The loss in a call of ``backward``, and what stands before and behind it."""

    text: str
    before: str = ""
    behind: str = ".backward()"


def _plain_loss(call: Expression, allowed: frozenset[str]) -> _Loss | None:
    node = call.node
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    if not isinstance(call.statement, ast.Expr) or any(one.arg not in allowed for one in node.keywords):
        return None
    name, holder, before = node.func.attr, node.func.value, ""
    if name in BACKWARDS and len(node.args) == 1:
        loss = _term(call.source, node.args[0])
        return None if loss is None else _Loss(loss, call.source.text(node.func), "")
    if name != "backward" or node.args:
        return None
    if isinstance(holder, ast.Call) and leaf_name(holder.func) == "scale" and len(holder.args) == 1:
        before, holder = call.source.text(holder.func), holder.args[0]
    loss = _term(call.source, holder)
    return None if loss is None else _Loss(loss, before)


def _term(source: SourceFile, node: ast.expr) -> str | None:
    """A loss as a term of a sum: what others have computed, or a multiple of it; None where a function is called."""
    is_product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div)
    if any(isinstance(one, ast.Call) for one in ast.walk(node)) or not (is_product or isinstance(node, _COMPUTED)):
        return None
    return source.text(node)


_COMPUTED = (ast.Name, ast.Attribute, ast.Subscript)


def _between(source: SourceFile, one: ast.stmt, other: ast.stmt) -> list[ast.stmt] | None:
    """The statements between two of one block; None where they are in different blocks."""
    block = source.block(one) if one in source.parents else []
    return block[block.index(one) + 1 : block.index(other)] if other in block else None


def _touches_gradients(statement: ast.stmt) -> bool:
    if hasattr(statement, "body"):
        return True
    return any(isinstance(node, ast.Attribute) and node.attr in _TOUCHING_GRADIENTS for node in header_nodes(statement))
