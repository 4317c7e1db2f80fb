"""An optimizer's turn (clear, backward, step) moved before those whose steps overwrite what its backward needs.

A turn begins with clearing: what the moved backward leaves in the gradients of the other optimizers is gone before
their own backward, so that every step gets the gradients that it was to get.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from itertools import takewhile

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import _blocks as blocks
from gradsan.repair.fixes._parameter_uses import hands_on
from gradsan.repair.fixes.chains import is_cleared
from gradsan.source.change import indentation_of
from gradsan.source.identifiers import leaf_name, standing_of
from gradsan.source.methods import BACKWARDS
from gradsan.source.rewrite.given import have_a_common_part, networks_of, stepped_optimizer, steps_schedule_of
from gradsan.source.rewrite.moving import is_whole_lines, names_bound
from gradsan.source.tree import SourceFile

FIRST, HELD = "fix.turn_first", "fix.steps_held"
"""The message keys of a turn moved up, and of steps taken after the last backward."""


def later_turn_first(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Move the turn of the failing backward before the first turn whose step wrote."""
    pairs, _ = blocks.steps_and_backward(diagnosis)
    if not pairs:
        return ()
    place = pairs[0][1]
    source, block = place.source, place.block
    steps = [pair[0] for pair in pairs]
    optimizers = [_of_step(source, one.statement) for one in steps]
    later = blocks.next_optimizer(place)
    if later is None or None in optimizers or later in optimizers or max(one.index for one in steps) >= place.index:
        return ()
    turn = _turn_around(source, place, later)
    starts = [_start_of(source, block, one.index, name or "") for one, name in zip(steps, optimizers, strict=True)]
    if not turn or None in starts:
        return ()
    first = min(one for one in starts if one is not None)
    passed = block[first : block.index(turn[0])]
    networks = networks_of(source, later)
    if not all(_is_of_turn(one) or _is_apart(source, one, networks) for one in passed) or names_bound(turn):
        return ()
    if names_bound(passed) & blocks.names_read(turn):
        return ()
    # Of several backwards through one graph the last one frees it: what is moved before them must not.
    if any(_keeps_graph(one) for one in passed) and not _keeps_graph(place.statement):
        return ()
    if not all(is_whole_lines(source, one) for one in (*turn, block[first])):
        return ()
    moved = range(_comments_above(source, turn[0]), source.span(turn[-1]).end_line + 1)
    start = _comments_above(source, block[first])
    text = "\n".join([*(source.lines[line - 1] for line in moved), source.lines[start - 1]])
    lines = blocks.lines_changed(source, {**dict.fromkeys(moved, ""), start: text})
    names = ", ".join(dict.fromkeys(one for one in optimizers if one is not None))
    return (Fix.worded(FIRST, {"later": later, "earlier": names}, lines, keeps=True, kind="reorder_step"),)


def steps_held(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Keep the gradients of every step up to the last backward of the block, and step with them after it.

    For turns under conditions (a discriminator that only trains while it loses), which no statement can be moved past,
    for several turns of one forward, and with them what changes the parameters further after a step.
    """
    pairs, followers = blocks.steps_and_backward(diagnosis)
    if not pairs:
        return ()
    place = pairs[0][1]
    source, block = place.source, place.block
    first, last = min(pair[0].index for pair in pairs), max(at for at, one in enumerate(block) if _walks_back(one))
    within = [one for one in block[first:last] if one not in followers]
    found = [one for node in within for one in ast.walk(node) if isinstance(one, ast.stmt)]
    known = {_container(_of_step(source, pair[0].statement) or "") for pair in pairs}

    def stepped(node: ast.stmt) -> str | None:
        name = _of_step(source, node)
        return name if name and (_container(name) in known or _is_optimizer(source, name)) else None

    steps = {one: name for one in found if (name := stepped(one))}
    inside = [one for node in (*within, block[last]) for one in ast.walk(node)]
    is_plain = all(isinstance(node, ast.Expr | ast.Assign) for node in (*within, block[last]))
    is_one_turn = is_plain and sum(map(_walks_back, block[first : last + 1])) == 1
    # A step right behind the last backward would find what the held steps of its optimizer have left.
    behind = list(takewhile(lambda one: _is_clip(one) or stepped(one), block[last + 1 :]))
    again = [at for at, one in enumerate(behind) if _may_share(source, stepped(one), set(steps.values()))]
    if again:
        steps |= {one: name for one in behind[: again[-1] + 1] if (name := stepped(one))}
        last += again[-1] + 1
    if any(steps_schedule_of(source, one, own) for one in found for own in steps.values() if one not in followers):
        return ()
    if any(isinstance(one, ast.For | ast.While | ast.Try | ast.With | ast.FunctionDef) for one in inside):
        return ()
    is_again = len(set(steps.values())) < len(steps)
    if any(_calls_networks(source, within, one) for one in steps.values()):
        return ()
    if (is_plain or is_again) and any(_may_run_network(source, one) for one in within):
        return ()  # it would see the parameters of before the steps
    if first >= place.index or not steps or is_one_turn or any(hands_on(source, within, one) for one in steps.values()):
        return ()
    if not all(is_whole_lines(source, one) for one in (*steps, *followers, block[first], block[last])):
        return ()
    held, optimizer, p, grad, grads = (
        blocks.fresh_name(source, one) for one in ("held", "optimizer", "p", "grad", "grads")
    )
    scaled = {blocks.owner_of(source, one, "step") for one, own in steps.items()} - set(steps.values())
    if len(scaled) > 1 or (scaled and not all(blocks.owner_of(source, one, "step") in scaled for one in steps)):
        return ()
    changes: dict[int, str] = {}
    for one, own in steps.items():
        each = f"({p}, None if {p}.grad is None else {p}.grad.clone()) for group in {own}.param_groups"
        kept = f'{held}.append(({own}, [{each} for {p} in group["params"]]))'
        changes[source.span(one).line] = f"{source.indent(one)}{kept}"
    changes |= {line: text for one in followers for line, text in blocks.removed(source, one).items()}
    unit, outer = indentation_of(source), source.indent(block[first])
    start, end = source.span(block[first]).line, source.span(block[last]).end_line
    changes[start] = f"{outer}{held} = []\n{changes.get(start, source.lines[start - 1])}"
    changes[end] = "\n".join(
        [
            changes.get(end, source.lines[end - 1]),
            f"{outer}for {optimizer}, {grads} in {held}:",
            f"{outer}{unit}for {p}, {grad} in {grads}:",
            f"{outer}{unit}{unit}{p}.grad = {grad}",
            f"{outer}{unit}{scaled.pop()}.step({optimizer})" if scaled else f"{outer}{unit}{optimizer}.step()",
            *(blocks.text_of(source, one) for one in followers),
        ]
    )
    lines = blocks.lines_changed(source, changes)
    held_until = replace(place, statement=block[last], index=last)
    held_fix = Fix.worded(HELD, {}, lines, keeps=True, kind="reorder_step")
    return blocks.with_one_update(held_until, [one for one in steps if one in block] or [block[first]], held_fix)


def _calls_networks(source: SourceFile, statements: list[ast.stmt], optimizer: str) -> bool:
    """Whether a statement after the first step of ``optimizer`` calls a network that it was given."""
    own = networks_of(source, optimizer)
    inner = [one for node in statements for one in ast.walk(node)]
    stepped = [one.lineno for one in inner if isinstance(one, ast.stmt) and _of_step(source, one) == optimizer]
    called = (one for one in inner if isinstance(one, ast.Call) and source.text(one.func) in own)
    return bool(stepped) and any(one.lineno > min(stepped) for one in called)


_OF_NUMBERS = frozenset({"item", "append", "detach", "mean", "sum", "abs", "pow", "square", "clamp", "size", "float"})
_OF_TURNS = BACKWARDS | {"zero_grad", "step", "print", "len", "max", "min", "round", "isinstance"}


def _may_run_network(source: SourceFile, node: ast.stmt) -> bool:
    """Whether a statement calls something else than functions of torch and methods of tensors and optimizers."""
    for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
        name = leaf_name(call.func) or ""
        is_of_torch = isinstance(call.func, ast.Attribute) and standing_of(source, call.func.value) == "namespace"
        if not is_of_torch and name not in _OF_NUMBERS | _OF_TURNS and not name.startswith("clip_grad_"):
            return True
    return False


def _may_share(source: SourceFile, optimizer: str | None, others: set[str]) -> bool:
    """Whether an optimizer may have parameters of one of ``others``: where the file does not show the networks, too."""
    if optimizer is None:
        return False
    own = networks_of(source, optimizer)
    given = [networks_of(source, one) for one in others]
    return optimizer in others or not own or any(not one or have_a_common_part(own, one) for one in given)


def _container(name: str) -> str:
    """``opts`` of ``opts["dec"]``: what else it holds are optimizers, too. A plain name is its own."""
    return name.rpartition("[")[0] or name


def _is_optimizer(source: SourceFile, name: str) -> bool:
    """Whether it clears gradients, or was made from parameters: a schedule, which has a ``step`` too, was not."""
    if is_cleared(source, name):
        return True
    for node in (one for one in source.nodes if isinstance(one, ast.Assign)):
        targets = [part for one in node.targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
        if any(source.text(one) == name for one in targets):
            return any(isinstance(one, ast.Attribute) and one.attr == "parameters" for one in ast.walk(node.value))
    return False


def _walks_back(node: ast.stmt) -> bool:
    return any(isinstance(one, ast.stmt) and blocks.backward_call(one) is not None for one in ast.walk(node))


def _comments_above(source: SourceFile, node: ast.stmt) -> int:
    """The line at which a statement begins with the comments right above it."""
    line = source.span(node).line
    while line > 1 and source.lines[line - 2].lstrip().startswith("#"):
        line -= 1
    return line


def _of_step(source: SourceFile, node: ast.stmt) -> str | None:
    """``opt`` of a statement ``opt.step()``, or ``scaler.step(opt)``."""
    return stepped_optimizer(source, node) if blocks.is_plain_step(source, node) else None


def _turn_around(source: SourceFile, place: blocks.Placed, optimizer: str) -> list[ast.stmt]:
    """The statements from the clearing before a backward to the step of ``optimizer`` after it; empty if others lie."""
    before = takewhile(lambda one: blocks.method_call(one, "zero_grad") is not None, place.block[place.index - 1 :: -1])
    clearing = list(before)[::-1] if place.index else []
    if not any(_clears(source, one, optimizer) for one in clearing):
        return []
    found = [*clearing, place.statement]
    for node in place.block[place.index + 1 :]:
        found.append(node)
        if _of_step(source, node) == optimizer:
            return found
        if not _is_clip(node):
            break
    return []


def _start_of(source: SourceFile, block: list[ast.stmt], step: int, optimizer: str) -> int | None:
    """The index of the statement that clears the gradients of ``optimizer`` before the backward of its step."""
    went_back = False
    for index in range(step - 1, -1, -1):
        if went_back and _clears(source, block[index], optimizer):
            return index
        went_back = went_back or blocks.backward_call(block[index]) is not None
    return None


def _clears(source: SourceFile, node: ast.stmt, optimizer: str) -> bool:
    return blocks.owner_of(source, node, "zero_grad") in {optimizer, *networks_of(source, optimizer)}


def _is_of_turn(node: ast.stmt) -> bool:
    """Whether a statement clears, walks back, clips or steps, and does nothing else."""
    names = (*BACKWARDS, "zero_grad", "step")
    return _is_clip(node) or any(blocks.method_call(node, name) is not None for name in names)


def _is_apart(source: SourceFile, node: ast.stmt, networks: set[str]) -> bool:
    """Whether a statement has nothing to do with ``networks``, as the update of another network's average.

    False where that does not show: no network is known, or a method of ``self`` may reach any.
    """
    if not networks or any(isinstance(one, (ast.Return, ast.Break, ast.Continue, ast.Raise)) for one in ast.walk(node)):
        return False
    names = [one for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute))]
    called = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    own = [one for one in called if isinstance(one, ast.Attribute) and source.text(one.value) == "self"]
    return not own and not any(source.text(one) in networks for one in names)


def _is_clip(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and (leaf_name(call.func) or "").startswith("clip_grad_")


def _keeps_graph(node: ast.stmt) -> bool:
    call = blocks.backward_call(node)
    return call is not None and any(one.arg == "retain_graph" for one in call.keywords)
