"""Updates that compute with themselves: ``average.lerp_(weight, 0.1)`` with one tensor on both sides.

``average``, ``backup`` or ``momentum`` was made without a copy. Checked in a few whole rounds, and reported where it
holds for all operands of the line: a network that shares some layers with its average has these on both sides on
purpose. A part of larger memory may be filled by a tensor that is a view of it already. A difference is checked, too,
if it is of a trained leaf or of a gradient: ``p - anchor``, ``p.grad - first`` are zero without a copy. States
of modules are processed once in many rounds: these are checked from where a state is taken while an older one
is kept. Lines that run every few rounds are awaited in later ones. ``target = 0.9 * target + 0.1 * weight`` in a loop
over parameters updates nothing, and is reported, too.

Rows: ``own_operand``, ``own_difference``, ``update_dropped``. Roles: ``written`` (the update or the difference;
``name``; ``op``; ``values``: ``shape``, ``dtype``, ``device``, ``is_leaf``, ``kept``, the side that was meant as a
copy), ``read`` (``name`` of the other side), ``given`` (where ``p.data = average`` made them one) and ``changed`` (what
last wrote the memory of a difference).
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from gradsan import _torch, source
from gradsan.detect.meaning.made import Making
from gradsan.detect.meaning.rounds import RoundDetector
from gradsan.detect.memory import Uncounted
from gradsan.detect.one_tensor.kept_references import reads_at
from gradsan.detect.one_tensor.second_names import Arrays, DetachedLeaves, facts_of_value
from gradsan.model import Clue, Failure, Site
from gradsan.record.detector import Run
from gradsan.record.log import RawStack, RawWrite, logged_writes
from gradsan.record.stacks import is_of_program, is_user_file, symbolise
from gradsan.record.steps import RawBackward

OWN, DIFFERENCE, DROPPED = "own_operand", "own_difference", "update_dropped"
_STACKS, _STATES, _FOLLOWED = 256, 4, 32
_LISTENER_FRAMES = 3
"""The frames between a call and :meth:`OwnOperands.result`; without them a stack is that of the call's write."""
_COMPARES = frozenset({"__sub__", "sub", "subtract", "mse_loss", "l1_loss", "dist"})
_MIXES = frozenset({"mul", "multiply", "add", "sub", "div", "truediv", "lerp", "clamp", "addcmul", "addcdiv"})
_SCALES = frozenset({"mul_", "__imul__"})
_TAKES_OPERAND = frozenset({"copy_", "add_", "sub_", "lerp_", "__iadd__", "__isub__"})


class OwnOperands(RoundDetector):
    """Checks updates of a few rounds whose operand is their target; findings go to ``found``."""

    takes_gradients = True
    rounds = (1, 2, 4, 8, 16, 32)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._uncounted, self._steps, self._making = run.get(Uncounted), run.steps, run.get(Making)
        self._known = run.failures
        self._uncounted.on_given_again = self.given_again
        self._uncounted.on_data_read.append(self.data_read)
        self._uncounted.on_replaced.append(self.replaced_by)
        self._own = self._notes(dict[Hashable, tuple[str, dict[str, Any]]]())
        self._computed = self._notes(dict[Hashable, dict[str, Any]]())
        self._before = self._notes(dict[Hashable, RawWrite | None]())
        self._twice = self._notes(collections.defaultdict[Hashable, set[int]](set))
        self._other, self._lending = self._notes(set[Any]()), self._notes(set[Hashable]())
        self._mixes, self._detached, self._arrays = Mixes(), run.get(DetachedLeaves), run.get(Arrays)
        self._behind = self._notes(_torch.WeakTensors())
        self._given = self._notes(dict[int, int]())
        self._shared = self._notes(_torch.WeakTensors())
        self._data_read = self._notes(dict[int, tuple[_torch.weak_tensor, int]]())
        self._filled = self._notes(dict[RawStack, bool]())
        self._filled_now = self._notes(dict[RawStack, tuple[RawWrite | None, dict[str, Any]]]())
        self._awaited: set[Any] | None = None
        self._lent = set[Any]()
        self._states = self._since = self._followed = 0

    def forget(self) -> None:
        super().forget()
        self._states = self._followed = 0
        self._since, self._lent = self._core.clock, set()
        self._detached.forget()

    def state_taken(self) -> None:
        """Open a round when a state is taken while an older one is kept; as ``KeptStates.on_older``."""
        self._states += 1
        if self._states <= _STATES:
            self.begin_here()

    def begins(self, entry: RawBackward) -> bool:
        """Drop the results of the round before; whether a first round, or one that awaits a line, begins."""
        self._mixes.forget()
        return self._awaited is None or bool(self._awaited)

    @_torch.hushed()
    def before_round(self, entry: RawBackward, rounds: int) -> None:
        """Check the first rounds, and later ones for lines that have run between; as ``on_round`` of the core."""
        self._awaited = self._lent or None
        if rounds in self.rounds[3:]:
            raws = logged_writes(self._core, self._since)
            stacks = {raw.stack for raw in raws if raw.op in _TAKES_OPERAND}
            # The line that gives a parameter other memory may compute it from what it had.
            stacks |= {one.stack for one in self._uncounted.replaced.values() if one.clock > self._since}
            self._awaited = {one for one in stacks - self._own.keys() - self._other if is_of_program(one)} | self._lent
            self._since = entry.clock
        super().before_round(entry, rounds)

    def goes_on(self, entry: RawBackward) -> bool:
        """Whether a line is still awaited; the first rounds await none."""
        self._awaited = self._awaited and self._awaited - self._own.keys() - self._other
        self._lent &= self._awaited or set()
        self._followed += bool(self._awaited)
        return bool(self._awaited) and self._followed <= _FOLLOWED

    def result(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note whether the line of an update, or of a difference, has computed with the same tensor."""
        if self._uncounted.replaced or self._given:
            self._note_behind(args)
        given = list(itertools.islice((*args, *kwargs.values()), 2))
        is_pair = len(given) == 2 and all(type(one) in _torch.PLAIN_TENSORS for one in given)
        is_mixed = self._mixes.computed(op, args, result)
        is_new = op.strip("_").removeprefix("r") in _MIXES and len(self._computed) <= _STACKS
        if is_new and (facts := facts_of_value(args, self._core)) is not None:
            self._computed.setdefault(self._core.stack(), facts)
        if (op not in _TAKES_OPERAND and op not in _COMPARES) or len(self._own) > _STACKS or not is_pair:
            return
        is_leaf = any(map(_torch.is_trainable_leaf, given))
        if op in _COMPARES and not is_leaf and len(set(map(_torch.storage_or_none, given))) > 1:
            self._note_filled(given)
            return
        target = given[0]
        stack = self._core.stack(_LISTENER_FRAMES)
        # What a library compares is its own affair, and its operands have other names in the program.
        if stack in self._other or not is_of_program(stack):
            return
        (storage, _, place), (others, _, other) = map(_torch.weak_identity, given)
        is_whole = target.untyped_storage().nbytes() == target.numel() * target.element_size()
        is_as_taken = op in _COMPARES and any(map(self._detached.is_as_taken, given))
        is_array = storage != others and self._arrays.is_of(given[0], given[1])
        if ((storage, place) == (others, other) or is_array or is_mixed) and is_whole and not is_as_taken:
            is_written = op in _COMPARES and given[0] is not given[1] and self._is_written(storage, stack)
            facts = {**_torch.facts_of(target), "is_leaf": is_leaf, "is_mixed": is_mixed, "is_written": is_written}
            if stack not in self._own:
                facts["is_array"] = is_array
                self._own[stack] = op, {**facts, "lent": self._lent_at(storage), "memory": storage}
            if op == "copy_":
                self._own[stack][1]["is_backup"] = not given[1].requires_grad
                writes = reversed(logged_writes(self._core))
                others_of_it = (raw for raw in writes if raw.storage == storage and raw.stack is not stack)
                self._before[stack] = next(others_of_it, None)
            if given[0] is given[1]:
                self._twice[stack].add(id(target))
        else:
            self._other.add(stack)
            self._own.pop(stack, None)

    def looks(self, entry: RawBackward, is_last: bool) -> None:
        """Report the lines of the round when it is over."""
        self._report_filled(entry)
        for stack in [one for one in self._computed if is_last and one not in self._described]:
            self._described.add(stack)
            frame = (site := symbolise(stack)).user_frame
            dropped = None if frame is None else source.dropped_update(frame, not self._computed[stack]["is_leaf"])
            if frame is not None and dropped is not None and (frame.file, frame.line) not in self._described:
                self._described.add((frame.file, frame.line))
                name, held = dropped[0], dropped[1] or source.walked_over(frame, dropped[0])[0]
                clue = Clue("written", site, name=name, op=held, values=self._computed[stack])
                self._found(Failure(DROPPED, "", "", symbolise(entry.stack), (clue,), raised=False))
        due = [one for one in self._own if is_last and one not in self._described]
        if due:
            from gradsan.detect.one_tensor.own_pairs import compared, is_meant
        # An update with a difference is more telling than the difference.
        for stack in sorted(due, key=lambda one: self._own[one][0] in _COMPARES):
            self._described.add(stack)
            op, facts = self._own[stack]
            site = symbolise(stack)
            if (frame := site.user_frame) is None:
                continue
            row = DIFFERENCE if op in _COMPARES else OWN
            if row == DIFFERENCE:
                pair = compared(frame, facts, len(self._twice[stack]))
            else:
                pair = source.mixed_operand(frame, op) if facts["is_mixed"] else source.target_and_operand(frame, op)
                pair = pair or source.own_difference(frame, op)
            is_known = row == DIFFERENCE and any(reads_at(one, frame) for one in self._known)
            before = self._before.get(stack)
            if pair is not None and is_meant(site, pair, op, before):
                continue
            # A line that computes with the same two the other way round has the same cause.
            if pair and not is_known and (at := (frame.file, frame.function, frozenset(pair))) not in self._described:
                self._described.add(at)
                self._tell(row, site, op, facts, pair, symbolise(entry.stack))

    def _note_filled(self, given: list[Any]) -> None:
        """Note a comparison of a value with memory that this round has filled with that very value."""
        kept = [one for one in given if not one.requires_grad]
        if len(kept) != 1 or given[0].shape != given[1].shape or self._entry is None or _torch.is_transformed():
            return
        stack = self._core.stack(_LISTENER_FRAMES + 1)
        if stack in self._filled_now or len(self._filled_now) > _STACKS:
            return
        from gradsan.detect.one_tensor.overwritten_names import fills

        other = given[0] if kept[0] is given[1] else given[1]
        self._filled_now[stack] = fills(self._core, self._entry.clock, kept[0], other), _torch.facts_of(kept[0])

    def _report_filled(self, entry: RawBackward) -> None:
        """Report such comparisons of two rounds, if the source shows that an older value was meant."""
        for stack, (write, facts) in self._filled_now.items():
            is_again = self._filled.get(stack, False) and write is not None
            self._filled[stack] = write is not None
            if is_again and write is not None and ("filled", stack) not in self._described:
                from gradsan.detect.one_tensor import overwritten_names

                self._described.add(("filled", stack))
                if (clues := overwritten_names.clues(stack, write, facts)) is not None:
                    self._report_at(overwritten_names.ROW, entry.stack, *clues)
        self._filled_now.clear()

    def _lent_at(self, storage: int) -> Any:
        """The stack at which a tensor was given that memory, and another had it before; None where none was."""
        given = [(one.tensor(), one.stack) for one in self._uncounted.replaced.values() if one.stack in self._lending]
        return next((at for held, at in given if held is not None and _torch.storage_or_none(held) == storage), None)

    def _last_changed(self, storage: int) -> tuple[Clue, ...]:
        """Return the last step of an optimizer, or else the last write, that has changed some memory in this run."""
        moves = (one for one in reversed(self._steps.steps) if one.before != one.after and storage in one.storages)
        step = next(moves, None)
        if step is not None:
            return (Clue("changed", symbolise(step.stack), op=f"{step.optimizer}.step"),)
        write = next((one for one in reversed(logged_writes(self._core)) if one.storage == storage), None)
        return () if write is None else (Clue("changed", symbolise(write.stack), op=write.op),)

    def _is_written(self, storage: int, stack: RawStack) -> bool:
        """Whether what the line at ``stack`` has called has written some memory in this round."""
        own = next((code for code in stack.codes if is_user_file(code.co_filename)), None)
        raws = logged_writes(self._core, 0 if self._entry is None else self._entry.clock)
        stacks = (raw.stack for raw in raws if raw.storage == storage and is_of_program(raw.stack))
        return any(own in one.codes[1:] for one in stacks)

    def _note_behind(self, args: tuple[Any, ...]) -> None:
        """Note tensors that share another's memory and are read after a step has updated it."""
        for tensor in _torch.tensors_in(args):
            given, is_shared = self._uncounted.replacement_of(tensor), self._shared.get(id(tensor)) is tensor
            if (given is not None or is_shared) and self._behind.get(id(tensor)) is not tensor:
                since = max(0 if given is None else given.clock, self._given.get(id(tensor), 0))
                if self._is_stepped(tensor, since):
                    self._behind.set(id(tensor), tensor)

    def _is_stepped(self, tensor: torch.Tensor, clock: int) -> bool:
        """Whether an optimizer that has another tensor of that memory, and not this one, has updated it since."""
        storage, steps = _torch.storage_or_none(tensor), (one for one in self._steps.steps if one.clock > clock)
        stepped = {one.identity for one in steps if one.before != one.after and storage in one.storages}
        held = _torch.parameters_of(*(one for one, _ in self._making.optimizers() if id(one) in stepped))
        return bool(held) and not any(one is tensor for one in held)

    @_torch.hushed()
    def replaced_by(self, tensor: torch.Tensor, given: Any, before: Any, stack: RawStack) -> None:
        """Note whether ``average.data = 0.9 * average.data + 0.1 * weight.data`` mixes one memory with itself.

        Lines may compute with themselves after ``p.data = average``, and have not before: they are judged anew.
        """
        if self._other and stack not in self._lending and is_of_program(stack):
            self._lending.add(stack)
            frame = symbolise(stack).user_frame
            if frame is not None and source.assigned_data(frame) is not None:
                self._awaited = self._lent = {one for one in self._other if is_of_program(one)}
                self._other.clear()
                self.begin_here()
        if self._entry is None or stack in self._other:
            return
        if before is not None and self._mixes.is_of_one(given, before[0]):
            facts = {**_torch.facts_of(tensor), "is_leaf": True, "is_mixed": True}
            self._own.setdefault(stack, ("data =", facts))
        else:
            self._other.add(stack)
            self._own.pop(stack, None)

    def shares(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that a module has these tensors' memory from another."""
        for tensor in tensors:
            self._shared.set(id(tensor), tensor)
            self._given[id(tensor)] = self._core.clock

    def has_read(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of them was read after a step had updated its memory by another tensor."""
        return any(self._behind.get(id(one)) is one for one in tensors)

    @_torch.hushed()
    def data_read(self, tensor: torch.Tensor) -> None:
        """Note the version of a leaf whose ``.data`` is read; as ``Uncounted.on_data_read``."""
        if self._behind.get(id(tensor)) is tensor:
            self.state_taken()
        if _torch.is_trainable_leaf(tensor):
            known = self._data_read.get(id(tensor))
            weak = known[0] if known is not None and known[0]() is tensor else _torch.weak_tensor(tensor)
            self._data_read[id(tensor)] = weak, int(tensor._version)

    @_torch.hushed()
    def given_again(self, tensor: torch.Tensor, given: Any, stack: RawStack) -> None:
        """Handle a line that gives a tensor the memory it has; as ``Uncounted.on_given_again``.

        ``target.data = network.data`` is no copy. Repeating it after having read the target assumes two
        different tensors; so does copying one into the other, which is checked from here on. ``p.data = before``
        restores nothing where ``before`` is ``p.data`` of the time before a write.
        """
        self._given[id(tensor)] = self._core.clock
        replaced = self._uncounted.replacement_of(tensor)
        is_restored = self._is_restored(tensor, given) and is_of_program(stack)
        # If it is trained, too, the two are tied on purpose.
        is_read = replaced is not None and self._behind.get(id(tensor)) is tensor
        if not (is_read and tensor.grad is None) and not is_restored:
            return
        site, first = symbolise(stack), None if replaced is None else symbolise(replaced.stack).user_frame
        frame = site.user_frame
        if frame is None or not (is_restored or (first and (frame.file, frame.line) == (first.file, first.line))):
            return
        pair = source.assigned_data(frame)
        if pair is not None and (frame.file, frame.line) not in self._described:
            self._described.add((frame.file, frame.line))
            facts = {**_torch.facts_of(tensor), "is_restored": is_restored}
            self._tell(OWN, site, "data =", facts, pair, site)

    def _is_restored(self, tensor: torch.Tensor, given: Any) -> bool:
        """Whether ``given`` is ``tensor.data``, read before the tensor was written, and never written by itself."""
        known = self._data_read.get(id(tensor))
        is_old = known is not None and known[0]() is tensor and known[1] < int(tensor._version)
        return is_old and int(given._version) == 0 and not given._is_view() and not tensor._is_view()

    def _tell(self, row: str, site: Site, op: str, facts: dict[str, Any], pair: tuple[str, str], used: Site) -> None:
        frame = site.user_frame
        (written, of_module), (read, of_other) = (
            source.walked_over(frame, one) if frame else (one, False) for one in pair
        )
        # ``average = deepcopy(net) if args.average else net`` is the same on purpose.
        if frame is not None and (source.is_bound_by_choice(frame, written) or source.is_bound_by_choice(frame, read)):
            return
        # A list of the program's own was meant to hold copies, a module's result was not.
        is_read_kept = row == DIFFERENCE or facts.get("is_restored") or (of_module and not of_other)
        if facts.pop("is_backup", False) and frame is not None:
            from gradsan.detect.one_tensor.own_pairs import restores

            is_read_kept = is_read_kept or restores(frame, facts["is_leaf"])
        lent, memory = facts.pop("lent", None), facts.pop("memory", 0)
        changed = self._last_changed(memory) if memory and row == DIFFERENCE else ()
        facts = {**facts, "kept": read if is_read_kept else written}
        # ``p`` and ``a`` say less than their sources; for ``p.grad`` these are not available.
        is_known = written != read and written != pair[0] and read != pair[1]
        pair = (written, read) if is_known else pair
        given = () if lent is None else (Clue("given", symbolise(lent)),)
        clues = (
            Clue("written", site, name=pair[0], op=op, values=facts),
            Clue("read", site, name=pair[1]),
            *given,
            *changed,
        )
        self._found(Failure(row, "", "", used, clues, raised=False))


class Mixes:
    """Results of a round computed from one memory alone, by sums and factors: ``0.1 * weight`` from ``weight``."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[_torch.weak_tensor, int, bool]] = {}
        self._nothing: dict[int, _torch.weak_tensor] = {}
        self._scaled: set[int] = set()

    def forget(self) -> None:
        """Forget all results."""
        self._made.clear()
        self._nothing.clear()
        self._scaled.clear()

    def computed(self, op: str, args: tuple[Any, ...], result: Any) -> bool:
        """Note a result; return whether an update mixed a tensor with its own memory under another name."""
        tensors = [one for one in args if type(one) in _torch.PLAIN_TENSORS]
        if not tensors:
            return False
        if op in _SCALES:
            self._scaled.add(_torch.storage_or_none(tensors[0]))
            return False
        if op in _TAKES_OPERAND:
            made = self._made.get(id(tensors[-1]))
            own = _torch.storage_or_none(tensors[0])
            is_own = made is not None and made[0]() is tensors[-1] and made[1] == own
            # The mix is copied, or the target was scaled before the rest was added to it, or the mix is zero.
            is_rest = own in self._scaled or self._is_nothing(tensors[-1])
            return is_own and (bool(made and made[2]) if op == "copy_" else is_rest)
        is_mix = op.strip("_").removeprefix("r") in _MIXES and type(result) in _torch.PLAIN_TENSORS
        if is_mix and len(self._made) >= _STACKS:
            self._made = {key: one for key, one in self._made.items() if one[0]() is not None}
        if is_mix and len(self._made) < _STACKS:
            origins = set(map(self._origin, tensors))
            if len(origins) == 1 and _torch.storage_or_none(result) not in origins:
                self._made[id(result)] = _torch.weak_tensor(result), origins.pop(), len(tensors) > 1
                if self._is_nothing(tensors[0]) or _is_of_itself(op, tensors):
                    self._nothing[id(result)] = _torch.weak_tensor(result)
        return False

    def is_of_one(self, tensor: torch.Tensor, storage: int) -> bool:
        """Whether a result was mixed from several tensors over that memory alone."""
        made = self._made.get(id(tensor))
        return made is not None and made[0]() is tensor and made[1] == storage and made[2]

    def _is_nothing(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a multiple of the difference of one memory with itself."""
        return self._nothing.get(id(tensor), lambda: None)() is tensor

    def _origin(self, tensor: torch.Tensor) -> int:
        """Return the memory that a tensor was mixed from, or its own."""
        made = self._made.get(id(tensor))
        return made[1] if made is not None and made[0]() is tensor else _torch.storage_or_none(tensor)


def _is_of_itself(op: str, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether this is the difference of two tensor objects with the same elements."""
    is_difference = op.strip("_").removeprefix("r") == "sub" and len(tensors) == 2 and tensors[0] is not tensors[1]
    return is_difference and len({_torch.weak_identity(one)[::2] for one in tensors}) == 1
