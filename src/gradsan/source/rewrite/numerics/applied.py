"""Operations of torch in the source: ``x.log()``, ``torch.log(x)`` and ``a / b`` by name, operands and arguments."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from gradsan.source.change import TAKES_A_METHOD_CALL, Edit, followed
from gradsan.source.identifiers import bindings_of, dotted_path, imported_as, local_nodes, parameters, standing_of
from gradsan.source.imports import torch_name
from gradsan.source.tree import SourceFile, Span

_OPERATORS = {ast.Div: "div", ast.Mult: "mul", ast.Pow: "pow", ast.Add: "add", ast.Sub: "sub", ast.MatMult: "matmul"}
_SAME = {
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "arccos": "acos",
    "arcsin": "asin",
}
_SAME |= {"arctanh": "atanh", "arccosh": "acosh"}
_BINARY = frozenset({"div", "mul", "pow", "add", "sub", "matmul", "xlogy"})
_DEEPEST = 4
_BINDS_LOOSER = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.Compare, ast.NamedExpr, ast.Starred, ast.Tuple)


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """An operation: its name in torch, its operands, and its other arguments.

    ``operands`` are two for an operation of two tensors, else one. ``function`` is the text before the name
    (``torch``, ``F``), None for a method or an operator. ``edit`` is the span of the last operand.
    """

    node: ast.expr | ast.AugAssign
    op: str
    operands: tuple[ast.expr, ...]
    arguments: tuple[ast.expr, ...] = ()
    keywords: tuple[ast.keyword, ...] = ()
    function: str | None = None


def applied(source: SourceFile, node: ast.AST) -> Applied | None:
    """The torch operation that ``node`` is; None where the source does not show one."""
    if isinstance(node, ast.BinOp):
        op = _OPERATORS.get(type(node.op))
        return None if op is None else Applied(node, op, (node.left, node.right))
    if isinstance(node, ast.AugAssign):
        op = _OPERATORS.get(type(node.op))
        return None if op is None else Applied(node, op, (node.target, node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return Applied(node, "neg", (node.operand,))
    if not isinstance(node, ast.Call) or any(isinstance(one, ast.Starred) for one in node.args):
        return None
    if isinstance(node.func, ast.Attribute):
        name, base = node.func.attr, node.func.value
        if standing_of(source, base) == "namespace":
            given, function = list(node.args), source.text(base)
        else:
            given, function = [base, *node.args], None
    elif isinstance(node.func, ast.Name) and (dotted_path(source, node.func) or "").startswith("torch."):
        name, given, function = (dotted_path(source, node.func) or "").rpartition(".")[2], list(node.args), ""
    else:
        return None
    op = _SAME.get(name, name)
    many = 2 if op in _BINARY else 1
    if len(given) < many:
        return None
    return Applied(node, op, tuple(given[:many]), tuple(given[many:]), tuple(node.keywords), function)


def keyword_of(one: Applied, name: str) -> ast.expr | None:
    """The value of the argument ``name=…``."""
    return next((keyword.value for keyword in one.keywords if keyword.arg == name), None)


def resolved(source: SourceFile, node: ast.expr, depth: int = 0) -> ast.expr:
    """The value of a name that its function binds once, earlier, if no name read by that value is rebound in between.

    The node itself for anything else.
    """
    if not isinstance(node, ast.Name) or depth > _DEEPEST:
        return node
    scope, use = scope_of_node(source, node), source.statement(node)
    if use is None or isinstance(scope, ast.Lambda):
        return node
    statements = [one for one in local_nodes(scope) if isinstance(one, ast.stmt)]
    bound = [(one, statement) for statement in statements for one in bindings_of(statement)]
    own = [(one, statement) for one, statement in bound if one.name == node.id]
    if len(own) != 1 or (not isinstance(scope, ast.Module) and node.id in parameters(scope)):
        return node
    binding, statement = own[0]
    value, made, used = binding.value, source.span(statement), source.span(use)
    is_plain = isinstance(statement, ast.Assign | ast.AnnAssign) and binding.computed and binding.replaces
    if value is None or not is_plain or made >= used or _loops(source, statement) != _loops(source, use):
        return node
    read = {one.id for one in ast.walk(value) if isinstance(one, ast.Name)}
    if any(one.name.split(".")[0] in read and made < source.span(other) < used for one, other in bound):
        return node
    return resolved(source, value, depth + 1)


def scope_of_node(
    source: SourceFile, node: ast.AST
) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module:
    """The function whose body ``node`` is in, or the module."""
    return source.function(node) or source.module


def _loops(source: SourceFile, node: ast.AST) -> list[ast.AST]:
    return [parent for parent, _ in source.ancestors(node) if isinstance(parent, ast.For | ast.While | ast.AsyncFor)]


def same(source: SourceFile, first: ast.expr, second: ast.expr) -> bool:
    """Whether two expressions have the same text once names are resolved."""
    return ast.dump(resolved(source, first)) == ast.dump(resolved(source, second))


def text_of_rest(source: SourceFile, one: Applied) -> str:
    """The arguments after the operands, as ``, dim=-1``."""
    given = [source.text(argument) for argument in one.arguments]
    given += [f"{key.arg}={source.text(key.value)}" for key in one.keywords if key.arg]
    return "".join(f", {text}" for text in given)


def receiver(source: SourceFile, node: ast.expr) -> str:
    """The text of ``node`` as the receiver of a method call."""
    text = source.text(node)
    return text if isinstance(node, TAKES_A_METHOD_CALL) else f"({text})"


def functional(source: SourceFile) -> str:
    """The file's name for ``torch.nn.functional``."""
    known = imported_as(source, "torch.nn.functional")
    if known is not None:
        return known
    layers = imported_as(source, "torch.nn")
    return f"{layers}.functional" if layers is not None else f"{torch_name(source)}.nn.functional"


def behind(source: SourceFile, node: ast.expr, tail: str) -> list[Edit]:
    """The edits that append a method call, ``tail``, to ``node``."""
    span = _parentheses(source, node)
    return followed(source, node, tail) if span is None else [Edit.after(span, tail)]


def plus(source: SourceFile, node: ast.expr, number: str) -> list[Edit]:
    """The edits that add ``number`` to ``node``."""
    span = source.span(node)
    parent, field = source.parents[node]
    is_argument = isinstance(parent, ast.Call) and field == "args"
    has_own = is_argument or _parentheses(source, node) is not None
    if has_own and not isinstance(node, _BINDS_LOOSER):
        return [Edit.after(span, f" + {number}")]
    return [Edit.before(span, "("), Edit.after(span, f" + {number})")]


def _parentheses(source: SourceFile, node: ast.expr) -> Span | None:
    """The span of the parentheses that only group ``node``, on one line; None where there are none."""
    parent, field = source.parents.get(node, (None, ""))
    span = source.span(node)
    if span.line != span.end_line or (isinstance(parent, ast.Call | ast.keyword) and field in ("args", "value")):
        return None
    line = source.lines[span.line - 1]
    before, after = line[: span.column - 1].rstrip(), line[span.end_column - 1 :]
    if not before.endswith("(") or not after.lstrip().startswith(")"):
        return None
    spaces = len(after) - len(after.lstrip())
    return Span(span.line, len(before), span.line, span.end_column + spaces + 1)
