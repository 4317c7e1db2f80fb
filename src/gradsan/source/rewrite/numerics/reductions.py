"""Reductions over nothing, masks of -inf, uninitialized memory, and operations in a wider dtype."""

from __future__ import annotations

import ast

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited, with_keyword
from gradsan.source.flow.modules import constructors
from gradsan.source.identifiers import chain_key, leaf_name, local_nodes
from gradsan.source.imports import torch_name
from gradsan.source.locate import Expression, expression_at
from gradsan.source.rewrite.numerics.applied import Applied, applied, behind, receiver, scope_of_node
from gradsan.source.tree import SourceFile

_IGNORING = frozenset({"cross_entropy", "nll_loss"})
_LOSSES = _IGNORING | {
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div"),
    *("binary_cross_entropy_with_logits",),
}
_LAYERS = {
    "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss",
    "MSELoss": "mse_loss",
    "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "HuberLoss": "huber_loss",
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
}
_CASTS = frozenset({"half", "to", "type"})
_EMPTY = {"empty": "zeros", "empty_like": "zeros_like", "new_empty": "new_zeros", "empty_permuted": "zeros"}


def without_correction(frame: Frame) -> Change | None:
    """The deviation or variance at ``frame`` divided by the number of elements instead of that number less one."""
    found, one = _at(frame)
    if found is None or one is None or one.op not in ("std", "var", "std_mean", "var_mean"):
        return None
    source, call = found.source, one.node
    flags = [arg for arg in one.arguments if isinstance(arg, ast.Constant) and isinstance(arg.value, bool)]
    named = next((key for key in one.keywords if key.arg == "unbiased"), None)
    if named is not None:
        return edited(source, [Edit(source.span(named.value), "False")], "without_correction")
    if flags:
        return edited(source, [Edit(source.span(flags[0]), "False")], "without_correction")
    edit = with_keyword(source, call, "correction", "0") if isinstance(call, ast.Call) else None
    return None if edit is None else edited(source, [edit], "without_correction")


def sum_over_count(frame: Frame) -> Change | None:
    """The mean at ``frame`` as a sum divided by the number of its terms, with 1 instead of 0."""
    found, one = _at(frame)
    if found is None or not isinstance(found.node, ast.Call):
        return None
    source, call = found.source, found.node
    if one is not None and one.op in ("mean", "nanmean"):
        return _mean(source, call, one)
    made, kind = _loss(source, call, one)
    if kind is None or kind not in _LOSSES or len(call.args) < 2:
        return None
    count = _count(source, call, kind, made)
    edit = with_keyword(source, made, "reduction", '"sum"')
    if edit is None or count is None:
        return None
    span = source.span(call)
    return edited(source, [edit, Edit.after(span, f" / {count}")], "sum_over_count")


def _mean(source: SourceFile, call: ast.Call, one: Applied) -> Change | None:
    operand, given = one.operands[0], [*one.arguments, *(key.value for key in one.keywords)]
    if any(isinstance(node, ast.Call) for node in ast.walk(operand)) or any(key.arg == "dtype" for key in one.keywords):
        return None
    tensor = receiver(source, operand)
    if not given:
        return edited(
            source, [Edit(source.span(call), f"({tensor}.sum() / max({tensor}.numel(), 1))")], "sum_over_count"
        )
    dim = given[0]
    if isinstance(dim, ast.Tuple | ast.List):
        return None
    rest = ", ".join(
        [*(source.text(arg) for arg in one.arguments), *(f"{k.arg}={source.text(k.value)}" for k in one.keywords)]
    )
    text = f"({tensor}.sum({rest}) / max({tensor}.shape[{source.text(dim)}], 1))"
    return edited(source, [Edit(source.span(call), text)], "sum_over_count")


def _loss(source: SourceFile, call: ast.Call, one: Applied | None) -> tuple[ast.Call, str | None]:
    """The call that names a loss's reduction, and which loss it is."""
    if one is not None and one.op in _LOSSES and one.function is not None:
        return call, one.op
    made = [value for value in constructors(source, call.func) if isinstance(value, ast.Call)]
    calls = [node for node in source.nodes if isinstance(node, ast.Call) and _calls_same(node, call)]
    if len(made) != 1 or len(calls) != 1:
        return call, None
    return made[0], _LAYERS.get(leaf_name(made[0].func) or "")


def _calls_same(node: ast.Call, call: ast.Call) -> bool:
    key = chain_key(call.func)
    return key is not None and chain_key(node.func) == key


def _count(source: SourceFile, call: ast.Call, kind: str, made: ast.Call) -> str | None:
    """The number of terms of a loss, never 0."""
    if any(key.arg == "weight" for key in made.keywords):
        return None
    if kind in _IGNORING:
        ignored = next((source.text(key.value) for key in made.keywords if key.arg == "ignore_index"), "-100")
        return f"({source.text(call.args[1])} != {ignored}).sum().clamp_min(1)"
    return f"max({receiver(source, call.args[0])}.numel(), 1)"


def nothing_to_average(frame: Frame) -> str | None:
    """The condition under which the reduction at ``frame`` has no term, as source text."""
    found, one = _at(frame)
    if found is None or not isinstance(found.node, ast.Call):
        return None
    source, call = found.source, found.node
    if one is not None and one.op in ("mean", "std", "var", "median"):
        operand = one.operands[0]
        if any(isinstance(n, ast.Call) for n in ast.walk(operand)):
            return None
        if one.op in ("mean", "median"):
            return f"{source.text(operand)}.numel() == 0"
        # A deviation divides by the number of its elements less one.
        return None if one.arguments or one.keywords else f"{receiver(source, operand)}.numel() < 2"
    made, kind = _loss(source, call, one)
    if kind is None or len(call.args) < 2:
        return None
    if kind in _IGNORING:
        ignored = next((source.text(key.value) for key in made.keywords if key.arg == "ignore_index"), "-100")
        return f"({source.text(call.args[1])} == {ignored}).all()"
    return f"{receiver(source, call.args[0])}.numel() == 0"


def finite_mask(frame: Frame, dtype: str) -> Change | None:
    """The -inf with which the function of ``frame`` masks, replaced by the smallest finite number."""
    found = expression_at(frame)
    if found is None:
        return None
    source, scope = found.source, scope_of_node(found.source, found.node)
    if isinstance(scope, ast.Lambda):
        return None
    edits: list[Edit] = []
    for node in local_nodes(scope):
        if isinstance(node, ast.expr) and _is_minus_infinity(node):
            edits.append(Edit(source.span(node), f"{torch_name(source)}.finfo({_type_of(source, node, dtype)}).min"))
    return edited(source, edits, "finite_mask")


def _type_of(source: SourceFile, node: ast.expr, dtype: str) -> str:
    parent, _ = source.parents[node]
    masked = parent.func.value if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) else None
    if isinstance(masked, ast.Name) and masked.id != torch_name(source):
        return f"{masked.id}.dtype"
    return f"{torch_name(source)}.{dtype}"


def _is_minus_infinity(node: ast.expr) -> bool:
    """``float("-inf")``, ``-float("inf")``, ``-math.inf``, ``-torch.inf``."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = node.operand
        return _is_float_of(inner, "inf") or (isinstance(inner, ast.Attribute) and inner.attr == "inf")
    return _is_float_of(node, "-inf")


def _is_float_of(node: ast.expr, text: str) -> bool:
    is_call = isinstance(node, ast.Call) and leaf_name(node.func) == "float" and len(node.args) == 1
    given = node.args[0] if isinstance(node, ast.Call) and is_call else None
    return isinstance(given, ast.Constant) and isinstance(given.value, str) and given.value.strip().lower() == text


def zeros_instead(frame: Frame) -> Change | None:
    """Zeros instead of the uninitialized memory that the call at ``frame`` allocates."""
    found = expression_at(frame)
    if found is None or not isinstance(found.node, ast.Call):
        return None
    source, function = found.source, found.node.func
    name = leaf_name(function) or ""
    span = source.span(function)
    if name in ("Tensor", "FloatTensor", "DoubleTensor") and isinstance(function, ast.Attribute):
        return edited(source, [Edit(span, f"{torch_name(source)}.zeros")], "zeros_instead")
    if name not in _EMPTY:
        return None
    text = f"{source.text(function)[: -len(name)]}{_EMPTY[name]}"
    return edited(source, [Edit(span, text)], "zeros_instead")


def in_float32(frame: Frame, device: str) -> list[Change]:
    """The operation at ``frame`` in float32: in its place, and in a block with autocast disabled."""
    found, one = _at(frame)
    if found is None:
        return []
    source, node = found.source, found.node
    if one is not None and one.op in _CASTS:
        cast = edited(source, [Edit(source.span(node), source.text(one.operands[0]))], "float32_operation")
        # ``x.to(device, dtype)`` moves x as well.
        return [] if cast is None or len(one.arguments) + len(one.keywords) > 1 else [cast]
    given = list(one.operands) if one is not None else list(node.args) if isinstance(node, ast.Call) else []
    given = [operand for operand in given if isinstance(operand, ast.Name | ast.Attribute | ast.Call | ast.Subscript)]
    if not given or isinstance(node, ast.AugAssign):
        return []
    # ``h * h`` has two operands, each of which is cast.
    edits = [edit for operand in given for edit in behind(source, operand, ".float()")]
    plain = edited(source, edits, "float32_operation")
    found_changes = [] if plain is None else [plain]
    statement = found.statement
    span = source.span(statement)
    head = source.indent(span)
    is_simple = isinstance(statement, ast.Assign | ast.Return | ast.Expr | ast.AnnAssign) and not head.strip()
    if plain is not None and is_simple and span.line == span.end_line == plain.line:
        wide = plain.new.strip()
        block = f'{head}with {torch_name(source)}.autocast("{device}", enabled=False):\n{head}    {wide}'
        found_changes.append(Change(span.line, source.lines[span.line - 1], block, "float32_operation"))
    return found_changes


def _at(frame: Frame) -> tuple[Expression | None, Applied | None]:
    found = expression_at(frame)
    return found, None if found is None else applied(found.source, found.node)
