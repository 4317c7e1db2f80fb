"""Elements that a program puts into a queue, a list or a dict, and takes out later: their parts, by both places."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.identifiers import binds, leaf_name
from gradsan.source.locate import Statement
from gradsan.source.methods import CUTTING, KEEPS_ONE
from gradsan.source.tree import SourceFile

_TAKING = frozenset({"popleft", "pop", "popitem", "get", "get_nowait", "values", "items"})
_PASSING_ON = frozenset(
    {"list", "tuple", "reversed", "sorted", "sample", "choice", "choices", "enumerate", "iter", "next"}
)
PLAIN = frozenset({"clone", "float", "to", *CUTTING})
DEEPEST = 6

Part = int | str
"""A place in what is kept: the position in a tuple, the key of a dict, or the field of a record."""


@dataclass(frozen=True, slots=True)
class Read:
    """A part of an element that ``statement`` takes out of ``container``; ``others`` are its other parts as read.

    ``whole`` is the expression that reads the part where the element itself has a name.
    """

    statement: ast.stmt
    container: ast.expr
    part: Part
    others: dict[Part, str] | None
    whole: str | None = None

    def other(self, part: Part) -> str | None:
        """How the statement reads another part of the same element."""
        if self.others is not None:
            return self.others.get(part)
        assert self.whole is not None
        return f"{self.whole}[{part!r}]"


def spelled(node: ast.AST) -> str:
    return ast.unparse(node).replace("'", '"')


def read_of(place: Statement, expression: ast.expr) -> Read | None:
    """Where the value that ``expression`` reads was taken out of a container."""
    root: ast.expr = expression
    part: Part | None = None
    if isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
        root, key = expression.value, expression.slice.value
        part = key if isinstance(key, int | str) else None
    elif isinstance(expression, ast.Attribute):
        root, part = expression.value, expression.attr
    if not isinstance(root, ast.Name):
        return None
    bound = _binding(place, root.id)
    if bound is None:
        return None
    statement, target, container = bound
    if part is not None:
        is_field = isinstance(expression, ast.Attribute)
        whole = root.id if isinstance(target, ast.Name) else None
        return (
            None
            if whole is None
            else _FieldRead(statement, container, part, None, whole)
            if is_field
            else Read(statement, container, part, None, whole)
        )
    if not isinstance(target, ast.Tuple | ast.List) or any(not isinstance(one, ast.Name) for one in target.elts):
        return None
    names: dict[Part, str] = {at: one.id for at, one in enumerate(target.elts) if isinstance(one, ast.Name)}
    mine = next(at for at, one in names.items() if one == root.id)
    return Read(statement, container, mine, {at: one for at, one in names.items() if at != mine})


class _FieldRead(Read):
    """The same by attributes: a dataclass, a named tuple."""

    def other(self, part: Part) -> str | None:
        return f"{self.whole}.{part}" if isinstance(part, str) else None


def _binding(place: Statement, name: str) -> tuple[ast.stmt, ast.expr, ast.expr] | None:
    """The last statement before ``place`` that binds ``name``, the innermost target with it, and its container."""
    scope = place.scope
    body = [] if scope is None else [one for one in ast.walk(scope) if place.source.function(one) is place.function]
    found: list[tuple[ast.stmt, tuple[ast.expr, ast.expr] | None]] = []
    for node in body:
        if isinstance(node, ast.For) and node.lineno <= place.node.lineno <= (node.end_lineno or node.lineno):
            target, value = node.target, node.iter
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and node.lineno < place.node.lineno:
            target, value = node.targets[0], node.value
        else:
            continue
        if name not in blocks.names_bound(target):
            continue
        taken = _taken(target, value)
        reads_itself = any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(value))
        found.append((node, None if reads_itself else taken))
    last, taken = max(found, key=lambda one: one[0].lineno, default=(None, None))
    return None if last is None or taken is None else (last, *taken)


def _taken(target: ast.expr, value: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """The target that an element is bound to, and the container that ``value`` takes it from."""
    while isinstance(value, ast.Call):
        name = leaf_name(value.func)
        if name in ("enumerate", "items", "popitem"):
            if not isinstance(target, ast.Tuple) or len(target.elts) != 2:
                return None
            target = target.elts[1]
        if isinstance(value.func, ast.Attribute) and name in _TAKING:
            value = value.func.value
        elif name in _PASSING_ON and value.args:
            value = value.args[0]
        else:
            return None
    if isinstance(value, ast.Subscript):
        value = value.value
    return (target, value) if isinstance(value, ast.Name | ast.Attribute) else None


@dataclass(frozen=True, slots=True)
class Kept:
    """The statement that puts an element into the container, and the expressions of its parts."""

    statement: ast.stmt
    parts: dict[Part, ast.expr]


def kept_as(source: SourceFile, read: Read) -> Kept | None:
    """The one place of the file where an element is put into the container that ``read`` takes it from."""
    function, container = source.function(read.statement), read.container
    is_local = isinstance(container, ast.Name) and function is not None and binds(function, container.id)
    nodes = (one for one in source.nodes if not is_local or source.function(one) is function)
    items = [item for node in nodes for item in _put(node, container)]
    if len(items) != 1:
        return None
    statement = source.statement(items[0])
    if statement is None:
        return None
    item = items[0]
    if isinstance(item, ast.Name):
        made = bound_once(source, statement, item.id)
        item = item if made is None else made
    parts = dict(_parts(source, item))
    if read.others is not None:
        parts = {at: one for at, one in parts.items() if isinstance(at, int)}
        if len(parts) != len(read.others) + 1:
            return None
    return Kept(statement, parts) if read.part in parts else None


def _put(node: ast.AST, container: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args and not node.keywords:
        is_kept = node.func.attr in {*KEEPS_ONE, "put_nowait"} and _is_same(node.func.value, container)
        yield from node.args[-1:] if is_kept else ()
    target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
    if isinstance(node, ast.Assign) and isinstance(target, ast.Subscript) and _is_same(target.value, container):
        yield node.value


def _is_same(one: ast.expr, other: ast.expr) -> bool:
    """Whether two expressions are the same container: one attribute, of ``self`` or of what holds it."""
    if isinstance(one, ast.Attribute) and isinstance(other, ast.Attribute):
        return one.attr == other.attr
    return ast.unparse(one) == ast.unparse(other)


def _parts(source: SourceFile, item: ast.expr) -> Iterator[tuple[Part, ast.expr]]:
    if isinstance(item, ast.Tuple | ast.List):
        yield from enumerate(item.elts)
    elif isinstance(item, ast.Dict):
        yield from (
            (key.value, value)
            for key, value in zip(item.keys, item.values, strict=True)
            if isinstance(key, ast.Constant) and isinstance(key.value, int | str)
        )
    elif isinstance(item, ast.Call) and leaf_name(item.func) == "dict" and not item.args:
        yield from ((one.arg, one.value) for one in item.keywords if one.arg is not None)
    elif isinstance(item, ast.Call):
        fields = _fields(source, leaf_name(item.func) or "")
        given = [*zip(fields, item.args, strict=False), *((one.arg, one.value) for one in item.keywords)]
        values = {name: value for name, value in given if name in fields}
        yield from values.items()
        yield from ((at, values[name]) for at, name in enumerate(fields) if name in values)


def _fields(source: SourceFile, name: str) -> list[str]:
    """The fields of a dataclass or a named tuple of the file, in order."""
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return [
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            ]
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and spelled(node.targets[0]) == name:
            given = node.value.args[1] if len(node.value.args) > 1 else None
            if leaf_name(node.value.func) == "namedtuple" and given is not None:
                if isinstance(given, ast.Constant) and isinstance(given.value, str):
                    return given.value.replace(",", " ").split()
                if isinstance(given, ast.List | ast.Tuple):
                    return [str(one.value) for one in given.elts if isinstance(one, ast.Constant)]
    return []


def bound_once(source: SourceFile, at: ast.stmt, name: str) -> ast.expr | None:
    """The value of the plain assignment before ``at``, in a block around it, that alone binds ``name`` for it."""
    function = source.function(at)
    node: ast.AST = at
    scope = source.module if function is None else function
    binding = [one for one in ast.walk(scope) if isinstance(one, ast.stmt) and name in _names_stored(one)]
    binding = [one for one in binding if source.function(one) is function]
    while node is not scope and node in source.parents:
        parent, field = source.parents[node]
        block = getattr(parent, field, None)
        before = block[: block.index(node)] if isinstance(block, list) and node in block else []
        within = [one for one in binding if isinstance(parent, ast.For | ast.While) and one in ast.walk(parent)]
        made = next((one for one in reversed(before) if one in binding), None)
        if made is not None:
            later = [one for one in binding if made.lineno < one.lineno < at.lineno]
            is_plain = isinstance(made, ast.Assign) and isinstance(made.targets[0], ast.Name) and not later
            return made.value if isinstance(made, ast.Assign) and is_plain and len(made.targets) == 1 else None
        if within:
            return None
        node = parent
    return None


def _names_stored(node: ast.stmt) -> set[str]:
    """The names that a statement itself binds, without the statements within it."""
    parts = [one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.stmt)]
    return {one for part in parts for one in blocks.names_bound(part)}


def inlined(source: SourceFile, value: ast.expr, at: ast.stmt, depth: int = 0) -> ast.expr:
    """``value`` with the values of names that are bound once put in for them."""

    class Inlining(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            made = bound_once(source, at, node.id) if isinstance(node.ctx, ast.Load) and depth < DEEPEST else None
            is_of_round = made is not None and (
                source.function(made) is not None or source.inside(made, ast.For) or source.inside(made, ast.While)
            )
            return inlined(source, made, at, depth + 1) if isinstance(made, ast.Call) and is_of_round else node

    found = Inlining().visit(copy.deepcopy(value))
    assert isinstance(found, ast.expr)
    return found


def without_cut(node: ast.expr) -> str:
    """The text of an expression without ``detach()`` and ``clone()`` at its end."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PLAIN:
        node = node.func.value
    return ast.unparse(node)


def own_attribute(node: ast.AST) -> str | None:
    """``x`` of ``self.x``."""
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if isinstance(node, ast.Attribute) and is_own else None
