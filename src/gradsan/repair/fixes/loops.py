"""Steps moved after the loop whose rounds share a forward.

One step for the sum of all losses is the short way. Where each round has its own gradients (an optimizer of its own, or
zeroing in between), they are kept and stepped with one after the other, which changes no gradient.
"""

from __future__ import annotations

import ast
import textwrap

from gradsan.model import Diagnosis, Fix, Label, NamedTensor
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.identifiers import chain_key
from gradsan.source.rewrite.moving import is_whole_lines, names_bound, names_read
from gradsan.source.tree import SourceFile, indentation_of

ONCE, APART = "fix.step_after_loop", "fix.step_after_loop_apart"
"""The message keys of one step for the sum of all losses, and of one for each."""


def step_after_loop(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Move the step after the loop whose rounds share a forward: once for all, or once for each round."""
    used = blocks.first(diagnosis, "used")
    written = blocks.labels(diagnosis, "written")
    saved = blocks.first(diagnosis, "saved")
    if used is None or saved is None or diagnosis.cause not in blocks.STEPPED:
        return ()
    pairs = blocks.each_in_one_block(written, used)
    if not pairs or any(pair[0].statement is not pairs[0][0].statement for pair in pairs):
        return ()
    step, backward = pairs[0]
    source = step.source
    loop = source.parents[step.statement][0]
    if not isinstance(loop, ast.For) or loop.orelse or step.index < backward.index:
        return ()
    if blocks.at_block(saved, step.block) is not None or len(step.block) < 2:
        return ()
    if not blocks.names_read(loop.body) & blocks.names_bound(loop.target):
        return ()  # without steps in between every round would do the same as the one before
    if _called(saved, loop, diagnosis.tensor) & _calls_in(loop):
        return ()  # every round computes anew with the parameters of its time: its step is not to wait
    # A loop over optimizers steps with each of them.
    own = next(one.statement for one in blocks.placements(written[0]) if one.source is source)
    call = blocks.method_call(own, "step") if own in set(ast.walk(step.statement)) else None
    # A manual update ends with clearing the gradients, which belongs to it.
    moving = [step.statement] if call is not None else step.block[step.index :]
    turn = blocks.names_bound(loop.target)
    before = step.block[: backward.index] if call is not None else []
    clearing = [node for node in before if _only_clears(node) and not blocks.names_read([node]) & turn]
    if len(moving) == len(step.block) or not all(is_whole_lines(source, node) for node in (*moving, *clearing)):
        return ()
    found = []
    bound = {name for node in step.block[: step.index] if node not in clearing for name in blocks.names_bound(node)}
    needed = {name for node in (*moving, *clearing) for name in names_read([node]) - names_bound([node])}
    if not needed & (turn | bound):
        found.append(_once(source, loop, moving, clearing))
    if call is not None and not call.args and not call.keywords:
        found.append(_each_round(source, loop, own, call))
    return tuple(found)


def _called(saved: Label, loop: ast.For, tensor: NamedTensor | None) -> set[str]:
    """What the forward before the loop calls: modules that hold the parameter, and functions of the same file."""
    owners = set(tensor.name.split(".")) if tensor is not None and tensor.name else set[str]()
    found: set[str] = set()
    for place in blocks.placements(saved):
        if loop in set(ast.walk(place.statement)):
            break
        defined = {node.name for node in place.source.nodes if isinstance(node, ast.FunctionDef)}
        found |= {name for name in _calls_in(place.statement) if name.rpartition(".")[2] in owners | defined}
    return found


def _calls_in(node: ast.AST) -> set[str]:
    """The names that are called in ``node``, as ``self.net``."""
    calls = (chain_key(one.func) for one in ast.walk(node) if isinstance(one, ast.Call))
    return {name for name in calls if name is not None}


def _only_clears(node: ast.stmt) -> bool:
    """Whether the statement is a ``zero_grad()``, or a loop that calls it for several optimizers."""
    inner = node.body if isinstance(node, ast.For) else [node]
    return all(blocks.method_call(one, "zero_grad") is not None for one in inner)


def _once(source: SourceFile, loop: ast.For, moving: list[ast.stmt], clearing: list[ast.stmt]) -> Fix:
    """The step after the loop, and what clears gradients in every round before it: else the last loss alone counts."""
    behind, before = (
        textwrap.indent(textwrap.dedent("\n".join(blocks.text_of(source, node) for node in nodes)), source.indent(loop))
        for nodes in (moving, clearing)
    )
    changes = {line: text for node in (*moving, *clearing) for line, text in blocks.removed(source, node).items()}
    start, end = source.span(loop).line, source.span(loop).end_line
    changes[end] = behind if end in changes else f"{source.lines[end - 1]}\n{behind}"
    if clearing:
        changes[start] = f"{before}\n{source.lines[start - 1]}"
    return blocks.fix("reorder_step", blocks.lines_changed(source, changes), "step_after_loop")


def _each_round(source: SourceFile, loop: ast.For, step: ast.stmt, call: ast.Call) -> Fix:
    assert isinstance(call.func, ast.Attribute)
    optimizer = source.text(call.func.value)
    names = ("pending", "optimizer", "params", "p", "grads", "grad")
    kept, stepping, params, p, grads, grad = (blocks.fresh_name(source, name) for name in names)
    start, place = source.span(loop), source.span(step)
    outer, inner = source.indent(start), source.indent(place)
    unit = indentation_of(source)
    # A gradient that is not removed in between is accumulated in place.
    value = f"{p}.grad" if _clears(loop) else f"None if {p}.grad is None else {p}.grad.clone()"
    keep = (
        f'{inner}{params} = [{p} for group in {optimizer}.param_groups for {p} in group["params"]]\n'
        f"{inner}{kept}.append(({optimizer}, [({p}, {value}) for {p} in {params}]))"
    )
    changes = {
        **blocks.removed(source, step),
        start.line: f"{outer}{kept} = []\n{source.lines[start.line - 1]}",
        place.line: keep,
    }
    after = (
        f"{outer}for {stepping}, {grads} in {kept}:\n"
        f"{outer}{unit}for {p}, {grad} in {grads}:\n"
        f"{outer}{unit}{unit}{p}.grad = {grad}\n"
        f"{outer}{unit}{stepping}.step()"
    )
    end = start.end_line
    changes[end] = f"{changes.get(end, source.lines[end - 1])}\n{after}"
    return blocks.fix("reorder_step", blocks.lines_changed(source, changes), "step_after_loop_apart")


def _clears(loop: ast.For) -> bool:
    """Whether every round sets all gradients to None, so that the next round's are new tensors.

    Where the loop iterates over optimizers, each leaves the others' gradients to accumulate.
    """
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    of_round = blocks.names_bound(loop)
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "zero_grad"
        and not (call.args or call.keywords or blocks.names_read([call.func]) & of_round)
        for call in calls
    )
