"""Other places for a detach: after the round that keeps a value, or at the readers instead of the definition.

Where one of two losses is to train the network that computed ``G(z).detach()``, the graph is kept at the definition,
and each statement that only the other backwards depend on reads the value detached.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from gradsan.model import Frame, Held, Layer, Lines
from gradsan.source.change import Change, Edit, edited, edited_lines, insert_after
from gradsan.source.flow.calls import dies_with_call
from gradsan.source.flow.cuts import cuts_taken
from gradsan.source.flow.modules import object_cut
from gradsan.source.flow.reaching import reaching
from gradsan.source.flow.rounds import after_round, deque_made
from gradsan.source.flow.writing import definition_of
from gradsan.source.identifiers import bindings_of, chain_key, consumed_names, leaf_name, local_nodes
from gradsan.source.imports import torch_name
from gradsan.source.locate import Statement, expression_at, statement_at
from gradsan.source.methods import CONTAINERS, METADATA, NUMBERS
from gradsan.source.rewrite.detached import detach_in_each, detach_reads
from gradsan.source.rewrite.moving import out_of_with
from gradsan.source.tree import FunctionNode, SourceFile, Span, header_nodes

_STAYING = METADATA | {"detach", "detach_", "data", "backward"}
_HEADED = (ast.If, ast.For, ast.While, ast.With, ast.Try)


class Uncut(NamedTuple):
    """The name that keeps its graph, whether others then read it detached, and the changed lines."""

    name: str
    is_read_by_others: bool
    lines: Lines


def cut_at_use(cut: Frame, operand: str, used: Sequence[Frame]) -> Uncut | None:
    """The lines that keep for the backward at ``used`` the graph which ends at ``cut``.

    ``operand`` is the detached expression, as written; ``used`` is a stack, outermost first. None where the cut is in
    no assignment, or one statement computes both the loss of that backward and another one.
    """
    found = expression_at(cut)
    if found is None or isinstance(found.node, ast.AugAssign):
        return None
    node = found.node
    # Where the frame has no columns of the call, the position is that of the attribute ``x.detach``.
    parent, field = found.source.parents[node]
    if isinstance(node, ast.Attribute) and isinstance(parent, ast.Call) and field == "func":
        node = parent
    return _moved(found.source, node, operand, used)


def term_uncut(term: Frame, used: Sequence[Frame]) -> Uncut | None:
    """The same for the one detached value that the statement at ``term`` computes with."""
    statement = statement_at(term)
    cuts = list(dict.fromkeys(cuts_taken(term)))
    return None if statement is None or len(cuts) != 1 else _moved(statement.source, cuts[0], "", used)


def _moved(source: SourceFile, node: ast.expr, operand: str, used: Sequence[Frame]) -> Uncut | None:
    """The change where ``node`` is a call of ``detach()``, ``.data``, or a ``with`` that switches grad mode off."""
    parent = source.parents[node][0]
    block = source.parents[parent][0] if isinstance(parent, ast.withitem) else None
    function = parent if isinstance(parent, ast.FunctionDef) and node in parent.decorator_list else None
    made: ast.stmt | None = None
    if isinstance(block, ast.With):
        made = next((one for one in block.body if _computes(source, one, operand)), None)
        edits = None if made is None else out_of_with(source, block, [made])
    elif function is not None:
        at = source.span(node)
        edits = [Edit(Span(at.line, 1, at.end_line + 1, 1), "")]
    else:
        made, edits = source.statement(node), uncut_edits(source, node)
    places = [one for one in map(statement_at, used) if one is not None and one.source is source]
    if isinstance(made, ast.Return):
        function = _function_of(source, made)
    if function is not None and edits is not None:
        made, others = _call_of(source, function, [one.node for one in places])
        edits += [Edit.after(span, ".detach()") for span in map(source.span, others)]
    if not isinstance(made, ast.Assign) or edits is None:
        return None
    names = {one.name for one in bindings_of(made) if one.value is None or node in ast.walk(one.value)}
    names = names or {one.name for one in bindings_of(made)}
    scope: FunctionNode | ast.Module = source.function(made) or source.module
    end = next((one.node for one in places if (source.function(one.node) or source.module) is scope), None)
    reads = None if end is None or len(names) != 1 else _reads_of_others(source, scope, made, end, names)
    if reads is None:
        return None
    edits += [Edit.after(source.span(one), ".detach()") for one in reads]
    lines = edited_lines(source, edits)
    return Uncut(next(iter(names)), bool(reads), lines) if lines else None


def _function_of(source: SourceFile, node: ast.stmt) -> ast.FunctionDef | None:
    function = source.function(node)
    return function if isinstance(function, ast.FunctionDef) else None


def _call_of(
    source: SourceFile, function: ast.FunctionDef, used: Sequence[ast.stmt]
) -> tuple[ast.stmt | None, list[ast.Call]]:
    """The one assignment, beside a statement of ``used``, of the result of ``function``, and its other calls."""
    calls = [one for one in source.nodes if isinstance(one, ast.Call) and leaf_name(one.func) == function.name]
    scopes = [source.function(one) for one in used]
    taking = [one for one in calls if isinstance(source.statement(one), ast.Assign) and source.function(one) in scopes]
    if len(taking) != 1:
        return None, []
    return source.statement(taking[0]), [one for one in calls if one is not taking[0]]


def _computes(source: SourceFile, node: ast.stmt, operand: str) -> bool:
    value = node.value if isinstance(node, ast.Assign | ast.Return) else None
    return value is not None and operand in (source.text(value), ast.unparse(value))


def uncut_edits(source: SourceFile, node: ast.expr) -> list[Edit] | None:
    """``x`` for ``x.detach()`` and ``x.data``."""
    if isinstance(node, ast.Call):
        cut = node.func
        if not isinstance(cut, ast.Attribute) or cut.attr != "detach" or node.args or node.keywords:
            return None
    elif isinstance(node, ast.Attribute) and node.attr == "data":
        cut = node
    else:
        return None
    end, inner = source.span(node), source.span(cut.value)
    return [Edit(Span(inner.end_line, inner.end_column, end.end_line, end.end_column), "")]


def _reads_of_others(
    source: SourceFile, scope: FunctionNode | ast.Module, made: ast.stmt, end: ast.stmt, names: set[str]
) -> list[ast.expr] | None:
    """The reads of ``names`` that backwards other than ``end`` depend on; None where one is shared with ``end``.

    Statements are read in source order.
    """
    nodes = [one for one in local_nodes(scope) if isinstance(one, ast.stmt) and one.lineno > made.lineno]
    statements = sorted(nodes, key=lambda one: (one.lineno, one.col_offset))
    if end not in statements:
        return None
    kept = set(_behind(statements, end))
    others = {
        one
        for other in statements
        if other is not end and _calls_backward(source, other)
        for one in _behind(statements, other)
    }
    reads = [one for node in others if _reaches(scope, made, node, names) for one in _values_read(source, node, names)]
    if any(source.statement(one) in kept for one in reads):
        return None
    return reads


def _reaches(scope: FunctionNode | ast.Module, made: ast.stmt, node: ast.stmt, names: set[str]) -> bool:
    """Whether ``node`` may read the value that ``made`` binds to one of ``names``, not one bound to that name since."""
    if not isinstance(scope.body, list):
        return True
    state = reaching(scope.body, node, lambda _: isinstance(scope, ast.Module))
    found = [one for name in names for one in state.get(name, ())]
    return not found or any(one.statement is made for one in found)


def _behind(statements: Sequence[ast.stmt], end: ast.stmt) -> Iterator[ast.stmt]:
    """``end``, and the earlier statements that the values it reads depend on."""
    needed = set(consumed_names(end))
    yield end
    for node in reversed(statements[: statements.index(end)]):
        bound = {one.name for one in bindings_of(node) if one.computed}
        if not isinstance(node, _HEADED) and bound & needed:
            yield node
            if isinstance(node, ast.Assign):
                needed -= bound
            needed |= set(consumed_names(node))


def _calls_backward(source: SourceFile, node: ast.stmt) -> bool:
    """Whether a statement calls ``backward()``, itself or in a function of this file that it calls."""
    if isinstance(node, (*_HEADED, ast.FunctionDef, ast.ClassDef)):
        return False
    called = {leaf_name(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)}
    functions = [one for one in source.nodes if isinstance(one, ast.FunctionDef) and one.name in called]
    calls = (one for function in functions for one in ast.walk(function) if isinstance(one, ast.Call))
    return "backward" in called or any(leaf_name(one.func) == "backward" for one in calls)


def _values_read(source: SourceFile, node: ast.stmt, names: set[str]) -> Iterator[ast.expr]:
    for one in ast.walk(node):
        if not isinstance(one, ast.Name | ast.Attribute) or chain_key(one) not in names:
            continue
        parent = source.parents[one][0]
        is_read = isinstance(one.ctx, ast.Load) and source.statement(one) is node
        if is_read and not (isinstance(parent, ast.Attribute) and parent.attr in _STAYING):
            yield one


def read_with_graph(frame: Frame) -> Change | None:
    """The line of ``frame`` without the ``.data``, ``.detach()`` or ``.item()`` at that position.

    None where there is none of them, or where what is computed next would not take a tensor with a graph.
    """
    place = expression_at(frame)
    if place is None:
        return None
    source, read = place.source, place.node
    cut = read.func if isinstance(read, ast.Call) else read
    if not isinstance(cut, ast.Attribute) or cut.attr not in ("data", "detach", "item"):
        return None
    if cut.attr != "data":
        calls = [one for one in header_nodes(place.statement) if isinstance(one, ast.Call) and one.func is cut]
        if len(calls) != 1 or calls[0].args or calls[0].keywords:
            return None
        read = calls[0]
    # A number is part of a formula, where a tensor does as well, or an argument, where it may not.
    if cut.attr == "item" and not isinstance(source.parents[read][0], ast.BinOp | ast.UnaryOp):
        return None
    # What becomes numbers next has no graph either way, and NumPy takes no tensor that requires grad.
    outer = (one for one in header_nodes(place.statement) if isinstance(one, ast.Attribute) and one.attr in NUMBERS)
    if any(one is not cut and read is inner for one in outer for inner in ast.walk(one.value)):
        return None
    return edited(source, [Edit(source.span(read), source.text(cut.value))], "read_with_graph")


_CLASSES = {"namedtuple": "tuple"} | {one: one for one in ("tuple", "list", "dict", "deque")} | {"defaultdict": "dict"}
_MOST_CUT = 4


def detach_compared(frame: Frame, name: str, made: Sequence[Frame]) -> Change | None:
    """``new - old.detach()`` at ``frame``, where ``old`` is ``name`` and one function has computed both.

    ``made`` are the frames that computed the value of ``name``. As old and new probabilities of one policy: computed
    again, the old one would be the new one. None where the statement does not subtract or divide the two.
    """
    statement = statement_at(frame)
    if statement is None:
        return None
    functions = {one.function.rpartition(".")[2] for one in made} - {"<module>", "forward"}
    for node in header_nodes(statement.node):
        sides = (
            [node.left, node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Div) else []
        )
        others = [one for one in sides if chain_key(one) != name]
        if len(others) == 1 and _computed_by(frame, others[0]) & functions:
            return detach_reads((frame,), (name,))
    return None


def _computed_by(frame: Frame, node: ast.expr) -> set[str]:
    """The functions called by an expression, or by the statement that bound the variable that it is."""
    key = chain_key(node)
    made = None if key is None else definition_of(frame, key)
    value = node if made is None else ast.parse(made.value, mode="eval").body
    return {name for one in ast.walk(value) if isinstance(one, ast.Call) and (name := leaf_name(one.func)) is not None}


def detach_held(frames: Sequence[Frame], held: Sequence[Held]) -> tuple[Change, tuple[str, ...]] | None:
    """A line after the round of ``frames`` that detaches the values described by ``held``, and the name that it binds.

    An attribute is detached as it is, in objects of one list in all of them; a container is made anew, with its
    non-tensors unchanged. None where a value lies in an object that is an element of several lists, or of a dict under
    a key which the file does not write: the next round may take another one.
    """
    statement = statement_at(frames[0]) if frames else None
    if statement is None:
        return None
    if (each := detach_in_each(statement.source, held)) is not None:
        change = after_round(frames, each[1], "detach")
        return None if change is None else (change, (each[0],))
    found: dict[str, str] = {}
    for one in held:
        cut = detached_anew(statement.source, one)
        if cut is None:
            return None
        found.setdefault(*cut)
    is_dead = not statement.loops and any(dies_with_call(frames[0], name) for name in found)
    if not found or len(found) > _MOST_CUT or is_dead:
        return None
    text = f"{', '.join(found)} = {', '.join(found.values())}"
    begun = _bound_before_rounds(statement, found)
    change = insert_after(statement.source, begun, text, "detach") if begun is not None else None
    change = change or after_round(frames, text, "detach", found)
    return None if change is None else (change, tuple(found))


def _bound_before_rounds(statement: Statement, names: Collection[str]) -> ast.stmt | None:
    """The last of the statements that bind the names, each once and before the loop of rounds: no round does."""
    scope = statement.scope
    nodes = [one for one in local_nodes(scope) if isinstance(one, ast.stmt)] if scope is not None else []
    bound = [(one.name, node) for node in nodes for one in bindings_of(node)]
    own = [node for name, node in bound if re.split(r"[.\[]", name)[0] in names]
    if not statement.loops or not all(map(str.isidentifier, names)) or len(own) != len(names):
        return None
    last, loop = max(own, key=lambda one: one.lineno), statement.loops[-1]
    is_before = last.lineno < loop.lineno and last not in ast.walk(loop)
    value = last.value if isinstance(last, ast.Assign) else None
    # What begins empty is filled by what the rounds call.
    is_empty = isinstance(value, ast.Call) and leaf_name(value.func) in CONTAINERS
    is_empty = is_empty or not any(isinstance(one, ast.Name) for one in ast.walk(value or ast.Pass()))
    return last if is_before and not is_empty else None


def detached_anew(source: SourceFile, held: Held) -> tuple[str, str] | None:
    """The name to bind and its detached value."""
    frozen = next((layer.path for layer in held.around if layer.is_frozen), None)
    if frozen is not None:
        cut = object_cut(source, frozen)
        return (cut[0][0], cut[1][0]) if cut is not None and cut[0] == [frozen] else None
    last = max((place for place, layer in enumerate(held.around) if layer.kind == "object"), default=-1)
    layers = held.around[last + 1 :]
    name = layers[0].path if layers else held.path
    if re.search(r"\[\d+\]", name) or not set(re.findall(r"\[(['\"].*?['\"])\]", name)) <= _keys_written(source):
        return None
    text = _anew(source, name, layers)
    return None if text is None else (name, text)


def _keys_written(source: SourceFile) -> set[str]:
    """The texts by which the file reads or makes elements of dicts: ``"h"`` of ``state["h"]``, in both quotes."""
    keys: list[ast.expr | None] = []
    for node in source.nodes:
        keys += [node.slice] if isinstance(node, ast.Subscript) else node.keys if isinstance(node, ast.Dict) else []
    texts = {one.value for one in keys if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return {f"{quote}{one}{quote}" for one in texts for quote in "'\""}


def _anew(source: SourceFile, value: str, layers: Sequence[Layer]) -> str | None:
    if not layers:
        return f"{value}.detach()"
    layer, item = layers[0], "s" if len(layers) == 1 else f"part{'_' * (len(layers) - 2)}"
    inner = _anew(source, item, layers[1:])
    wanted = "tensor" if len(layers) == 1 else layers[1].kind
    others = set(layer.items) - {wanted}
    if inner is None:
        return None
    if others == {"none"}:
        inner = f"{item} if {item} is None else {inner}"
    elif others:
        test = _test(source, item, wanted)
        inner = f"{inner} if {test} else {item}"
    if layer.kind.endswith("dict"):
        kept = f"{value} | " if layer.kind == "defaultdict" else ""
        return f"{kept}{{key: {inner} for key, {item} in {value}.items()}}"
    if layer.kind == "list":
        return f"[{inner} for {item} in {value}]"
    each = f"{inner} for {item} in {value}"
    if layer.kind == "namedtuple":
        return f"{value}._make({each})"
    if layer.kind == "deque":
        made = deque_made(source, value)
        return f"{'type(' + value + ')' if made is None else source.text(made.func)}(({each}), {value}.maxlen)"
    return f"tuple({each})"


def _test(source: SourceFile, item: str, wanted: str) -> str:
    """The condition that selects items of the ``wanted`` kind."""
    if wanted != "tensor":
        return f"isinstance({item}, {_CLASSES[wanted]})"
    return f"{torch_name(source)}.is_tensor({item})"


def detach_given(frame: Frame, taker: str, maker: str) -> tuple[str, Change] | None:
    """The call of ``maker`` that is an argument of a call of ``taker`` at ``frame``, detached, and its text.

    With it those that later statements of the block pass to the same method: ``train(d_b, pool_b.query(fake_b))``. None
    where the statement does not have exactly one.
    """
    statement = statement_at(frame)
    calls = [] if statement is None else _calls_of(statement.node, taker)
    given = [(call, one) for call in calls for one in _results_given(call, maker)]
    if statement is None or len(given) != 1:
        return None
    source, (call, mine) = statement.source, given[0]
    called = chain_key(call.func)
    later = source.behind(statement.node) if called is not None else []
    alike = [one for node in later for one in _calls_of(node, taker) if chain_key(one.func) == called]
    found = [mine, *(one for other in alike for one in _results_given(other, maker))]
    change = edited(source, [Edit.after(source.span(one), ".detach()") for one in found], "detach")
    return None if change is None else (source.text(mine), change)


def _calls_of(node: ast.stmt, name: str) -> list[ast.Call]:
    return [one for one in header_nodes(node) if isinstance(one, ast.Call) and leaf_name(one.func) == name]


def _results_given(call: ast.Call, maker: str) -> list[ast.Call]:
    given = (*call.args, *(keyword.value for keyword in call.keywords))
    return [one for one in given if isinstance(one, ast.Call) and leaf_name(one.func) == maker]
