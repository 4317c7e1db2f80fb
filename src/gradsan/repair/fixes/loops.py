"""Steps moved after the loop whose rounds share a forward.

One step for the sum of all losses is the short way. Where each round has its own gradients (an optimizer of its own, or
zeroing in between), they are kept and stepped with one after the other, which changes no gradient.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator

from gradsan.model import Diagnosis, Fix, Label, NamedTensor
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Edit, indentation_of, text_with
from gradsan.source.identifiers import chain_key
from gradsan.source.rewrite.moving import is_whole_lines, names_bound, names_read
from gradsan.source.rewrite.renewing import draws_again
from gradsan.source.tree import SourceFile, Span

ONCE, APART = "fix.step_after_loop", "fix.step_after_loop_apart"
"""The message keys of one step for the sum of all losses, and of one for each."""
BOUNDING = frozenset({"clamp_", "clamp_max_", "clamp_min_", "clip_"})
"""Operations that change nothing where they run again."""


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


def bound_after_loop(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Move ``rates.clamp_(0, 1)`` of a loop behind it, and behind the backward and the step that follow."""
    used, written = blocks.first(diagnosis, "used"), blocks.labels(diagnosis, "written")
    if used is None or {one.op for one in written} - BOUNDING or diagnosis.cause not in blocks.STEPPED:
        return ()
    pairs = blocks.each_in_one_block(written, used)
    places = {next(blocks.placements(one)).statement: next(blocks.placements(one)) for one in written}
    if not pairs or len(places) != 1 or pairs[0][0].index > pairs[0][1].index:
        return ()
    (around, backward), (bounds, place) = pairs[0], *places.items()
    source, loop = place.source, around.statement
    if not isinstance(loop, ast.For | ast.While) or bounds not in set(ast.walk(loop)):
        return ()
    while isinstance(outer := source.parents[bounds][0], ast.For | ast.With) and len(outer.body) == 1:
        bounds = outer
    parent, field = source.parents[bounds]
    bound = {name for node in loop.body for name in blocks.names_bound(node)} | blocks.names_bound(loop)
    behind = backward.block[backward.index :]
    last = next((node for node in behind if blocks.method_call(node, "step")), behind[0])
    if bounds is loop or names_read([bounds]) & bound - names_bound([bounds]) or len(getattr(parent, field)) < 2:
        return ()
    if not is_whole_lines(source, bounds) or not is_whole_lines(source, last):
        return ()
    text = textwrap.indent(textwrap.dedent(blocks.text_of(source, bounds)), source.indent(last))
    end = source.span(last).end_line
    changes = {**blocks.removed(source, bounds), end: f"{source.lines[end - 1]}\n{text}"}
    return (blocks.fix("bound_after_loop", blocks.lines_changed(source, changes)),)


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


def each_in_its_round(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Compute each element of a list in the round that takes it, where a comprehension before the loop computes all.

    ``losses = [m(x) for m in models]`` and ``for opt, loss in zip(opts, losses)`` become ``for opt, m in zip(opts,
    models)`` with ``loss = m(x)`` as the first statement of the round.
    """
    used, saved = blocks.first(diagnosis, "used"), blocks.first(diagnosis, "saved")
    if used is None or saved is None or diagnosis.cause not in blocks.STEPPED:
        return ()
    pair = blocks.in_one_block(saved, used)
    loop = None if pair is None else pair[1].statement
    made = None if pair is None else pair[0].statement
    if pair is None or pair[0].index > pair[1].index or not isinstance(loop, ast.For) or loop.orelse:
        return ()
    source, name = pair[0].source, made.targets[0] if isinstance(made, ast.Assign) and len(made.targets) == 1 else None
    value = made.value if isinstance(made, ast.Assign) else None
    if made is None or not isinstance(name, ast.Name) or not isinstance(value, ast.ListComp | ast.DictComp):
        return ()
    one = value.generators[0]
    taken = next((part for part in _handed_out(loop.target, loop.iter) if _is_of(part[1], name.id, value)), None)
    if len(value.generators) > 1 or one.ifs or one.is_async or taken is None or not is_whole_lines(source, made):
        return ()
    scope = source.function(loop) or source.module
    inside = set(ast.walk(made))
    shown = [part for part in ast.walk(scope) if isinstance(part, ast.Name) and part not in inside]
    others = {part.id for part in shown if not _is_of_comprehension(source, part)}
    if names_bound([one.target]) & others or loop.body[0].lineno == loop.lineno:
        return ()
    element = [value.elt] if isinstance(value, ast.ListComp) else [value.key, value.value]
    targets = taken[0].elts if len(element) == 2 and isinstance(taken[0], ast.Tuple) else [taken[0]]
    if len(targets) != len(element) or not all(isinstance(part, ast.Name) for part in targets):
        return ()
    head = source.indent(loop.body[0])
    texts = [f"{head}{source.text(a)} = {source.text(b)}" for a, b in zip(targets, element, strict=True)]
    if any("\n" in text for text in texts) or source.span(loop.target).line != source.span(loop.iter).end_line:
        return ()
    walked, each = source.text(one.iter), source.text(one.target)
    each = f"({each})" if isinstance(one.target, ast.Tuple) and taken[0] is not loop.target else each
    line = source.span(loop).line
    edits = [Edit(source.span(taken[0]), each), Edit(source.span(taken[1]), walked)]
    whole = Span(line, 1, line, len(source.lines[line - 1]) + 1)
    reads = [part for part in ast.walk(scope) if isinstance(part, ast.Name) and part.id == name.id]
    gone = blocks.removed(source, made) if len(reads) <= 2 else {}
    texts.insert(0, text_with(source, whole, edits))
    lines = blocks.lines_changed(source, {**gone, line: "\n".join(texts)})
    return (blocks.fix("recompute_forward", lines, "rebuild_in_loop"),)


def _is_of_comprehension(source: SourceFile, name: ast.Name) -> bool:
    """Whether a comprehension around the name binds it."""
    around = [one for one, _ in source.ancestors(name)]
    bound = [part.target for one in around for part in getattr(one, "generators", ())]
    return any(name.id in blocks.names_bound(target) for target in bound)


def _handed_out(target: ast.expr, walked: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a loop binds, and from which container: of ``zip`` and ``enumerate`` each part for itself."""
    yield target, walked
    if isinstance(walked, ast.Call) and isinstance(target, ast.Tuple) and isinstance(walked.func, ast.Name):
        if walked.func.id == "zip" and len(walked.args) == len(target.elts):
            for part, given in zip(target.elts, walked.args, strict=True):
                yield from _handed_out(part, given)
        if walked.func.id == "enumerate" and len(target.elts) == 2 and len(walked.args) == 1:
            yield from _handed_out(target.elts[1], walked.args[0])


def _is_of(walked: ast.expr, name: str, value: ast.ListComp | ast.DictComp) -> bool:
    """Whether ``walked`` is the list called ``name``, or the items of the dict."""
    if isinstance(value, ast.DictComp):
        return ast.unparse(walked) == f"{name}.items()"
    return isinstance(walked, ast.Name) and walked.id == name


def compute_in_own_loop(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Repeat, in the loop that steps, the assignment by which an earlier loop has computed what all its rounds read.

    ``for _ in range(5): fake = netG(z); …`` and then ``for _ in range(3): loss = -netD(fake).mean(); …``.
    """
    used = blocks.first(diagnosis, "used")
    if used is None or diagnosis.cause not in (*blocks.STEPPED, blocks.SHARED):
        return ()
    updated = [*blocks.labels(diagnosis, "written"), *blocks.labels(diagnosis, "freed")]
    found = (_repeated(made, used, updated) for made in blocks.labels(diagnosis, "bridge", "saved"))
    return next(((one,) for one in found if one is not None), ())


def _repeated(made: Label, used: Label, updated: list[Label]) -> Fix | None:
    pair = blocks.in_one_block(made, used)
    if pair is None or pair[0].index >= pair[1].index:
        return None
    earlier, loop = (set(ast.walk(one.statement)) for one in pair)
    inner = next((one for one in blocks.placements(made) if one.statement in earlier), None)
    steps = {one.statement for label in updated for one in blocks.placements(label)}
    # The innermost loop with both the backward and the update.
    around = (one.source.parents[one.statement][0] for one in blocks.placements(used) if one.statement in loop)
    rounds = next((one for one in around if isinstance(one, ast.For | ast.While) and steps & set(ast.walk(one))), None)
    if (
        inner is None
        or inner.statement is pair[0].statement
        or rounds is None
        or rounds.body[0].lineno == rounds.lineno
    ):
        return None
    source, node = inner.source, inner.statement
    bound, needed, within = blocks.names_bound(node), blocks.names_read([node]), blocks.names_read(rounds.body)
    if not isinstance(node, ast.Assign) or not is_whole_lines(source, node) or not bound & within:
        return None
    rebound = {name for one in rounds.body for name in blocks.names_bound(one)}
    # ``h = cell(x, h)`` would advance its state once more in each round.
    if bound & needed or rebound & (bound | needed) or draws_again(ast.walk(node)):
        return None
    first = source.span(rounds.body[0])
    text = textwrap.indent(textwrap.dedent(blocks.text_of(source, node)), source.indent(rounds.body[0]))
    lines = blocks.lines_changed(source, {first.line: f"{text}\n{source.lines[first.line - 1]}"})
    return blocks.fix("recompute_forward", lines, "rebuild_in_loop")


def compute_behind_step(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Move what an outer loss gathers in every round of a loop behind the step of that round.

    ``total = total - critic(fake).mean()`` before ``optimizer.step()``, where the backward stands after the loop.
    """
    used, saved = blocks.first(diagnosis, "used"), blocks.first(diagnosis, "saved")
    written = blocks.labels(diagnosis, "written")
    if used is None or saved is None or not written or diagnosis.cause not in blocks.STEPPED:
        return ()
    if bound_after_loop(diagnosis):
        return ()  # moved behind the bounds of its own round, it would wait for those of the next
    pairs = blocks.each_in_one_block(written, saved)
    if not pairs or any(pair[1].block is not pairs[0][1].block for pair in pairs):
        return ()
    made, last = pairs[0][1], max((pair[0] for pair in pairs), key=lambda one: one.index)
    source, block = made.source, made.block
    if made.index > last.index or blocks.at_block(used, block) is not None or not _is_in_loop(made):
        return ()
    moving, names = list[ast.stmt](), set[str]()
    for node in block[made.index : last.index + 1]:
        if node is made.statement or blocks.names_read([node]) & names:
            moving.append(node)
            names |= blocks.names_bound(node)
    staying = [node for node in block[made.index : last.index + 1] if node not in moving]
    bound = {name for node in staying for name in blocks.names_bound(node)}
    is_plain = all(isinstance(one, ast.Assign | ast.AugAssign) and is_whole_lines(source, one) for one in moving)
    if not is_plain or bound & (names | names_read(moving)) or draws_again(ast.walk(made.statement)):
        return ()
    texts = [blocks.text_of(source, node) for node in moving]
    changes = {line: text for node in moving for line, text in blocks.removed(source, node).items()}
    end = source.span(last.statement).end_line
    changes[end] = "\n".join([source.lines[end - 1], *texts])
    return (blocks.fix("recompute_forward", blocks.lines_changed(source, changes), "compute_behind_step"),)


def _is_in_loop(place: blocks.Placed) -> bool:
    return isinstance(place.source.parents[place.statement][0], ast.For | ast.While)
