"""Statements that add a value to a list, a dictionary or a sum that the program keeps."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from gradsan.model import Frame
from gradsan.source.change import Change, edited, followed
from gradsan.source.flow.kept import as_python, frame_at_node
from gradsan.source.identifiers import leaf_name
from gradsan.source.methods import KEEPS_ONE
from gradsan.source.tree import SourceFile, read_source

_JOINING = ("cat", "concat", "hstack", "vstack")
_SIMPLE = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


@dataclass(frozen=True, slots=True)
class Addition:
    """A statement that adds ``value`` to something kept, and, where known, its line with the value detached."""

    frame: Frame
    value: str
    change: Change | None


def additions(frame: Frame, path: str, *, within: bool = False) -> tuple[Addition, ...]:
    """The places in the file of ``frame``, or ``within`` the function that it defines, that add to ``path``.

    ``path.append(x)``, ``path += x``, ``path = path + x``, ``path = torch.cat([path, x])``, ``path[k] = x``,
    ``path[k] += x``, ``path.setdefault(k, []).append(x)``. An element ``path["loss"]`` is ``path[key]``, too.
    """
    text, source = as_python(path), read_source(frame.file)
    if text is None or source is None:
        return ()
    wanted = ast.parse(text, mode="eval").body
    found = []
    for node in source.nodes:
        if within and not _is_in_function(source, node, frame.line):
            continue
        value = _added(node, wanted)
        if value is not None:
            statement = source.statement(value) or node
            text = source.text(value) if isinstance(value, _SIMPLE) else f"({source.text(value)})"
            found.append(Addition(frame_at_node(source, frame, statement), text, value_detached(source, value)))
    return tuple(found)


def _is_in_function(source: SourceFile, node: ast.AST, line: int) -> bool:
    """Whether ``node`` lies in the function whose definition, its decorators included, begins at ``line``."""
    around = (one for one, _ in source.ancestors(node) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    return any(line == min(at.lineno for at in (one, *one.decorator_list)) for one in around)


def _added(node: ast.AST, wanted: ast.expr) -> ast.expr | None:
    """The value that ``node`` adds to ``wanted``; None where it adds nothing to it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KEEPS_ONE:
        position = KEEPS_ONE[node.func.attr]
        if len(node.args) > position and _is_in(node.func.value, wanted):
            return node.args[position]
    if isinstance(node, ast.AugAssign) and _is_in(node.target, wanted):
        return _single(node.value)
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    if _is(node.targets[0], wanted):
        return _added_anew(node.value, wanted)
    if isinstance(node.targets[0], ast.Subscript) and _is(node.targets[0].value, wanted):
        return _added_anew(node.value, node.targets[0]) or node.value
    return None


def _is(node: ast.expr, wanted: ast.expr) -> bool:
    """Whether two expressions are spelled alike, or are elements of one container, by a key that is computed here."""
    if ast.unparse(node) == ast.unparse(wanted):
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "setdefault"):
        held, key = node.func.value, node.args[0] if node.args else None
    elif isinstance(node, ast.Subscript):
        held, key = node.value, node.slice
    else:
        return False
    if not isinstance(wanted, ast.Subscript) or key is None or ast.unparse(held) != ast.unparse(wanted.value):
        return False
    return not isinstance(key, ast.Constant) or ast.unparse(key) == ast.unparse(wanted.slice)


def _is_in(node: ast.expr, wanted: ast.expr) -> bool:
    """The same, or an element of ``wanted``."""
    return _is(node, wanted) or (isinstance(node, ast.Subscript) and _is(node.value, wanted))


def _added_anew(value: ast.expr, wanted: ast.expr) -> ast.expr | None:
    """The value added to or joined with ``wanted``: ``x`` of ``wanted + x`` and of ``torch.cat([wanted, x])``."""
    terms: list[ast.expr] = []
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        terms = [value.left, value.right]
    elif isinstance(value, ast.Call) and leaf_name(value.func) in _JOINING and value.args:
        joined = value.args[0]
        terms = list(joined.elts) if isinstance(joined, ast.List | ast.Tuple) else []
    others = [one for one in terms if not _is(one, wanted)]
    return _single(others[0]) if len(others) == 1 and len(terms) == 2 else None


def _single(value: ast.expr) -> ast.expr | None:
    """``value`` itself; the one element of a list display, None where it has several."""
    if isinstance(value, ast.List | ast.Tuple):
        return value.elts[0] if len(value.elts) == 1 else None
    return value


def value_detached(source: SourceFile, value: ast.expr) -> Change | None:
    """The statement with ``.detach()`` at a value, which gets parentheses where it is an operation."""
    if not isinstance(value, (ast.BinOp, ast.UnaryOp, *_SIMPLE)):
        return None
    return edited(source, followed(source, value, ".detach()"), "detach")
