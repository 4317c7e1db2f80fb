"""A step that runs between its own ``zero_grad()`` and the backward whose gradients it is to use."""

from __future__ import annotations

import ast

from gradsan.model import Frame, Lines
from gradsan.source.identifiers import leaf_name
from gradsan.source.locate import statement_at
from gradsan.source.rewrite.moving import is_whole_lines, names_bound, names_read


def backward_to_its_step(backward: Frame) -> Lines:
    """The changed lines that put the backward at a frame before the step, or the step behind the backward.

    Where one block clears, steps, and then runs its first backward, which no other step follows. What stands in between
    (an average, a projection) is meant for after the step, so the backward moves; unless it computes the loss. Or where
    an ``if`` of that block steps and clears: the backward accumulates, and goes before it.
    """
    statement = statement_at(backward)
    if statement is None:
        return ()
    source, node = statement.source, statement.node
    parent, field = source.parents[node]
    block = getattr(parent, field, None)
    if not isinstance(block, list):
        return ()
    at, owners = block.index(node), [_method_of(one) for one in block]
    step = next((index for index in range(at - 1, -1, -1) if _steps(block[index])), None)
    runs = [index for index, one in enumerate(block) if any(map(_is_backward, ast.walk(one)))]
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
    elif not cleared:
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
    return isinstance(node, ast.Call) and leaf_name(node.func) == "backward"
