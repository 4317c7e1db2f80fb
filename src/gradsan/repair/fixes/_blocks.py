"""Statements of a diagnosis within one block of source: their order, and the names that they read and bind."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradsan.model import Diagnosis, Fix, Frame, Label, Lines
from gradsan.source.change import Change, Edit, changed_lines, text_with
from gradsan.source.identifiers import chain_key, leaf_name
from gradsan.source.methods import BACKWARDS
from gradsan.source.rewrite.given import parameters_of, scalers_of, stepped_optimizer, steps_schedule_of
from gradsan.source.rewrite.moving import blocks_around, is_whole_lines, until_apart
from gradsan.source.rewrite.moving import names_read as names_read
from gradsan.source.rewrite.renewing import fresh_name as fresh_name
from gradsan.source.tree import SourceFile, Span, read_source

_SWITCHING_OFF = frozenset({"no_grad", "inference_mode"})

STEP_BETWEEN = "step_between_forward_and_backward"
STEPPED = frozenset({STEP_BETWEEN, "fused_optimizer", "gathered_anew"})
"""Causes by which an update of parameters came between a forward and its backward."""


SHARED = "forward_shared_by_two_backwards"


@dataclass(frozen=True, slots=True)
class Placed:
    """A statement of ``block`` (a list of statements) that a label's stack passes through."""

    source: SourceFile
    block: list[ast.stmt]
    statement: ast.stmt
    index: int


def labels(diagnosis: Diagnosis, *roles: str) -> tuple[Label, ...]:
    """The labels with one of these roles."""
    return tuple(label for label in diagnosis.labels if label.role in roles)


def first(diagnosis: Diagnosis, role: str) -> Label | None:
    """The first label with this role."""
    return next(iter(labels(diagnosis, role)), None)


def advice(diagnosis: Diagnosis, kind: str) -> Fix | None:
    """The fix of ``kind`` that the diagnosis suggests without changed lines."""
    return next((fix for fix in diagnosis.fixes if fix.kind == kind and not fix.lines), None)


def _user_files(diagnosis: Diagnosis) -> tuple[str, ...]:
    """The user's files in the stacks of a diagnosis, those of the innermost frames first."""
    frames = (frame for label in diagnosis.labels for frame in (label.frame, *reversed(label.site.frames)))
    return tuple(dict.fromkeys(frame.file for frame in frames if frame.is_user))


def user_sources(diagnosis: Diagnosis) -> Iterator[SourceFile]:
    """The parsed user files in the stacks of a diagnosis."""
    yield from (source for file in _user_files(diagnosis) if (source := read_source(file)) is not None)


def lines_in_files(diagnosis: Diagnosis, changed: Callable[[SourceFile], Change | None]) -> Lines:
    """The lines of the change ``changed`` for each of the user's files in the stacks of a diagnosis."""
    lines: list[tuple[str, int, str]] = []
    for source in user_sources(diagnosis):
        change = changed(source)
        lines += changed_lines(source.file, change)
    return tuple(lines)


def user_frames(label: Label) -> tuple[Frame, ...]:
    """The user's frames of a label's stack, outermost first; its own frame where the stack has none."""
    return tuple(frame for frame in label.site.frames if frame.is_user) or (label.frame,)


def placements(label: Label) -> Iterator[Placed]:
    """Every block that the label's stack passes through, the innermost first."""
    return _placed(user_frames(label))


def _placed(frames: Sequence[Frame]) -> Iterator[Placed]:
    for source, block, node in blocks_around(frames):
        yield Placed(source, block, node, block.index(node))


def in_one_block(first: Label, second: Label) -> tuple[Placed, Placed] | None:
    """The places of both labels in the innermost block in which they are separate statements; None without one."""
    above, below = until_apart(user_frames(first), user_frames(second))
    others = list(_placed(below))
    for one in _placed(above):
        for other in others:
            if one.block is other.block and one.statement is not other.statement:
                return one, other
    return None


def each_in_one_block(several: Iterable[Label], second: Label) -> list[tuple[Placed, Placed]]:
    """``in_one_block`` of each of ``several`` with ``second``; empty where one of them has none."""
    pairs = [in_one_block(one, second) for one in several]
    found = [pair for pair in pairs if pair is not None]
    return found if len(found) == len(pairs) else []


def steps_and_backward(diagnosis: Diagnosis) -> tuple[list[tuple[Placed, Placed]], list[ast.stmt]]:
    """Each step that wrote, with the failing backward, and what follows a step: a clip of parameters, a schedule.

    Empty unless all of them are statements of one block.
    """
    used, written = first(diagnosis, "used"), labels(diagnosis, "written")
    pairs = [] if used is None or diagnosis.cause not in STEPPED else each_in_one_block(written, used)
    if not pairs or any(one.block is not pairs[0][1].block for pair in pairs for one in pair):
        return [], []
    by_hand = {
        pair[0].statement
        for label, pair in zip(written, pairs, strict=True)
        if not (label.op or "").endswith(".step") and method_call(pair[0].statement, "step") is None
    }
    steps = [pair for pair in pairs if pair[0].statement not in by_hand]
    start = min((pair[0].index for pair in steps), default=len(pairs[0][0].block))
    behind = [pair for pair in pairs if pair[0].statement in by_hand]
    if not all(start < pair[0].index < pair[1].index and _is_kept_apart(*pair) for pair in behind):
        return [], []
    (source, block), until = (pairs[0][1].source, pairs[0][1].block), pairs[0][1].index
    followers = {pair[0].statement for pair in behind} | schedules_between(source, [pair[0] for pair in steps], until)
    if any(names_read([one]) & _bound_in(block[block.index(one) : until]) for one in followers):
        return [], []
    return steps, sorted(followers, key=lambda one: one.lineno)


def _bound_in(nodes: Iterable[ast.AST]) -> set[str]:
    return set[str]().union(*map(names_bound, nodes))


def schedules_between(source: SourceFile, steps: Sequence[Placed], until: int) -> set[ast.stmt]:
    """The statements of the steps' block before index ``until`` that step a schedule of one of their optimizers."""
    found = set[ast.stmt]()
    for one in steps:
        optimizer = stepped_optimizer(source, one.statement)
        behind = one.block[one.index + 1 : until]
        found |= {node for node in behind if optimizer is not None and steps_schedule_of(source, node, optimizer)}
    return found


def _is_kept_apart(changing: Placed, backward: Placed) -> bool:
    """Whether nothing up to the backward reads what a statement binds."""
    return not names_bound(changing.statement) & names_read(changing.block[changing.index + 1 : backward.index + 1])


def at_block(label: Label, block: list[ast.stmt]) -> int | None:
    """The index of the label's statement in ``block``; None where the label's stack does not pass through it."""
    return next((one.index for one in placements(label) if one.block is block), None)


def method_call(node: ast.stmt, name: str) -> ast.Call | None:
    """The call of a statement that is just ``<expression>.<name>(…)``."""
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == name:
        return call
    return None


def backward_call(node: ast.stmt) -> ast.Call | None:
    """The call of a statement that is just a backward: ``loss.backward()``, ``self.manual_backward(loss)``."""
    return next((call for name in BACKWARDS if (call := method_call(node, name)) is not None), None)


def owner_of(source: SourceFile, node: ast.stmt, method: str) -> str | None:
    """``opt`` of a statement that is just ``opt.<method>(…)``, as written; None for any other."""
    call = method_call(node, method)
    return source.text(call.func.value) if call is not None and isinstance(call.func, ast.Attribute) else None


def is_plain_step(source: SourceFile, node: ast.stmt) -> bool:
    """Whether a statement is just ``opt.step()``, or ``scaler.step(opt)``: without a closure, or other arguments."""
    call = method_call(node, "step")
    is_scaled = stepped_optimizer(source, node) != owner_of(source, node, "step")
    return call is not None and (is_scaled or not (call.args or call.keywords))


def with_one_update(place: Placed, steps: Sequence[ast.stmt], *fixes: Fix) -> tuple[Fix, ...]:
    """Fixes that move steps behind ``place``, without the ``scaler.update()`` calls that follow those steps.

    A scale that changes between the steps of one forward would unscale the later gradients wrongly; one update, after
    all of the steps, is what PyTorch's recipe for several optimizers has. None where the block has no later update.
    """
    source, start = place.source, min(map(place.block.index, steps))
    scalers = scalers_of(source)
    early, later = (
        [node for node in part if owner_of(source, node, "update") in scalers]
        for part in (place.block[start : place.index], place.block[place.index :])
    )
    owners = {owner_of(source, node, "update") for node in later}
    if any(owner_of(source, node, "update") not in owners or not is_whole_lines(source, node) for node in early):
        return ()
    away = tuple((source.file, line, "") for node in early for line in removed(source, node))
    return tuple(replace(one, lines=tuple(sorted({*one.lines, *away}))) for one in fixes)


def text_of(source: SourceFile, node: ast.stmt) -> str:
    """The whole lines of a statement."""
    span = source.span(node)
    return "\n".join(source.lines[span.line - 1 : span.end_line])


def names_bound(node: ast.AST) -> set[str]:
    """The names that ``node`` binds."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def lines_changed(source: SourceFile, changes: dict[int, str]) -> Lines:
    """``Fix.lines`` from new texts by line number, "" for a removed line."""
    return tuple((source.file, line, text) for line, text in sorted(changes.items()))


def texts_of(source: SourceFile, change: Change) -> dict[int, str]:
    """``change`` as new texts by line number."""
    return {line: text for _, line, text in changed_lines(source.file, change)}


def switches_grad_off(block: ast.With) -> bool:
    """Whether autograd records nothing within ``block``."""
    return any(_is_switch(item.context_expr) for item in block.items)


def module_of(block: ast.With) -> str | None:
    """The name of torch in a ``block`` that switches grad mode off: ``torch`` of ``with torch.no_grad():``."""
    for call in (item.context_expr for item in block.items):
        if isinstance(call, ast.Call) and _is_switch(call) and isinstance(call.func, ast.Attribute):
            return ast.unparse(call.func.value)
    return None


def _is_switch(call: ast.expr) -> bool:
    return isinstance(call, ast.Call) and leaf_name(call.func) in _SWITCHING_OFF


def removed(source: SourceFile, node: ast.stmt) -> dict[int, str]:
    """The changes that remove the statement's lines."""
    span = source.span(node)
    return dict.fromkeys(range(span.line, span.end_line + 1), "")


def next_optimizer(place: Placed, passed: Iterable[ast.stmt] = ()) -> str | None:
    """The optimizer of the first ``step()`` after ``place`` in its block, but for the statements ``passed``."""
    later = (node for node in place.block[place.index + 1 :] if node not in passed)
    return next((owner for node in later if (owner := stepped_optimizer(place.source, node)) is not None), None)


def with_inputs(source: SourceFile, node: ast.stmt, optimizer: str) -> str | None:
    """The line of a backward, restricted to the parameters of ``optimizer``."""
    call = backward_call(node)
    if call is None or any(keyword.arg in ("inputs", None) for keyword in call.keywords):
        return None
    span = source.span(call)
    if span.line != span.end_line or not is_whole_lines(source, node):
        return None
    inputs = f"inputs={parameters_of(source, optimizer, node)}"
    comma = ", " if call.args or call.keywords else ""
    edit = Edit.insert(span.line, span.end_column - 1, f"{comma}{inputs}")
    whole = Span(span.line, 1, span.line, len(source.lines[span.line - 1]) + 1)
    return text_with(source, whole, [edit])


def behind_clipping(place: Placed) -> ast.stmt:
    """The last of the statements right after the backward at ``place`` that clip gradients; else the backward."""
    last = place.statement
    for node in place.block[place.index + 1 :]:
        inner = node.value if isinstance(node, ast.Expr) else None
        if not (isinstance(inner, ast.Call) and (leaf_name(inner.func) or "").startswith("clip_grad")):
            break
        last = node
    return last


def fix(kind: str, lines: Lines, words: str = "", **values: Any) -> Fix:
    """An untried fix of ``kind``; ``words`` is the key of its sentences if it differs from the kind."""
    return Fix.worded(f"fix.{words or kind}", values, lines, kind=kind)


def only_module(source: SourceFile, model: str, owner: str) -> str | None:
    """``net.cell`` where the file makes one module of the class ``owner``, as ``self.cell`` of the class of ``net``.

    ``net`` itself where that is the one.
    """
    made = _made_once(source, owner)
    if made is None or made[0] == model:
        return None if made is None else model
    target, statement = made
    init, attribute = source.parents[statement][0], target.removeprefix("self.")
    is_own = isinstance(init, ast.FunctionDef) and init.name == "__init__" and target == f"self.{attribute}"
    around = source.parents[init][0] if is_own else None
    holder = _made_once(source, around.name) if isinstance(around, ast.ClassDef) else None
    return f"{model}.{attribute}" if holder is not None and holder[0] == model else None


def _made_once(source: SourceFile, name: str) -> tuple[str, ast.stmt] | None:
    """What the one call of the class ``name`` is bound to, and the statement that does so."""
    calls = [node for node in source.nodes if isinstance(node, ast.Call) and leaf_name(node.func) == name]
    parent = source.parents[calls[0]][0] if len(calls) == 1 else None
    key = chain_key(parent.targets[0]) if isinstance(parent, ast.Assign) and len(parent.targets) == 1 else None
    return None if key is None or not isinstance(parent, ast.stmt) else (key, parent)
