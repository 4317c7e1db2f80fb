"""Write to a part of a tensor as a new tensor: ``x[:, c] = v`` becomes ``x = x.select_scatter(v, 1, c)``."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from gradsan.model import Frame
from gradsan.source.change import TAKES_A_METHOD_CALL, Change, Edit, augmented_value, edited, elements_of, is_all
from gradsan.source.flow.targets import target_at
from gradsan.source.identifiers import bindings_in, chain_key, constant_key, leaf_name, parameters
from gradsan.source.imports import torch_name
from gradsan.source.rewrite.out_of_place import chain_value
from gradsan.source.rewrite.rebinding import can_rebind, notes_on_rebinding
from gradsan.source.tree import SourceFile, Span

_MASKS = frozenset(
    {"bernoulli", "bool", "eq", "ge", "greater", "greater_equal", "gt", "isclose", "isfinite", "isinf", "isnan", "le"}
    | {"less", "less_equal", "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "ne", "not_equal"}
)
_MOST_PARTS = 2


def part_out_of_place(frame: Frame, op: str, index_is_tensor: bool | None = None) -> Change | None:
    """The line of ``frame`` with its write to a part of a tensor replaced by a new tensor, bound to the same name.

    ``index_is_tensor`` says what the run knows of the index: True for a mask or a tensor of positions, False for
    numbers and slices, None where it is not known; then the source must decide. A number or slice becomes
    ``select_scatter`` or ``slice_scatter``, a mask ``masked_fill`` or ``index_put``, positions ``index_put``. None
    where none of these is equivalent in one line. The notes of the change are those of ``out_of_place``.
    """
    found = _part_written(frame, op)
    if found is None:
        return None
    source, statement, target, part, value = found
    if not can_rebind(source, part.value) or source.text(target) not in (source.text(part), source.text(part.value)):
        return None
    new = _with_part(source, part, value, index_is_tensor)
    if new is None:
        return None
    notes = notes_on_rebinding(source, part.value)
    name = source.text(part.value)
    return edited(source, [Edit(source.span(statement), f"{name} = {new}")], "out_of_place", notes)


def member_out_of_place(frame: Frame, op: str) -> Change | None:
    """``grads = (grads[0].mul(s), *grads[1:])`` for ``grads[0].mul_(s)`` in a hook of a module, which is given a tuple.

    A hook of a tensor is given that alone.
    """
    found = _part_written(frame, op)
    if found is None:
        return None
    source, statement, _, part, value = found
    function = source.function(statement)
    given = [] if function is None else [one for one in parameters(function) if one not in ("self", "cls")]
    name, index = chain_key(part.value), constant_key(part.slice)
    if name not in given[1:] or not isinstance(index, int) or index < 0:
        return None
    before = f"*{name}[:{index}], " if index else ""
    text = f"{name} = ({before}{value}, *{name}[{index + 1}:])"
    return edited(source, [Edit(source.span(statement), text)], "out_of_place")


def mask_out_of_place(frame: Frame, op: str, *, is_of_rows: bool) -> Change | None:
    """``x[rows] = 0`` as ``x = x.masked_fill(rows, 0)``, where the source does not show what kind of index it is.

    With ``is_of_rows`` for a mask that has one dimension less than ``x``. Only a run shows whether the index is a mask.
    """
    found = _part_written(frame, op)
    if found is None or not can_rebind(found[0], found[3].value):
        return None
    source, statement, target, part, value = found
    name, index = source.text(part.value), part.slice
    is_single = isinstance(index, TAKES_A_METHOD_CALL) or _is_mask(index)
    if (
        not is_single
        or _is_position(source, index)
        or not _is_number(value)
        or source.text(target) not in (source.text(part), name)
    ):
        return None
    mask = source.text(index)
    if is_of_rows:
        mask = f"{mask if isinstance(index, TAKES_A_METHOD_CALL) else f'({mask})'}.unsqueeze(-1)"
    text = f"{name} = {name}.masked_fill({mask}, {value})"
    return edited(source, [Edit(source.span(statement), text)], "out_of_place", notes_on_rebinding(source, part.value))


def element_out_of_place(frame: Frame, op: str) -> Change | None:
    """The line of ``frame`` that writes in place to an element of a list, with a new tensor as that element.

    ``states[k] += v`` becomes ``states[k] = states[k] + v``. For a tensor this would be the same write again:
    only a run shows whether ``states`` holds tensors or is one. ``torch.add(x, y, out=rows[k, :3])`` becomes
    ``rows[k, :3] = torch.add(x, y)``, which autograd records.
    """
    found = target_at(frame, op)
    if found is None:
        return None
    source, place = found[0].source, found[0].node
    statement = source.statement(place)
    if statement is None or isinstance(statement, ast.Assign):
        return None
    part, value = _part_and_value(source, statement, place)
    given_out = isinstance(place, ast.Call) and any(one.arg == "out" for one in place.keywords)
    if part is None or value is None or (isinstance(part.slice, ast.Slice | ast.Tuple) and not given_out):
        return None
    new = f"{source.text(part)} = {value}"
    return edited(source, [Edit(source.span(statement), new)], "out_of_place")


def whole_of_part(source: SourceFile, statement: ast.stmt, place: ast.AST) -> str | None:
    """The whole tensor's new value for a statement that writes to a part of it; None for any other statement."""
    part, value = _part_and_value(source, statement, place)
    return None if part is None or value is None else _with_part(source, part, value, None)


def _part_written(frame: Frame, op: str) -> tuple[SourceFile, ast.stmt, ast.expr, ast.Subscript, str] | None:
    """The statement at ``frame`` that writes a part: what it writes, that part, and its new value's text."""
    found = target_at(frame, op)
    statement = None if found is None else found[0].source.statement(found[0].node)
    if found is None or statement is None:
        return None
    part, value = _part_and_value(found[0].source, statement, found[0].node)
    return None if part is None or value is None else (found[0].source, statement, found[1].node, part, value)


def _part_and_value(source: SourceFile, statement: ast.stmt, place: ast.AST) -> tuple[ast.Subscript | None, str | None]:
    """The ``x[…]`` that the statement writes to, and the text of the new value of that part."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        if isinstance(target, ast.Subscript) and place is target and not isinstance(statement.value, ast.Tuple):
            return target, _after(source, target, statement, "=")
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Subscript):
        return statement.target, augmented_value(source, statement)
    if isinstance(statement, ast.Expr) and isinstance(place, ast.Call):
        base = next((one.value for one in place.keywords if one.arg == "out"), statement.value)
        while isinstance(base, ast.Call) and isinstance(base.func, ast.Attribute):
            base = base.func.value
        chain = chain_value(source, place)
        if isinstance(base, ast.Subscript) and chain is not None and chain[0] is statement.value:
            return base, chain[1]
    return None, None


def _after(source: SourceFile, target: ast.expr, statement: ast.stmt, sign: str) -> str | None:
    before, whole = source.span(target), source.span(statement)
    rest = source.slice(Span(before.end_line, before.end_column, whole.end_line, whole.end_column)).strip()
    return rest.removeprefix(sign).strip() if rest.startswith(sign) else None


def _with_part(source: SourceFile, part: ast.Subscript, value: str, index_is_tensor: bool | None) -> str | None:
    name = source.text(part.value)
    elements = elements_of(part)
    if any(isinstance(one, ast.Starred) or _is_constant(one, (None, True, False)) for one in elements):
        return None
    if index_is_tensor is None:
        index_is_tensor = not all(_is_position(source, one) for one in elements)
    constant = _is_number(value) or _is_always_number(source, value, int, float)
    if not constant and _is_given_plain(source, part, value):
        return None
    if index_is_tensor:
        return _by_tensors(source, name, elements, value, constant)
    if constant:
        value = f"{torch_name(source)}.full_like({source.text(part)}, {value})"
    return _by_positions(source, name, list(elements), value)


def _by_tensors(source: SourceFile, name: str, elements: Sequence[ast.expr], value: str, constant: bool) -> str | None:
    """The form for an index of tensors: all of them at the front, and nothing else."""
    if any(isinstance(one, ast.Slice | ast.Constant | ast.UnaryOp) and not _is_mask(one) for one in elements):
        return None
    if any(_is_sequence(source, one) for one in elements):
        return None  # ``index_put`` takes tensors only
    texts = [source.text(one) for one in elements]
    if constant and len(elements) == 1 and _is_mask(elements[0]) and _may_have_shape_of(source, elements[0], name):
        return f"{name}.masked_fill({texts[0]}, {value})"
    filled = f"{name}.new_tensor({value})" if constant else value
    return f"{name}.index_put(({', '.join(texts)}{',' if len(texts) == 1 else ''}), {filled})"


def _by_positions(source: SourceFile, name: str, elements: list[ast.expr], value: str) -> str | None:
    """The form for numbers and slices, the outermost first; the part itself is read by the remaining index."""
    chosen = [(place, one) for place, one in enumerate(elements) if not is_all(one)]
    if any(_may_be_slice(source, one) for _, one in chosen):
        return None
    if not chosen or len(chosen) > _MOST_PARTS or any(_is_constant(one, (Ellipsis,)) for one in elements):
        return _from_the_end(source, name, elements, value)
    dim, first = chosen[0]
    if len(chosen) > 1:
        inner = f"{name}[{', '.join([':'] * dim + [_index_text(source, first)])}]"
        # A number removes its dimension, a slice keeps it.
        ahead: list[ast.expr] = [ast.Slice()] * (dim + isinstance(first, ast.Slice))
        nested = _by_positions(source, inner, [*ahead, *elements[dim + 1 :]], value)
        if nested is None:
            return None
        value = nested
    return _one_part(source, name, dim, first, value)


def _from_the_end(source: SourceFile, name: str, elements: list[ast.expr], value: str) -> str | None:
    """The form for ``x[..., i]``: dimensions counted from the last one."""
    if not elements or not _is_constant(elements[0], (Ellipsis,)):
        return None
    after = elements[1:]
    chosen = [(place - len(after), one) for place, one in enumerate(after) if not is_all(one)]
    if any(_may_be_slice(source, one) for _, one in chosen):
        return None
    if len(chosen) != 1 or any(_is_constant(one, (Ellipsis,)) for one in after):
        return None
    return _one_part(source, name, chosen[0][0], chosen[0][1], value)


def _one_part(source: SourceFile, name: str, dim: int, index: ast.expr, value: str) -> str:
    if not isinstance(index, ast.Slice):
        return f"{name}.select_scatter({value}, {dim}, {source.text(index)})"
    bounds = [None if one is None else source.text(one) for one in (index.lower, index.upper, index.step)]
    while bounds and bounds[-1] is None:
        bounds.pop()
    arguments = "".join(f", {one}" for one in bounds)
    return f"{name}.slice_scatter({value}, {dim}{arguments})"


def _index_text(source: SourceFile, index: ast.expr) -> str:
    if not isinstance(index, ast.Slice):
        return source.text(index)
    lower, upper, step = ("" if one is None else source.text(one) for one in (index.lower, index.upper, index.step))
    return f"{lower}:{upper}{f':{step}' if step else ''}"


def _is_constant(node: ast.expr, values: tuple[object, ...]) -> bool:
    return isinstance(node, ast.Constant) and any(node.value is value for value in values)


_NAMED_NUMBER = re.compile(
    r"[-+]?\s*(float\(\s*([\"'])[-+]?(inf|infinity|nan)\2\s*\)|(math|np|numpy|torch)\.(inf|nan|pi|e))", re.IGNORECASE
)


def _is_number(text: str) -> bool:
    if _NAMED_NUMBER.fullmatch(text.strip()):
        return True
    try:
        return isinstance(ast.literal_eval(text), int | float)
    except (ValueError, SyntaxError):
        return False


def _is_mask(node: ast.expr) -> bool:
    """Whether the source shows that an index is a boolean tensor."""
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Invert)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor)
    if isinstance(node, ast.Call):
        return leaf_name(node.func) in _MASKS
    return "mask" in (leaf_name(node) or "")


def _may_have_shape_of(source: SourceFile, mask: ast.expr, name: str) -> bool:
    """Whether a mask reads the tensor that it selects from; a comparison of others may be of its rows."""
    if not isinstance(mask, ast.Compare | ast.BinOp | ast.UnaryOp):
        return True
    return any(isinstance(one, ast.expr) and source.text(one) == name for one in ast.walk(mask))


def _is_sequence(source: SourceFile, node: ast.expr) -> bool:
    """Whether the source shows that an index is a list or a range of positions."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("list", "range", "sorted", "tuple")
    if isinstance(node, ast.Name):
        bound = [one.value for one in bindings_in(source.nodes, node.id) if one.value is not None]
        return any(not isinstance(one, ast.Name) and _is_sequence(source, one) for one in bound)
    return isinstance(node, ast.List | ast.ListComp)


def _is_position(source: SourceFile, node: ast.expr) -> bool:
    """Whether the source shows that an index is a number or a slice."""
    if isinstance(node, ast.Slice):
        return True
    if isinstance(node, ast.Constant):
        return node.value is Ellipsis or isinstance(node.value, int)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and _is_position(source, node.operand)
    if isinstance(node, ast.BinOp):
        return _is_position(source, node.left) and _is_position(source, node.right)
    if not isinstance(node, ast.Name):
        return False
    if any(isinstance(around, ast.For) and _counts(around, node.id) for around, _ in source.ancestors(node)):
        return True
    return _is_always_number(source, node.id, int)


def _may_be_slice(source: SourceFile, node: ast.expr) -> bool:
    """Whether an index without a colon may be a slice: the file constructs some."""
    if isinstance(node, ast.Slice) or _is_position(source, node):
        return False
    calls = (one.func for one in source.nodes if isinstance(one, ast.Call))
    return any(isinstance(one, ast.Name) and one.id == "slice" for one in calls)


def _is_always_number(source: SourceFile, name: str, *kinds: type) -> bool:
    """Whether the file binds ``name`` to literals of ``kinds`` only."""
    if any(isinstance(node, ast.arg) and node.arg == name for node in source.nodes):
        return False
    bound = bindings_in(source.nodes, name)
    return bool(bound) and all(isinstance(one.value, ast.Constant) and type(one.value.value) in kinds for one in bound)


def _is_given_plain(source: SourceFile, part: ast.Subscript, value: str) -> bool:
    """Whether ``value`` is an attribute set to an argument or a number: only ``x[i] = self.fill`` takes a number."""
    name = value.lstrip("-+ ")
    if not name.replace(".", "").isidentifier():
        return False
    owner = source.owner_class(part) if name.startswith("self.") else None
    nodes = () if owner is None else ast.walk(owner)
    bound = [one.value for one in bindings_in(nodes, name) if one.value is not None]
    return bool(bound) and all(isinstance(one, ast.Name | ast.Constant | ast.UnaryOp) for one in bound)


def _counts(loop: ast.For, name: str) -> bool:
    """Whether the loop variable ``name`` is a number from ``range`` or ``enumerate``."""
    made_by = leaf_name(loop.iter.func) if isinstance(loop.iter, ast.Call) else None
    target = loop.target
    if made_by == "range":
        return isinstance(target, ast.Name) and target.id == name
    first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else None
    return made_by == "enumerate" and isinstance(first, ast.Name) and first.id == name
