"""Penalties on parameters that are computed without their graph: ``loss = task + 1e-4 * sum(p.data.abs().sum() ...)``.

Values that calls compute from parameters alone, unrecorded, are followed in some rounds. Such a value is a penalty if
it is added to a one-element value with a graph, and only sums and constant factors lie between there and the loss. A
value computed from data, too, is a measurement: the loss of a network that is only monitored. Copies that are detached
again, and bounds such as the maximum of log-sum-exp, are constants on purpose.

A penalty is on parameters that the loss trains: a multiplier that another loss trains is a constant of this one. Where
the program writes the parameters itself, a step of its own replaces the gradient, as in soft thresholding. Before the
first backward those leaves count as parameters that an operation has read until then; a penalty found there is
reported at the end, if no later round was followed, and nothing has written its parameters since.

Beside them :class:`DataReads` follows, before the first backward, whatever shares memory with other tensors without
having a graph: ``p.data``. Whose memory it was is asked later, of a parameter that has got no gradient.

Row: ``penalty_is_constant``. Roles: ``read`` (where a parameter's values were read; ``values``: ``shape``, ``dtype``,
``device`` of the term, ``is_decayed``, whether the optimizer was given a weight decay for it), ``added`` (where the
term was added to the loss).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from gradsan import _torch
from gradsan.detect.meaning.rounds import RoundDetector
from gradsan.detect.meaning.terms.constant_terms import LISTED, SUMS, Terms, made_of, sums_below
from gradsan.detect.memory import Uncounted
from gradsan.graph import walk
from gradsan.model import Clue
from gradsan.record.detector import Run
from gradsan.record.ledger import Noted
from gradsan.record.log import RawStack, logged_writes
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward, read_backward

ROW = "penalty_is_constant"
_TENSORS_FOLLOWED = 1_024
_ON_PURPOSE = frozenset(
    {"detach", "detach_", "max", "amax", "min", "amin", "logsumexp", "clone", "copy_", "zeros_like"}
)
_BY_ELEMENT = frozenset(
    {"add", "sub", "rsub", "mul", "div", "true_divide", "where", "pow", "dist", "mse_loss", "l1_loss"}
)
"""Operations that combine parameters with values of their own shape: earlier ones, weights, masks."""


class _Origin(NamedTuple):
    """A read of parameters: its stack, and weak references to them."""

    stack: RawStack
    parameters: tuple[Any, ...]


class _Joined(NamedTuple):
    number: int | None
    read: _Origin
    added: Clue
    facts: dict[str, Any]


class DataReads(RoundDetector):
    """Notes where memory that other tensors hold is read without a graph, into results that have one."""

    from_start = True
    rounds = ()

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._read = self._notes(dict[int, tuple[_torch.weak_storage, RawStack]]())
        self._made = dict[int, tuple[_torch.weak_tensor, dict[int, tuple[_torch.weak_storage, RawStack]]]]()

    def of(self, tensor: torch.Tensor) -> RawStack | None:
        """Return the first such read of a tensor's memory."""
        known = self._read.get(_torch.storage_or_none(tensor))
        return None if known is None else known[1]

    def begins(self, entry: RawBackward) -> bool:
        """Drop what was followed before."""
        self._made.clear()
        return True

    def result(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Follow such values to the results of calls."""
        if not _torch.is_grad_enabled() or len(self._read) + len(self._made) >= _TENSORS_FOLLOWED:
            return
        read = {key: one for tensor in _torch.tensors_of_call(args, kwargs) for key, one in self._of(tensor).items()}
        for made in _torch.tensors_in(result) if read else ():
            if made.requires_grad:
                for key, one in read.items():
                    self._read.setdefault(key, one)
            elif made.is_floating_point() and op not in _ON_PURPOSE:
                self._made[id(made)] = _torch.weak_tensor(made), read

    def _of(self, tensor: torch.Tensor) -> dict[int, tuple[_torch.weak_storage, RawStack]]:
        if tensor.requires_grad or not tensor.is_floating_point():
            return {}
        weak, read = self._made.get(id(tensor), (None, {}))
        if weak is not None and weak() is tensor:
            return read
        storage = _torch.storage_or_none(tensor)
        if not storage or storage in self._read or not _torch.shares_memory(tensor):
            return {}
        return {storage: (_torch.weak_storage(tensor.untyped_storage()), self._core.stack())}


class ConstantPenalties(RoundDetector):
    """Follows values of parameters in some rounds; ``optimizers`` returns those that have stepped."""

    from_start = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._optimizers, self._steps = run.stepped_optimizers, run.steps
        self._parameters: dict[int, Any] = {}
        self._held: dict[int, tuple[Any, Any]] = {}
        self._joined: list[_Joined] = []
        self._begun = 0
        self._terms = Terms(self._notes({}))
        self._early = self._notes(list[tuple[Noted, RawBackward, _Joined]]())
        # By the end of the watching, the parameters of a function that has returned are gone.
        run.get(Uncounted).on_replaced.append(lambda *_: self._drop_written())

    def begins(self, entry: RawBackward) -> bool:
        """Note the trained parameters."""
        self._held.clear()
        self._joined.clear()
        self._terms.clear()
        self._begun = entry.clock
        if entry.stack is None:
            self._parameters = {}
            return True
        held = _torch.parameters_of(*self._optimizers())
        self._parameters = {
            _torch.storage_or_none(one): _torch.weak_tensor(one)
            for one in held
            if one.requires_grad and one.numel() > 1
        }
        self._parameters.pop(0, None)
        return bool(self._parameters)

    def result(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Follow values computed from parameters."""
        given = _torch.tensors_of_call(args, kwargs)
        # Writes that initialise a parameter come before it is read.
        if self.is_before_first_backward and (op.endswith("__") or not op.endswith("_")):
            self._begun = self._core.clock if self._add_leaves(given) else self._begun
        for made, sources in made_of(op, given, result):
            found = ((origin, tensor) for tensor in sources if (origin := self._origin(tensor)) is not None)
            origin, read = next(found, (None, None))
            if made.requires_grad:
                node = _torch.grad_fn_of(made)
                name = "" if node is None else node.name()
                if origin is not None and name in SUMS and (made.numel() == 1 or name in LISTED):
                    facts = {**_torch.facts_of(made), "shape": ()}
                    stack = self._core.stack()
                    named = self._terms.name(stack, read if len(sources) > 1 else None, sys._getframe(1))
                    added = Clue("added", symbolise(stack), name=named, values=facts)
                    self._joined.append(_Joined(_torch.node_sequence(node), origin, added, facts))
            elif made.is_floating_point() and op not in _ON_PURPOSE and len(self._held) < _TENSORS_FOLLOWED:
                self._hold(op, made, origin, sources)
                self._terms.note(op, made, read)

    def _add_leaves(self, given: list[Any]) -> bool:
        """Note the leaves that a call reads; whether there was a new one."""
        fresh = {
            _torch.storage_or_none(one): _torch.weak_tensor(one)
            for one in given
            if isinstance(one, torch.nn.Parameter) and one.requires_grad and one.numel() > 1
        }
        fresh = {key: weak for key, weak in fresh.items() if key and key not in self._parameters}
        self._parameters.update(fresh)
        return bool(fresh)

    def _origin(self, tensor: Any) -> Any:
        known = self._held.get(id(tensor))
        # A tensor returned by the forward of a custom Function gets its graph afterwards.
        return known[1] if known is not None and known[0]() is tensor and _torch.grad_fn_of(tensor) is None else None

    def _hold(self, op: str, made: Any, origin: Any, given: list[Any]) -> None:
        read = [one for one in given if self._is_parameter(one)]
        # A view of a parameter counts once something is computed from it.
        if origin is None and (not read or self._is_parameter(made)):
            return
        own = [*read, *(one for one in given if self._origin(one) is not None)]
        shapes = {tuple(one.shape) for one in own} if op.strip("_") in _BY_ELEMENT else set()
        # One number that is no loss or other value of the data may be a factor.
        others = [one for one in given if one.numel() != 1 or one.grad_fn is not None]
        if all(tuple(one.shape) in shapes or any(one is other for other in own) for one in others):
            if origin is None:
                weak = (self._parameters.get(_torch.storage_or_none(one)) for one in read)
                origin = _Origin(self._core.stack(), tuple(one for one in weak if one is not None))
            self._held[id(made)] = (_torch.weak_tensor(made), origin)
        else:
            self._held.pop(id(made), None)

    def _is_parameter(self, tensor: Any) -> bool:
        weak = self._parameters.get(_torch.storage_or_none(tensor))
        return weak is not None and weak() is not None

    def looks(self, entry: RawBackward, is_last: bool) -> None:
        """Check whether a penalty has been added to this loss."""
        if not self.is_before_first_backward:
            self._early.clear()
        if not self._joined or entry.stack in self._described:
            return
        roots = read_backward(entry).roots
        sums = set(sums_below(roots))
        found = next((one for one in self._joined if one.number in sums), None)
        if found is not None and self._is_meant_for(walk.leaves_of(walk.engine_order(roots)), found.read):
            if self.is_before_first_backward:
                own = [one for weak in found.read.parameters if (one := weak()) is not None]
                self._early.append((Noted(self._core, own), entry._replace(outputs=()), found))
            else:
                self._report(entry, found)

    def _report(self, entry: RawBackward, found: _Joined) -> None:
        self._described.add(entry.stack)
        values = {**found.facts, "is_decayed": self._is_decayed(found.read)}
        self._report_at(
            ROW,
            entry.stack,
            Clue("read", symbolise(found.read.stack), values=values),
            found.added,
        )

    def settle(self) -> None:
        """Report what the only round has shown."""
        super().settle()
        self._drop_written()
        for noted, entry, found in self._early:
            if not noted.was_logged(self._core, self._steps, entry.clock) and entry.stack not in self._described:
                self._report(entry, found)
        self._early.clear()

    def _drop_written(self) -> None:
        self._early[:] = [one for one in self._early if not one[0].was_written()]

    def _is_meant_for(self, leaves: Iterable[Any], read: _Origin) -> bool:
        """Whether the loss trains the parameters that were read, and the program writes none of them itself."""
        reached = set(map(id, leaves))
        own = [one for weak in read.parameters if (one := weak()) is not None and id(one) in reached]
        storages = set(map(_torch.storage_or_none, own))
        raws = logged_writes(self._core, self._begun)
        return bool(own) and not any(
            raw.storage in storages and raw.kind not in ("step", "metadata", "outside") for raw in raws
        )

    def _is_decayed(self, read: _Origin) -> bool:
        own = {id(weak()) for weak in read.parameters}
        for optimizer in self._optimizers():
            usual = inspect.signature(type(optimizer)).parameters.get("weight_decay")
            for group in optimizer.param_groups:
                decay = group.get("weight_decay", 0)
                is_given = decay and (usual is None or decay != usual.default)
                if is_given and any(id(one) in own for one in group["params"]):
                    return True
        return False
