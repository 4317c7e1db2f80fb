"""States of modules that are kept without a copy: ``best = model.state_dict()`` while training goes on.

``state_dict()`` returns the module's own tensors, which every later update changes. Checked where a module is given a
state and where it is asked for one: a kept state that is the module's own memory, updated in between, restores nothing,
unless the program has last filled it itself; and several in one list or dict of the program's, taken at different
times, are one. Versions show that training went on, and the lifetimes of the tensors that somebody keeps them. A line
that again and again gives a module the state of another name, ``target.load_state_dict(network.state_dict())``, assumes
two modules. A state that was kept as the best one, in a branch that also keeps the score, is no longer that after an
update: it is saved, or given to another module.

So do optimizers return their own tensors, and ``load_state_dict`` of an optimizer takes what it is given without a
copy: an optimizer that is given another's state shares it from then on. Reported where both have stepped since, with
parameters of their own.

Rows: ``state_restored_itself``, ``states_are_one``, ``state_of_now``, ``optimizer_state_shared``. Roles: ``bound``
(where the state was taken), ``written`` (where it is given or saved, or one is asked for again; ``name`` of the state;
``values``: ``shape``, ``dtype``, ``device``, ``module``, the class of the module or optimizer). And the row of an
update that computes with itself (``own_operands.py``).
"""

from __future__ import annotations

import collections
import itertools
import sys
import weakref
from collections.abc import Hashable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from gradsan import _torch, source
from gradsan.detect.one_tensor.own_operands import OwnOperands
from gradsan.graph import naming
from gradsan.graph.live import value_of
from gradsan.graph.variables import kind_of
from gradsan.model import Clue, Failure, Frame, Site
from gradsan.record.detector import Finder, Guard, Run
from gradsan.record.log import RawStack, logged_writes
from gradsan.record.patches import Patches, standing
from gradsan.record.stacks import is_of_program, symbolise

RESTORED, ONE, NOW = "state_restored_itself", "states_are_one", "state_of_now"
SHARED = "optimizer_state_shared"
_TENSORS, _STATES, _SEARCHES = 16, 256, 32
_COPIES = frozenset({"copy_", "__setitem__"})


class _State(NamedTuple):
    """A state that a module returned at ``clock``: some of its tensors, with their versions then.

    ``is_best`` says whether a branch that compares scores keeps it; integers are most likely counters.
    """

    module: weakref.ref[Any]
    stack: RawStack
    clock: int
    tensors: tuple[tuple[weakref.ref[Any], int], ...]
    is_best: bool
    identity: int = 0
    """The ``id`` of the dict, for an optimizer: another one, of a later call, has the same tensors."""

    def tensor(self) -> Any:
        """Return one of the tensors that is still alive and has been written since; None where there is none."""
        held = ((one(), version) for one, version in self.tensors)
        return next((one for one, version in held if one is not None and int(one._version) > version), None)


class _Shared(NamedTuple):
    """The optimizers that have one state tensor since ``load_state_dict`` of the first, and its name in their state."""

    optimizers: tuple[weakref.ref[Optimizer], weakref.ref[Optimizer]]
    tensor: weakref.ref[Any]
    name: str
    stack: RawStack
    clock: int


class KeptStates(Finder):
    """Notes the states that modules return; findings go to ``found``."""

    part = "states of modules"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._operands, self._steps, self._optimizers = run.get(OwnOperands), run.steps, run.stepped_optimizers
        self._shared = self._notes(list[_Shared]())
        self._states = self._notes(list[_State]())
        self._scores = self._notes(dict[RawStack, frozenset[str]]())
        self._given_own = self._notes(dict[Hashable, tuple[int, int, int]]())
        self._searches = 0

    def forget(self) -> None:
        super().forget()
        self._searches = 0

    def install(self, patches: Patches, guard: Guard) -> None:
        core = self._core
        give, take = standing(nn.Module, "state_dict"), standing(nn.Module, "load_state_dict")

        def given(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: Any) -> None:
            # A module passes a destination to its inner modules.
            if len(args) == 1 and kwargs.get("destination") is None and not _torch.is_compiling():
                stack, frame = core.stack(1), sys._getframe(1)
                guard(lambda: self._given(args[0], state, stack, frame))

        def taken(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
            is_due = bool(args and self._states) and not _torch.is_compiling()
            if is_due:
                stack, frame = core.stack(1), sys._getframe(1)
                state = args[1] if len(args) > 1 else kwargs.get("state_dict")
                guard(lambda: self._taken(args[0], state, stack, frame))
            return self._operands.has_read(args[0].parameters()) if is_due and kwargs.get("assign") is True else None

        def has_taken(is_read: bool | None, args: tuple[Any, ...], _: dict[str, Any], __: Any) -> None:
            if is_read is not None:
                stack = core.stack(1)
                guard(lambda: self._assigned(args[0], stack, is_read))

        def saved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._states and not _torch.is_compiling():
                stack, held = core.stack(1), args[0] if args else kwargs.get("obj")
                guard(lambda: self._used(held, stack, "save"))

        def step_state_given(_: Any, args: tuple[Any, ...], __: dict[str, Any], state: Any) -> None:
            if not _torch.is_compiling():
                stack = core.stack(1)
                guard(lambda: self._note_state_of(args[0], state, stack))

        def step_state_taken(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
            if not args or _torch.is_compiling():
                return None
            stack, state = core.stack(1), args[1] if len(args) > 1 else kwargs.get("state_dict")
            guard(lambda: self._given_back(args[0], state, stack))
            return True

        def has_taken_step_state(_: bool, args: tuple[Any, ...], __: dict[str, Any], ___: Any) -> None:
            stack = core.stack(1)
            guard(lambda: self._note_shared(args[0], stack))

        step_states = standing(Optimizer, "state_dict"), standing(Optimizer, "load_state_dict")
        patches.set(Optimizer, "state_dict", core.listener(step_states[0], None, step_state_given))
        patches.set(Optimizer, "load_state_dict", core.listener(step_states[1], step_state_taken, has_taken_step_state))
        patches.set(torch, "save", core.listener(standing(torch, "save"), saved, None))
        patches.set(nn.Module, "state_dict", core.listener(give, None, given))
        patches.set(nn.Module, "load_state_dict", core.listener(take, taken, has_taken))

    def settle(self) -> None:
        """Report, as watching ends, the optimizers that have both stepped since they share a state."""
        for one in self._shared:
            pair, tensor = [weak() for weak in one.optimizers], one.tensor()
            stepped = {record.identity for record in self._steps.steps if record.clock > one.clock}
            if tensor is None or not stepped.issuperset(map(id, pair)) or one.stack in self._described:
                continue
            if all(any(it is tensor for _, it in _state_tensors(held)) for held in pair if held is not None):
                self._described.add(one.stack)
                site = symbolise(one.stack)
                frame = site.user_frame
                given = None if frame is None else source.state_given(frame) or source.first_argument(frame)
                other = given or type(pair[1]).__name__
                values = {**_torch.facts_of(tensor), "module": type(pair[0]).__name__, "given": other}
                written = Clue("written", site, name=one.name, op="load_state_dict", values=values)
                self._found(Failure(SHARED, "", "", site, (written,), raised=False))

    def _note_state_of(self, optimizer: Optimizer, state: Any, stack: RawStack) -> None:
        """Note the tensors that ``optimizer.state_dict()`` has returned."""
        if is_of_program(stack) and isinstance(state, Mapping):
            tensors = [one for _, one in _state_tensors(optimizer)][:_TENSORS]
            noted = tuple((_torch.weak_tensor(one), int(one._version)) for one in tensors)
            kept = [one for one in self._states if any(weak() is not None for weak, _ in one.tensors)]
            taken = _State(weakref.ref(optimizer), stack, self._core.clock, noted, False, id(state))
            self._states[:] = [*kept[-_STATES:], taken]

    def _given_back(self, optimizer: Optimizer, state: Any, stack: RawStack) -> None:
        """Report a state that an optimizer is given back, and that its steps have changed since it was taken."""
        if not is_of_program(stack):
            return
        given = {id(one) for one in _torch.tensors_in(state)}
        kept = next((one for one in reversed(self._states) if one.identity == id(state)), None)
        if kept is None or kept.module() is not optimizer or id(kept.tensor()) not in given:
            return
        if any(one.clock > kept.clock for one in self._steps.steps):
            site = symbolise(stack)
            name = None if site.user_frame is None else source.first_argument(site.user_frame)
            self._tell(RESTORED, kept, site, name or "state_dict")

    def _note_shared(self, optimizer: Optimizer, stack: RawStack) -> None:
        """Note which optimizer of other parameters has the tensors that this one has just taken."""
        own = {id(one): name for name, one in _state_tensors(optimizer) if one.dim()}
        trained = set(map(id, _torch.parameters_of(optimizer)))
        for other in self._optimizers() if own and is_of_program(stack) else ():
            if other is optimizer or not trained.isdisjoint(map(id, _torch.parameters_of(other))):
                continue
            shared = next((one for _, one in _state_tensors(other) if id(one) in own), None)
            if shared is not None:
                pair, clock = (weakref.ref(optimizer), weakref.ref(other)), self._core.clock
                self._shared.append(_Shared(pair, _torch.weak_tensor(shared), own[id(shared)], stack, clock))
                del self._shared[:-_STATES]

    def _given(self, module: nn.Module, state: Any, stack: RawStack, frame: FrameType) -> None:
        if not is_of_program(stack) or not isinstance(state, Mapping):
            return
        self._compare(module, stack, frame)
        if any(one.module() is module and one.tensor() is not None for one in self._states):
            self._operands.state_taken()
        tensors = [one for one in state.values() if type(one) in _torch.PLAIN_TENSORS and _torch.storage_or_none(one)]
        noted = tuple((_torch.weak_tensor(one), int(one._version)) for one in tensors[:_TENSORS])
        kept = [one for one in self._states if any(weak() is not None for weak, _ in one.tensors)]
        is_best = self._is_best(stack, frame)
        taken = _State(weakref.ref(module), stack, self._core.clock, noted, is_best)
        self._states[:] = [*kept[-_STATES:], taken]

    def _taken(self, module: nn.Module, state: Any, stack: RawStack, frame: FrameType) -> None:
        if not is_of_program(stack) or not isinstance(state, Mapping):
            return
        self._compare(module, stack, frame)
        own = {_torch.storage_or_none(one) for one in (*module.parameters(), *module.buffers())}
        tensors = [one for one in state.values() if type(one) in _torch.PLAIN_TENSORS]
        if tensors and all(_torch.storage_or_none(one) not in own for one in tensors):
            self._used(state, stack, "load_state_dict")
        if not tensors or not all(_torch.storage_or_none(one) in own for one in tensors):
            return
        given = {id(one) for one in state.values()}
        kept = next((one for one in reversed(self._states) if id(one.tensor()) in given), None)
        if kept is not None and kept.module() is module and not self._is_filled(kept):
            site = symbolise(stack)
            name = None if site.user_frame is None else source.first_argument(site.user_frame)
            self._tell(RESTORED, kept, site, name or "state_dict")
        elif kept is None:
            self._given_itself(module, tensors[0], stack, frame)

    def _is_filled(self, kept: _State) -> bool:
        """Whether the program has last written into the state itself, to load it, and no step has followed."""
        storage = _torch.storage_or_none(kept.tensor())
        raws = logged_writes(self._core, kept.clock)
        last = next((raw for raw in reversed(raws) if raw.storage == storage and raw.kind != "metadata"), None)
        if last is None or last.is_parameter:
            return False
        return not any(one.clock > last.clock and storage in one.storages for one in self._steps.steps)

    def _used(self, used: Any, stack: RawStack, op: str) -> None:
        """Check what is saved, or given to another module: a state of earlier that was kept as the best one."""
        if stack in self._described or not is_of_program(stack):
            return
        given = {id(one) for one in _torch.tensors_in(used)}
        kept = next((one for one in reversed(self._states) if id(one.tensor()) in given), None)
        frame = None if kept is None else symbolise(kept.stack).user_frame
        module = None if kept is None else kept.module()
        if kept is None or self._is_filled(kept):
            return
        if frame is not None and module is not None and kept.is_best:
            # Running statistics may have changed alone.
            own = set(map(_torch.storage_or_none, module.parameters()))
            held = [(one(), version) for one, version in kept.tensors]
            moved = [one for one, version in held if one is not None and one._version > version]
            trained = [one for one in moved if _torch.storage_or_none(one) in own]
            if not trained or any(map(self._is_restored, trained)):
                return
            self._described.add(stack)
            self._tell(NOW, kept, symbolise(stack), _name_of(frame), op)

    def _is_best(self, stack: RawStack, running: FrameType) -> bool:
        if stack not in self._scores:
            frame = symbolise(stack).user_frame
            self._scores[stack] = frozenset() if frame is None else source.compared_scores(frame)
        values = [value_of(running, one) for one in self._scores[stack]]
        known = [one for one in values if one is not None]
        return any(type(one) is not int for one in known or values)

    def _is_restored(self, tensor: torch.Tensor) -> bool:
        """Whether something wrote the tensor after the last step that had it: the best values may be back."""
        storage = _torch.storage_or_none(tensor)
        for record in reversed(self._steps.steps):
            if storage in record.storages:
                return bool(tensor._version != record.after[record.storages.index(storage)])
        return any(raw.storage == storage and raw.op in _COPIES for raw in logged_writes(self._core, 0))

    def _given_itself(self, module: nn.Module, tensor: torch.Tensor, stack: RawStack, running: FrameType) -> None:
        """Check a module given its own current state, with ``tensor`` in it: that copy is the only write to expect."""
        own = _torch.storage_or_none(tensor)
        before, clock, known = self._given_own.get(stack, (None, 0, 0))
        self._given_own[stack] = version, _, _ = int(tensor._version), self._core.clock, own
        if before is None or stack in self._described:
            return
        is_trained = version > before + 1
        # What nobody has trained or written, while others were trained, was to be given the state of one of them.
        if not is_trained and not any(one.clock > clock for one in self._steps.steps):
            return
        if not is_trained and (own != known or _has_hooks(module) or self._is_written_between(own, clock)):
            return
        self._described.add(stack)
        site = symbolise(stack)
        frame = site.user_frame
        taker, named = (None, None) if frame is None else (source.method_receiver(frame), source.state_given(frame))
        if frame is None or taker is None or named is None or (taker == named) is is_trained:
            return
        # What takes the keys that were missing checks them.
        if not is_trained and source.takes_result(frame):
            return
        # ``average = deepcopy(net) if args.average else net`` is the same on purpose.
        if source.is_bound_by_choice(frame, taker) or source.is_bound_by_choice(frame, named):
            return
        # ``net`` and ``ddp.module``: one of them is a wrapper's part, and the same on purpose. So is a wrapper whose
        # ``state_dict`` is that of what it wraps.
        holders = [value_of(running, one.rpartition(".")[0]) for one in (taker, named)]
        if holders[0] is holders[1] and value_of(running, named) is module:
            written = Clue("written", site, name=taker, op="load_state_dict", values=_torch.facts_of(tensor))
            row = "own_operand" if is_trained else "own_state"
            self._found(Failure(row, "", "", site, (written, Clue("read", site, name=named)), raised=False))

    def _is_written_between(self, storage: int, clock: int) -> bool:
        """Whether anything but ``load_state_dict`` has written memory after ``clock``, by ``.data`` perhaps."""
        raws = (raw for raw in logged_writes(self._core, clock) if raw.storage == storage and raw.kind != "metadata")
        return any("load_state_dict" not in {code.co_name for code in raw.stack.codes} for raw in raws)

    def _assigned(self, module: nn.Module, stack: RawStack, is_read: bool) -> None:
        """Check a module that takes another's tensors themselves, and read the ones before when they were trained."""
        self._operands.shares(module.parameters())
        if not is_read or stack in self._described or not is_of_program(stack):
            return
        self._described.add(stack)
        site = symbolise(stack)
        frame = site.user_frame
        taker, named = (None, None) if frame is None else (source.method_receiver(frame), source.state_given(frame))
        if taker is None or named is None or taker == named:
            return
        facts = _torch.facts_of(next(module.parameters()))
        written = Clue("written", site, name=taker, op="load_state_dict", values=facts)
        self._found(Failure("own_operand", "", "", site, (written, Clue("read", site, name=named)), raised=False))

    def _compare(self, module: nn.Module, stack: RawStack, frame: FrameType) -> None:
        """Search for states of the module, of different times, in one list or dict of the program's."""
        mine = [one for one in self._states if one.module() is module]
        earlier = next((one for one in mine if one.tensor() is not None), None)
        if len(mine) < 2 or earlier is None or earlier.stack in self._described or self._searches >= _SEARCHES:
            return
        self._searches += 1
        held: dict[str, set[int]] = collections.defaultdict(set)
        by_id = {id(weak()): version for one in mine for weak, version in one.tensors[:1]}
        by_id.pop(id(None), None)
        for one in naming.find(frame, lambda tensor: id(tensor) in by_id):
            for path, _ in itertools.takewhile(lambda it: kind_of(it[1]) in naming.COLLECTING, reversed(one.around)):
                held[path].add(by_id[id(one.tensor)])
        name = next((path for path, versions in held.items() if len(versions) > 1), None)
        if name is not None:
            self._tell(ONE, earlier, symbolise(stack), name)

    def _tell(self, row: str, kept: _State, site: Site, name: str, op: str = "load_state_dict") -> None:
        if kept.stack in self._described:
            return
        self._described.add(kept.stack)
        tensor = kept.tensor()
        module = kept.module()
        values = {**_torch.facts_of(tensor), "module": type(module).__name__}
        values["is_nested"] = isinstance(module, Optimizer)
        clues = (
            Clue("bound", symbolise(kept.stack), name=name),
            Clue("written", site, name=name, op=op, values=values),
        )
        self._found(Failure(row, "", "", site, clues, raised=False))


def _state_tensors(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in the state of an optimizer, with their names: ``exp_avg``."""
    for held in optimizer.state.values():
        for name, one in held.items() if isinstance(held, Mapping) else ():
            if type(one) in _torch.PLAIN_TENSORS:
                yield str(name), one


def _has_hooks(module: nn.Module) -> bool:
    """Whether the program's code is called when states are given or taken: the call may be made for its sake."""
    kinds = ("_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    methods = ("state_dict", "load_state_dict", "_load_from_state_dict", "_save_to_state_dict", "set_extra_state")
    own = {getattr(type(one), name).__module__.partition(".")[0] for one in module.modules() for name in methods}
    return own != {"torch"} or any(getattr(one, kind, None) for one in module.modules() for kind in kinds)


def _name_of(frame: Frame) -> str:
    """The variable that the statement at ``frame`` binds."""
    statement = source.statement_at(frame)
    return next(iter(() if statement is None else source.assigned_names(statement)), "state_dict")
