"""Leaves made within an expression of which only the result is kept: the result, or the leaf alone, is bound instead.

``nn.Parameter(torch.randn(n)) * 0.1`` is no Parameter, and nothing holds the one inside it; meant was
``nn.Parameter(torch.randn(n) * 0.1)``.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited, indentation_of, text_with, without_keyword
from gradsan.source.flow.writing import written_root
from gradsan.source.identifiers import assigned_names, binds, chain_key, leaf_name, walks
from gradsan.source.imports import torch_name
from gradsan.source.locate import Statement, at_span, statement_at
from gradsan.source.methods import METADATA, has_attribute
from gradsan.source.tree import FunctionNode, SourceFile, Span, header_nodes

_SINGLE = (ast.Name, ast.Call, ast.Attribute, ast.Subscript, ast.Constant, ast.List, ast.Tuple)
_SCALED = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_KEEPS_MEANING = frozenset(
    {
        *("bfloat16", "clone", "contiguous", "cpu", "cuda", "double", "float", "half", "requires_grad_", "to", "type"),
        *("flatten", "permute", "reshape", "squeeze", "swapaxes", "t", "transpose", "unsqueeze", "view"),
        *("add", "div", "mul", "neg", "sub"),
    }
)
"""Methods whose result can be the leaf as well: places, types, shapes, scales. Of ``exp()`` the argument is meant.

So it is of ``expand()`` and ``repeat()``, whose elements are to stay alike, and of a product with a mask.
"""
_OF_NUMBERS = frozenset({"abs", "float", "int", "len", "max", "min", "round"})
_GIVE_NUMBERS = frozenset({"dim", "item", "numel", "size"})
_OF_LEAF = frozenset({"data", "grad", "grad_fn", "is_leaf", "requires_grad"})
_JOINS = frozenset({"cat", "concat", "concatenate", "dstack", "hstack", "stack", "vstack"})
_MOST_USES = 3


def leaf_alone(frame: Frame) -> Change | None:
    """The leaf in the statement at ``frame`` made to stand alone: as the result of what is done to it, or beside that.

    ``w = torch.randn(3, requires_grad=True) / 2`` becomes ``w = (torch.randn(3) / 2).requires_grad_()``. Where another
    function bounds the leaf, ``self.scale = nn.Parameter(torch.zeros(1)).exp()``, the leaf is bound by itself, and what
    reads it computes ``self.scale.exp()``. None where the value has no such part, or several, or is one itself. So are
    the elements of a list or a dict, of a comprehension, and what is appended.
    """
    statement = statement_at(frame)
    values = [] if statement is None else list(_values_in(statement.node))
    parts = [(value, leaves) for value in values if (leaves := list(_leaves_in(value))) and leaves[0] is not value]
    if statement is None or not parts or any(len(leaves) > 1 for _, leaves in parts):
        return None
    source = statement.source
    if not all(_keeps_meaning(source, leaves[0], value) for value, leaves in parts):
        is_bound = values == [getattr(statement.node, "value", None)]
        return _computed_by_readers(statement, values[0], parts[0][1][0]) if is_bound else None
    edits = [_result_as_leaf(source, leaves[0], value) for value, leaves in parts]
    return None if None in edits else edited(source, [one for one in edits if one is not None], "leaf_alone")


def _values_in(node: ast.stmt) -> Iterator[ast.expr]:
    """What a statement binds or appends; the elements of a display, and what a comprehension makes."""
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr) else None
    if isinstance(node, ast.Expr):
        is_added = isinstance(value, ast.Call) and leaf_name(value.func) == "append" and len(value.args) == 1
        value = value.args[0] if isinstance(value, ast.Call) and is_added else None
    if isinstance(value, ast.List | ast.Tuple):
        yield from value.elts
    elif isinstance(value, ast.Dict | ast.DictComp):
        yield from value.values if isinstance(value, ast.Dict) else [value.value]
    elif value is not None:
        yield value.elt if isinstance(value, ast.ListComp) else value


def _result_as_leaf(source: SourceFile, leaf: ast.Call, value: ast.expr) -> Edit | None:
    edit = _as_data(source, leaf)
    if edit is None:
        return None
    data, whole = text_with(source, source.span(value), [edit]), source.span(value)
    if leaf_name(leaf.func) == "Parameter":
        return Edit(whole, f"{ast.unparse(leaf.func)}({data})")
    return Edit(whole, f"{data if isinstance(value, _SINGLE) else f'({data})'}.requires_grad_()")


def read_instead(frame: Frame, name: str, other: str) -> Change | None:
    """The statement at ``frame`` with ``other`` in the place of ``name``."""
    statement = statement_at(frame)
    nodes = [] if statement is None else [one for one in header_nodes(statement.node) if isinstance(one, ast.expr)]
    reads = [one for one in nodes if chain_key(one) == name and isinstance(getattr(one, "ctx", None), ast.Load)]
    if statement is None or not reads:
        return None
    return edited(statement.source, [Edit(statement.source.span(one), other) for one in reads], "read_instead")


def _keeps_meaning(source: SourceFile, leaf: ast.expr, value: ast.expr) -> bool:
    """Whether all that is done to a leaf within ``value`` moves, casts, shapes or scales it, or fills it first."""
    node: ast.AST = leaf
    while node is not value:
        node, part = source.parents[node]
        if isinstance(node, ast.BinOp) and not isinstance(node.op, _SCALED):
            return False
        if not all(_is_number(source, one) for one in _factors(node, part)):
            return False
        if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.USub):
            return False
        if isinstance(node, ast.Attribute) and node.attr not in {"T", "mT", "data"} | _KEEPS_MEANING:
            return False
        if isinstance(node, ast.Call) and part != "func":
            name = leaf_name(node.func) or ""
            if not (name.endswith("_") or name in _KEEPS_MEANING):
                return False
        if not isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Attribute, ast.Call)):
            return False
    return True


def _factors(node: ast.AST, part: str) -> list[ast.expr]:
    """What the operand at ``part`` of a product or a quotient is multiplied with."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        return [node.left if part == "right" else node.right]
    is_method = isinstance(node, ast.Call) and part == "func" and leaf_name(node.func) in ("mul", "div")
    return node.args if isinstance(node, ast.Call) and is_method else []


def _is_number(source: SourceFile, node: ast.expr, *, is_bound: bool = False) -> bool:
    """Whether a factor may be a number: no comparison, and made by no call but of numbers, as its file binds it."""
    for one in ast.walk(node):
        if isinstance(one, ast.Compare):
            return False
        if isinstance(one, ast.Call) and leaf_name(one.func) in _GIVE_NUMBERS:
            return True
        if isinstance(one, ast.Call) and not (leaf_name(one.func) in _OF_NUMBERS or _root(one.func) == "math"):
            return False
        name = chain_key(one) if isinstance(one, ast.Name | ast.Attribute) and not is_bound else None
        if name is not None and any(not _is_number(source, value, is_bound=True) for value in _bound(source, name)):
            return False
    return True


def _root(node: ast.expr) -> str:
    return ast.unparse(node).partition(".")[0]


def _bound(source: SourceFile, name: str) -> Iterator[ast.expr]:
    """The values that the file binds to a name or an attribute, a buffer among them."""
    for node in source.nodes:
        if isinstance(node, ast.Assign) and any(chain_key(one) == name for one in node.targets):
            yield node.value
        if isinstance(node, ast.Call) and leaf_name(node.func) == "register_buffer":
            yield from (node for one in node.args[:1] if f"self.{ast.unparse(one)[1:-1]}" == name)


def _computed_by_readers(statement: Statement, value: ast.expr, leaf: ast.expr) -> Change | None:
    """The leaf bound alone, and each of its few readers in this class or function computing the value from it."""
    source, node = statement.source, statement.node
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    name = chain_key(targets[0]) if len(targets) == 1 else None
    scope = statement.scope if name is not None and name.isidentifier() else source.owner_class(statement.node)
    if name is None or scope is None or any(isinstance(one, ast.Call) for one in _others(leaf, value)):
        return None
    if not name.isidentifier() and statement.function is not None and _reads_local(statement.function, leaf, value):
        return None
    readers = [
        one
        for one in ast.walk(scope)
        if isinstance(one, (ast.Name, ast.Attribute)) and isinstance(one.ctx, ast.Load) and chain_key(one) == name
    ]
    bound = [
        one for one in ast.walk(scope) if isinstance(getattr(one, "ctx", None), ast.Store) and chain_key(one) == name
    ]
    if not 1 <= len(readers) <= _MOST_USES or len(bound) != 1 or any(_is_written(source, one) for one in readers):
        return None
    readers = [one for one in readers if not _is_of_leaf(source, one)]
    computed = text_with(source, source.span(value), [Edit(source.span(leaf), name)])
    computed = computed if isinstance(value, _SINGLE) else f"({computed})"
    alone = text_with(source, source.span(leaf), [])
    edits = [Edit(source.span(value), alone), *(Edit(source.span(one), computed) for one in readers)]
    return edited(source, edits, "leaf_alone")


def _is_of_leaf(source: SourceFile, reader: ast.expr) -> bool:
    """Whether a reader means the leaf itself: its ``.grad`` or memory, or a list of what is trained."""
    node, _ = source.parents[reader]
    if isinstance(node, ast.Attribute):
        return node.attr in _OF_LEAF
    is_listed = False
    while isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict | ast.Starred):
        is_listed, (node, _) = True, source.parents[node]
    is_joined = isinstance(node, ast.Call) and leaf_name(node.func) in _JOINS
    return is_listed and not is_joined and not isinstance(node, ast.Return | ast.Subscript)


def _is_written(source: SourceFile, reader: ast.expr) -> bool:
    """Whether a method writes in place there."""
    node, _ = source.parents[reader]
    is_private = isinstance(node, ast.Attribute) and node.attr.startswith("_")
    return isinstance(node, ast.Attribute) and node.attr.endswith("_") and not is_private


def _reads_local(function: FunctionNode, leaf: ast.expr, value: ast.expr) -> bool:
    """Whether what is done to a leaf reads variables of its function, which other methods do not see."""
    own = set(ast.walk(leaf))
    read = {one.id for one in ast.walk(value) if isinstance(one, ast.Name) and one not in own}
    return any(binds(function, one) for one in read - {"self"})


def _others(leaf: ast.expr, value: ast.expr) -> Iterator[ast.AST]:
    """The arguments of what is done to a leaf: calls among them may draw numbers, or cost much."""
    own = set(ast.walk(leaf))
    for node in ast.walk(value):
        if isinstance(node, ast.Call) and node not in own:
            yield from (part for one in node.args if leaf not in ast.walk(one) for part in ast.walk(one))


def _leaves_in(value: ast.expr) -> Iterator[ast.Call]:
    """The calls within an expression that make a leaf: a Parameter, or a tensor that is told to require a gradient."""
    for node in ast.walk(value):
        if isinstance(node, (ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)):
            return
        if isinstance(node, ast.Call) and (leaf_name(node.func) in ("Parameter", "requires_grad_") or _requires(node)):
            yield node


def _requires(call: ast.Call) -> bool:
    given = next((one.value for one in call.keywords if one.arg == "requires_grad"), None)
    return isinstance(given, ast.Constant) and given.value is True


def _as_data(source: SourceFile, made: ast.Call) -> Edit | None:
    """The edit that puts the values of a leaf in its place."""
    if leaf_name(made.func) == "requires_grad_":
        given = made.func.value if isinstance(made.func, ast.Attribute) and not made.args else None
    elif leaf_name(made.func) in ("Parameter", "Variable"):
        given = made.args[0] if len(made.args) == 1 else None
    else:
        return without_keyword(source, made, "requires_grad")
    if given is None or (made.keywords and not _requires(made)):
        return None
    text = text_with(source, source.span(given), [])
    return Edit(source.span(made), text if isinstance(given, _SINGLE) else f"({text})")


def written_behind(frame: Frame, names: Collection[str] | None = None) -> list[Frame]:
    """The later statements of the block of ``frame`` that write variables in place, those of ``names`` where given."""
    statement = statement_at(frame)
    if statement is None:
        return []
    roots = [(one, written_root(one)) for one in statement.source.behind(statement.node)]
    spans = [statement.source.span(one) for one, root in roots if root is not None and (names is None or root in names)]
    return [at_span(frame, one) for one in spans]


def later_writes_of_same(source: SourceFile, node: ast.stmt, block: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of later loops of the function that write what goes through the same leaves as that of ``node``.

    ``p.add_(d)`` of ``for p, d in zip(net.parameters(), ds)`` after ``p.copy_(s)`` of another such loop.
    """
    loop = source.parents[node][0]
    walked = _walked_by_variable(loop).get(written_root(node) or "")
    scope = source.function(node) or source.module
    found = []
    # After another assignment (``ws = [w.clone() for w in ws]``) the name stands for other tensors.
    assigned = [one for one in ast.walk(scope) if isinstance(one, ast.Assign) and one.lineno > node.lineno]
    names = set() if walked is None else _names_of(walked)
    rebound = [one.lineno for one in assigned if not names.isdisjoint(assigned_names(one))]
    end = min(rebound, default=None)
    for other in (one for one in ast.walk(scope) if isinstance(one, ast.For) and one is not loop):
        if end is not None and other.lineno > end:
            continue
        same = {name for name, text in _walked_by_variable(other).items() if text == walked and walked is not None}
        found += [one for one in other.body if written_root(one) in same and one not in block]
    return sorted((one for one in found if one.lineno > node.lineno), key=lambda one: one.lineno)


def _names_of(text: str) -> set[str]:
    return {one.id for one in ast.walk(ast.parse(text, mode="eval")) if isinstance(one, ast.Name)}


def later_updates_of_same(source: SourceFile, node: ast.stmt, block: list[ast.stmt]) -> list[ast.stmt]:
    """The updates by gradients, in later loops of the block, of what ``node`` writes: ``d += a * d.grad``."""
    root, found = written_root(node), list[ast.stmt]()
    for later in block[block.index(node) + 1 :]:
        inner = [one for one in ast.walk(later) if isinstance(one, ast.stmt) and one is not later]
        if root is None or any(
            root in assigned_names(one) and not isinstance(one, ast.AugAssign) for one in [later, *inner]
        ):
            break
        found += [one for one in inner if written_root(one) == root and has_attribute(one, "grad")]
    return sorted(found, key=lambda one: one.lineno)


def _walked_by_variable(loop: ast.AST) -> dict[str, str]:
    """What each variable of a ``for`` loop goes through: ``ps`` for ``p`` of ``for p, g in zip(ps, gs)``."""
    if not isinstance(loop, ast.For):
        return {}
    pairs = walks(loop.target, loop.iter)
    return {target.id: ast.unparse(value) for target, value in pairs if isinstance(target, ast.Name)}


def attribute_assigned(frame: Frame) -> str | None:
    """``layer.weight`` of the assignment ``layer.weight = …`` at ``frame``; None for any other statement."""
    statement = statement_at(frame)
    return None if statement is None else _assigned(statement.source, statement.node)


def _assigned(source: SourceFile, node: ast.stmt) -> str | None:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    target = targets[0] if len(targets) == 1 else None
    return source.text(target) if isinstance(target, ast.Attribute) else None


def assigned_in_place(frame: Frame) -> Change | None:
    """The update ``layer.weight = layer.weight - step`` at ``frame`` in place, and those of other attributes behind it.

    They are put under ``no_grad``: ``layer.weight -= step``, ``copy_()`` where it is no sum. None where the new value
    is not computed from the old one.
    """
    statement = statement_at(frame)
    if statement is None:
        return None
    source = statement.source
    texts: list[str] = []
    last = statement.node
    for node in (statement.node, *source.behind(statement.node)):
        text = _in_place(source, node)
        if text is None or source.indent(node).strip():
            break
        texts, last = [*texts, text], node
    if not texts:
        return None
    begin, end = source.span(statement.node), source.span(last)
    lines = [f"with {torch_name(source)}.no_grad():", *(f"{indentation_of(source)}{one}" for one in texts)]
    whole = Span(begin.line, begin.column, end.end_line, end.end_column)
    return edited(source, [Edit(whole, f"\n{source.indent(begin)}".join(lines))], "no_grad")


def assigned_by_copy(frame: Frame) -> Change | None:
    """``layer.weight.copy_(value)`` under ``no_grad`` for ``layer.weight = value``: the parameter stays the same."""
    statement = statement_at(frame)
    name = None if statement is None else _assigned(statement.source, statement.node)
    if statement is None or name is None or not isinstance(statement.node, ast.Assign):
        return None
    source, span = statement.source, statement.source.span(statement.node)
    if source.indent(span).strip() or span.line != span.end_line:
        return None
    inner = f"{source.indent(span)}{indentation_of(source)}"
    text = f"with {torch_name(source)}.no_grad():\n{inner}{name}.copy_({source.text(statement.node.value)})"
    return edited(source, [Edit(span, text)], "no_grad")


def assigned_as_parameter(frame: Frame) -> Change | None:
    """``layer.weight = torch.nn.Parameter(value)`` for ``layer.weight = value``."""
    statement = statement_at(frame)
    node = None if statement is None else statement.node
    if statement is None or not isinstance(node, ast.Assign):
        return None
    span = statement.source.span(node.value)
    nn = f"{torch_name(statement.source)}.nn"
    return edited(statement.source, [Edit.before(span, f"{nn}.Parameter("), Edit.after(span, ")")], "parameter")


def _in_place(source: SourceFile, node: ast.stmt) -> str | None:
    name, span = _assigned(source, node), source.span(node)
    value = node.value if isinstance(node, ast.Assign) else None
    if name is None or value is None or span.line != span.end_line:
        return None
    if not any(chain_key(one) == name for one in ast.walk(value)):
        return None
    sign = {ast.Sub: "-", ast.Add: "+"}.get(type(value.op)) if isinstance(value, ast.BinOp) else None
    if sign is not None and isinstance(value, ast.BinOp) and source.text(value.left) == name:
        return f"{name} {sign}= {source.text(value.right)}"
    return f"{name}.copy_({source.text(value)})"


def reads_later(frame: Frame, name: str) -> bool:
    """Whether a later line of the function at ``frame`` reads values of ``name``, and not only its shape or type."""
    statement = statement_at(frame)
    if statement is None or statement.scope is None:
        return False
    source, later = statement.source, statement.span.end_line + 1
    reads = [
        one for one in ast.walk(statement.scope) if isinstance(one, ast.Name | ast.Attribute) and one.lineno >= later
    ]
    return any(
        chain_key(one) == name and isinstance(one.ctx, ast.Load) and not _is_described(source.parents[one][0])
        for one in reads
    )


def _is_described(parent: ast.AST) -> bool:
    """Whether ``w`` is read for its shape or type alone: ``w.shape``, ``x.view_as(w)``, ``torch.zeros_like(w)``."""
    if isinstance(parent, ast.Attribute):
        return parent.attr in METADATA
    name = leaf_name(parent.func) or "" if isinstance(parent, ast.Call) else ""
    return name.endswith(("_as", "_like"))
