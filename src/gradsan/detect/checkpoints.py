"""Checkpointed functions whose recomputation in backward reads other values than their forward.

PyTorch keeps the arguments of a checkpointed function, and checks the versions of those that are tensors. All other
values are read by the function itself, in the recomputation in their current state. They are noted when the
forward has ended, so that the function's own writes are no change, and compared right before the
recomputation. Nothing is kept alive: notes hold weak references.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.detect import recomputation
from gradsan.detect.memory import Notes
from gradsan.detect.recomputation import Call, Change, Fingerprint, Tally, compare_values, fingerprint
from gradsan.model import Conflict, Message
from gradsan.record.detector import Detector, KnownConflicts, Run
from gradsan.record.log import RawStack
from gradsan.record.patches import Patches
from gradsan.record.stacks import is_own_file, symbolise
from gradsan.record.user_hooks import RecomputedSaves

_COMPARED = 2
"""The calls of a function, one that writes what it reaches or draws anew, with values compared outside deep mode."""
Guard = Callable[[Callable[[], object]], None]
Fingerprints = tuple[Fingerprint | None, ...]


class _Forward(NamedTuple):
    """A running checkpointed function: the frame that checkpoint made for it, its arguments, the site and the time."""

    frame: FrameType
    args: Sequence[Any]
    inputs: Fingerprints
    stack: RawStack
    clock: int


class Checkpoints(Detector):
    """The checkpointed calls that wait for their recomputation; conflicts go to ``findings``."""

    part = "functions"
    is_hushed = False

    def __init__(self, run: Run) -> None:
        self._core, self._steps, self._notes, self._findings = (
            run.core,
            run.steps,
            run.get(Notes),
            run.get(KnownConflicts),
        )
        self._note = run.guard.note
        self.compares_values = False
        self._calls: weakref.WeakKeyDictionary[Any, Call] = weakref.WeakKeyDictionary()
        self._changes: weakref.WeakKeyDictionary[Any, list[Change]] = weakref.WeakKeyDictionary()
        self._altered: weakref.WeakSet[Any] = weakref.WeakSet()
        self._tally = Tally()
        self._recomputed = run.get(RecomputedSaves)
        self._compared: dict[Any, int] = {}
        self._local = threading.local()

    def install(self, patches: Patches, guard: Guard) -> None:
        """Watch both forms of checkpoint until ``patches`` is undone."""
        module, function = _torch.checkpoint_classes(), _torch.reentrant_checkpoint()
        if module is not None:
            self._watch_forwards(patches, guard, *module)
            self._watch_frames(patches, guard, module[1])
            compare_values(patches, self._is_comparing, self._tally)
        if function is not None:
            self._watch_reentrant(patches, guard, function)

    def kept(self, conflict: Conflict | None, error: BaseException) -> Conflict | None:
        """``conflict`` with checkpoint as the saver of the value, if ``error`` arose while it unpacked its inputs."""
        if conflict is None or conflict.save.node is not None:
            return conflict
        known = _torch.checkpoint_classes()
        for frame in _torch.frames_of(error) if known is not None else ():
            holder = _torch.locals_of(frame).get("self")
            call = self._calls.get(holder) if known is not None and isinstance(holder, known[1]) else None
            if call is not None:
                save = replace(conflict.save, site=symbolise(call.stack), node="checkpoint", slot="input")
                return replace(conflict, save=save)
        return conflict

    def _watch_forwards(self, patches: Patches, guard: Guard, hooks: Any, frames: Any) -> None:
        """Note the values that a function reads when the hooks are left in which its forward ran."""
        core, local = self._core, self._local
        forwards: weakref.WeakKeyDictionary[Any, _Forward] = weakref.WeakKeyDictionary()

        def saved(_: Any, args: tuple[Any, ...], __: dict[str, Any], ___: Any) -> None:
            frame, *given = args
            local.compares = self._is_due(frame)
            inputs = self._inputs(guard, given)
            local.saved = None if _torch.is_compiling() else _Forward(frame, given, inputs, core.stack(1), core.clock)

        def made(_: Any, args: tuple[Any, ...], __: dict[str, Any], ___: Any) -> None:
            forward: _Forward | None = getattr(local, "saved", None)
            local.saved = None
            if forward is not None and forward.frame in args:
                forwards[args[0]] = forward

        def left(_: Any, args: tuple[Any, ...], __: dict[str, Any], ___: Any) -> None:
            forward = forwards.pop(args[0], None)
            local.compares = False
            if forward is not None and args[1] is None:
                guard(lambda: self._begin(forward))

        patches.set(frames, "save_inputs", core.listener(frames.save_inputs, None, saved))
        patches.set(hooks, "__init__", core.listener(hooks.__init__, None, made))
        patches.set(hooks, "__exit__", core.listener(hooks.__exit__, None, left))

    def _watch_frames(self, patches: Patches, guard: Guard, frames: Any) -> None:
        core = self._core
        load, check = frames.get_inputs, frames.check_recomputed_tensors_match

        def loaded(_: Any, args: tuple[Any, ...], __: dict[str, Any], arguments: Any) -> None:
            frame = args[0]
            call = self._calls.get(frame)
            self._local.compares = self._is_due(frame)
            if call is not None:
                guard(lambda: self._examine(call, frame, arguments))
                if call.inputs:
                    guard(lambda: None if _same(call.inputs, _fingerprints(arguments)) else self._altered.add(frame))

        def checks(args: tuple[Any, ...], _: dict[str, Any]) -> Any:
            self._tally.begin()
            return self._calls.get(args[0]), self._changes.pop(args[0], None)

        def checked(noted: Any, args: tuple[Any, ...], _: dict[str, Any], __: Any) -> None:
            frame, (call, found) = args[0], noted
            if getattr(self._local, "compares", False) and call is not None:
                self._compared[call.code] += 1
            self._local.compares = False
            if call is not None and found is not None:
                guard(lambda: self._report(call, found, None if frame in self._altered else self._verdict(frame)))

        patches.set(frames, "get_inputs", core.listener(load, None, loaded))
        patches.set(frames, "check_recomputed_tensors_match", core.listener(check, checks, checked))

    def _watch_reentrant(self, patches: Patches, guard: Guard, function: Any) -> None:
        core = self._core

        def runs(args: tuple[Any, ...], _: dict[str, Any]) -> Fingerprints | None:
            return None if _torch.is_compiling() else self._inputs(guard, args[3:])

        def ran(inputs: Fingerprints, args: tuple[Any, ...], _: dict[str, Any], result: Any) -> None:
            # A Function's context is the Node that it makes.
            if any(args[0].needs_input_grad):
                stack = core.stack(1)
                guard(lambda: self._begin_reentrant(args[0], args[1], args[3:], result, stack, inputs))

        def runs_again(args: tuple[Any, ...], _: dict[str, Any]) -> Any:
            context = args[0]
            call = self._calls.get(context)
            if call is None:
                return None
            run, found = context.run_function, list[Change]()
            if call.marks:
                arguments = _by_name(run, context.inputs)
                guard(lambda: found.extend(recomputation.compare(self._notes, call, run, arguments)))
            if not call.values:
                guard(lambda: self._report(call, found, None))
                return None

            def ran_again(_: Any, args: tuple[Any, ...], __: dict[str, Any], outputs: Any) -> None:
                # Results may be equal where intermediate values, and the gradient, are not.
                is_unknown = _same(call.values, _fingerprints(outputs))
                if call.inputs and not is_unknown:
                    is_unknown = not _same(call.inputs, _fingerprints(args))
                guard(lambda: self._report(call, found, None if is_unknown else False))

            context.run_function = core.listener(run, None, ran_again)
            return run

        def has_run_again(run: Any, args: tuple[Any, ...], _: dict[str, Any], __: Any) -> None:
            args[0].run_function = run

        patches.set(function, "forward", staticmethod(core.listener(function.forward, runs, ran)))
        patches.set(function, "backward", staticmethod(core.listener(function.backward, runs_again, has_run_again)))

    def _inputs(self, guard: Guard, args: Sequence[Any]) -> Fingerprints:
        """Fingerprint values that hooks of the program's are about to pack, and may return otherwise (half precision).

        Empty where there are no such hooks, or values are not compared.
        """
        found: list[Fingerprint | None] = []
        if self.compares_values and _torch.has_hooks():
            hooks = _torch.top_hooks()
            # Before 2.7 torch does not show the hooks.
            pack = None if hooks is None else recomputation.code_of(hooks[0])
            if not is_own_file(getattr(pack, "co_filename", "")):
                guard(lambda: found.extend(_fingerprints(args)))
        return tuple(found)

    def _is_comparing(self, tensor: torch.Tensor) -> bool:
        is_due = (self.compares_values or getattr(self._local, "compares", False)) and self._core.active
        # Its value is another one by a write: a conflict of its own.
        return is_due and not self._recomputed.is_overwritten(tensor)

    def _is_due(self, frame: FrameType) -> bool:
        """Whether the values of a call are to be compared in any mode: it writes what it reaches, or draws anew."""
        called = _torch.recomputed_call(frame) if self._compared else None
        return called is not None and self._compared.get(recomputation.code_of(called[0]), _COMPARED) < _COMPARED

    def _begin(self, forward: _Forward) -> None:
        called = _torch.recomputed_call(forward.frame)
        if called is not None:
            function, keywords = called
            arguments = {**_by_name(function, forward.args), **keywords}
            self._remember(forward.frame, function, arguments, forward.stack, (), forward.inputs, forward.clock)

    def _begin_reentrant(
        self, node: Node, function: Any, args: tuple[Any, ...], result: Any, stack: RawStack, inputs: Fingerprints
    ) -> None:
        # Tensor arguments are saved, and checked like those of every other Node.
        arguments = [None if torch.is_tensor(one) else one for one in args]
        code = recomputation.code_of(function)
        is_due = self._compared.get(code, _COMPARED) < _COMPARED and _torch.draws_anew(node)
        if is_due:
            self._compared[code] += 1
        values = _fingerprints(result) if self.compares_values or is_due else ()
        self._remember(node, function, _by_name(function, arguments), stack, values, inputs)

    def _remember(
        self,
        key: Any,
        function: Any,
        arguments: Mapping[str, Any],
        stack: RawStack,
        values: Fingerprints = (),
        inputs: Fingerprints = (),
        since: int | None = None,
    ) -> None:
        from gradsan.graph.reached import TooMuchError

        name = recomputation.name_of(function)
        try:
            marks = recomputation.marks_of(self._notes, function, arguments)
        except TooMuchError:
            self._note(Message("blind.checkpoint_reaches_much", {"name": name}))
            marks = {}
        code, core = recomputation.code_of(function), self._core
        own = {} if since is None else recomputation.own_writes(core, marks, since)
        if own or _torch.draws_anew(key):
            self._compared.setdefault(code, 0)
        self._calls[key] = Call(name, code, stack, core.tick(), marks, values, inputs, own)

    def _examine(self, call: Call, frame: FrameType, arguments: Iterable[Any]) -> None:
        """Compare values as a recomputation begins; changes are reported after it, unless checkpoint itself raises."""
        called = _torch.recomputed_call(frame)
        if called is None:
            return
        function, keywords = called
        if call.marks:
            arguments = {**_by_name(function, arguments), **keywords}
            self._changes[frame] = recomputation.compare(self._notes, call, function, arguments)

    def _verdict(self, frame: FrameType) -> bool | None:
        """Whether the recomputation gave the values that backward reads; None where they were not compared."""
        if not self._tally.compared:
            return None
        different = {id(one) for one in self._tally.different}
        holders = [holder for holder, saved in _torch.saved_in_checkpoint(frame) if id(saved) in different]
        return not holders or not _torch.are_read(holders)

    def _report(self, call: Call, found: list[Change], same: bool | None) -> None:
        """Report the changes; ``same`` says whether the recomputed values are the same, None if not compared."""
        found = found or (recomputation.changed_itself(call) if same is False else [])
        changes: list[Change | None] = [*found] if found or same is not False else [None]
        for change in changes:
            writes = change.written.writes if change is not None and change.written is not None else ()
            key = (call.stack, change and change.path, writes[0].site if writes else None)
            self._findings.add(
                key, functools.partial(recomputation.conflict_of, self._core, self._steps, call, change, same=same)
            )


def _by_name(function: Any, arguments: Iterable[Any]) -> dict[str, Any]:
    """Return positional arguments by their parameter names."""
    from gradsan.graph.reached import parameter_names

    names = parameter_names(function)
    return {
        names[position] if position < len(names) else f"args[{position}]": value
        for position, value in enumerate(arguments)
    }


def _fingerprints(outputs: Any) -> Fingerprints:
    return tuple(map(fingerprint, outputs if isinstance(outputs, (tuple, list)) else (outputs,)))


def _same(before: Fingerprints, now: Fingerprints) -> bool:
    pairs = zip(before, now, strict=False)
    return not any(one is not None and other is not None and one.differs(other) for one, other in pairs)
