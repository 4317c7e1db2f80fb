"""Steps and updates moved after the backward that needs the old values.

The later backward would add its own gradients to those of the optimizer that now steps after it. Where it should
reach only the next optimizer's parameters, ``inputs=`` keeps them apart; else a copy of the gradients does.

One step for the sum of all losses is the short way. Where each round has its own gradients (an optimizer of its own, or
zeroing in between), they are kept and stepped with one after the other, which changes no gradient.

The usual shape: a world model is trained on observations, and the actor imagines on from its last states. The
states are a dict, or carried by loops on both sides, so that no single argument of a call can be detached.
"""

from __future__ import annotations

import ast
import textwrap

from gradsan.model import Diagnosis, Fix, Frame, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.repair.fixes.graphs import detach_other_network
from gradsan.source.change import changed_lines
from gradsan.source.identifiers import bindings_of, consumed_names, leaf_name
from gradsan.source.locate import statement_at
from gradsan.source.modules import Shape, shape_in_source
from gradsan.source.rewrite.moving import is_whole_lines, move_behind
from gradsan.source.rewrite.renewing import constructs
from gradsan.source.rounds import detach_after
from gradsan.source.tree import SourceFile, indentation_of


def reorder_step(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Move the steps that wrote, and do the same with ``inputs=`` where another optimizer steps afterwards."""
    used = blocks.first(diagnosis, "used")
    if used is None or diagnosis.cause not in blocks.STEPPED:
        return ()
    if swapped := _later_call_first(blocks.labels(diagnosis, "written"), used):
        return swapped
    steps: dict[ast.stmt, blocks.Placed] = {}
    place = None
    for written in blocks.labels(diagnosis, "written"):
        pair = blocks.in_one_block(written, used)
        if pair is None or pair[0].index >= pair[1].index or blocks.method_call(pair[0].statement, "step") is None:
            return ()
        if place is not None and place.statement is not pair[1].statement:
            return ()
        steps[pair[0].statement], place = pair
    if place is None:
        return ()
    source, backward = place.source, place.statement
    if not all(is_whole_lines(source, node) for node in (*steps, backward)):
        return ()
    if isinstance(backward, ast.If):
        return tuple(_in_both_branches(place, list(steps), used))
    if any(_hands_parameters_on(node, used) for node in ast.walk(backward)):
        return ()
    moved = "\n".join(blocks.text_of(source, node) for node in steps)
    away = {line: text for node in steps for line, text in blocks.removed(source, node).items()}
    span = source.span(backward)
    last = source.lines[span.end_line - 1]
    found = [blocks.fix("reorder_step", blocks.lines_changed(source, {**away, span.end_line: f"{last}\n{moved}"}))]
    apart = _with_inputs(place, set(steps))
    if apart is not None:
        texts = {**away, span.line: f"{apart}\n{moved}"}
        texts.update(dict.fromkeys(range(span.line + 1, span.end_line + 1), ""))
        found.append(blocks.fix("reorder_step", blocks.lines_changed(source, texts), "reorder_step_apart"))
    found += _with_kept_gradients(place, list(steps))
    return tuple(found)


def _later_call_first(written: tuple[Label, ...], used: Label) -> tuple[Fix, ...]:
    """Two calls of helpers that each run a backward and step: the later one moved before the one whose step wrote."""
    pairs = [pair for one in written if (pair := _outermost_pair(one, used)) is not None]
    if len(pairs) < len(written) or len({pair[0].index for pair in pairs}) != 1:
        return ()
    earlier, later = pairs[0]
    calls = [place.statement.value for place in (earlier, later) if isinstance(place.statement, ast.Expr)]
    source, between = later.source, later.block[earlier.index : later.index]
    if len(calls) != 2 or earlier.index > later.index or not all(isinstance(one, ast.Call) for one in calls):
        return ()
    # Plain backward and step statements are left to the other fixes, which know what to move.
    if any(isinstance(one, ast.Call) and leaf_name(one.func) in ("backward", "step") for one in calls):
        return ()
    if any(blocks.names_bound(node) & blocks.names_read([later.statement]) for node in between):
        return ()
    if not all(is_whole_lines(source, node) for node in (earlier.statement, later.statement)):
        return ()
    start = source.span(earlier.statement).line
    changes = blocks.removed(source, later.statement)
    changes[start] = f"{blocks.text_of(source, later.statement)}\n{source.lines[start - 1]}"
    values = {"later": source.text(calls[1]), "earlier": source.text(calls[0])}
    return (blocks.fix("reorder_step", blocks.lines_changed(source, changes), "reorder_calls", **values),)


def _outermost_pair(first: Label, second: Label) -> tuple[blocks.Placed, blocks.Placed] | None:
    """The outermost block in which two stacks diverge: within a shared helper they would belong to two of its calls."""
    others = list(blocks.placements(second))[::-1]
    for one in list(blocks.placements(first))[::-1]:
        for other in others:
            if one.block is other.block and one.statement is not other.statement:
                return one, other
    return None


def _with_kept_gradients(backward: blocks.Placed, steps: list[ast.stmt]) -> list[Fix]:
    """A copy of the gradients where the step was, restored right before it: without those of the later backward.

    Also with the gradients of that backward restored in turn, for a parameter that the next optimizer has, too.
    """
    source = backward.source
    call = blocks.method_call(steps[0], "step")
    if len(steps) != 1 or call is None or call.args or call.keywords:
        return []
    assert isinstance(call.func, ast.Attribute)
    optimizer = source.text(call.func.value)
    names = ("params", "kept", "later", "p", "grad")
    params, kept, later, p, grad = (blocks.fresh_name(source, name) for name in names)
    start, end = source.span(steps[0]), source.span(backward.statement).end_line
    indent = source.lines[start.line - 1][: start.column - 1]
    step, unit = blocks.text_of(source, steps[0]), indentation_of(source)
    away = {
        **blocks.removed(source, steps[0]),
        start.line: f'{indent}{params} = [{p} for group in {optimizer}.param_groups for {p} in group["params"]]\n'
        f"{indent}{kept} = [None if {p}.grad is None else {p}.grad.clone() for {p} in {params}]",
    }

    def put_back(gradients: str) -> str:
        return f"{indent}for {p}, {grad} in zip({params}, {gradients}):\n{indent}{unit}{p}.grad = {grad}"

    last = source.lines[end - 1]
    with_later = f"{indent}{later} = [{p}.grad for {p} in {params}]\n{put_back(kept)}\n{step}\n{put_back(later)}"
    texts = {"reorder_step_kept": f"{put_back(kept)}\n{step}"}
    if _shares_parameters(source, optimizer):
        texts["reorder_step_both_kept"] = with_later
    return [
        blocks.fix("reorder_step", blocks.lines_changed(source, {**away, end: f"{last}\n{text}"}), words)
        for words, text in texts.items()
    ]


def _shares_parameters(source: SourceFile, optimizer: str) -> bool:
    """Whether the file passes this optimizer's argument (``encoder.parameters()``) to another object, too."""
    made = [one for one in source.nodes if isinstance(one, ast.Assign) and isinstance(one.value, ast.Call)]
    given: dict[str, set[str]] = {}
    for node in made:
        calls = [
            one for one in ast.walk(node.value) if isinstance(one, ast.Call) and leaf_name(one.func) == "parameters"
        ]
        given.setdefault(ast.unparse(node.targets[0]), set()).update(map(ast.unparse, calls))
    own = given.pop(optimizer, set())
    return any(own & others for others in given.values())


_HANDING_ON = frozenset({"data", "state_dict", "load_state_dict", "parameters", "named_parameters"})


def _hands_parameters_on(node: ast.AST, used: Label) -> bool:
    """Whether a part of the statement after the backward reads parameters, for which a later step would be too late."""
    return isinstance(node, ast.Attribute) and node.lineno > used.frame.line and node.attr in _HANDING_ON


def _in_both_branches(place: blocks.Placed, steps: list[ast.stmt], used: Label) -> list[Fix]:
    """The step right after a backward that is under an ``if``, and in an added ``else``."""
    source, branch = place.source, place.statement
    assert isinstance(branch, ast.If)
    inner = next((one for one in blocks.placements(used) if one.block is branch.body), None)
    call = blocks.method_call(steps[0], "step")
    if len(steps) != 1 or call is None or inner is None or branch.orelse or call.args or call.keywords:
        return []
    if not is_whole_lines(source, inner.statement) or inner.statement.lineno == branch.lineno:
        return []
    assert isinstance(call.func, ast.Attribute)
    optimizer, step = source.text(call.func.value), source.text(steps[0])
    params, kept, p, grad = (blocks.fresh_name(source, name) for name in ("params", "kept", "p", "grad"))
    start, last, first = source.span(steps[0]), source.span(inner.statement), source.span(branch)
    outer, within = (source.lines[one.line - 1][: one.column - 1] for one in (first, last))
    unit = within.removeprefix(outer) or "    "
    end = first.end_line
    changes = {
        **blocks.removed(source, steps[0]),
        start.line: f'{outer}{params} = [{p} for group in {optimizer}.param_groups for {p} in group["params"]]\n'
        f"{outer}{kept} = [None if {p}.grad is None else {p}.grad.clone() for {p} in {params}]",
        last.end_line: f"{source.lines[last.end_line - 1]}\n{within}for {p}, {grad} in zip({params}, {kept}):\n"
        f"{within}{unit}{p}.grad = {grad}\n{within}{step}",
    }
    changes[end] = f"{changes.get(end, source.lines[end - 1])}\n{outer}else:\n{outer}{unit}{step}"
    return [blocks.fix("reorder_step", blocks.lines_changed(source, changes), "reorder_step_kept")]


def _with_inputs(place: blocks.Placed, moved: set[ast.stmt]) -> str | None:
    """The backward's lines with ``inputs=`` naming the parameters of the optimizer that steps next."""
    call = blocks.method_call(place.statement, "backward")
    following = place.block[place.index + 1 :]
    step = next((one for node in following if node not in moved and (one := blocks.method_call(node, "step"))), None)
    if call is None or step is None or any(keyword.arg == "inputs" for keyword in call.keywords):
        return None
    assert isinstance(step.func, ast.Attribute)
    source = place.source
    optimizer = source.text(step.func.value)
    inputs = f'inputs=[p for group in {optimizer}.param_groups for p in group["params"]]'
    span = source.span(call)
    text = blocks.text_of(source, place.statement)
    if span.line != span.end_line:
        return None
    at = span.end_column - 2
    comma = ", " if call.args or call.keywords else ""
    return f"{text[:at]}{comma}{inputs}{text[at:]}"


_CAUSES = frozenset({"statistics_updated", "input_changed_between_passes"})
_BY_HAND = frozenset({"data_attribute", "checkpoint_closure", *blocks.STEPPED})


def reorder_update(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Move the statements that wrote, and all in between that belong to them, after the backward.

    A run shows whether computations in between need the new values.
    """
    used = blocks.first(diagnosis, "used")
    written = blocks.labels(diagnosis, "written")
    if used is None or not written or diagnosis.cause not in _CAUSES | _BY_HAND:
        return ()
    moved = move_behind([blocks.user_frames(one) for one in written], blocks.user_frames(used))
    if moved is not None:
        return (blocks.fix("reorder_update", moved.lines),)
    return _writers_alone(written, used) if diagnosis.cause in _CAUSES else ()


def _writers_alone(written: tuple[Label, ...], used: Label) -> tuple[Fix, ...]:
    """Only the statements that wrote, where they bind no name."""
    moved: dict[ast.stmt, blocks.Placed] = {}
    backward = None
    for label in written:
        pair = blocks.in_one_block(label, used)
        if pair is None or pair[0].index >= pair[1].index or not _may_move(pair[0]):
            return ()
        if backward is not None and backward.statement is not pair[1].statement:
            return ()
        moved[pair[0].statement], backward = pair
    if backward is None or not is_whole_lines(backward.source, backward.statement):
        return ()
    source = backward.source
    end = source.span(backward.statement).end_line
    behind = "\n".join([source.lines[end - 1], *(blocks.text_of(source, node) for node in moved)])
    away = {line: text for node in moved for line, text in blocks.removed(source, node).items()}
    return (blocks.fix("reorder_update", blocks.lines_changed(source, {**away, end: behind})),)


def _may_move(place: blocks.Placed) -> bool:
    """Whether the statement only has effects and binds nothing: a call, or a ``with`` or a loop around such calls."""
    node = place.statement
    is_backward = any(isinstance(one, ast.Attribute) and one.attr in ("backward", "grad") for one in ast.walk(node))
    if is_backward or constructs(place.source, node) or not is_whole_lines(place.source, node):
        return False
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if not isinstance(node, ast.For | ast.With):
        return False
    # As a rule only a loop's own body reads its variables; the trial shows exceptions.
    return all(isinstance(one, ast.Expr | ast.AugAssign) for one in node.body)


def step_after_loop(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Move the step after the loop whose rounds share a forward: once for all, or once for each round."""
    used = blocks.first(diagnosis, "used")
    written = blocks.labels(diagnosis, "written")
    saved = blocks.first(diagnosis, "saved")
    if used is None or saved is None or len(written) != 1 or diagnosis.cause not in blocks.STEPPED:
        return ()
    pair = blocks.in_one_block(used, written[0])
    if pair is None:
        return ()
    backward, step = pair
    source = step.source
    loop = source.parents[step.statement][0]
    if not isinstance(loop, ast.For) or loop.orelse or step.index < backward.index:
        return ()
    is_shared = blocks.at_block(saved, step.block) is None
    if not is_shared or len(step.block) < 2:
        return ()
    if not blocks.names_read(loop.body) & blocks.names_bound(loop.target):
        return ()  # without steps in between every round would do the same as the one before
    call = blocks.method_call(step.statement, "step")
    # A manual update ends with clearing the gradients, which belongs to it.
    moving = [step.statement] if call is not None else step.block[step.index :]
    if len(moving) == len(step.block) or not all(is_whole_lines(source, node) for node in moving):
        return ()
    found = []
    if not blocks.names_read(moving) & (blocks.names_bound(loop.target) | _bound_before(step)):
        found.append(_once(source, loop, moving))
    if call is not None and not call.args and not call.keywords:
        found.append(_each_round(source, loop, step.statement, call))
    return tuple(found)


def _bound_before(step: blocks.Placed) -> set[str]:
    """The names that a round binds before its update: after the loop they would be those of the last round."""
    return {name for node in step.block[: step.index] for name in blocks.names_bound(node)}


def _once(source: SourceFile, loop: ast.For, moving: list[ast.stmt]) -> Fix:
    lines = "\n".join(blocks.text_of(source, node) for node in moving)
    moved = textwrap.indent(textwrap.dedent(lines), source.indent(loop))
    changes = {line: text for node in moving for line, text in blocks.removed(source, node).items()}
    end = source.span(loop).end_line
    changes[end] = moved if end in changes else f"{source.lines[end - 1]}\n{moved}"
    return blocks.fix("reorder_step", blocks.lines_changed(source, changes), "step_after_loop")


def _each_round(source: SourceFile, loop: ast.For, step: ast.stmt, call: ast.Call) -> Fix:
    assert isinstance(call.func, ast.Attribute)
    optimizer = source.text(call.func.value)
    names = ("pending", "optimizer", "params", "p", "grads", "grad")
    kept, stepping, params, p, grads, grad = (blocks.fresh_name(source, name) for name in names)
    start, place = source.span(loop), source.span(step)
    outer, inner = source.lines[start.line - 1][: start.column - 1], source.lines[place.line - 1][: place.column - 1]
    unit = inner[len(outer) :] or "    "
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


_SHARED = "forward_shared_by_two_backwards"


def cut_between(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """A line after the step that detaches the values which the later loss takes from the shared tensor's statement."""
    used = blocks.first(diagnosis, "used")
    updates = [one for one in diagnosis.labels if one.message.key == "label.updated_between"]
    if diagnosis.cause in blocks.STEPPED:
        updates = list(blocks.labels(diagnosis, "written"))
    pairs = [] if used is None else blocks.each_in_one_block(updates, used)
    if not pairs or diagnosis.cause not in (_SHARED, *blocks.STEPPED) or detach_other_network(diagnosis):
        return ()
    label, (step, backward) = max(zip(updates, pairs, strict=True), key=lambda one: one[1][0].index)
    frame = next((one for one in blocks.user_frames(label) if _is_at(one, step.statement)), None)
    if frame is None or step.index >= backward.index:
        return ()
    carried: dict[str, Shape] = {}
    for made in blocks.labels(diagnosis, "bridge", "saved"):
        carried |= {name: shape for name, shape in _left_by(made, step, backward).items() if name not in carried}
    change = detach_after(frame, carried)
    lines = changed_lines(step.source.file, change)
    return (blocks.fix("detach_other_network", lines, name=", ".join(carried)),) if lines else ()


def _is_at(frame: Frame, node: ast.stmt) -> bool:
    place = statement_at(frame)
    return place is not None and place.node is node


def _left_by(made: Label, step: blocks.Placed, backward: blocks.Placed) -> dict[str, Shape]:
    """The names computed by the statement of the block that contains ``made``, and read after the step."""
    index = blocks.at_block(made, step.block)
    if index is None or index >= step.index:
        return {}
    later = step.block[step.index + 1 : backward.index + 1]
    walked = blocks.names_read([node for node in step.block[index : step.index] if _runs_backward(node)])
    found: dict[str, Shape] = {}
    for node in ast.walk(step.block[index]):
        for one in bindings_of(node) if isinstance(node, ast.stmt) else ():
            if one.computed and one.replaces and one.name not in walked and _is_read(one.name, later):
                found.setdefault(one.name, shape_in_source(step.source, one) or "tensor")
    return found


def _is_read(name: str, nodes: list[ast.stmt]) -> bool:
    """Whether the first statement of ``nodes`` that uses the name reads it, or a part of it."""
    for node in nodes:
        inner = [one for one in ast.walk(node) if isinstance(one, ast.stmt)]
        reads = {read for one in inner for read in consumed_names(one)}
        if any(read == name or read.startswith((f"{name}[", f"{name}.")) for read in reads):
            return True
        if any(one.name == name and one.replaces for part in inner for one in bindings_of(part)):
            return False
    return False


def _runs_backward(node: ast.stmt) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "backward" for one in ast.walk(node))
