"""Statements moved after a backward, and backwards or updates moved within their block."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import UnionType
from typing import TypeAlias

from gradsan.model import Frame, Lines
from gradsan.source.change import Change, Edit, edited
from gradsan.source.flow.writing import written_root
from gradsan.source.identifiers import assigned_names, leaf_name, standing_of, walks
from gradsan.source.locate import expression_at, statement_at
from gradsan.source.methods import BACKWARDS, has_attribute
from gradsan.source.tree import SourceFile, Span

_LEAVING = (ast.Return, ast.Continue, ast.Break, ast.Raise, ast.Yield, ast.YieldFrom, ast.Await)
_LIGHT = frozenset(
    {
        *("append", "debug", "float", "info", "item", "len", "log", "ones_like", "print", "randn_like"),
        *("set_description", "zero_grad", "zeros_like"),
    }
)


@dataclass(frozen=True, slots=True)
class Moved:
    """The changed lines, and whether the statements in between compute nothing that could see the moved ones."""

    lines: Lines
    is_plain: bool


def move_behind(written: Sequence[Sequence[Frame]], used: Sequence[Frame]) -> Moved | None:
    """The statements that lead to the writes, moved after the one that leads to the backward.

    ``written`` and ``used`` are stacks of the user's frames, outermost first. None where they are not in one block
    with the backward last, where a statement in between reads a name that the moved ones bind or binds one that they
    read, or where the moved ones read gradients (which that backward will change) or run a backward themselves.
    """
    found = in_one_block(written, used)
    if found is None:
        return None
    source, block, first, last, backward = found
    moved, between, use = block[first : last + 1], block[last + 1 : backward], block[backward]
    if not all(is_whole_lines(source, node) for node in (*moved, use)):
        return None
    if any(_must_stay(node) for node in moved) or any(_takes_gradients(source, use, stack) for stack in written):
        return None
    if names_bound(moved) & names_read([*between, use]) or names_bound([*between, use]) & names_read(moved):
        return None
    if _is_put_back(_written_by_hand(source, moved), _written_by_hand(source, block[backward + 1 :])):
        return None  # a perturbation: moved, no backward would see it
    end = source.span(use).end_line
    texts = [source.lines[source.span(node).line - 1 : source.span(node).end_line] for node in moved]
    behind = "\n".join([source.lines[end - 1], *(line for text in texts for line in text)])
    gone = {line for node in moved for line in range(source.span(node).line, source.span(node).end_line + 1)}
    lines = (*((source.file, line, "") for line in sorted(gone)), (source.file, end, behind))
    apart = [node for node in between if names_read([node]).isdisjoint(names_read(moved))]
    return Moved(lines, all(_is_light(source, node, node in apart) for node in between))


def within_block(written: Sequence[Sequence[Frame]], used: Sequence[Frame], saved: Sequence[Frame]) -> Lines:
    """A ``with`` block that writes on exit extended over the backward and the statements in between: the changed lines.

    Weights that are changed for the duration of the block (noise, an average) are restored when it ends. Stacks as for
    ``move_behind``. Empty where the writes are not those of the exit of one such block before the backward, or where
    the forward (``saved``) ran outside of the block: its backward needs the values that the block has changed.
    """
    found = in_one_block(written, used)
    if found is None:
        return ()
    source, block, first, last, backward = found
    node = block[first]
    if first != last or not isinstance(node, ast.With) or node.body[0].lineno == node.lineno:
        return ()
    within = {part for one in node.body for part in ast.walk(one)}

    def is_inside(stack: Sequence[Frame]) -> bool:
        places = [statement_at(frame) for frame in stack]
        return any(one is not None and one.source is source and one.node in within for one in places)

    if any(map(is_inside, written)) or not is_inside(saved):
        return ()
    added = block[last + 1 : backward + 1]
    if not all(is_whole_lines(source, one) for one in added):
        return ()
    if any(isinstance(part, _LEAVING) for one in added for part in ast.walk(one)):
        return ()
    start, body = source.span(node), source.span(node.body[0])
    head = source.indent(start)
    unit = source.indent(body).removeprefix(head) or "    "
    lines = range(start.end_line + 1, source.span(block[backward]).end_line + 1)
    texts = {line: source.lines[line - 1] for line in lines}
    return tuple((source.file, line, unit + text if text.strip() else text) for line, text in texts.items())


def blocks_around(stack: Sequence[Frame]) -> Iterator[tuple[SourceFile, list[ast.stmt], ast.stmt]]:
    """Every block of statements that a stack passes through, with its statement there, the innermost first."""
    for frame in reversed(stack):
        found = statement_at(frame)
        node: ast.AST | None = None if found is None else found.node
        while found is not None and node is not None:
            parent, field = found.source.parents.get(node, (None, ""))
            block = None if parent is None else getattr(parent, field, None)
            if isinstance(node, ast.stmt) and isinstance(block, list):
                yield found.source, block, node
            if parent is None or isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                break
            node = parent


def computed_outside(frame: Frame, operand: str) -> Change | None:
    """The one statement that computes ``operand`` moved out of the ``with`` at ``frame``, which the others stay in.

    With it go those behind it, if all of them bind variables to what they compute of it: an average that is kept would
    get a graph. None where it is neither the first nor the last, or another one reads what it binds.
    """
    place = expression_at(frame)
    if place is None:
        return None
    source = place.source
    item = source.parents[place.node][0]
    block = source.parents[item][0] if isinstance(item, ast.withitem) else None
    if not isinstance(block, ast.With) or not operand:
        return None
    texts = [[source.text(one) for one in ast.walk(part) if isinstance(one, ast.expr)] for part in block.body]
    making = [part for part, parts in zip(block.body, texts, strict=True) if operand in parts]
    if len(making) != 1 or not isinstance(making[0], ast.Assign | ast.Return):
        return None
    at, moved, bound = block.body.index(making[0]), [*making], names_bound(making)
    for one in block.body[at + 1 :]:
        if bound & names_read([one]):
            moved.append(one)
            bound |= names_bound([one])
    is_rest = moved == block.body[at:] and all(map(_binds_variables, moved[1:]))
    if bound & names_read(block.body[:at]) or not (is_rest or moved == making):
        return None
    edits = out_of_with(source, block, moved)
    return None if edits is None else edited(source, edits, "undone")


def _binds_variables(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    parts = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return bool(parts) and all(isinstance(one, ast.Name) for one in parts)


def out_of_with(source: SourceFile, block: ast.With, moved: Sequence[ast.stmt]) -> list[Edit] | None:
    """The first or last statements of ``block`` moved before or after it and dedented; the block goes with its last."""
    around, first, own, last = map(source.span, (block, block.body[0], moved[0], moved[-1]))
    is_end = moved[0] is block.body[0] or moved[-1] is block.body[-1]
    if len(block.items) != 1 or first.line == around.line or not is_end:
        return None
    deeper = own.column - around.column
    inner = [line for line in range(own.line + 1, last.end_line + 1) if source.lines[line - 1].strip()]
    edits = [Edit(Span(line, 1, line, deeper + 1), "") for line in inner]
    if moved[0] is not block.body[0]:
        return [Edit(Span(own.line, 1, own.line, deeper + 1), ""), *edits]
    edits.append(Edit(Span(around.line, around.column, own.line, own.column), ""))
    if len(block.body) > len(moved):
        header = source.slice(Span(around.line, 1, first.line, 1)).rstrip("\n")
        edits.append(Edit.after(last, f"\n{header}"))
    return edits


def until_apart(first: Sequence[Frame], second: Sequence[Frame]) -> tuple[Sequence[Frame], Sequence[Frame]]:
    """Two stacks, outermost first, up to the frame in which they diverge.

    Deeper frames of one function belong to two calls of it: a later line of one call may have run before an earlier
    line of the other.
    """
    if not first or not second or (first[0].file, first[0].function) != (second[0].file, second[0].function):
        # One of them lacks the frames above: its position comes from the source alone.
        return first, second
    pairs = zip(first, second, strict=False)
    together = sum(1 for _ in takewhile(lambda pair: _position(pair[0]) == _position(pair[1]), pairs))
    return first[: together + 1], second[: together + 1]


def _position(frame: Frame) -> tuple[str, int, int | None]:
    return frame.file, frame.line, frame.column


def is_whole_lines(source: SourceFile, node: ast.stmt) -> bool:
    """Whether the statement shares its lines with no other."""
    span = source.span(node)
    before = source.indent(span)
    after = source.lines[span.end_line - 1][span.end_column - 1 :].strip()
    return not before.strip() and (not after or after.startswith("#"))


def in_one_block(
    written: Sequence[Sequence[Frame]], used: Sequence[Frame]
) -> tuple[SourceFile, list[ast.stmt], int, int, int] | None:
    """The block with all writes before the backward; the indices of the first and last write, and of the backward."""
    places = [list(blocks_around(until_apart(stack, used)[0])) for stack in written]
    for source, block, use in blocks_around(used):
        at = [[node for _, other, node in stack if other is block] for stack in places]
        if not at or not all(at):
            continue
        indices = [block.index(nodes[0]) for nodes in at]
        backward = block.index(use)
        if any(index == backward for index in indices):
            continue
        return (source, block, min(indices), max(indices), backward) if max(indices) < backward else None
    return None


def _takes_gradients(source: SourceFile, use: ast.stmt, stack: Sequence[Frame]) -> bool:
    """Whether a function that the block calls on the way to the write reads ``.grad``, or runs a backward itself."""
    around = source.function(use)
    statements = [statement_at(frame) for frame in stack]
    level = max((at for at, one in enumerate(statements) if one is not None and one.function is around), default=-1)
    return any(
        one is None
        or one.function is None
        or has_attribute(one.function, "grad")
        or any(_runs_backward(each) for each in (one.function, *_called(one.source, one.function)))
        for one in statements[level + 1 :]
    )


def _called(source: SourceFile, function: ast.AST) -> Iterator[ast.FunctionDef]:
    """The functions and own methods of the file that a function calls."""
    known = functions_of(source)
    for func in (one.func for one in ast.walk(function) if isinstance(one, ast.Call)):
        is_own = isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "self"
        if (is_own or isinstance(func, ast.Name)) and (called := known.get(leaf_name(func) or "")) is not None:
            yield called


@functools.lru_cache(maxsize=256)
def _runs_backward(function: ast.AST) -> bool:
    return any(_calls(node, name) for node in ast.walk(function) for name in BACKWARDS)


@functools.lru_cache(maxsize=16)
def functions_of(source: SourceFile) -> Mapping[str, ast.FunctionDef]:
    """The functions and methods of a file by their names."""
    return {one.name: one for one in source.nodes if isinstance(one, ast.FunctionDef)}


Writes: TypeAlias = dict[str, set[tuple[str, frozenset[str]]]]
"""For each name whose tensors are written, the operations and the names that they read."""


def _is_put_back(first: Writes, later: Writes) -> bool:
    """Whether the write of ``first`` may be undone: a second write, and not the same operation with other operands."""
    pairs = ((one, other) for name in first.keys() & later.keys() for one in first[name] for other in later[name])
    return any(one[0] != other[0] or not one[1] or not other[1] or one[1] & other[1] for one, other in pairs)


def _written_by_hand(source: SourceFile, nodes: Iterable[ast.stmt]) -> Writes:
    """The names whose tensors statements write in place, themselves or in functions of this file.

    For a loop variable, the names that the loop iterates over. Updates by ``.grad`` belong to an optimizer and are not
    counted.
    """
    found: Writes = {}
    functions = functions_of(source)
    for node in nodes:
        if has_attribute(node, "grad"):
            continue
        inner = list(ast.walk(node))
        walked: dict[str, set[str]] = {}
        for one in inner:
            if isinstance(one, ast.For | ast.AsyncFor):
                walked |= gone_through(one.target, one.iter)
        for one in inner:
            root = written_root(one) if isinstance(one, ast.stmt) else None
            if root is None:
                continue
            names = walked.get(root.partition(".")[0], {root.partition(".")[0]})
            read = {name for given in names_read([one]) for name in walked.get(given, {given})} - names
            for name in names - _WALKING:
                found.setdefault(name, set()).add((_operation(one), frozenset(read - _WALKING)))
        for call in inner:
            called = functions.get(leaf_name(call.func) or "") if isinstance(call, ast.Call) else None
            if isinstance(call, ast.Call) and called is not None and not has_attribute(called, "grad"):
                writes = any(isinstance(one, ast.stmt) and written_root(one) for one in ast.walk(called))
                for name in names_read(call.args) - _WALKING if writes else ():
                    found.setdefault(name, set()).add((called.name, frozenset()))
    return found


def _operation(node: ast.AST) -> str:
    """The operator or method with which a statement writes in place."""
    if isinstance(node, ast.AugAssign):
        return type(node.op).__name__
    call = node.value if isinstance(node, ast.Expr) else None
    return (leaf_name(call.func) or "") if isinstance(call, ast.Call) else ""


def gone_through(target: ast.expr, walked: ast.expr) -> dict[str, set[str]]:
    """The names that each loop variable iterates over: for ``p`` and ``g`` of ``for p, g in zip(params, grads)``."""
    return {name: names_read([given]) for one, given in walks(target, walked) for name in names_bound([one])}


_WALKING = frozenset({"enumerate", "list", "reversed", "sorted", "zip"})


def _must_stay(node: ast.stmt) -> bool:
    inner = list(ast.walk(node))
    return (
        any(isinstance(one, _LEAVING) for one in inner)
        or has_attribute(node, "grad")
        or any(_calls(one, name) for one in inner for name in (*BACKWARDS, "step"))
        or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)
    )


def _calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and leaf_name(node.func) == name


def names_bound(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that ``nodes`` bind."""
    return {name for node in nodes for name in _names(node, ast.Store | ast.Del)}


def names_read(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that ``nodes`` read from outside."""
    return {name for node in nodes for name in _names(node, ast.Load)}


def names_exposed(nodes: Iterable[ast.stmt]) -> set[str]:
    """The names that statements, run one after another, read before an assignment of theirs has bound them anew."""
    read, bound = set[str](), set[str]()
    for node in nodes:
        branches = (node.body, node.orelse) if isinstance(node, ast.If) else ()
        own = names_read([node.test if isinstance(node, ast.If) else node])
        read |= own.union(*map(names_exposed, branches)) - bound
        bound |= names_bound([node]) if isinstance(node, ast.Assign | ast.AnnAssign) else set()
    return read


def _names(node: ast.AST, context: type[ast.expr_context] | UnionType) -> set[str]:
    """The names used in ``context`` within ``node``, except the variables of its comprehensions."""
    inner = list(ast.walk(node))
    own = {
        one.id
        for comprehension in inner
        if isinstance(comprehension, ast.comprehension)
        for one in ast.walk(comprehension.target)
        if isinstance(one, ast.Name)
    }
    return {one.id for one in inner if isinstance(one, ast.Name) and isinstance(one.ctx, context)} - own


def _is_light(source: SourceFile, node: ast.stmt, is_apart: bool) -> bool:
    """Whether a statement computes nothing; one ``is_apart`` from what is moved may call functions of torch."""
    calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    owners = {one: one.value for one in calls if isinstance(one, ast.Attribute) and leaf_name(one) not in _LIGHT}
    of_torch = {one for one, owner in owners.items() if is_apart and standing_of(source, owner) == "namespace"}
    return all(leaf_name(one) in _LIGHT or one in of_torch for one in calls)


def bound_names(frame: Frame) -> list[str]:
    """The names that the statement at ``frame`` binds."""
    statement = statement_at(frame)
    return [] if statement is None else assigned_names(statement)
