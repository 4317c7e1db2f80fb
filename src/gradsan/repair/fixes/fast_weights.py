"""Differentiated inner steps: new values of the parameters, and the model called with them (GS218).

The usual shape: MAML, or an unrolled network, whose inner step writes ``p.data -= lr * g``. The same step makes a dict
of new tensors, and every later call of the model becomes ``torch.func.functional_call(model, fast, …)``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from gradsan.model import Diagnosis, Fix, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Edit, edited_lines, text_with
from gradsan.source.identifiers import leaf_name, local_nodes
from gradsan.source.imports import torch_name
from gradsan.source.locate import Statement, statement_at
from gradsan.source.methods import CUTTING
from gradsan.source.rewrite.moving import is_whole_lines, names_read
from gradsan.source.rewrite.out_of_place import out_of_place, recorded
from gradsan.source.tree import SourceFile

BEGUN = "fix.begin_anew"
_PARAMETERS = frozenset({"parameters", "named_parameters"})


def functional_fast_weights(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """The inner step as a dict of new tensors, with which the model is called from there on."""
    advice = blocks.advice(diagnosis, "functional_fast_weights")
    asked, written, used = (_statement(blocks.first(diagnosis, role)) for role in ("note", "written", "used"))
    at = blocks.first(diagnosis, "written")
    if advice is None or at is None or asked is None or written is None or used is None:
        return ()
    source, loop = written.source, written.source.parents[written.node][0]
    is_one = asked.function is written.function is used.function and not isinstance(written.function, ast.Lambda)
    value = _new_value(at)
    if not is_one or value is None:
        return ()
    walked = _parameters_walked(loop) if isinstance(loop, ast.For) else None
    if walked is None:
        return _one_leaf(source, advice, (asked, written, used), value)
    if not isinstance(loop, ast.For) or len(loop.body) != 1 or loop.orelse:
        return ()
    torch, model = torch_name(source), source.text(walked.func.value)  # type: ignore[attr-defined]
    if not isinstance(loop.target, ast.Tuple):
        return ()
    variable, new = value
    fast, name = blocks.fresh_name(source, "fast"), blocks.fresh_name(source, "name")
    inner = _round_of(source, loop, asked.node, used.node)

    named = f"{model}.named_parameters()" if inner is None else f"{fast}.items()"
    iterated = text_with(source, source.span(loop.iter), [Edit(source.span(walked), named)])
    own = next((one for one in ast.walk(loop.target) if isinstance(one, ast.Name) and one.id == variable), None)
    if own is None:
        return ()
    target = text_with(source, source.span(loop.target), [Edit(source.span(own), f"({name}, {variable})")])
    around = source.parents[loop][0]
    is_alone = isinstance(around, ast.With) and blocks.switches_grad_off(around) and around.body == [loop]
    replaced = source.span(around if is_alone else loop)
    edits = [Edit(replaced, f"{fast} = {{{name}: {new} for {target} in {iterated}}}")]

    first, last = (loop if inner is None else inner), used.node
    calls = list(_calls_of(source, written, model, source.span(first).line, source.span(last).end_line))
    if not any(call.lineno > replaced.end_line for call in calls) or any(one.keywords or not one.args for one in calls):
        return ()
    for call in calls:
        given = ", ".join(source.text(one) for one in call.args)
        text = f"{torch}.func.functional_call({model}, {fast}, ({given}{',' if len(call.args) == 1 else ''}))"
        edits.append(Edit(source.span(call), text))
    if inner is not None:
        at_loop, inputs = source.span(inner), _inputs(asked.node)
        if inputs is None:
            return ()
        indent = source.indent(at_loop)
        start = f"{fast} = dict({model}.named_parameters())\n{indent}"
        edits += [Edit.before(at_loop, start), Edit(source.span(inputs), f"list({fast}.values())")]
    lines = edited_lines(source, edits)
    values: dict[str, Any] = {**advice.summary.values, "model": model, "fast": fast}
    return (blocks.fix("functional_fast_weights", lines, **values),) if lines else ()


def begin_anew(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Fast weights begun as the parameters in each round, where one round went on from those of the one before.

    Detached, nothing would train the parameters any more.
    """
    bridge, used = blocks.first(diagnosis, "bridge"), blocks.first(diagnosis, "used")
    name = None if bridge is None else bridge.message.values.get("bridge")
    if used is None or not isinstance(name, str) or blocks.advice(diagnosis, "reset_state") is None:
        return ()
    for place in blocks.placements(used):
        loop, source = place.statement, place.source
        begun = [one for one in place.block[: place.index] if name in blocks.names_bound(one)]
        first = begun[0] if len(begun) == 1 else None
        if not isinstance(loop, ast.For | ast.While) or not isinstance(first, ast.Assign):
            continue
        calls = {leaf_name(one.func) for one in ast.walk(first.value) if isinstance(one, ast.Call)}
        between = place.block[place.block.index(first) + 1 : place.index]
        if (
            calls & CUTTING
            or not calls & _PARAMETERS
            or name in names_read([*between, *place.block[place.index + 1 :]])
        ):
            return ()
        at = next((one for one in loop.body if name in names_read([one])), None)
        if (
            at is None
            or len(blocks.names_bound(first)) > 1
            or not all(is_whole_lines(source, one) for one in (first, at))
        ):
            return ()
        line, text = source.span(at).line, source.text(first)
        changes = {**blocks.removed(source, first), line: f"{source.indent(at)}{text}\n{source.lines[line - 1]}"}
        return (blocks.fix("reset_state", blocks.lines_changed(source, changes), "begin_anew", name=name),)
    return ()


def _one_leaf(
    source: SourceFile, advice: Fix, places: tuple[Statement, Statement, Statement], value: tuple[str, str]
) -> tuple[Fix, ...]:
    """The new value of a leaf under a new name, which all reads up to the later backward use."""
    asked, written, used = places
    if _round_of(source, written.node, asked.node, used.node) is not None or asked.node.lineno > written.node.lineno:
        return ()
    variable, new = value
    fast = blocks.fresh_name(source, "fast")
    scope = source.module if written.function is None or isinstance(written.function, ast.Lambda) else written.function
    reads = [
        one
        for one in local_nodes(scope)
        if isinstance(one, ast.Name) and one.id == variable and isinstance(one.ctx, ast.Load)
        if written.span.end_line < one.lineno <= used.span.end_line
    ]
    edits = [Edit(written.span, f"{fast} = {new}"), *(Edit(source.span(one), fast) for one in reads)]
    lines = edited_lines(source, edits) if reads else ()
    values = {**advice.summary.values, "name": variable, "fast": fast}
    return (blocks.fix("functional_fast_weights", lines, "fast_leaf", **values),) if lines else ()


def _statement(label: Label | None) -> Statement | None:
    return None if label is None else statement_at(label.frame)


def _new_value(at: Label) -> tuple[str, str] | None:
    """The variable that a write updates, and its new value as an expression that autograd records."""
    change = recorded(at.frame, at.op or "") or out_of_place(at.frame, at.op or "")
    statement = statement_at(at.frame)
    text = change.new if change is not None else None if statement is None else statement.text
    try:
        node = ast.parse((text or "").strip()).body[0]
    except (SyntaxError, IndexError):
        return None
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    target = _with_graph(node.targets[0])
    return (target.id, ast.unparse(_WithGraph().visit(node.value))) if isinstance(target, ast.Name) else None


def _with_graph(node: ast.expr) -> ast.expr:
    return node.value if isinstance(node, ast.Attribute) and node.attr == "data" else node


class _WithGraph(ast.NodeTransformer):
    """``x`` for ``x.data`` and ``x.detach()``."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        return _with_graph(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_cut = isinstance(node.func, ast.Attribute) and node.func.attr == "detach" and not node.args
        return node.func.value if is_cut and isinstance(node.func, ast.Attribute) else node


def _parameters_walked(loop: ast.For) -> ast.Call | None:
    calls = [one for one in ast.walk(loop.iter) if isinstance(one, ast.Call) and leaf_name(one.func) == "parameters"]
    return calls[0] if len(calls) == 1 and isinstance(calls[0].func, ast.Attribute) and not calls[0].args else None


def _round_of(source: SourceFile, loop: ast.stmt, asked: ast.stmt, used: ast.stmt) -> ast.stmt | None:
    """The loop of inner steps: around the update and its gradient, and not around the later backward."""
    for parent, _ in source.ancestors(loop):
        if isinstance(parent, ast.For | ast.While):
            inside = set(ast.walk(parent))
            return parent if asked in inside and used not in inside else None
    return None


def _calls_of(source: SourceFile, at: Statement, model: str, first: int, last: int) -> Iterator[ast.Call]:
    scope = source.module if at.function is None or isinstance(at.function, ast.Lambda) else at.function
    for node in local_nodes(scope):
        is_call = isinstance(node, ast.Call) and source.text(node.func) == model
        if is_call and isinstance(node, ast.Call) and first <= node.lineno <= last:
            yield node


def _inputs(asked: ast.stmt) -> ast.expr | None:
    calls = [one for one in ast.walk(asked) if isinstance(one, ast.Call) and leaf_name(one.func) == "grad"]
    return calls[0].args[1] if len(calls) == 1 and len(calls[0].args) > 1 else None
