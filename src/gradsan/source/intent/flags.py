"""Flags, settings and gradients that a file sets or reads: ``requires_grad``, ``.grad``, a scaler's scale, groups."""

from __future__ import annotations

import ast
import functools
from typing import NamedTuple

from gradsan.model import Frame
from gradsan.source.identifiers import leaf_name
from gradsan.source.locate import expression_at, statement_at
from gradsan.source.methods import METADATA
from gradsan.source.tree import SourceFile, read_source, source_lines

_FLAG = "requires_grad"
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Call)


def drops_result(frame: Frame) -> bool:
    """Whether the call at ``frame`` is a statement of its own, so that nothing takes its result."""
    call, statement = expression_at(frame), statement_at(frame)
    if call is None or statement is None or not isinstance(call.node, ast.Call):
        return False
    return isinstance(statement.node, ast.Expr) and statement.node.value is call.node


def writes_into_result(frame: Frame, key: str) -> int | None:
    """The line that sets an element of what the call at ``frame`` returns under ``key``, where nothing keeps that.

    ``opt.state_dict()["param_groups"][0]["lr"] = rate``, or a loop over ``opt.state_dict()["param_groups"]`` that reads
    and sets elements of its variable alone.
    """
    call, statement = expression_at(frame), statement_at(frame)
    if call is None or statement is None:
        return None
    parents, node = statement.source.parents, statement.node
    chain = [call.node, parents[call.node][0]]
    while isinstance(chain[-1], ast.Subscript):
        chain.append(parents[chain[-1]][0])
    first, outer = chain[1], chain[-2]
    if not (isinstance(first, ast.Subscript) and isinstance(first.slice, ast.Constant) and first.slice.value == key):
        return None
    if isinstance(outer, ast.Subscript) and isinstance(outer.ctx, ast.Store):
        return node.lineno
    if not (isinstance(node, ast.For) and node.iter is outer and isinstance(node.target, ast.Name)):
        return None
    named = node.target.id
    names = [one for part in node.body for one in ast.walk(part) if isinstance(one, ast.Name) and one.id == named]
    elements = [one for name in names if isinstance(one := parents[name][0], ast.Subscript) and one.value is name]
    stores = [one.lineno for one in elements if isinstance(one.ctx, ast.Store)]
    first_store = min(stores, default=None)
    # What is read behind it was changed for that, as for a log.
    is_read = any(isinstance(one.ctx, ast.Load) and one.lineno > (first_store or 0) for one in elements)
    return first_store if len(elements) == len(names) and not is_read else None


class Flag(NamedTuple):
    """A statement that sets an attribute of ``owner``; ``is_of_parameters`` where a loop goes over these."""

    owner: str
    is_of_parameters: bool
    line: int


def flags_set(file: str, name: str, to: bool) -> list[Flag]:
    """The statements of a file that set an attribute ``name`` to True or False, but those of ``self``."""
    is_set = any(f".{name}" in line and str(to) in line for line in source_lines(file))
    source = read_source(file) if is_set else None
    found = []
    for node in () if source is None else source.nodes:
        if source is None or not isinstance(node, ast.Attribute) or node.attr != name:
            continue
        statement = source.statement(node)
        value = statement.value if isinstance(statement, ast.Assign) else None
        is_it = isinstance(value, ast.Constant) and value.value is to
        if is_it and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) != "self":
            found.append(Flag(ast.unparse(node.value), _is_of_parameters(source, node), node.lineno))
    return found


def reads_flag(file: str, name: str) -> bool:
    """Whether a file reads the attribute ``name``: by itself, or by its name in a string, as ``getattr`` takes it.

    Parameters have a flag ``requires_grad``: what a loop over these reads is that.
    """
    source = read_source(file) if any(name in line for line in source_lines(file)) else None
    for node in () if source is None else source.nodes:
        if isinstance(node, ast.Constant) and node.value == name:
            return True
        is_read = isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load)
        if is_read and (source is None or name != _FLAG or not _is_of_parameters(source, node)):
            return True
    return False


def reads_value_of(file: str, name: str, times: int = 0) -> bool:
    """Whether a file reads the attribute or variable ``name`` more than ``times``, not just its device or dtype.

    True where the source is not available.
    """
    source = read_source(file)
    for node in () if source is None else source.nodes:
        is_named = isinstance(node, ast.Attribute | ast.Name) and leaf_name(node) == name
        is_read = is_named and isinstance(getattr(node, "ctx", None), ast.Load)
        around = None if source is None or not is_read else source.parents[node][0]
        is_metadata = isinstance(around, ast.Attribute) and around.attr in METADATA
        times -= (is_read and not is_metadata) or (isinstance(node, ast.Constant) and node.value == name)
    return source is None or times < 0


def sets_own_flag(file: str) -> bool:
    """Whether a class of the file may have its own flag ``requires_grad``, or attributes are set by their names."""
    source = read_source(file)
    for node in () if source is None else source.nodes:
        if isinstance(node, ast.Attribute) and (
            node.attr == "__dict__" or (node.attr == _FLAG and ast.unparse(node) == f"self.{_FLAG}")
        ):
            return True
        if isinstance(node, ast.Name) and node.id in ("setattr", "vars"):
            return True
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == _FLAG:
            return True
    return False


def _is_of_parameters(source: SourceFile, node: ast.AST) -> bool:
    around = (one for one, _ in source.ancestors(node) if isinstance(one, (ast.For, ast.AsyncFor, *_COMPREHENSIONS)))
    return any("parameters(" in ast.unparse(getattr(one, "iter", one)) for one in around)


_LOGS = frozenset({"print", "info", "debug", "warning", "log", "write", "append", "add_scalar", "set_postfix"})


def reads_scale(file: str) -> bool:
    """Whether a file reads the scale of a ``GradScaler`` for more than a log."""
    source = read_source(file) if any("_scale" in line for line in source_lines(file)) else None
    for node in () if source is None else source.nodes:
        if source is not None and isinstance(node, ast.Attribute) and node.attr in ("get_scale", "_scale"):
            statement = source.statement(node)
            call = statement.value if isinstance(statement, ast.Expr) else None
            if not (isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in _LOGS):
                return True
    return False


def told_to_require(frame: Frame, name: str) -> Frame | None:
    """The last statement up to ``frame``, in its function, that tells ``name`` to require a gradient.

    ``loss.requires_grad_()``, ``loss.requires_grad = True``, or a call with ``requires_grad=True`` bound to ``loss``.
    """
    statement = statement_at(frame)
    if statement is None or statement.scope is None:
        return None
    lines = [
        node.lineno
        for node in ast.walk(statement.scope)
        if isinstance(node, ast.Expr | ast.Assign) and node.lineno <= frame.line and _tells(node, name)
    ]
    return Frame(frame.file, max(lines), frame.function, is_user=True) if lines else None


def _tells(statement: ast.Expr | ast.Assign, name: str) -> bool:
    is_bound = isinstance(statement, ast.Assign) and any(ast.unparse(one) == name for one in statement.targets)
    if isinstance(statement, ast.Assign) and not is_bound:
        is_set = any(ast.unparse(one) == f"{name}.{_FLAG}" for one in statement.targets)
        return is_set and isinstance(statement.value, ast.Constant) and statement.value.value is True
    for call in (one for one in ast.walk(statement.value) if isinstance(one, ast.Call)):
        is_asked = any(
            one.arg == _FLAG and isinstance(one.value, ast.Constant) and one.value.value is True
            for one in call.keywords
        )
        is_method = isinstance(call.func, ast.Attribute) and call.func.attr == f"{_FLAG}_"
        is_own = is_method and isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == name
        if is_own or (is_bound and (is_asked or is_method)):
            return True
    return False


_CLEARS = frozenset({"zero_", "fill_", "detach_", "requires_grad_"})
_MEASURES = frozenset({"amax", "amin", "max", "mean", "median", "min", "norm", "std", "sum", "var", "vector_norm"})
_STEPS_ON = frozenset({"abs", "cpu", "data", "detach", "double", "flatten", "float", "pow", "square", "view"})
"""Methods whose result stands for the gradient on the way to a measure."""


@functools.lru_cache(maxsize=256)
def reads_gradients(file: str) -> bool:
    """Whether code in ``file`` reads some ``.grad`` other than to clear it or to compare it with None.

    True where the source is not available.
    """
    source = read_source(file)
    return source is None or any(is_gradient_read(source, node) for node in source.nodes)


@functools.lru_cache(maxsize=256)
def sets_gradients(file: str) -> bool:
    """Whether code in ``file`` assigns some ``.grad`` other than None; True where the source is not available."""
    source = read_source(file)
    for node in () if source is None else source.nodes:
        if isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Store):
            value = getattr(source.statement(node), "value", None) if source is not None else None
            if not (isinstance(value, ast.Constant) and value.value is None):
                return True
    return source is None


@functools.lru_cache(maxsize=256)
def measures_gradients(file: str) -> bool:
    """Whether each read of some ``.grad`` in ``file`` is the start of a norm, a largest element or the like."""
    source = read_source(file)
    if source is None:
        return False
    return all(_is_measured(source, node) for node in source.nodes if is_gradient_read(source, node))


def _is_measured(source: SourceFile, node: ast.AST) -> bool:
    parent, _ = source.parents[node]
    while isinstance(parent, ast.Attribute | ast.Call):
        name = parent.attr if isinstance(parent, ast.Attribute) else leaf_name(parent.func)
        if name in _MEASURES:
            return True
        if name not in _STEPS_ON:
            return False
        parent, _ = source.parents[parent]
    return False


def is_gradient_read(source: SourceFile, node: ast.AST) -> bool:
    """Whether a node reads some ``.grad`` other than to clear it or to compare it with None."""
    if isinstance(node, ast.Call):
        names = [one.value for one in node.args[1:2] if isinstance(one, ast.Constant)]
        return leaf_name(node.func) == "getattr" and names == ["grad"]
    if not isinstance(node, ast.Attribute) or node.attr not in ("grad", "_grad"):
        return False
    at, (parent, field) = node, source.parents[node]
    if isinstance(node.ctx, ast.Store | ast.Del):
        return isinstance(parent, ast.AugAssign)
    while isinstance(parent, ast.Attribute) and parent.attr in ("data", *_CLEARS):
        at, (parent, field) = parent, source.parents[parent]
    if isinstance(parent, ast.Call) and field == "func":
        # A function of that name, such as ``autograd.grad``; or one that clears the gradient.
        return at is not node and at.attr not in _CLEARS
    return not (isinstance(parent, ast.Compare) and all(isinstance(one, ast.Is | ast.IsNot) for one in parent.ops))
