"""Leaves made within an expression of which only the result is kept: the result, or the leaf alone, is bound instead.

``nn.Parameter(torch.randn(n)) * 0.1`` is no Parameter, and nothing holds the one inside it; meant was
``nn.Parameter(torch.randn(n) * 0.1)``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited, text_with, without_keyword
from gradsan.source.identifiers import chain_key, leaf_name
from gradsan.source.locate import Statement, statement_at
from gradsan.source.tree import SourceFile

_SINGLE = (ast.Name, ast.Call, ast.Attribute, ast.Subscript, ast.Constant, ast.List, ast.Tuple)
_SCALED = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_KEEPS_MEANING = frozenset(
    {
        *("bfloat16", "clone", "contiguous", "cpu", "cuda", "double", "float", "half", "requires_grad_", "to", "type"),
        *(
            "expand",
            "flatten",
            "permute",
            "repeat",
            "reshape",
            "squeeze",
            "swapaxes",
            "t",
            "transpose",
            "unsqueeze",
            "view",
        ),
        *("add", "div", "mul", "neg", "sub"),
    }
)
"""Methods whose result can be the leaf as well: places, types, shapes, scales. Of ``exp()`` the argument is meant."""
_MOST_USES = 3


def leaf_alone(frame: Frame) -> Change | None:
    """The leaf in the statement at ``frame`` made to stand alone: as the result of what is done to it, or beside that.

    ``w = torch.randn(3, requires_grad=True) / 2`` becomes ``w = (torch.randn(3) / 2).requires_grad_()``. Where another
    function bounds the leaf, ``self.scale = nn.Parameter(torch.zeros(1)).exp()``, the leaf is bound by itself, and what
    reads it computes ``self.scale.exp()``. None where the value has no such part, or several, or is one itself.
    """
    statement = statement_at(frame)
    if statement is None or not isinstance(statement.node, (ast.Assign, ast.AnnAssign)):
        return None
    source, value = statement.source, statement.node.value
    parts = [] if value is None else list(_leaves_in(value))
    if value is None or len(parts) != 1 or parts[0] is value:
        return None
    if not _keeps_meaning(source, parts[0], value):
        return _computed_by_readers(statement, value, parts[0])
    edit = _as_data(source, parts[0])
    if edit is None:
        return None
    data, whole = text_with(source, source.span(value), [edit]), source.span(value)
    if leaf_name(parts[0].func) == "Parameter":
        return edited(source, [Edit(whole, f"{ast.unparse(parts[0].func)}({data})")], "leaf_alone")
    data = data if isinstance(value, _SINGLE) else f"({data})"
    return edited(source, [Edit(whole, f"{data}.requires_grad_()")], "leaf_alone")


def _keeps_meaning(source: SourceFile, leaf: ast.expr, value: ast.expr) -> bool:
    """Whether all that is done to a leaf within ``value`` moves, casts, shapes or scales it, or fills it first."""
    node: ast.AST = leaf
    while node is not value:
        node, part = source.parents[node]
        if isinstance(node, ast.BinOp) and not isinstance(node.op, _SCALED):
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


def _computed_by_readers(statement: Statement, value: ast.expr, leaf: ast.expr) -> Change | None:
    """The leaf bound alone, and each of its few readers in this class or function computing the value from it."""
    source, node = statement.source, statement.node
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    name = chain_key(targets[0]) if len(targets) == 1 else None
    scope = statement.scope if name is not None and name.isidentifier() else source.owner_class(statement.node)
    if name is None or scope is None or any(isinstance(one, ast.Call) for one in _others(leaf, value)):
        return None
    readers = [
        one
        for one in ast.walk(scope)
        if isinstance(one, (ast.Name, ast.Attribute)) and isinstance(one.ctx, ast.Load) and chain_key(one) == name
    ]
    bound = [
        one for one in ast.walk(scope) if isinstance(getattr(one, "ctx", None), ast.Store) and chain_key(one) == name
    ]
    if not 1 <= len(readers) <= _MOST_USES or len(bound) != 1:
        return None
    computed = text_with(source, source.span(value), [Edit(source.span(leaf), name)])
    computed = computed if isinstance(value, _SINGLE) else f"({computed})"
    alone = text_with(source, source.span(leaf), [])
    edits = [Edit(source.span(value), alone), *(Edit(source.span(one), computed) for one in readers)]
    return edited(source, edits, "leaf_alone")


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
