"""Tensors written in place, with the graph of what is stored, for rounds that come later: filled ones, parameters."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from gradsan.model import Frame, Lines
from gradsan.source.change import Change, Edit, changed_lines, edited
from gradsan.source.flow.writing import definition_of, written_root
from gradsan.source.identifiers import assigned_names, chain_key, consumed_names, leaf_name, local_nodes
from gradsan.source.locate import statement_at
from gradsan.source.methods import augmented_names, is_inplace_method
from gradsan.source.rewrite.leaves import reads_later
from gradsan.source.rewrite.out_of_place import out_of_place
from gradsan.source.rewrite.renewing import fresh_name
from gradsan.source.rewrite.updates import under_no_grad
from gradsan.source.tree import SourceFile

_SWITCHES = frozenset({"no_grad", "inference_mode"})
_WRITING_NO_VALUE = frozenset({"requires_grad_", "detach_", "share_memory_"})
_STEPS_BACK = 2
_SCALING = frozenset({"add_", "addcdiv_", "addcmul_", "div_", "lerp_", "mul_", "sub_"})
"""Methods through whose result a gradient reaches the tensor: not ``round_`` and ``sign_``, which have none."""


def detach_behind_loop(filling: Frame, used: Frame, name: str) -> Change | None:
    """A line that detaches ``name`` behind the loop that fills it at a frame, and what the same statement fills.

    ``used`` is in rounds that do not run this loop again: they read a rollout, a memory, the advantages.
    """
    own, other = statement_at(filling), statement_at(used)
    if own is None or other is None or own.function is not other.function:
        return None
    loops = [loop for loop in own.loops if loop not in other.loops]
    if not loops or all(loop in own.loops for loop in other.loops):
        return None
    names = [name for target in getattr(own.node, "targets", ()) for name in _filled(target)]
    if name not in names:
        return None
    source, span = own.source, own.source.span(loops[0])
    each = list(dict.fromkeys(names))
    text = f"{', '.join(each)} = {', '.join(f'{one}.detach()' for one in each)}"
    line = f"\n{source.indent(span)}{text}"
    return edited(source, [Edit.insert(span.end_line, span.end_column, line)], "detach")


def reads_filled(bound_at: Frame) -> bool:
    """Whether the value bound at a frame is of a tensor that a loop has filled by parts: ``flat = values.reshape(-1)``.

    A rollout: to compute it anew is to collect it anew. Definitions of the same function are followed some steps back.
    """
    own = statement_at(bound_at)
    scope = None if own is None else own.scope
    if own is None or scope is None:
        return False
    before = [one for one in local_nodes(scope) if isinstance(one, ast.Assign) and one.lineno < own.node.lineno]
    read = set(consumed_names(own.node))
    for _ in range(_STEPS_BACK):
        read |= {name for one in before if read & set(assigned_names(one)) for name in consumed_names(one)}
    loops = [one for one in local_nodes(scope) if isinstance(one, ast.For | ast.While) and one not in own.loops]
    within = [one for one in before if any(loop.lineno < one.lineno <= (loop.end_lineno or 0) for loop in loops)]
    return any(read & set(_filled(target)) for one in within for target in one.targets)


def _filled(target: ast.expr) -> list[str]:
    """``S`` and ``A`` of the targets ``S[i], A[i]``."""
    if isinstance(target, ast.Tuple | ast.List):
        return [name for one in target.elts for name in _filled(one)]
    key = chain_key(target.value) if isinstance(target, ast.Subscript) else None
    return [] if key is None else [key]


def all_under_no_grad(stack: Sequence[Frame], attribute: str) -> Lines:
    """``Fix.lines`` of the statement of the stack that writes ``….attribute`` in place, under ``no_grad``.

    With it all others of its class, or of the file, that write the same. Empty where one of them shares its lines.
    """
    if (writes := _recorded_writes(stack, attribute)) is None:
        return ()
    source, _, nodes = writes
    found: dict[tuple[str, int], str] = {}
    for node in nodes:
        span = source.span(node)
        if (source.file, span.line) in found:
            continue
        place = Frame(source.file, span.line, source.scope_name(node), span.column, span.end_line, span.end_column)
        lines = changed_lines(source.file, under_no_grad(place))
        if not lines:
            return ()
        found |= {(file, line): text for file, line, text in lines}
    return tuple((*at, text) for at, text in sorted(found.items()))


def second_name_anew(stack: Sequence[Frame], attribute: str) -> Lines:
    """``weight = weight + d`` for ``weight += d`` where ``weight = self.weight`` was bound before, and is read later.

    The new value is meant for that name: written in place, the parameter itself takes it, once more in each forward.
    """
    for frame in reversed(stack):
        statement = statement_at(frame)
        name = None if statement is None else _written(statement.node)
        made = None if name is None or not name.isidentifier() else definition_of(frame, name)
        path = [] if made is None or made.is_loop else made.value.split(".")
        if statement is None or name is None or len(path) < 2 or path[-1] != attribute or not reads_later(frame, name):
            continue
        node = statement.node
        ops = augmented_names(node.op) if isinstance(node, ast.AugAssign) else [_method_of(node)]
        change = next(filter(None, (out_of_place(frame, one) for one in ops if one)), None)
        return changed_lines(frame.file, change)
    return ()


def own_name_in_forward(frame: Frame) -> Change | None:
    """``w = self.w + d`` for ``self.w += d`` at ``frame``, with the later reads of ``self.w`` in its method as ``w``.

    None where the method does not read it later, binds it, or repeats the statement: then no name would do.
    """
    statement = statement_at(frame)
    node, function = (None, None) if statement is None else (statement.node, statement.function)
    if statement is None or not isinstance(function, ast.FunctionDef) or node not in function.body:
        return None
    source, call = statement.source, node.value if isinstance(node, ast.Expr) else None
    target: ast.expr
    if isinstance(node, ast.AugAssign) and not isinstance(node.op, ast.FloorDiv):
        target, value = node.target, source.text(node.value)
        sign = source.text(node).removeprefix(source.text(target)).lstrip().partition("=")[0]
        is_product = isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Mult)
        is_plain = isinstance(node.value, (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant))
        is_plain = is_plain or (is_product and sign in "+-" and "\n" not in value)
        text = f" {sign} {value}" if is_plain else f" {sign} ({value})"
    elif isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _SCALING:
        target, text = call.func.value, source.text(call).removeprefix(source.text(call.func))
        text = f".{call.func.attr.rstrip('_')}{text}"
    else:
        return None
    key = chain_key(target)
    if not isinstance(target, ast.Attribute) or key is None or not key.startswith("self."):
        return None
    others = [one for one in ast.walk(function) if chain_key(one) == key and isinstance(one, ast.Attribute)]
    later = [one for one in others if one.lineno > statement.span.end_line]
    if not later or any(not isinstance(one.ctx, ast.Load) for one in others if one is not target):
        return None
    name = fresh_name(source, target.attr)
    edits = [Edit(statement.span, f"{name} = {key}{text}"), *(Edit(source.span(one), name) for one in later)]
    return edited(source, edits, "out_of_place")


def _method_of(node: ast.stmt) -> str | None:
    return leaf_name(node.value.func) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None


def cut_before_written(stack: Sequence[Frame], attribute: str) -> Lines:
    """``self.weight.detach_()`` before each statement that ``all_under_no_grad`` finds, where all replace the whole.

    The old values, which nothing of the new ones depends on, leave no graph behind; that of the new ones stays.
    """
    if (writes := _recorded_writes(stack, attribute)) is None:
        return ()
    source, target, nodes = writes
    if not nodes or not all(_replaces(source, one, target) for one in nodes):
        return ()
    if not all(source.lines[one.lineno - 1][: one.col_offset].isspace() for one in nodes):
        return ()
    text = "{}{}.detach_()\n{}".format
    lines = {one.lineno: source.lines[one.lineno - 1] for one in nodes}
    return tuple(
        (source.file, line, text(old[: len(old) - len(old.lstrip())], target, old)) for line, old in lines.items()
    )


def _recorded_writes(stack: Sequence[Frame], attribute: str) -> tuple[SourceFile, str, list[ast.stmt]] | None:
    """The recorded writes, in one class or file, to the ``….attribute`` that a statement of the stack writes."""
    for frame in reversed(stack):
        statement = statement_at(frame)
        target = None if statement is None else _written(statement.node)
        if statement is None or target is None or target.rpartition(".")[2] != attribute:
            continue
        source = statement.source
        owner = source.owner_class(statement.node) or source.module
        nodes = (one for one in ast.walk(owner) if isinstance(one, ast.stmt) and _written(one) == target)
        return source, target, [one for one in nodes if not _is_unrecorded(source, one)]
    return None


def _replaces(source: SourceFile, node: ast.stmt, target: str) -> bool:
    """Whether a statement gives all elements new values: ``w.copy_(v)``, ``w[:] = v``."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return source.text(node.value.func) == f"{target}.copy_"
    place = node.targets[0] if isinstance(node, ast.Assign) else None
    return isinstance(place, ast.Subscript) and source.text(place) in (f"{target}[:]", f"{target}[...]")


def _written(node: ast.stmt) -> str | None:
    """``self.base.weight`` of a statement that writes it, or a part of it, in place."""
    call = node.value if isinstance(node, ast.Expr) else None
    if written_root(node) is None or (isinstance(call, ast.Call) and leaf_name(call.func) in _WRITING_NO_VALUE):
        return None
    parts = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None) or node.value]  # type: ignore[attr-defined]
    target: ast.AST = parts[0]
    while isinstance(target, ast.Subscript | ast.Call) or is_inplace_method(getattr(target, "attr", "")):
        target = target.func if isinstance(target, ast.Call) else target.value  # type: ignore[attr-defined]
    return chain_key(target)


def _is_unrecorded(source: SourceFile, node: ast.stmt) -> bool:
    """Whether autograd is switched off around the statement, by a block or by a decorator of its function."""
    switches: list[ast.expr] = []
    for around, _ in source.ancestors(node):
        switches += [item.context_expr for item in around.items] if isinstance(around, ast.With) else []
        switches += around.decorator_list if isinstance(around, ast.FunctionDef) else []
    return any(leaf_name(one.func if isinstance(one, ast.Call) else one) in _SWITCHES for one in switches)
