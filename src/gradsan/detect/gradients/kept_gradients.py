"""Gradients that are never cleared: a leaf is updated round after round, and every backward adds to the old gradient.

Checked when a line calls backward for the 4th, the 8th and the 16th time, against the gradient half as many
rounds before: the same memory holds the gradient of the same leaf, nothing but the engine has written it meanwhile, and
the leaf has been updated in every round, or in several of them. Several backwards before one update are gradients
accumulated on purpose, but for one update only.

And gradients that a parameter has from rounds of training without it when an optimizer gets it (the last layers were
trained first): nobody has cleared them when that optimizer first steps with it.

Row: ``gradient_left_over``. Roles: ``gradient`` (the leaf; ``values``: ``shape``, ``dtype``, ``device``, ``leaves``),
``grouped`` (the call that gave it to the optimizer; ``name``, the optimizer's class).
Row: ``gradient_never_cleared``. Roles: ``gradient`` (the leaf; ``values``: ``shape``, ``dtype``, ``device``, ``rounds``
and ``leaves``, their number), ``updated`` (the update's site; ``op`` is the operation).
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from gradsan import _torch, source
from gradsan._imports import stored_in
from gradsan.detect.meaning.made import Making
from gradsan.detect.memory import Uncounted
from gradsan.graph import naming, walk
from gradsan.model import Clue, Failure
from gradsan.record.detector import Detector, Run
from gradsan.record.log import Log, RawStack, RawWrite, backward_calls, latest_backward, logged_writes
from gradsan.record.stacks import is_user_file, symbolise
from gradsan.record.steps import RawBackward, as_backward, read_backward

_ROUNDS = (2, 4, 8, 16, 32)
_UPDATES = 2
_SHOWN = 3
_LEAVES_NOTED = 4_096
_USER_FRAMES_READ = 2
_NO_UPDATE = frozenset(
    {"clamp_", "clamp_min_", "clamp_max_", "clip_", "renorm_", "embedding_renorm_", "zero_", "fill_"}
)
"""Operations that bound a value, or set it: they need no gradient."""
_SETS, _LOOKED_AT = frozenset({"zero_", "fill_", "copy_", "_foreach_zero_"}), 8
_GROUPS = 64
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
_GRADIENT_KEPT = ("clip_grad.py", "grad_scaler.py")
"""Files of torch whose functions write gradients without clearing them."""


class Standing(NamedTuple):
    """A gradient at an earlier round: the leaf, its path, the memory of the gradient, and the clock."""

    leaf: _torch.weak_tensor
    path: str
    storage: int
    memory: Any
    clock: int


class LeftOver(NamedTuple):
    """The gradients that parameters had when an optimizer got them: as ``Standing``, with their versions."""

    optimizer: weakref.ref[Optimizer]
    stack: RawStack
    gradients: tuple[tuple[Standing, int], ...]


class Update(NamedTuple):
    """An update of a leaf: clock, stack, operation. ``is_last`` says that earlier ones may be unknown."""

    clock: int
    stack: RawStack
    op: str
    is_last: bool = False


class KeptGradients(Detector):
    """Checks the gradients of live leaves in some rounds of a line; findings go to ``found``."""

    def __init__(self, run: Run) -> None:
        self._core, self._steps, self._backwards, self._uncounted = (
            run.core,
            run.steps,
            run.backwards,
            run.get(Uncounted),
        )
        self._found, self._run = run.report, run
        self._left: dict[int, LeftOver] = {}
        self._groups = 0
        run.get(Making).on_group.append(self._grouped)
        self._standing: dict[int, list[Standing]] = {}
        self._described: dict[int, Any] = {}

    def forget(self) -> None:
        self._left.clear()
        self._groups = 0

    def _grouped(self, optimizer: Optimizer, stack: RawStack) -> None:
        """Note the gradients of what an optimizer gets; as ``Making.on_group``."""
        self._groups += 1
        # A program may make one optimizer per task.
        is_due = self._groups <= _GROUPS or self._groups & (self._groups - 1) == 0
        last = latest_backward(self._core) if is_due else None
        if last is None or (threading.active_count() > 1 and _others_call(self._core, threading.get_ident())):
            return
        given = [one for one in optimizer.param_groups[-1]["params"] if one.grad is not None]
        # Gradients that no step has followed are for the first one.
        if not given or not any(one.clock > last.clock for one in self._steps.steps):
            return
        with _torch.hushed(), torch.no_grad():
            plain = [one for one in given if one.grad.layout is torch.strided and _torch.storage_or_none(one.grad)]
            if plain and any(bool(one.grad.any()) for one in plain[:_LOOKED_AT]):
                noted = tuple((_standing(one, self._core.clock), int(one.grad._version)) for one in plain)
                self._left[id(optimizer)] = LeftOver(weakref.ref(optimizer), stack, noted)
                self._run.settling.look_at(optimizer)

    @_torch.hushed()
    def stepped(self, optimizer: Optimizer) -> None:
        """Report the gradients to which a backward has added since, if the step has used them."""
        left = self._left.pop(id(optimizer), None)
        if left is None or left.optimizer() is not optimizer:
            return
        since = left.gradients[0][0].clock
        cleared = {raw.storage for raw in logged_writes(self._core, since) if raw.op in _SETS}
        leaves = [
            leaf
            for one, version in left.gradients
            if (leaf := one.leaf()) is not None and leaf.grad is not None and not one.memory.expired()
            if _torch.storage_or_none(leaf.grad) == one.storage and one.storage not in cleared
            if int(leaf.grad._version) > version
        ]
        if leaves:
            values = {**_torch.facts_of(leaves[0]), "leaves": len(leaves)}
            gradient = Clue("gradient", name=naming.name_of(leaves[0], sys._getframe(1)), values=values)
            grouped = Clue("grouped", symbolise(left.stack), name=type(optimizer).__name__)
            site = symbolise(self._steps.steps[-1].stack)
            self._found(Failure("gradient_left_over", "", "", site, (gradient, grouped), raised=False))

    def before_round(self, entry: RawBackward, rounds: int) -> None:
        # autograd.grad() does not accumulate gradients.
        if rounds not in _ROUNDS or not entry.accumulates:
            return
        with _torch.hushed(), torch.no_grad():
            earlier = self._standing.pop(id(entry.stack), [])
            if others_run(self._core, entry):
                return
            kept = self._kept(entry, earlier, rounds - rounds // 2) if earlier else []
            if kept:
                self._report(entry, kept, rounds)
            if rounds < _ROUNDS[-1]:
                self._standing[id(entry.stack)] = self._note(entry)

    def _note(self, entry: RawBackward) -> list[Standing]:
        clock = self._core.clock
        # A thread may call its first backward meanwhile.
        own = _leaves_of(entry) if threading.active_count() > 1 else None

        def has_gradient(one: Any) -> bool:
            return _torch.is_trainable_leaf(one) and (own is None or id(one) in own) and one.grad is not None

        live = naming.find(sys._getframe(1), has_gradient)
        noted: dict[int, Standing] = {}
        for one in itertools.islice(live, _LEAVES_NOTED):
            grad = one.tensor.grad
            if grad is None or grad.is_sparse or id(one.tensor) in noted or self._is_meant(one.tensor):
                continue
            if _torch.storage_or_none(grad):
                noted[id(one.tensor)] = _standing(one.tensor, clock, one.path)
        return list(noted.values())

    def _is_meant(self, leaf: torch.Tensor) -> bool:
        known = self._described.get(id(leaf))
        return known is not None and known() is leaf

    def _kept(self, entry: RawBackward, earlier: list[Standing], rounds: int) -> list[tuple[Standing, Update]]:
        clock, stack = entry.clock, entry.stack
        borders = [one.clock for one in self._backwards.before_in_thread(clock) if one.stack is stack][-rounds:]
        since = earlier[0].clock
        if len(borders) < rounds or borders[0] > since + 1:
            return []
        writes: dict[int, list[RawWrite]] = {}
        for raw in logged_writes(self._core, since):
            writes.setdefault(raw.storage, []).append(raw)
        kept, alive = [], functools.cache(naming.optimizers_alive)
        for standing in earlier:
            leaf = standing.leaf()
            if leaf is None or not self._stands(standing, leaf, writes):
                continue
            updates = self._updates(leaf, since, writes, alive)
            ends = [*borders[1:], clock]
            if updates and _are_regular(updates, borders, ends) and bool(leaf.grad.any()):
                kept.append((standing, updates[-1]))
        reached = _leaves_of(entry) if kept else frozenset()
        return [(standing, update) for standing, update in kept if id(standing.leaf()) in reached]

    def _stands(self, standing: Standing, leaf: torch.Tensor, writes: dict[int, list[RawWrite]]) -> bool:
        """Whether a leaf still has the same gradient, and only the engine has written it since."""
        grad = leaf.grad
        if grad is None or standing.memory.expired() or _torch.storage_or_none(grad) != standing.storage:
            return False
        return all(
            raw.kind == "metadata" or any(code.co_filename.endswith(_GRADIENT_KEPT) for code in raw.stack.codes[:2])
            for raw in writes.get(standing.storage, ())
        )

    def _updates(
        self, leaf: torch.Tensor, since: int, writes: dict[int, list[RawWrite]], alive: Callable[[], list[Any]]
    ) -> list[Update]:
        storage = _torch.storage_or_none(leaf)
        # A leaf that shares its memory may be updated by an optimizer that never reads this gradient.
        is_shared = self._uncounted.replacement_of(leaf) is not None
        optimizers = alive() if is_shared else ()
        others = {id(one) for one in optimizers if all(held is not leaf for held in _torch.parameters_of(one))}
        found = [
            Update(record.end, record.stack, f"{record.optimizer}.step")
            for record in self._steps.steps
            if record.end is not None and record.end > since and _has_written(record, storage)
            if record.identity not in others
        ]
        found += [
            Update(raw.clock, raw.stack, raw.op)
            for raw in writes.get(storage, ())
            if raw.kind == "step" or (raw.kind != "metadata" and raw.op not in _NO_UPDATE and by_gradient(raw.stack))
        ]
        replaced = self._uncounted.replaced.get(id(leaf))
        if (
            replaced is not None
            and replaced.clock > since
            and replaced.tensor() is leaf
            and by_gradient(replaced.stack)
        ):
            found.append(Update(replaced.clock, replaced.stack, "data =", is_last=True))
        return sorted(found, key=lambda update: update.clock)

    def _report(self, entry: RawBackward, kept: list[tuple[Standing, Update]], rounds: int) -> None:
        clues = []
        for standing, update in kept[:_SHOWN]:
            leaf = standing.leaf()
            if leaf is None:
                continue
            values = {**_torch.facts_of(leaf), "rounds": rounds, "leaves": len(kept)}
            clues.append(Clue("gradient", name=standing.path, values=values))
            clues.append(Clue("updated", symbolise(update.stack), name=standing.path, op=update.op))
        self._described.update((id(standing.leaf()), standing.leaf) for standing, _ in kept)
        self._found(Failure("gradient_never_cleared", "", "", symbolise(entry.stack), tuple(clues), raised=False))


def _standing(leaf: Any, clock: int, path: str = "") -> Standing:
    memory = _torch.weak_storage(leaf.grad.untyped_storage())
    return Standing(_torch.weak_tensor(leaf), path, _torch.storage_or_none(leaf.grad), memory, clock)


def others_run(core: Log, entry: RawBackward) -> bool:
    """Whether another live thread calls backward, or has called it.

    Reading ``.grad`` while the engine sets it in another thread can crash the process.
    """
    return _others_call(core, entry.thread)


def _others_call(core: Log, thread: int) -> bool:
    callers = {one.thread for one in backward_calls(core)} | {one.thread for one in map(as_backward, core.running)}
    return not callers.isdisjoint(_torch.frames_of_threads().keys() - {thread})


def _are_regular(updates: list[Update], begins: list[int], ends: list[int]) -> bool:
    """Whether there is an update in each round, or in several; of ``data =`` only the last is known."""
    updated = [
        any(begin < one.clock < end or (one.is_last and one.clock >= end) for one in updates)
        for begin, end in zip(begins, ends, strict=True)
    ]
    return all(updated) or sum(updated) >= _UPDATES


def _has_written(record: Any, storage: int) -> bool:
    return any(
        one == storage and position < len(record.after) and record.after[position] != record.before[position]
        for position, one in enumerate(record.storages)
    )


def by_gradient(stack: RawStack) -> bool:
    """Whether the program's own code wrote, near a place that reads some ``.grad``."""
    own = [code for code in stack.codes if is_user_file(code.co_filename)][:_USER_FRAMES_READ]
    return bool(own) and own[0] is stack.codes[0] and any(reads_gradient(code) for code in own)


@functools.lru_cache(maxsize=1024)
def reads_gradient(code: CodeType) -> bool:
    """Whether a function or module reads an attribute ``grad`` that is no module of torch's (``torch.autograd``)."""
    before = None
    for one in dis.get_instructions(code):
        is_read = one.argval == "grad" and one.opname.startswith(("LOAD_ATTR", "LOAD_METHOD"))
        if is_read and before not in ("autograd", "func", "functorch"):
            return True
        if one.opname not in ("CACHE", "EXTENDED_ARG"):
            before = one.argval
    # Before Python 3.12 a comprehension is a function of its own.
    inner = [one for one in code.co_consts if isinstance(one, CodeType) and one.co_name in COMPREHENSIONS]
    return any(map(reads_gradient, inner))


def _leaves_of(entry: RawBackward) -> frozenset[int]:
    """Return the leaves of the graph of a backward."""
    order = walk.engine_order(read_backward(entry).roots)
    return frozenset(map(id, walk.leaves_of(order)))


_FILES = 200


def program_reads_gradients(frame: FrameType | None) -> bool:
    """Whether a file of the program running at ``frame``, or a module that it uses, reads some ``.grad``.

    If so, the use of gradients cannot be judged by torch's calls alone: ``p.grad.item()``, ``float(p.grad)`` and
    ``copy.p.grad = p.grad`` are no operations of torch's. So the source is read.
    """
    return any(source.reads_gradients(file) for file in files_of_program(frame))


def files_of_program(frame: FrameType | None) -> list[str]:
    """Return the files of the program running at ``frame``, and those of its modules that these use."""
    found: dict[str, None] = {}
    waiting: list[dict[str, Any]] = []
    # The code that started the program is no part of it.
    while frame is not None and frame.f_globals.get("__name__") != "runpy":
        file = frame.f_code.co_filename
        if file not in found and is_user_file(file):
            found[file] = None
            waiting.append(frame.f_globals)
        frame = frame.f_back
    while waiting and len(found) < _FILES:
        for module in _used_by(waiting.pop()):
            own = stored_in(module).get("__file__")
            if isinstance(own, str) and own not in found and is_user_file(own):
                found[own] = None
                waiting.append(vars(module))
    return list(found)


def _used_by(names: dict[str, Any]) -> Iterator[ModuleType]:
    """Yield the modules referred to by a module's globals: imported, or defining an imported function or class."""
    for value in list(names.values()):
        if isinstance(value, FunctionType | type):
            value = sys.modules.get(str(value.__module__))
        if isinstance(value, ModuleType):
            yield value
