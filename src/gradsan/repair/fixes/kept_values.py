"""Values kept in a queue, a list or an attribute over a step, computed again where a loss reads them.

``queue.append((x, y, net(x)))`` and, rounds later, ``x, y, out = queue.popleft()``: behind it, ``out = net(x)``. States
that each round fills in place, and whose graph stays: ``state.zero_()``.
"""

from __future__ import annotations

import ast
import copy
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradsan.model import Diagnosis, Fix, Frame, Label, Lines
from gradsan.repair.fixes import _blocks as blocks
from gradsan.repair.fixes._kept_parts import (
    DEEPEST,
    PLAIN,
    Kept,
    Part,
    Read,
    bound_once,
    inlined,
    kept_as,
    read_of,
    spelled,
    without_cut,
)
from gradsan.source.change import Edit, changed_lines, edited, edited_lines, indentation_of, text_with
from gradsan.source.flow.bindings import method_receiver
from gradsan.source.flow.kept import is_kept_here, kept_since
from gradsan.source.identifiers import chain_key, leaf_name, local_nodes
from gradsan.source.locate import Statement, statement_at
from gradsan.source.rewrite.moving import is_whole_lines, names_read
from gradsan.source.rewrite.renewing import constructs, draws_again
from gradsan.source.tree import SourceFile

WORDS, CUT, _CUT = "recompute_from_kept", "detach_kept", "help.build_without_graph"
AGAIN = f"fix.{WORDS}"
_LONGEST, _MOST_STORED = 200, 3


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


def _found(frame: Frame, name: str) -> tuple[Statement, _Again] | None:
    place = statement_at(frame)
    try:
        expression = ast.parse(name, mode="eval").body
    except SyntaxError:
        return None
    read = None if place is None or place.scope is None else read_of(place, expression)
    kept = None if place is None or read is None else kept_as(place.source, read)
    return None if place is None or read is None or kept is None else (place, _Again(place, read, kept))


def _bound_again(place: Statement, read: Read, name: str, value: str) -> Lines:
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


def _read_again(place: Statement, read: Read, name: str, value: str) -> Lines:
    """The new value in the place of each reading of the old one, behind the statement that took out its element."""
    source, first = place.source, read.statement
    last = first.end_lineno if isinstance(first, ast.For) else place.node.end_lineno
    reads = [one for one in source.nodes if isinstance(one, ast.Attribute | ast.Subscript) and spelled(one) == name]
    own = [one for one in reads if first.lineno < one.lineno <= (last or 0)]
    if not all(isinstance(one.ctx, ast.Load) and source.function(one) is place.function for one in own):
        return ()
    return edited_lines(source, [Edit(source.span(one), value) for one in own]) if own else ()


@dataclass(frozen=True, slots=True)
class _Again:
    """The expression of a kept value in terms of what is taken out beside it."""

    place: Statement
    read: Read
    kept: Kept

    def value(self) -> str | None:
        """The text; None where it needs something that is not kept, computes nothing, or would draw again."""
        source, own = self.place.source, self.kept.parts[self.read.part]
        beside = {without_cut(part): self._beside(at) for at, part in self.kept.parts.items()}
        known = {part: text for part, text in beside.items() if text is not None}
        found, used = self._with(own, known, 0)
        if found is None or not used or draws_again(ast.walk(found)) or source.statement(own) is None:
            return None
        calls = [one for one in ast.walk(found) if isinstance(one, ast.Call)]
        is_computed = any(leaf_name(one.func) not in PLAIN for one in calls)
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
        taken_at = self.read.statement.lineno
        values = [one.value for one in own if isinstance(one, ast.Assign) and one not in here and one.lineno > taken_at]
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
        if depth > DEEPEST or isinstance(node, ast.Lambda | ast.Await | ast.Yield | ast.NamedExpr):
            return None, False
        if (text := known.get(without_cut(node))) is not None:
            return ast.parse(text, mode="eval").body, True
        if isinstance(node, ast.Name):
            if node.id not in self._locals():
                return node, False
            value = bound_once(self.place.source, self.kept.statement, node.id)
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


def _own(function: ast.AST | None) -> str | None:
    args = function.args.args if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) else []
    return args[0].arg if args else None


def _owner(source: SourceFile, node: ast.AST) -> ast.ClassDef | None:
    return source.owner_class(node)


def as_property(made: Label) -> Fix | None:
    """``self.x = …`` of a method as a property that computes it at every access.

    Arguments that the method stores unchanged (``self.net = net``) are read from the attribute; other local names are
    stored beside them, in the place of the value.
    """
    for place in blocks.placements(made):
        source, node = place.source, place.statement
        function = source.function(node)
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if not isinstance(function, ast.FunctionDef) or source.owner_class(node) is None:
            continue
        if not isinstance(node, ast.Assign) or not isinstance(target, ast.Attribute):
            continue
        own = target.value.id if isinstance(target.value, ast.Name) else ""
        if not function.args.args or own != function.args.args[0].arg or node not in function.body:
            continue
        stored = {
            one.id for one in local_nodes(function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
        }
        given = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)} - {own}
        kept = kept_arguments(source, function, own, given - stored)
        missing = sorted(names_read([node.value]) & ((stored | given) - set(kept)))
        attributes = [one for one in source.nodes if isinstance(one, ast.Attribute)]
        known = {one.attr for one in attributes if isinstance(one.value, ast.Name) and one.value.id == own}
        if known & set(missing) or len(missing) > _MOST_STORED or not is_whole_lines(source, node):
            return None
        if (len(place.block) < 2 and not missing) or _is_bound_elsewhere(source, target):
            return None
        kept |= {one: f"{own}.{one}" for one in missing}
        reads = (one for one in ast.walk(node.value) if isinstance(one, ast.Name) and one.id in kept)
        value = text_with(source, source.span(node.value), [Edit(source.span(one), kept[one.id]) for one in reads])
        stores = f"{', '.join(kept[one] for one in missing)} = {', '.join(missing)}" if missing else ""
        return _property(source, function, node, value, target, stores)
    return None


def kept_arguments(source: SourceFile, function: ast.FunctionDef, own: str, given: set[str]) -> dict[str, str]:
    """The attributes in which the function stores its arguments unchanged, by argument name.

    And those of which it makes second names, by these: ``w`` of ``w = self.linear.weight``.
    """
    found: dict[str, str] = {}
    found |= {name: path for name, (_, path) in _second_names(function, own).items()}
    for node in function.body:
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Name) or node.value.id not in given:
            continue
        is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == own
        if isinstance(target, ast.Attribute) and is_own and not _is_bound_elsewhere(source, target):
            found[node.value.id] = ast.unparse(target)
    return found


def _second_names(function: ast.FunctionDef, own: str) -> dict[str, tuple[ast.stmt, str]]:
    """The statements ``w = self.linear.weight`` whose variable nothing else binds, and the attributes, by variable."""
    bound = [one.id for one in ast.walk(function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
    plain = [one for one in function.body if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)]
    paths = {ast.unparse(one.targets[0]): (one, chain_key(one.value) or "") for one in plain if len(one.targets) == 1}
    return {
        name: (node, path)
        for name, (node, path) in paths.items()
        if path.startswith(f"{own}.") and "[" not in path and bound.count(name) == 1
    }


def unread(source: SourceFile, function: ast.FunctionDef, own: str, moved: Sequence[ast.stmt]) -> dict[int, str]:
    """The lines of second names that only the statements ``moved`` out of the function have read, removed."""
    gone = {node for one in moved for node in ast.walk(one)}
    left = {one.id for one in ast.walk(function) if isinstance(one, ast.Name) and one not in gone and _is_read(one)}
    lines: dict[int, str] = {}
    for name, (node, _) in _second_names(function, own).items():
        lines |= blocks.removed(source, node) if name in names_read(moved) - left else {}
    return lines


def _is_read(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _property(
    source: SourceFile, function: ast.FunctionDef, node: ast.Assign, value: str, target: ast.Attribute, stores: str
) -> Fix:
    indent, unit, name = source.indent(function), indentation_of(source), target.attr
    text = f"\n{indent}@property\n{indent}def {name}({ast.unparse(target.value)}):\n{indent}{unit}return {value}"
    changes = unread(source, function, ast.unparse(target.value), [node]) | blocks.removed(source, node)
    if stores:
        changes[source.span(node).line] = f"{source.indent(node)}{stores}"
    end = source.span(function).end_line
    standing = changes.get(end, source.lines[end - 1])
    changes[end] = f"{standing}\n{text}" if standing else text
    return blocks.fix("recompute_forward", blocks.lines_changed(source, changes), "as_property", name=name)


def _is_bound_elsewhere(source: SourceFile, target: ast.Attribute) -> bool:
    return any(
        isinstance(one, ast.Attribute)
        and one.attr == target.attr
        and isinstance(one.ctx, ast.Store)
        and one is not target
        for one in source.nodes
    )


def without_cache(made: Label) -> Fix | None:
    """``if self.x is None: self.x = …`` without its condition, or a method without its caching decorator."""
    for place in blocks.placements(made):
        source, guard = place.source, place.source.parents[place.statement][0]
        if isinstance(guard, ast.If) and place.block is guard.body and not guard.orelse:
            kept = kept_since(guard)
            if kept is None or not is_kept_here(source, guard, kept) or not is_whole_lines(source, guard):
                return None
            if any(constructs(source, node) for node in guard.body):
                return None
            head = source.lines[source.span(guard).line - 1][: source.span(guard).column - 1]
            body = "\n".join(blocks.text_of(source, node) for node in guard.body)
            text = textwrap.indent(textwrap.dedent(body), head)
            changes = {**blocks.removed(source, guard), source.span(guard).line: text}
            name = ast.unparse(kept)
            return blocks.fix("recompute_forward", blocks.lines_changed(source, changes), "without_cache", name=name)
        function = source.function(place.statement)
        for decorator in getattr(function, "decorator_list", ()):
            lines = _without_decorator(source, decorator)
            if lines and isinstance(function, ast.FunctionDef):
                return blocks.fix("recompute_forward", lines, "without_cache", name=function.name)
    return None


def _without_decorator(source: SourceFile, decorator: ast.expr) -> Lines:
    """The decorator's line with ``property`` for ``cached_property``, and without ``cache`` and ``lru_cache``."""
    name = leaf_name(decorator.func if isinstance(decorator, ast.Call) else decorator)
    span = source.span(decorator)
    if name == "cached_property":
        return changed_lines(source.file, change) if (change := edited(source, [Edit(span, "property")], "")) else ()
    is_alone = source.indent(span).strip() == "@" and span.line == span.end_line
    return ((source.file, span.line, ""),) if name in ("cache", "lru_cache") and is_alone else ()
