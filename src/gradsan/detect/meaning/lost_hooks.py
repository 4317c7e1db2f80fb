"""Gradient hooks without effect: of a view that is written, of a parameter that is replaced, or returning nothing.

And hooks that a parameter gets again in every round.

A write gives a view, or its base, a new grad_fn. A parameter that a module gets in place of one with hooks has none.

PyTorch leaves the hooks of a view at its Node of when they were registered. Uses of the view after the write
depend on another Node, so these hooks do not run. Backward calls are only checked while there is such a view.

Row ``hook_result_dropped``: roles ``hook`` (where it was registered; ``name``) and ``computed`` (its line).
Row: ``hook_lost``. Roles: ``hook`` (where it was registered; ``name`` is the view; ``values``: ``shape``, ``dtype``,
``device``), ``written`` (the write; ``op``). The value ``earlier`` of the failure is set where the hook still runs for
uses of the view before the write, ``replaced`` where the tensor was a parameter, and ``written`` is where its module
got another one; it had died before any backward, and this one reaches the other, which has no hook.

Gradient hooks that are registered on a parameter again in every round, so that each round has one more of them.

``p.register_hook(lambda g: g * 0.5)`` in the body of a training loop halves the gradient twice in the second round.
Hooks of one code, with the same values in their closures, were registered before different backward calls, and are
all there. A hook that leaves what the one before has returned as it is (a mask, a clamp, a print) does no harm: the
last one is measured in the next backward, where it changes nothing.

Row ``hook_repeated``: role ``hook`` (where it was registered; ``name`` of the parameter; ``values``: ``shape``,
``dtype``, ``device``, ``times``, the number of these hooks).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from gradsan import _torch, source
from gradsan.detect.gradients.lost_updates import Graph
from gradsan.graph import naming, walk
from gradsan.model import Clue, Failure, Frame, Site
from gradsan.record.detector import Finder, Guard, Run
from gradsan.record.guarding import numbered_apart
from gradsan.record.ledger import call_that_made
from gradsan.record.log import Core, RawStack, RawWrite, backward_calls, logged_writes
from gradsan.record.patches import Patches, standing
from gradsan.record.stacks import is_user_file, symbolise
from gradsan.record.steps import RawBackward, read_backward
from gradsan.record.user_hooks import note_tensor_hook

ROW, DROPPED = "hook_lost", "hook_result_dropped"
_KEPT = 64
_CALLS_AWAITED = 8
_REGISTERED, _MANY = 4_096, 4


@dataclass(slots=True)
class _Hooked:
    """A view with a hook, in its state when the hook was registered; ``alive`` is empty once the hook was removed.

    ``failure`` is reported if the hook does not run later, for uses of the view before the write.
    """

    tensor: _torch.weak_tensor
    place: tuple[Any, ...]
    facts: dict[str, Any]
    graph: Graph
    number: int | None
    alive: Any
    clock: int
    stack: RawStack
    thread: int
    calls: int = 0
    failure: Failure | None = None


@dataclass(slots=True)
class _Leaf:
    """A parameter with a hook, as long as no backward has begun; then what replaced it in its module, and where."""

    tensor: _torch.weak_tensor
    facts: dict[str, Any]
    alive: Any
    clock: int
    stack: RawStack
    name: str = ""
    instead: _torch.weak_tensor | None = None
    replaced: RawStack | None = None


class LostHooks(Finder):
    """Checks backward calls while there are views with hooks; ``listen(True)`` requests these calls."""

    part = "hooks of views"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._waiting: list[_Hooked] = []
        self._codes = self._notes(set[CodeType]())
        self._leaves = self._notes(dict[int, _Leaf]())
        self._registered: dict[int, int] = {}
        self._repeated: RepeatedHooks | None = None

    def install(self, patches: Patches, guard: Guard) -> None:
        """Watch ``register_hook``."""
        register, core = standing(torch.Tensor, "register_hook"), self._core

        def registered(_: Any, args: tuple[Any, ...], __: dict[str, Any], handle: Any) -> None:
            if not _torch.is_compiling():
                stack = core.stack(1)
                guard(lambda: note_tensor_hook(args[0]))
                guard(lambda: self._remember(args[0], handle, stack))
                guard(lambda: self._count(args[0], handle, stack))
                guard(lambda: self._read(args[0], args[1] if len(args) > 1 else None, stack))

        patches.set(torch.Tensor, "register_hook", core.listener(register, None, registered))

        def replacing(module: nn.Module, name: str, parameter: torch.Tensor | None) -> None:
            if self._leaves and parameter is not None:
                stack = core.stack(1)
                guard(lambda: self._replace(module, name, parameter, stack))

        handle = numbered_apart(register_module_parameter_registration_hook(replacing))
        patches.on_undo(handle.remove)

        patches.on_undo(self._put_back)
        self._guard = guard

    def _count(self, tensor: torch.Tensor, handle: Any, stack: RawStack) -> None:
        """Note before which backward a leaf got a hook, and look whether it has gathered several of them."""
        hooks: Any = tensor._backward_hooks
        if not _torch.is_trainable_leaf(tensor) or not hooks or handle.id not in hooks:
            return
        if len(self._registered) >= _REGISTERED:
            self._registered.clear()
        self._registered[handle.id] = self._core.backwards
        if len(hooks) < _MANY or stack in self._described:
            return
        if self._repeated is None:
            self._repeated = RepeatedHooks(self._core, self._guard, self._found)
        if self._repeated.look(tensor, self._registered, stack):
            self._described.add(stack)

    def _put_back(self) -> None:
        if self._repeated is not None:
            self._repeated.forget()

    def forget(self) -> None:
        self._put_back()
        self._registered.clear()
        for one in self._waiting:
            one.graph.let_go()
        self._waiting.clear()
        super().forget()
        self._listeners.call_before_backward(self.before_backward, False)

    def settle(self) -> None:
        """Report, as watching ends, the hooks that have not run."""
        for one in self._waiting:
            self._report(one)
        self.forget()

    @_torch.hushed()
    def _read(self, tensor: torch.Tensor, hook: Any, stack: RawStack) -> None:
        """Report a hook of the program's whose source computes a new gradient, and returns nothing."""
        function = hook.__func__ if isinstance(hook, MethodType) else hook
        code = function.__code__ if isinstance(function, FunctionType) else None
        if code is None or code in self._codes or not is_user_file(code.co_filename):
            return
        self._codes.add(code)
        at = code.co_filename, code.co_firstlineno, code.co_name, int(function is not hook)
        if (line := source.unreturned_gradient(*at)) is not None:
            frame = Frame(code.co_filename, line, code.co_qualname if hasattr(code, "co_qualname") else code.co_name)
            name = naming.name_of(tensor, sys._getframe(1))
            clues = Clue("hook", name=name, values=_torch.facts_of(tensor)), Clue("computed", Site((frame,)))
            self._report_at(DROPPED, stack, *clues)

    def _replace(self, module: nn.Module, name: str, parameter: torch.Tensor, stack: RawStack) -> None:
        """Note a parameter that a module gets in place of one with a hook, before it has it."""
        before = dict(module.named_parameters(recurse=False)).get(name)
        known = None if before is None else self._leaves.get(id(before))
        if known is not None and known.tensor() is before and before is not parameter:
            known.name, known.replaced = f"{type(module).__name__}.{name}", stack
            known.instead = _torch.weak_tensor(parameter)
            self._listeners.call_before_backward(self.before_backward)

    def _look_at_leaves(self, entry: RawBackward) -> None:
        """Report the hooks that died with their parameter before any backward, if this one reaches the other."""
        begun = [call.clock for call in backward_calls(self._core) if call.clock < entry.clock]
        first = min(begun, default=entry.clock)
        lost = [
            (known, instead, known.replaced)
            for known in self._leaves.values()
            if known.tensor() is None and known.alive and known.instead is not None and known.replaced is not None
            if known.clock < first and (instead := known.instead()) is not None
            if not _torch.has_leaf_hooks(instead)
        ]
        self._leaves.clear()
        reached = {id(one) for one in walk.leaves_of(walk.engine_order(read_backward(entry).roots))} if lost else set()
        for known, instead, replaced in lost:
            if id(instead) in reached and known.stack not in self._described:
                self._described.add(known.stack)
                hook = Clue("hook", symbolise(known.stack), name=known.name, values=known.facts)
                written = Clue("written", symbolise(replaced), op="=")
                values = {"earlier": "", "replaced": "yes"}
                self._found(Failure(ROW, "", "", symbolise(entry.stack), (hook, written), values, raised=False))

    def _remember(self, tensor: torch.Tensor, handle: Any, stack: RawStack) -> None:
        if _torch.is_trainable_leaf(tensor) and len(self._leaves) < _KEPT and stack not in self._described:
            facts, alive = _torch.facts_of(tensor), _torch.removal_of(handle)
            weak = _torch.weak_tensor(tensor)
            self._leaves[id(tensor)] = _Leaf(weak, facts, alive, self._core.clock, stack)
            return
        if type(tensor) not in _torch.PLAIN_TENSORS or tensor._base is None or stack in self._described:
            return
        if tensor.grad_fn is None or len(self._waiting) >= _KEPT:
            return
        storage, _, geometry = _torch.weak_identity(tensor)
        facts = _torch.facts_of(tensor)
        one = _Hooked(
            _torch.weak_tensor(tensor),
            (storage, *geometry),
            facts,
            Graph([tensor]),
            _torch.node_sequence(tensor.grad_fn),
            _torch.removal_of(handle),
            self._core.clock,
            stack,
            threading.get_ident(),
        )
        self._waiting.append(one)
        self._listeners.call_before_backward(self.before_backward)

    @_torch.hushed()
    def before_backward(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the views; the arguments are those of ``listeners.BeforeBackward``."""
        if entry.accumulates and self._leaves:
            self._look_at_leaves(entry)
        waiting, self._waiting = self._waiting, []
        since = min((one.clock for one in waiting), default=0)
        writes = logged_writes(self._core, since) if waiting else []
        nodes: dict[int, Any] | None = None
        for one in waiting:
            own = [
                raw
                for raw in writes
                if raw.storage == one.place[0] and raw.clock > one.clock and raw.kind != "metadata"
            ]
            one.calls += 1
            is_over = one.graph.was_used or not one.alive or (one.graph.is_gone and not own)
            if one.failure is not None:
                is_over = is_over or one.graph.is_gone
                if is_over:
                    self._report(one)
            elif own and not is_over and one.thread == entry.thread:
                if nodes is None:
                    nodes = _numbered(entry)
                is_over = self._look(entry, one, own, nodes)
            if is_over or one.calls > _CALLS_AWAITED:
                one.graph.let_go()
            else:
                self._waiting.append(one)
        if not self._waiting:
            self._listeners.call_before_backward(self.before_backward, False)

    def _look(self, entry: RawBackward, one: _Hooked, writes: list[RawWrite], nodes: dict[int, Any]) -> bool:
        """Check whether this backward bypasses a hook; return whether the view is done with."""
        runs = one.number in nodes and not one.graph.is_gone
        tensor = one.tensor()
        if tensor is None:
            # The view cannot be used any more; its own write in this graph shows that it was used.
            raw = next((raw for raw in reversed(writes) if self._is_own(one, raw, nodes)), None)
            if raw is not None and not runs:
                one.failure = self._failure(entry, one, raw, False)
            return one.graph.is_gone and (raw is None or self._report(one))
        node = None
        with contextlib.suppress(RuntimeError):
            node = tensor.grad_fn
        number = _torch.node_sequence(node)
        if number is None or number == one.number or nodes.get(number) is not node:
            return False
        one.failure = self._failure(entry, one, writes[0], runs)
        return self._report(one)

    def _is_own(self, one: _Hooked, raw: RawWrite, nodes: dict[int, Any]) -> bool:
        if (raw.storage, raw.offset, raw.shape, raw.strides, raw.itemsize) != one.place:
            return False
        made = call_that_made(self._core, raw.sequence - 1, one.thread)
        return made is not None and any(number in nodes for number in range(made.first, made.end))

    def _report(self, one: _Hooked) -> bool:
        if one.failure is not None and one.alive and not one.graph.was_used and one.stack not in self._described:
            self._described.add(one.stack)
            self._found(one.failure)
        return True

    def _failure(self, entry: RawBackward, one: _Hooked, raw: RawWrite, earlier: bool) -> Failure:
        tensor = one.tensor()
        name = naming.name_of(tensor, sys._getframe(1)) if tensor is not None else None
        clues = (
            Clue("hook", symbolise(one.stack), name=name, values=one.facts),
            Clue("written", symbolise(raw.stack), op=raw.op),
        )
        values = {"earlier": "yes" if earlier else ""}
        return Failure(ROW, "", "", symbolise(entry.stack), clues, values, raised=False)


def _numbered(entry: RawBackward) -> dict[int, Any]:
    order = walk.engine_order(read_backward(entry).roots)
    return {number: node for node in order if (number := _torch.node_sequence(node)) is not None}


REPEATED = "hook_repeated"
_NUMBERS = (int, float, bool, str)
_MEASURED = 8


class RepeatedHooks:
    """Measures the last of several hooks that are the same; findings go to ``found``."""

    def __init__(self, core: Core, guard: Guard, found: Callable[[Failure], None]) -> None:
        self._core, self._guard, self._found = core, guard, found
        self._restore: list[Callable[[], None]] = []
        self._measured = 0

    def forget(self) -> None:
        """Put the program's own hooks back."""
        while self._restore:
            self._restore.pop()()

    def look(self, tensor: torch.Tensor, registered: dict[int, int], stack: RawStack) -> bool:
        """Measure the hook that a leaf has got, if it has several of them; whether it is measured."""
        hooks: Any = tensor._backward_hooks
        key = next(reversed(hooks))
        hook = hooks[key]
        same = [one for one, other in hooks.items() if one in registered and _is_same(hook, other)]
        if len({registered[one] for one in same}) < _MANY or self._measured >= _MEASURED:
            return False
        self._measured += 1
        weak, times = _torch.weak_tensor(tensor), len(same)

        def before(args: tuple[Any, ...], _: dict[str, Any]) -> Any:
            with _torch.hushed(), torch.no_grad():
                return args[0].detach().clone() if args and not _torch.is_compiling() else None

        def after(given: Any, args: tuple[Any, ...], _: dict[str, Any], result: Any) -> None:
            restore()
            if given is not None:
                taken = args[0] if result is None else result
                self._guard(lambda: self._judge(given, taken, weak(), times, stack))

        measured = self._core.listener(hook, before, after)

        def restore() -> None:
            if hooks.get(key) is measured:
                hooks[key] = hook

        hooks[key] = measured
        self._restore.append(restore)
        return True

    @_torch.hushed()
    def _judge(self, given: torch.Tensor, taken: torch.Tensor, leaf: Any, times: int, stack: RawStack) -> None:
        if leaf is None or given.layout is not torch.strided or given.shape != taken.shape:
            return
        with torch.no_grad():
            if torch.allclose(given, taken.detach(), rtol=1e-3, atol=0.0, equal_nan=True):
                return
        name = naming.name_of(leaf, sys._getframe(1))
        site = symbolise(stack)
        clue = Clue("hook", site, name=name, values={**_torch.facts_of(leaf), "times": times})
        self._found(Failure(REPEATED, "", "", site, (clue,), raised=False))


def _is_same(one: Any, other: Any) -> bool:
    """Whether two hooks do the same: one code, and the same values in closure, defaults and arguments."""
    if one is other:
        return True
    if isinstance(one, MethodType) and isinstance(other, MethodType):
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    if isinstance(one, partial) and isinstance(other, partial):
        is_alike = _are_alike(one.args, other.args) and one.keywords.keys() == other.keywords.keys()
        values = one.keywords.values(), other.keywords.values()
        return is_alike and _are_alike(*map(tuple, values)) and _is_same(one.func, other.func)
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)) or one.__code__ is not other.__code__:
        return False
    return _are_alike(one.__defaults__ or (), other.__defaults__ or ()) and _are_alike(_cells(one), _cells(other))


def _cells(function: FunctionType) -> tuple[Any, ...]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not bound yet
            found.append(cell)
    return tuple(found)


def _are_alike(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(
        one is other or (type(one) is type(other) and isinstance(one, _NUMBERS) and one == other)
        for one, other in zip(some, others, strict=True)
    )
