"""Steps that use no gradients of their own loss, or update what was to be frozen.

Gradients of ``scaler.scale(loss).backward()`` that reach a step of PyTorch's own optimizers as they are: nobody has
unscaled, read or written them. Steps between which no backward runs and no gradient is cleared, where the source shows
that an ``if`` of the same loop chose the backward, and no round lacks a loss: a phase of validation that steps.
A closure of LBFGS, evaluated several times in a step, that leaves the gradients as they were. And a program that
records a graph and steps, round after round, without any backward. A parameter that was frozen, and has a gradient of
zeros, which momentum or weight decay moves all the same.

Gradients that the same line has scaled after each of several backwards whose sum a step then uses: the first of them
were scaled several times. That is a division, or a product with a number: a mask may be applied again. A division after
an all-reduce of each part is right.

And ``requires_grad = False`` that was set on a module, or misspelt, while an optimizer updates the parameters.

Row: ``step_without_its_gradients``. Roles: ``stepped`` (the step; ``name``, the optimizer's; ``values``: ``kind``,
``scaled``, ``again``, ``closure``, ``no_backward``, ``frozen`` or ``divided``), ``filled`` (the backward that has
filled them; where they were divided, the line that did, with the ``name`` of the gradient, ``shape``, ``dtype`` and
``device``).
Row: ``flag_unread``. Roles: ``written`` (the statement; ``name``, its owner; ``op``, the attribute), ``stepped``.
"""

from __future__ import annotations

import itertools
import re
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from types import FrameType, FunctionType
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from gradsan import _torch, source
from gradsan.detect.gradients.clip_calls import CLEARS, ClipCalls, Gradient
from gradsan.detect.gradients.kept_gradients import by_gradient, files_of_program
from gradsan.graph import naming
from gradsan.graph.live import value_of
from gradsan.model import Clue, Frame, Site
from gradsan.record.log import Core, RawStack, RawWrite, backward_calls, logged_writes
from gradsan.record.stacks import symbolise
from gradsan.record.steps import StepRecord

ROW, UNREAD = "step_without_its_gradients", "flag_unread"
_FLAG = "requires_grad"
_PAIRS, _STEPS = 2, 3
_DIVIDES = frozenset({"div_", "__itruediv__", "true_divide_", "divide_"})
_MULTIPLIES = frozenset({"mul_", "__imul__", "multiply_"})
_FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer"})


class WrongStep(NamedTuple):
    """A step with other gradients: the stack to report it at, and that of the backward, where there is one."""

    kind: str
    stack: RawStack
    optimizer: str
    filled: RawStack | None = None
    moved: int = 0
    """The memory of a frozen parameter."""
    divided: RawWrite | None = None

    def clues(self) -> tuple[Clue, ...]:
        """Return the clues of the report."""
        stepped = Clue("stepped", symbolise(self.stack), name=self.optimizer, values={"kind": self.kind})
        if self.divided is not None:
            site, raw = symbolise(self.divided.stack), self.divided
            name = None if site.user_frame is None else source.written_expression(site.user_frame, raw.op)
            facts = {"shape": raw.shape, "dtype": "?", "device": "?"}
            return stepped, Clue("filled", site, name=name, op=raw.op, values=facts)
        return (stepped, *(() if self.filled is None else (Clue("filled", symbolise(self.filled)),)))


def scaled_step(
    filled: RawStack,
    calls: ClipCalls,
    steps: list[StepRecord],
    writes: list[RawWrite],
    gradients: Iterable[tuple[int, int]],
    refilled: list[int],
    optimizers: list[Optimizer],
) -> WrongStep | None:
    """Return the first step of a round that uses scaled gradients; these are given as (memory of the leaf, its own).

    ``refilled`` are the clocks of the round's later backwards.
    """
    known = {id(one): one for one in optimizers}
    for record in steps:
        optimizer = known.get(record.identity)
        held = {own: grad for own, grad in gradients if own in record.storages}
        is_plain = type(optimizer).__module__.startswith("torch.optim.") and not _torch.has_step_hooks(optimizer)
        if not held or not is_plain or record.identity in calls.through_scaler:
            continue
        changed = any(raw.storage in held.values() and raw.clock < record.clock for raw in writes)
        cleared = any(one.clock < record.clock for one in calls.clearings)
        if not (changed or cleared or any(clock < record.clock for clock in refilled)):
            # A program that reads the scale may divide it out where no write is seen, or out of the rate.
            is_read = any(map(source.reads_scale, files_of_program(sys._getframe(1))))
            is_wrong = calls.has_scale and not is_read
            return WrongStep("scaled", record.stack, record.optimizer, filled) if is_wrong else None
    return None


def steps_at_the_end(
    core: Core, since: int, steps: list[StepRecord], optimizers: list[Optimizer]
) -> Iterator[WrongStep]:
    """Yield what the logs show as watching ends: steps with gradients of earlier ones, and steps without a backward.

    The logs also have steps of earlier stretches: only those after ``since`` count.
    """
    by_optimizer = defaultdict[int, list[StepRecord]](list)
    for record in steps:
        if record.end is not None and record.clock > since:
            by_optimizer[record.identity].append(record)
    calls = [(call.clock, call.stack) for call in backward_calls(core) if call.clock > since]
    yield from _divided_each_time(core, since, steps)
    grads = {_torch.storage_or_none(one.grad) for one in _torch.parameters_of(*optimizers) if one.grad is not None}
    raws = logged_writes(core, since)
    changes = sorted(raw.clock for raw in raws if raw.op in CLEARS or raw.storage in grads)
    begun = sorted(clock for clock, _ in calls)
    reported = set[RawStack]()
    # A fused step moves no version counter.
    is_fused = any(group.get("fused") for one in optimizers for group in one.param_groups)
    known = {id(one): type(one) for one in optimizers}
    for records in by_optimizer.values():
        # Another optimizer than PyTorch's own may write what no counter shows, and need no gradient.
        kind = known.get(records[-1].identity, getattr(torch.optim, records[-1].optimizer, None))
        is_plain = kind is not None and kind.__module__.startswith("torch.optim.")
        if is_plain and not (calls or is_fused) and _are_idle(records) and records[-1].stack not in reported:
            reported.add(records[-1].stack)
            yield WrongStep("no_backward", records[-1].stack, records[-1].optimizer)
        repeated = defaultdict[RawStack, list[StepRecord]](list)
        for before, record in itertools.pairwise(records):
            end = record.end or record.clock
            is_moved = before.before != before.after and record.before != record.after
            # Of a time that one of the logs has forgotten nothing is known.
            is_known = bool(calls) and before.clock > begun[0] and not core.lost_writes_after(before.clock)
            is_fed = _has_between(begun, before.clock, end)
            is_changed = _has_between(changes, before.end or 0, record.clock)
            if is_known and is_moved and not is_fed and not is_changed and before.sequence == record.sequence:
                repeated[record.stack].append(record)
        for stack, found in repeated.items():
            filled = next((one for clock, one in reversed(calls) if clock < found[-1].clock), None)
            if len(found) >= _PAIRS and filled is not None and stack not in reported and _is_beside(stack, filled):
                reported.add(stack)
                yield WrongStep("again", stack, found[-1].optimizer, filled)


def _divided_each_time(core: Core, since: int, steps: list[StepRecord]) -> Iterator[WrongStep]:
    """Yield the steps that use a sum whose parts a line has scaled one after another, the earlier ones with it."""
    scales = _DIVIDES | _MULTIPLIES
    raws = [raw for raw in logged_writes(core, since) if raw.op in scales and not raw.is_parameter]
    if not raws or _torch.has_other_ranks():
        return
    begun = sorted(call.clock for call in backward_calls(core))
    stepped = sorted(record.clock for record in steps)
    lines = defaultdict[RawStack, dict[int, list[RawWrite]]](dict)
    for raw in raws:
        lines[raw.stack].setdefault(raw.storage, []).append(raw)
    for stack, memories in lines.items():
        pairs = (pair for one in memories.values() for pair in itertools.pairwise(one))
        steps_after = (
            (later, step)
            for pair in pairs
            if (later := _divided_again(pair, begun, stepped)) is not None
            for step in [next((one for one in steps if one.clock > later.clock), None)]
        )
        found = next(
            (one for one in steps_after if one[1] and not _has_between(begun, one[0].clock, one[1].clock)), None
        )
        frame = None if found is None or not by_gradient(stack) else symbolise(stack).user_frame
        name = None if found is None or frame is None else source.written_expression(frame, found[0].op)
        if found is None or frame is None or name is None or source.is_of_itself(frame, name):
            continue
        factor = source.number_given(frame) if found[0].op in _MULTIPLIES else None
        if found[1] and (found[0].op in _DIVIDES or (factor is not None and abs(factor) not in (0, 1))):
            yield WrongStep("divided", found[1].stack, found[1].optimizer, divided=found[0])


def _divided_again(pair: tuple[RawWrite, RawWrite], begun: list[int], stepped: list[int]) -> RawWrite | None:
    """The second of two scalings of a sum, if backwards alone have added to it in between, and no step has used it."""
    earlier, later = pair
    added = bisect_right(begun, later.clock) - bisect_right(begun, earlier.clock)
    is_alone = (later.version or 0) - (earlier.version or 0) == added + 1
    return later if added and is_alone and not _has_between(stepped, earlier.clock, later.clock) else None


def is_starved(
    gradients: list[Gradient], writes: list[RawWrite], step: StepRecord, optimizers: list[Optimizer]
) -> bool:
    """Whether a step found only what was cleared before ``writes``, and the program has only measured it before."""
    optimizer = next((one for one in optimizers if id(one) == step.identity), None)
    leaves = [leaf for one in gradients if (leaf := one.leaf()) is not None]
    kept = {one.storage for one in gradients}
    held = {_torch.storage_or_none(one.grad) for one in leaves if one.grad is not None}
    is_plain = type(optimizer).__module__.startswith("torch.optim.") and held <= kept
    if not is_plain or any(raw.storage in kept and raw.op not in CLEARS for raw in writes):
        return False
    files = files_of_program(sys._getframe(1))
    is_other = any(source.sets_gradients(file) or not source.measures_gradients(file) for file in files)
    return not is_other and any(map(source.reads_gradients, files))


def frozen_step(steps: list[StepRecord], optimizer: Optimizer) -> WrongStep | None:
    """Return the step that an optimizer has just made, if it moved a frozen parameter beside trained ones.

    Without a gradient (None) it would have let it alone; a gradient that is not zero may be set by hand. Second moments
    alone move nothing, and neither does a rate of zero. A group of frozen parameters alone decays on purpose.
    """
    record = next((one for one in reversed(steps) if one.identity == id(optimizer)), None)
    is_partial = any(one.requires_grad for one in _torch.parameters_of(optimizer))
    if record is None or not is_partial or optimizer._optimizer_step_post_hooks:
        return None
    moves = zip(record.storages, record.before, record.after, strict=False)
    moved = {storage for storage, before, after in moves if before != after}
    for group in optimizer.param_groups if moved else ():
        decays = group.get("weight_decay") and any(one.requires_grad for one in group["params"])
        for one in group["params"] if group.get("lr") else ():
            is_frozen = not one.requires_grad and one.grad is not None and _torch.storage_or_none(one) in moved
            held = optimizer.state.get(one, {}) if is_frozen else {}
            coasts = any(torch.is_tensor(it) and bool(it.any()) for name, it in held.items() if name in _FIRST_MOMENTS)
            if is_frozen and (coasts or decays) and not one.grad.any():
                return WrongStep("frozen", record.stack, record.optimizer, moved=_torch.storage_or_none(one))
    return None


def is_left_so(wrong: WrongStep, steps: list[StepRecord]) -> bool:
    """Whether nobody has put a frozen parameter back to its values between the steps that moved it."""
    ours = [one for one in steps if one.stack == wrong.stack and wrong.moved in one.storages]
    versions = [(one.before, one.after, one.storages.index(wrong.moved)) for one in ours]
    return all(
        after[at] == before[there] for (_, after, at), (before, _, there) in itertools.pairwise(versions[-_PAIRS:])
    )


def unfed_closure(
    core: Core, steps: list[StepRecord], optimizer: Optimizer, frame: FrameType | None
) -> WrongStep | None:
    """Return the step of an LBFGS that has just evaluated its closure several times, and got the same gradient.

    None where the program at ``frame`` sets or reads gradients itself: a closure may have its own formula.
    """
    record = next((one for one in reversed(steps) if one.identity == id(optimizer)), None)
    if not isinstance(optimizer, LBFGS) or record is None:
        return None
    if any(call.clock > record.clock for call in backward_calls(core)):
        return None
    held = list(_torch.parameters_of(optimizer))
    state = optimizer.state.get(held[0]) or {}
    before = state.get("prev_flat_grad")
    if state.get("n_iter", 0) < _PAIRS or before is None or any(one.grad is None for one in held):
        return None
    with torch.no_grad():
        now = torch.cat([one.grad.reshape(-1) for one in held if one.grad is not None])
        is_same = now.shape == before.shape and torch.equal(now, before) and bool(now.any())
    if not is_same or any(source.sets_gradients(one) or source.reads_gradients(one) for one in files_of_program(frame)):
        return None
    return WrongStep("closure", record.stack, record.optimizer)


_MISSPELT = re.compile(r"_?requi[a-z]*_?gr[a-z]*d[a-z]*_?", re.IGNORECASE)


def unread_flags(optimizer: Optimizer, frame: FrameType) -> Iterator[Clue]:
    """Yield the flags that were to freeze, or to unfreeze, what an optimizer has, by the statement that set them."""
    held = list(_torch.parameters_of(optimizer))
    trained = [one for one in held if one.requires_grad]
    own = {name for one in trained for name, value in getattr(one, "__dict__", {}).items() if value is False}
    files = files_of_program(frame)
    for name in sorted(filter(_MISSPELT.fullmatch, own)):
        for file in () if any(source.reads_flag(one, name) for one in files) else files:
            for flag in source.flags_set(file, name, False)[:1]:
                yield _flag_clue(file, flag, name, False)
    for value in (False, True):
        others = {id(one) for one in held if one.requires_grad is not value}
        yield from _flags_on_modules(others, value, files, frame)


def _flags_on_modules(held: set[int], value: bool, files: list[str], frame: FrameType) -> Iterator[Clue]:
    """Yield the statements that set the flag of a module to ``value``; ``held`` are parameters that have the other."""
    found = ((file, flag) for file in files if held for flag in source.flags_set(file, _FLAG, value))
    flags = [(file, flag) for file, flag in found if not flag.is_of_parameters]
    if not flags or any(source.reads_flag(file, _FLAG) for file in files):
        return
    flagged = [
        one
        for one in naming.all_modules_alive()
        if vars(one).get(_FLAG) is value and any(id(it) in held for it in one.parameters())
        if not _has_own_flag(one, files)
        # A part of it may be frozen on purpose.
        if not (value and any(it.requires_grad for it in one.parameters()))
    ]
    is_only = len(flags) == 1 and not any(map(source.sets_own_flag, files))
    for file, flag in flags if flagged else ():
        at: FrameType | None = frame
        seen: list[object] = []
        while at is not None:
            seen.append(value_of(at, flag.owner))
            at = at.f_back
        is_of_module = any(held_by is one for held_by in seen for one in flagged)
        is_of_other = any(one is not None and not isinstance(one, nn.Module) for one in seen)
        if is_of_module or (is_only and not is_of_other):
            yield _flag_clue(file, flag, _FLAG, value)


def _has_own_flag(module: nn.Module, files: list[str]) -> bool:
    """Whether a class of a library's mentions the flag, and may give it a meaning for its modules."""
    for kind in type(module).__mro__:
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if file not in files and not kind.__module__.startswith("torch."):
            codes = [one.__code__ for one in vars(kind).values() if isinstance(one, FunctionType)]
            if any(_FLAG in one.co_names or _FLAG in one.co_consts for one in codes):
                return True
    return False


def _flag_clue(file: str, flag: source.Flag, name: str, value: bool) -> Clue:
    place = Frame(file, flag.line, "", is_user=True)
    return Clue("written", Site((place,)), name=flag.owner, op=name, values={"value": value})


def _has_between(clocks: list[int], first: int, last: int) -> bool:
    at = bisect_right(clocks, first)
    return at < len(clocks) and clocks[at] < last


def _are_idle(records: list[StepRecord]) -> bool:
    """Whether the steps have changed nothing, and Nodes were made from each to the next."""
    return len(records) >= _STEPS and all(
        before.sequence < after.sequence and after.before == after.after
        for before, after in itertools.pairwise(records)
    )


def _is_beside(step: RawStack, backward: RawStack) -> bool:
    stepped, filled = symbolise(step).user_frame, symbolise(backward).user_frame
    return stepped is not None and filled is not None and source.steps_without_backward(stepped, filled)
