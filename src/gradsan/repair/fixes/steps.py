"""Steps and updates moved after the backward that needs the old values.

The later backward would add its own gradients to those of the optimizer that now steps after it. Where it should
reach only the next optimizer's parameters, ``inputs=`` keeps them apart; else a copy of the gradients does.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from gradsan.model import Diagnosis, Fix, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.repair.fixes._parameter_uses import HANDING_ON, clears, hands_on
from gradsan.source.change import indentation_of
from gradsan.source.identifiers import leaf_name
from gradsan.source.locate import statement_at
from gradsan.source.methods import BACKWARDS
from gradsan.source.rewrite.given import have_a_common_part, networks_of, parameters_of, stepped_optimizer
from gradsan.source.rewrite.moving import is_whole_lines, move_behind
from gradsan.source.tree import SourceFile

CALL_FIRST = "fix.reorder_calls"
"""The message key of a later call of a helper moved before an earlier one."""


def reorder_step(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Move the steps that wrote, and do the same with ``inputs=`` where another optimizer steps afterwards."""
    used = blocks.first(diagnosis, "used")
    if used is None or diagnosis.cause not in blocks.STEPPED:
        return ()
    if swapped := _later_call_first(blocks.labels(diagnosis, "written"), used):
        return swapped
    pairs, followers = blocks.steps_and_backward(diagnosis)
    steps = {pair[0].statement: pair[0] for pair in pairs}
    if not pairs or any(
        one.index >= pairs[0][1].index or blocks.method_call(node, "step") is None for node, one in steps.items()
    ):
        return ()
    place = pairs[0][1]
    return blocks.with_one_update(place, list(steps), *_moved_behind(diagnosis, used, place, steps, followers))


def _moved_behind(
    diagnosis: Diagnosis,
    used: Label,
    place: blocks.Placed,
    steps: dict[ast.stmt, blocks.Placed],
    followers: list[ast.stmt],
) -> tuple[Fix, ...]:
    """The steps of one block behind the backward at ``place``."""
    source, backward = place.source, place.statement
    if not all(is_whole_lines(source, node) for node in (*steps, *followers, backward)):
        return ()
    between = [one for one in place.block[min(map(place.block.index, steps)) : place.index] if one not in followers]
    # An average, a checkpoint: it would get the parameters of the round before.
    hands_values_on = any(hands_on(source, between, owner) for owner in _owners(source, list(steps)))
    if isinstance(backward, ast.If):
        if followers or hands_values_on:
            return ()
        return (*_behind_branch(place, list(steps), used), *_with_kept_gradients(place, list(steps), used))
    if any(_hands_parameters_on(node, used) for node in ast.walk(backward)):
        return ()
    moving = sorted((*steps, *followers), key=lambda node: node.lineno)
    moved = "\n".join(blocks.text_of(source, node) for node in moving)
    away = {line: text for node in moving for line, text in blocks.removed(source, node).items()}
    span = source.span(backward)
    last = source.lines[span.end_line - 1]
    plain = blocks.fix("reorder_step", blocks.lines_changed(source, {**away, span.end_line: f"{last}\n{moved}"}))
    if (slipped := blocks.advice(diagnosis, "step_behind_backward")) is not None:
        end = source.span(blocks.behind_clipping(place)).end_line
        lines = blocks.lines_changed(source, {**away, end: f"{source.lines[end - 1]}\n{moved}"})
        return (replace(slipped, lines=lines, applicability="review"),)
    if hands_values_on:
        return ()
    found: list[Fix] = []
    optimizer = blocks.next_optimizer(place, steps)
    shared = None if optimizer is None else _share_parameters(source, list(steps), optimizer)
    kept = _with_kept_gradients(place, list(steps), used, followers)
    both = _with_kept_gradients(place, list(steps), used, followers, swapped=True)
    if not _may_move(place, list(steps)):
        # Only a copy of its gradients is what such a step would have had; left there, they would add up where it clears
        # between its step and that backward alone.
        if not _steps_again(place, list(steps)):
            # Of one network, each of two optimizers may have a part: then the later one does not clear the first's.
            return (*both, *([plain] if both else [])) if shared else (*both, *kept)
        once = blocks.fix("reorder_step", blocks.lines_changed(source, away), "step_once")
        is_one = not followers and not _is_cleared_between(place, list(steps))
        return (*both, once) if is_one and len(steps) == 1 else tuple(both)
    apart = None if optimizer is None else blocks.with_inputs(source, backward, optimizer)
    if apart is not None:
        texts = {**away, span.line: f"{apart}\n{moved}"}
        texts.update(dict.fromkeys(range(span.line + 1, span.end_line + 1), ""))
        found.append(blocks.fix("reorder_step", blocks.lines_changed(source, texts), "reorder_step_apart"))
    if shared is not False and optimizer is not None:
        if _is_cleared_between(place, list(steps)):
            # Moved alone, the step would find the gradients of the later loss where both train a parameter.
            return tuple(both) if shared else (*both, *found, *kept, plain)
        kept += both
    # The plain one gives the first optimizer the gradients of the later backward, too.
    return (*found, *kept, plain) if found else (plain, *kept)


def _behind_branch(place: blocks.Placed, steps: list[ast.stmt], used: Label) -> tuple[Fix, ...]:
    """The steps moved behind an ``if`` with the backward, which then reaches only what the next optimizer has, or all.

    All where what it reaches of theirs is frozen meanwhile.
    """
    source, branch = place.source, place.statement
    inner = next((one for one in blocks.placements(used) if one.block is getattr(branch, "body", None)), None)
    others = [one for one in ast.walk(branch) if isinstance(one, ast.stmt) and blocks.backward_call(one)]
    # The call of a method that runs it stays as it is.
    if inner is None or others not in ([], [inner.statement]) or not _may_move(place, steps):
        return ()
    if any(hands_on(source, [branch], owner) for owner in _owners(source, steps)):
        return ()
    optimizer = blocks.next_optimizer(inner) or blocks.next_optimizer(place, steps)
    is_apart = bool(others) and optimizer is not None and not _share_parameters(source, steps, optimizer)
    apart = blocks.with_inputs(source, inner.statement, optimizer) if optimizer is not None and is_apart else None
    moving = sorted(steps, key=lambda node: node.lineno)
    texts = {line: text for node in moving for line, text in blocks.removed(source, node).items()}
    line, end = source.span(inner.statement).line, source.span(branch).end_line
    moved = [blocks.text_of(source, node) for node in moving]
    found = []
    for reaching, words in ((apart, "reorder_step_apart"), (source.lines[line - 1], "reorder_step")):
        if reaching is not None:
            own = {**texts, line: reaching}
            own[end] = "\n".join([own.get(end, source.lines[end - 1]), *moved])
            found.append(blocks.fix("reorder_step", blocks.lines_changed(source, own), words))
    return tuple(found)


def _may_move(place: blocks.Placed, steps: list[ast.stmt]) -> bool:
    """Whether the steps find their own gradients behind the backward, and are not repeated there with the same ones."""
    source = place.source
    between = place.block[min(map(place.block.index, steps)) : place.index]
    cleared = any(clears(source, between, owner) for owner in _owners(source, steps))
    return not cleared and not _steps_again(place, steps)


def _steps_again(place: blocks.Placed, steps: list[ast.stmt]) -> bool:
    """Whether one of the optimizers steps behind the backward, too, before another backward of the block."""
    owners, source = set(_owners(place.source, steps)), place.source
    for node in place.block[place.index + 1 :]:
        inner = list(ast.walk(node))
        if any(isinstance(one, ast.stmt) and stepped_optimizer(source, one) in owners for one in inner):
            return True
        if any(isinstance(one, ast.Call) and leaf_name(one.func) in BACKWARDS for one in inner):
            return False
    return False


def _owners(source: SourceFile, steps: list[ast.stmt]) -> list[str]:
    return [owner for step in steps if (owner := stepped_optimizer(source, step)) is not None]


def _share_parameters(source: SourceFile, steps: list[ast.stmt], optimizer: str) -> bool | None:
    """Whether the file gives one network to ``optimizer`` and to one that steps earlier; None if it does not show."""
    given = [networks_of(source, one) for one in (*_owners(source, steps), optimizer)]
    if not all(given):
        return None
    return any(have_a_common_part(one, given[-1]) for one in given[:-1])


def _is_cleared_between(place: blocks.Placed, steps: list[ast.stmt]) -> bool:
    between = place.block[min(map(place.block.index, steps)) : place.index]
    return any(
        leaf_name(one.func) == "zero_grad" for node in between for one in ast.walk(node) if isinstance(one, ast.Call)
    )


def _later_call_first(written: tuple[Label, ...], used: Label) -> tuple[Fix, ...]:
    """Two calls of helpers that each run a backward and step: the later one moved before the one whose step wrote.

    With it go the assignments in between that compute what it is given.
    """
    pairs = [pair for one in written if (pair := _outermost_pair(one, used)) is not None]
    if len(pairs) < len(written) or any(pair[1].statement is not pairs[0][1].statement for pair in pairs):
        return ()
    earlier, later = min(pairs, key=lambda pair: pair[0].index)
    calls = [place.statement.value for place in (earlier, later) if isinstance(place.statement, ast.Expr)]
    source, between = later.source, later.block[earlier.index : later.index]
    if len(calls) != 2 or earlier.index > later.index or not all(isinstance(one, ast.Call) for one in calls):
        return ()
    # Plain backward and step statements are left to the other fixes, which know what to move.
    if any(isinstance(one, ast.Call) and leaf_name(one.func) in BACKWARDS | {"step"} for one in calls):
        return ()
    if (given := _computed_for(later.statement, between)) is None:
        return ()
    # The earlier backward keeps a graph that both losses go through: to swap the calls is not enough.
    if any(one.arg == "retain_graph" for call in calls for one in getattr(call, "keywords", ())):
        return ()
    moved = [*given, later.statement]
    if not all(is_whole_lines(source, node) for node in (earlier.statement, *moved)):
        return ()
    start = source.span(earlier.statement).line
    changes = {line: text for node in moved for line, text in blocks.removed(source, node).items()}
    changes[start] = "\n".join([*(blocks.text_of(source, node) for node in moved), source.lines[start - 1]])
    values = {"later": source.text(calls[1]), "earlier": source.text(calls[0])}
    # Where each call clears first, what the moved backward leaves in other gradients is gone before their own.
    keeps = all(_clears_first(one) for one in written)
    lines = blocks.lines_changed(source, changes)
    return (Fix.worded(CALL_FIRST, values, lines, keeps=keeps, kind="reorder_step"),)


def _computed_for(later: ast.stmt, between: Sequence[ast.stmt]) -> list[ast.stmt] | None:
    """The assignments among the statements ``between`` of what ``later`` reads; None where others bind it."""
    needed, found = blocks.names_read([later]), list[ast.stmt]()
    for node in reversed(between):
        if not blocks.names_bound(node) & needed:
            continue
        attributes = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
        if not isinstance(node, ast.Assign) or attributes & (BACKWARDS | {"step", "zero_grad"}):
            return None
        needed |= blocks.names_read([node])
        found.insert(0, node)
    return found


def _clears_first(written: Label) -> bool:
    """Whether the function that steps clears gradients before its backward."""
    statement = statement_at(blocks.user_frames(written)[-1])
    calls = [] if statement is None or statement.function is None else list(ast.walk(statement.function))
    lines = {
        name: [one.lineno for one in calls if isinstance(one, ast.Call) and leaf_name(one.func) == name]
        for name in ("zero_grad", "backward")
    }
    return bool(lines["zero_grad"] and lines["backward"]) and min(lines["zero_grad"]) < min(lines["backward"])


def _outermost_pair(first: Label, second: Label) -> tuple[blocks.Placed, blocks.Placed] | None:
    """The outermost block in which two stacks diverge: within a shared helper they would belong to two of its calls."""
    others = list(blocks.placements(second))[::-1]
    for one in list(blocks.placements(first))[::-1]:
        for other in others:
            if one.block is other.block and one.statement is not other.statement:
                return one, other
    return None


def _with_kept_gradients(
    place: blocks.Placed,
    steps: list[ast.stmt],
    used: Label,
    followers: Sequence[ast.stmt] = (),
    *,
    swapped: bool = False,
) -> list[Fix]:
    """A copy of the gradients where the step was, restored right before it: without those of the later backward.

    ``swapped``: those of the later backward stand again after it, for an optimizer that shares parameters.
    Where that backward is under an ``if``, the step follows it there, and an added ``else`` steps without it.
    """
    source, steps = place.source, sorted(steps, key=lambda node: node.lineno)
    branch = place.statement if isinstance(place.statement, ast.If) else None
    inner = (
        place if branch is None else next((one for one in blocks.placements(used) if one.block is branch.body), None)
    )
    if not all(blocks.is_plain_step(source, step) for step in steps) or inner is None:
        return []
    if not is_whole_lines(source, inner.statement) or (branch is not None and branch.orelse):
        return []
    first = place.block.index(steps[0])
    if place.block[first : first + len(steps)] != steps:
        # What stands between two steps may change the gradients of the second.
        return []
    unit, stepping = indentation_of(source), [source.text(one) for one in steps]
    names = ("params", "kept", "p", "grad", "later")
    params, kept, p, grad, later = (blocks.fresh_name(source, name) for name in names)
    outer, within = source.indent(steps[0]), source.indent(inner.statement)
    last, end = source.span(inner.statement).end_line, source.span(place.statement).end_line

    each = [parameters_of(source, optimizer, steps[0], p) for optimizer in _owners(source, steps)]
    together = ", ".join(f"*{one[5:-1] if one.startswith('list(') else one}" for one in each)
    given = each[0] if len(each) == 1 else f"[{together}]"

    def put(grads: str) -> list[str]:
        return [f"{within}for {p}, {grad} in zip({params}, {grads}):", f"{within}{unit}{p}.grad = {grad}"]

    before = [f"{within}{later} = [{p}.grad for {p} in {params}]"] if swapped else []
    behind = [blocks.text_of(source, one) for one in followers]
    behind += put(later) if swapped else []
    stepped = [f"{within}{one}" for one in stepping]
    away = {line: text for one in followers for line, text in blocks.removed(source, one).items()}
    changes = {
        **away,
        **{line: text for one in steps for line, text in blocks.removed(source, one).items()},
        source.span(steps[0]).line: f"{outer}{params} = {given}\n"
        f"{outer}{kept} = [None if {p}.grad is None else {p}.grad.clone() for {p} in {params}]",
        last: "\n".join([source.lines[last - 1], *before, *put(kept), *stepped, *behind]),
    }
    if branch is not None:
        changes[end] = f"{changes.get(end, source.lines[end - 1])}\n{outer}else:" + "".join(
            f"\n{outer}{unit}{one}" for one in stepping
        )
    return [
        blocks.fix(
            "reorder_step",
            blocks.lines_changed(source, changes),
            "reorder_step_swapped" if swapped else "reorder_step_kept",
        )
    ]


def _hands_parameters_on(node: ast.AST, used: Label) -> bool:
    """Whether a part of the statement after the backward reads parameters, for which a later step would be too late."""
    return isinstance(node, ast.Attribute) and node.lineno > used.frame.line and node.attr in HANDING_ON


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
    # A callback, a handler: what it steps is moved with it.
    kind = "reorder_step" if all((one.op or "").endswith(".step") for one in written) else "reorder_update"
    return () if moved is None else (blocks.fix(kind, moved.lines),)
