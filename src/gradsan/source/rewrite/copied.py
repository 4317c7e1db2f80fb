"""Copies of what a call is given, hands out or returns: lines with ``.clone()`` in one expression."""

from __future__ import annotations

import ast
from collections.abc import Callable

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited, followed
from gradsan.source.flow.aliases import share_memory
from gradsan.source.flow.reuse import SecondName
from gradsan.source.flow.rounds import in_same_function
from gradsan.source.flow.targets import written_expression
from gradsan.source.identifiers import leaf_name
from gradsan.source.locate import call_at, statement_at
from gradsan.source.methods import ALIASING_METHODS
from gradsan.source.rewrite.rebinding import can_rebind
from gradsan.source.tree import SourceFile

_OF_TENSORS = frozenset({"numpy", "__array__", "__dlpack__"})
_OF_ARRAYS = frozenset({"from_numpy", "frombuffer", "from_dlpack", "as_tensor", "asarray"})
_KEEPING = frozenset({"detach", "cpu", "contiguous"})
_NAMES_OF_VALUES = ("value", "new_value", "written_value")


def clone_given(frame: Frame, chosen: Callable[[ast.Call], ast.expr | None]) -> Change | None:
    """``.clone()`` after the part of the call at ``frame`` that is ``chosen``; None where there is no such part."""
    found = call_at(frame)
    value = None if found is None else chosen(found[1])
    if found is None or value is None or isinstance(value, ast.Starred):
        return None
    return edited(found[0], followed(found[0], value, ".clone()"), "clone_before")


def parameter_of_copy(frame: Frame) -> Change | None:
    """``nn.Parameter(x.expand(4).clone())``, or ``x.expand(4).clone().requires_grad_()``, where it is made."""
    statement = statement_at(frame)
    value = statement.node.value if statement is not None and isinstance(statement.node, ast.Assign) else None
    if statement is None or not isinstance(value, ast.Call):
        return None
    is_method = isinstance(value.func, ast.Attribute) and value.func.attr == "requires_grad_"
    if not is_method and (leaf_name(value.func) != "Parameter" or not value.args):
        return None
    given = value.func.value if isinstance(value.func, ast.Attribute) and is_method else value.args[0]
    return edited(statement.source, followed(statement.source, given, ".clone()"), "clone_before")


def buffer_of_copy(frame: Frame) -> Change | None:
    """``register_buffer("x", y.expand(4).clone())``, or ``self.x = y.expand(4).clone()``, where it is made."""
    statement = statement_at(frame)
    value = getattr(None if statement is None else statement.node, "value", None)
    if isinstance(value, ast.Call) and leaf_name(value.func) == "register_buffer":
        given = [*value.args[1:2], *(one.value for one in value.keywords if one.arg == "tensor")]
        value = given[0] if given else None
    if statement is None or not isinstance(value, ast.expr):
        return None
    return edited(statement.source, followed(statement.source, value, ".clone()"), "clone_before")


def clone_for_second_name(
    source: SourceFile, statement: ast.stmt, written: ast.AST, notes: tuple[str, ...]
) -> Change | None:
    """``out = x.clone()`` instead of ``out = x`` right before the write to ``out`` at ``statement``."""
    before = next(reversed(source.ahead(statement)), None)
    if not isinstance(before, ast.Assign) or len(before.targets) != 1 or not isinstance(written, ast.Name):
        return None
    name, value = before.targets[0], before.value
    if not isinstance(name, ast.Name) or name.id != written.id or not isinstance(value, ast.Name | ast.Attribute):
        return None
    return edited(source, [Edit.after(source.span(value), ".clone()")], "clone_before", notes)


def computes_with(source: SourceFile, statement: ast.stmt, name: str) -> bool:
    """Whether the value that a statement writes is computed from ``name``, which a copy before it would be, too."""
    value = statement.value if isinstance(statement, ast.Assign | ast.AugAssign) else None
    return value is not None and any(source.text(one) == name for one in ast.walk(value) if isinstance(one, ast.expr))


def clone_source(frame: Frame) -> Change | None:
    """``x[1:] += x[:-1].clone()``: a copy of the one operand that may be a view, of a write that reads its own memory.

    None where several operands may be.
    """
    statement = statement_at(frame)
    node = None if statement is None else statement.node
    if statement is None or not isinstance(node, ast.AugAssign | ast.Assign | ast.Expr):
        return None
    call = node.value if isinstance(node, ast.Expr) else None
    operands = [*call.args, *(one.value for one in call.keywords)] if isinstance(call, ast.Call) else [node.value]
    views = [one for one in operands if _may_be_view(one)]
    if len(views) != 1 or (isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Subscript)):
        return None
    return edited(statement.source, [Edit.after(statement.source.span(views[0]), ".clone()")], "clone_before")


def _may_be_view(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in ALIASING_METHODS
    return isinstance(node, ast.Name | ast.Attribute | ast.Subscript)


def clone_handed_out(frame: Frame, bypass: str) -> Change | None:
    """The conversion at ``frame`` with a copy on one side: ``x.clone().numpy()``, ``from_numpy(a).clone()``.

    ``bypass`` is PyTorch's method or function that shared the memory. None for a bare pointer, which would not
    keep a copy alive.
    """
    if bypass in _OF_TENSORS:
        return clone_given(frame, lambda call: next(iter(call.args), getattr(call.func, "value", None)))
    return clone_given(frame, lambda call: call) if bypass in _OF_ARRAYS else None


def handed_out(frame: Frame, bypass: str) -> str | None:
    """``z`` of ``z.detach().numpy()`` at ``frame``: the tensor whose memory the method ``bypass`` shares."""
    found = call_at(frame)
    if found is None or bypass not in _OF_TENSORS:
        return None
    value = next(iter(found[1].args), getattr(found[1].func, "value", None))
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _KEEPING:
        value = value.func.value
    if isinstance(value, ast.Attribute) and value.attr == "data":
        value = value.value
    return found[0].text(value) if isinstance(value, ast.Name | ast.Attribute | ast.Subscript) else None


def clone_argument(frame: Frame, written: Frame | None, op: str) -> tuple[str, Change] | None:
    """``x`` and the line with ``f(x.clone())``, where the one call at ``frame`` has one argument: a variable.

    The operation ``op`` at ``written``, in the same function, must write that variable's memory: else an inner layer
    may have saved a value of its own, which somebody else writes.
    """
    found = call_at(frame)
    if found is None or len(found[1].args) != 1 or found[1].keywords:
        return None
    source, given = found[0], found[1].args[0]
    name = None if written is None or not in_same_function(frame, written) else written_expression(written, op, ())
    statement = source.statement(found[1])
    if not isinstance(given, ast.Name | ast.Attribute) or name is None or statement is None:
        return None
    if not share_memory(source, statement, source.text(given), name.partition("[")[0]):
        return None
    change = edited(source, [Edit.after(source.span(given), ".clone()")], "clone_at_save")
    return None if change is None else (source.text(given), change)


def cloned(name: str, op: str) -> str:
    """``x.clone()``; of a list whose tensors a ``_foreach`` operation writes, a list of copies."""
    is_list = op.rpartition("::")[2].startswith("_foreach_")
    return f"[t.clone() for t in {name}]" if is_list else f"{name}.clone()"


def value_and_clone(source: SourceFile, statement: ast.stmt, name: str, notes: tuple[str, ...]) -> Change | None:
    """``value = y[i] * s``, ``y = y.clone()`` and ``y[i] = value`` instead of ``y[i] = y[i] * s``.

    Of ``h[i], c[i] = cell(x, (h[i], c[i]))`` both are copied.
    """
    if not isinstance(statement, ast.Assign) or len(statement.targets) > 1:
        return None
    target, span = statement.targets[0], source.span(statement)
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    wholes = [one.value for one in parts if isinstance(one, ast.Subscript)]
    written = {source.text(one): one for one in wholes}
    indent = source.indent(span)
    used = {node.id for node in source.nodes if isinstance(node, ast.Name)}
    free = next((one for one in _NAMES_OF_VALUES if one not in used), None)
    if len(wholes) < len(parts) or name not in written or indent.strip() or free is None:
        return None
    copied = [text for text, one in written.items() if text == name or can_rebind(source, one)]
    copies = "".join(f"{text} = {text}.clone()\n{indent}" for text in copied)
    ahead = f"{free} = {source.text(statement.value)}\n{indent}{copies}"
    edits = [Edit.before(span, ahead), Edit(source.span(statement.value), free)]
    return edited(source, edits, "clone_before", notes)


def copy_second_name(frame: Frame, found: SecondName | None) -> Change | None:
    """The line that binds a second name, with a copy: ``clean = noisy.clone()``, ``augment(x.clone())``.

    None without a second name, or where the source does not show what it is bound to.
    """
    statement = statement_at(frame)
    if statement is None or found is None or found.value is None:
        return None
    end = Edit.insert(found.value.end_line, found.value.end_column, ".clone()")
    return edited(statement.source, [end], "clone_second_name")


def copy_where_bound(frame: Frame) -> Change | None:
    """``last = rows[i].clone()``: a copy of what the one name at ``frame`` is bound to; None for computed values."""
    statement = statement_at(frame)
    node = None if statement is None else statement.node
    if statement is None or not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
        return None
    if len(node.targets) > 1 or not isinstance(node.value, ast.Name | ast.Attribute | ast.Subscript | ast.Call):
        return None
    span = statement.source.span(node.value)
    return edited(statement.source, [Edit.insert(span.end_line, span.end_column, ".clone()")], "clone_second_name")
