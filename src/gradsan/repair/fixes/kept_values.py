"""Values kept in a queue or a list over a step, computed again from what is kept beside them, where a loss reads them.

``queue.append((x, y, net(x)))`` and, rounds later, ``x, y, out = queue.popleft()``: behind it, ``out = net(x)``.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

from gradsan.model import Diagnosis, Fix, Frame, Label, Lines
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Edit, edited_lines
from gradsan.source.flow.bindings import method_receiver
from gradsan.source.identifiers import leaf_name
from gradsan.source.locate import Statement, statement_at
from gradsan.source.methods import CUTTING, KEEPS_ONE
from gradsan.source.rewrite.moving import is_whole_lines
from gradsan.source.rewrite.renewing import draws_again
from gradsan.source.tree import SourceFile

WORDS, CUT, _CUT = "recompute_from_kept", "detach_kept", "help.build_without_graph"
_TAKING = frozenset({"popleft", "pop", "popitem", "get", "get_nowait", "values", "items"})
_PASSING_ON = frozenset(
    {"list", "tuple", "reversed", "sorted", "sample", "choice", "choices", "enumerate", "iter", "next"}
)
_PLAIN = frozenset({"clone", "float", "to", *CUTTING})
_DEEPEST, _LONGEST = 6, 200

Part = int | str
"""A place in what is kept: the position in a tuple, the key of a dict, or the field of a record."""


def recompute_from_kept(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Compute the carried value, or the loss, again where it was taken out of what kept it.

    Where the round computes the same by itself, to compare it with the kept value (a ratio of probabilities), that one
    is kept without its graph instead.
    """
    used = blocks.first(diagnosis, "used")
    if used is None or blocks.advice(diagnosis, "recompute_forward") is None:
        return ()
    for frame, name in _readings(diagnosis, used):
        found = _found(frame, name)
        if found is None:
            continue
        place, again = found
        if again.is_computed_here():
            lines = again.detached()
            kind = next((one.kind for one in diagnosis.fixes if one.summary.key == _CUT and not one.lines), CUT)
            return (Fix.worded(_CUT, {"name": name}, lines, kind=kind),) if lines else ()
        value = again.value()
        if value is None:
            continue
        changed = _bound_again if again.read.whole is None else _read_again
        if lines := changed(place, again.read, name, value):
            return (blocks.fix("recompute_forward", lines, WORDS, name=name),)
    return ()


def _readings(diagnosis: Diagnosis, used: Label) -> Iterator[tuple[Frame, str]]:
    """Where the loss may read a kept value, and by which name: the state carried over, or the loss itself."""
    advised = blocks.advice(diagnosis, "recompute_forward")
    said = [] if advised is None else [advised.summary.values.get(key) for key in ("bridge", "name")]
    said += [one.values.get("bridge") for one in diagnosis.notes if one.key == "note.hangs_on"]
    for name in (one for one in said if isinstance(one, str)):
        yield from ((label.frame, name) for label in (*blocks.labels(diagnosis, "bridge"), used))
    receiver = method_receiver(used.frame)
    if receiver is not None:
        yield used.frame, receiver


@dataclass(frozen=True, slots=True)
class _Read:
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


def _found(frame: Frame, name: str) -> tuple[Statement, _Again] | None:
    place = statement_at(frame)
    try:
        expression = ast.parse(name, mode="eval").body
    except SyntaxError:
        return None
    read = None if place is None or place.scope is None else _read_of(place, expression)
    kept = None if place is None or read is None else _kept_as(place.source, read)
    return None if place is None or read is None or kept is None else (place, _Again(place, read, kept))


def _bound_again(place: Statement, read: _Read, name: str, value: str) -> Lines:
    """The name bound to the new value, behind the statement that took out the old one."""
    source, node = place.source, read.statement
    if isinstance(node, ast.For):
        first = node.body[0]
        if first.lineno == node.lineno or not is_whole_lines(source, first):
            return ()
        line = source.span(first).line
        return blocks.lines_changed(source, {line: f"{source.indent(first)}{name} = {value}\n{source.lines[line - 1]}"})
    if not is_whole_lines(source, node):
        return ()
    end = source.span(node).end_line
    return blocks.lines_changed(source, {end: f"{source.lines[end - 1]}\n{source.indent(node)}{name} = {value}"})


def _read_again(place: Statement, read: _Read, name: str, value: str) -> Lines:
    """The new value in the place of each reading of the old one, behind the statement that took out its element."""
    source, first = place.source, read.statement
    last = first.end_lineno if isinstance(first, ast.For) else place.node.end_lineno
    reads = [one for one in source.nodes if isinstance(one, ast.Attribute | ast.Subscript) and _spelled(one) == name]
    own = [one for one in reads if first.lineno < one.lineno <= (last or 0)]
    if not all(isinstance(one.ctx, ast.Load) and source.function(one) is place.function for one in own):
        return ()
    return edited_lines(source, [Edit(source.span(one), value) for one in own]) if own else ()


def _spelled(node: ast.AST) -> str:
    return ast.unparse(node).replace("'", '"')


def _read_of(place: Statement, expression: ast.expr) -> _Read | None:
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
            else _Read(statement, container, part, None, whole)
        )
    if not isinstance(target, ast.Tuple | ast.List) or any(not isinstance(one, ast.Name) for one in target.elts):
        return None
    names: dict[Part, str] = {at: one.id for at, one in enumerate(target.elts) if isinstance(one, ast.Name)}
    mine = next(at for at, one in names.items() if one == root.id)
    return _Read(statement, container, mine, {at: one for at, one in names.items() if at != mine})


class _FieldRead(_Read):
    """The same by attributes: a dataclass, a named tuple."""

    def other(self, part: Part) -> str | None:
        return f"{self.whole}.{part}" if isinstance(part, str) else None


def _binding(place: Statement, name: str) -> tuple[ast.stmt, ast.expr, ast.expr] | None:
    """The last statement before ``place`` that binds ``name``, the innermost target with it, and its container."""
    scope = place.scope
    body = [] if scope is None else [one for one in ast.walk(scope) if place.source.function(one) is place.function]
    found: list[tuple[ast.stmt, ast.expr, ast.expr]] = []
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
        if taken is None or any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(value)):
            return None
        found.append((node, *taken))
    return max(found, key=lambda one: one[0].lineno) if found else None


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
class _Kept:
    """The statement that puts an element into the container, and the expressions of its parts."""

    statement: ast.stmt
    parts: dict[Part, ast.expr]


def _kept_as(source: SourceFile, read: _Read) -> _Kept | None:
    """The one place of the file where an element is put into the container that ``read`` takes it from."""
    items = [item for node in source.nodes for item in _put(node, read.container)]
    if len(items) != 1:
        return None
    statement = source.statement(items[0])
    if statement is None:
        return None
    item = items[0]
    if isinstance(item, ast.Name):
        made = _bound_once(source, statement, item.id)
        item = item if made is None else made
    parts = dict(_parts(source, item))
    if read.others is not None:
        parts = {at: one for at, one in parts.items() if isinstance(at, int)}
        if len(parts) != len(read.others) + 1:
            return None
    return _Kept(statement, parts) if read.part in parts else None


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
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _spelled(node.targets[0]) == name:
            given = node.value.args[1] if len(node.value.args) > 1 else None
            if leaf_name(node.value.func) == "namedtuple" and given is not None:
                if isinstance(given, ast.Constant) and isinstance(given.value, str):
                    return given.value.replace(",", " ").split()
                if isinstance(given, ast.List | ast.Tuple):
                    return [str(one.value) for one in given.elts if isinstance(one, ast.Constant)]
    return []


def _bound_once(source: SourceFile, at: ast.stmt, name: str) -> ast.expr | None:
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


@dataclass(frozen=True, slots=True)
class _Again:
    """The expression of a kept value in terms of what is taken out beside it."""

    place: Statement
    read: _Read
    kept: _Kept

    def value(self) -> str | None:
        """The text; None where it needs something that is not kept, computes nothing, or would draw again."""
        source, own = self.place.source, self.kept.parts[self.read.part]
        known = {_cut(part): text for at, part in self.kept.parts.items() if (text := self._beside(at)) is not None}
        found, used = self._with(own, known, 0)
        if found is None or not used or draws_again(ast.walk(found)) or source.statement(own) is None:
            return None
        calls = [one for one in ast.walk(found) if isinstance(one, ast.Call)]
        is_computed = any(leaf_name(one.func) not in _PLAIN for one in calls)
        if not is_computed or len(list(ast.walk(found))) > _LONGEST:
            return None
        text = ast.unparse(found)
        is_double = sum(line.count('"') for line in source.lines) > sum(line.count("'") for line in source.lines)
        return text.replace("'", '"') if is_double and '"' not in text else text

    def is_computed_here(self) -> bool:
        """Whether the function that reads the kept value computes the same of the same parts by itself."""
        source, scope, again = self.place.source, self.place.scope, self.value()
        same = None if again is None else ast.unparse(ast.parse(again, mode="eval"))
        nodes = [] if scope is None or again is None else list(ast.walk(scope))
        own = [one for one in nodes if source.function(one) is self.place.function]
        here = set(ast.walk(self.kept.statement))
        values = [one.value for one in own if isinstance(one, ast.Assign) and one not in here]
        return any(ast.unparse(inlined(source, one, self.place.node)) == same for one in values)

    def detached(self) -> Lines:
        """The changed lines that keep the value without its graph."""
        source, own = self.place.source, self.kept.parts[self.read.part]
        if not isinstance(own, ast.Call | ast.Name | ast.Attribute | ast.Subscript) or source.statement(own) is None:
            return ()
        return edited_lines(source, [Edit.after(source.span(own), ".detach()")])

    def _beside(self, part: Part) -> str | None:
        return None if part == self.read.part else self.read.other(part)

    def _with(self, node: ast.expr, known: dict[str, str], depth: int) -> tuple[ast.expr | None, bool]:
        """``node`` with kept parts and local values put in for names, and whether it has a kept part."""
        if depth > _DEEPEST or isinstance(node, ast.Lambda | ast.Await | ast.Yield | ast.NamedExpr):
            return None, False
        if (text := known.get(_cut(node))) is not None:
            return ast.parse(text, mode="eval").body, True
        if isinstance(node, ast.Name):
            if node.id not in self._locals():
                return node, False
            value = _bound_once(self.place.source, self.kept.statement, node.id)
            return (None, False) if value is None else self._with(value, known, depth + 1)
        new, has_kept = copy.copy(node), False
        for field, value in ast.iter_fields(node):
            several = value if isinstance(value, list) else [value]
            changed: list[object] = []
            for one in several:
                inner = one.value if isinstance(one, ast.keyword) else one
                if isinstance(inner, ast.comprehension):
                    return None, False
                if not isinstance(inner, ast.expr):
                    changed.append(one)
                    continue
                found, is_kept = self._with(inner, known, depth)
                if found is None:
                    return None, False
                has_kept = has_kept or is_kept
                changed.append(ast.keyword(one.arg, found) if isinstance(one, ast.keyword) else found)
            setattr(new, field, changed if isinstance(value, list) else changed[0])
        return new, has_kept

    def _locals(self) -> set[str]:
        """The names that stand for other values where the kept value is read than where it was kept."""
        source, at = self.place.source, self.kept.statement
        function = source.function(at)
        around = [one for one, _ in source.ancestors(at) if isinstance(one, ast.For | ast.While)]
        loops = [one for one in around if source.function(one) is function]
        if function is self.place.function or function is None:
            return blocks.names_bound(loops[-1]) if loops else set()
        given = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
        mine = _own(function)
        if (
            mine is not None
            and mine == _own(self.place.function)
            and _owner(source, at) is _owner(source, self.place.node)
        ):
            given -= {mine}
        return blocks.names_bound(function) | given


def inlined(source: SourceFile, value: ast.expr, at: ast.stmt, depth: int = 0) -> ast.expr:
    """``value`` with the values of names that are bound once put in for them."""

    class Inlining(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            made = _bound_once(source, at, node.id) if isinstance(node.ctx, ast.Load) and depth < _DEEPEST else None
            is_of_round = made is not None and (
                source.function(made) is not None or source.inside(made, ast.For) or source.inside(made, ast.While)
            )
            return inlined(source, made, at, depth + 1) if isinstance(made, ast.Call) and is_of_round else node

    found = Inlining().visit(copy.deepcopy(value))
    assert isinstance(found, ast.expr)
    return found


def _own(function: ast.AST | None) -> str | None:
    args = function.args.args if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) else []
    return args[0].arg if args else None


def _owner(source: SourceFile, node: ast.AST) -> ast.ClassDef | None:
    return source.owner_class(node)


def _cut(node: ast.expr) -> str:
    """The text of an expression without ``detach()`` and ``clone()`` at its end."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PLAIN:
        node = node.func.value
    return ast.unparse(node)
