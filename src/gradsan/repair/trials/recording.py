"""Recording of a run in the child: gradients at every step and backward, losses, parameters."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from gradsan import _torch
from gradsan.graph.variables import Scope, Space, spaces_of
from gradsan.record.recorder import unwatched
from gradsan.record.steps import RawBackward
from gradsan.repair.trials.calls import RepeatedCalls
from gradsan.repair.trials.state import Draws, LeftOver, lasting, random_states, tensors_of, value_of, values_of
from gradsan.repair.trials.trial import Gradients, Moment, Parameters, Recording, Request

_NUMBERS_KEPT = 200_000
"""Elements kept per gradient; of larger ones evenly spaced elements are kept beside the norm."""

_NUMBERS_LOOKED_AT = 64
"""Elements of a leaf that identify it in the other run."""

_BYTES_KEPT = 512 * 1024 * 1024
_MOST_MOMENTS = 24
_SHARE_OF_TIME = 0.2
"""Share of a run's time for reading its variables, beside ``_FREE_SECONDS`` in any case."""
_FREE_SECONDS = 0.3
ROUNDS = 3
"""Steps of every optimizer after which a training may be compared."""
_ROUNDS_PAST = 2
"""Of these, those after the place where the program failed: the round that it is in, and a whole one."""
_BACKWARDS_A_ROUND = 8
"""Largest number of backwards in a round where a program has no optimizer."""
_SAVED = 64
_COARSENESS = {"float64": 1, "float32": 2, "float16": 3, "bfloat16": 4}


class EnoughSteps(SystemExit):
    """End of the program after the requested number of steps."""


class Recorder:
    """Recorder of optimizer steps and backward calls."""

    def __init__(self, request: Request) -> None:
        """Set the program to end where ``request`` allows it."""
        self._limit = request.steps
        self._past, self._enough_seconds = request.past, request.enough_seconds
        self._until = request.until
        self._compiling = request.compiling
        self.names: dict[str, tuple[str, ...]] = {}
        """Names of parameters, by the key of their optimizer or a leaf's label, where compiled code is compared."""
        self._named: dict[int, str] = {}
        self._began = time.perf_counter()
        self._looked_for = 0.0
        self._was_ended = False
        self._bytes = 0
        self._steps: list[Gradients] = []
        self._parameters: list[Parameters] = []
        self._made: Counter[str] = Counter()
        self._made_before: Counter[str] = Counter()
        self._moments: list[Moment] = []
        self._ordinals: Counter[tuple[tuple[str, int], ...]] = Counter()
        self._backwards: list[Gradients] = []
        self._returned: list[Gradients] = []
        self._returns = False
        self._losses: list[float] = []
        self._begun: list[float] = []
        self._begun_count = 0
        self._labels: Any = WeakIdKeyDictionary()
        self._numbers: dict[str, int] = {}
        self._ends_with_backward = False
        self._left_over = LeftOver()
        self._draws = Draws()
        self._calls = RepeatedCalls() if request.hears_calls else None
        self._dtype = ""
        self._held: list[tuple[str, Any, int]] = []
        self._lasting: list[Space] = []
        self._added_to: list[tuple[str, Any]] = []
        self._overwritten: set[str] = set()
        self._saved: list[str] = []

    def start(self) -> None:
        """Start observing optimizers and random draws."""
        self._left_over.start()
        self._draws.start()
        if self._calls is not None:
            self._calls.start()
        torch.save = self._saving(torch.save)
        if self._compiling is None:
            torch.autograd.grad = self._returning(torch.autograd.grad)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def recording(self, finished: bool, exception: tuple[str, str] | None) -> Recording:
        """The recording so far."""
        # A program ended by the limit would go on, and not from the same position in every candidate.
        undecided: list[Gradients] = []
        for key, gradients in [] if self._was_ended else self._left_over.undecided():
            self._keep(undecided, key, gradients)
        return Recording(
            tuple(self._steps),
            # A program that never accumulates has only the gradients that it asked for.
            tuple(self._backwards or self._returned),
            tuple(self._losses),
            tuple(self._begun),
            finished or self._was_ended,
            exception,
            self._bytes >= _BYTES_KEPT,
            self._backwards[-1] if self._backwards and self._ends_with_backward else None,
            tuple(undecided),
            self._was_ended,
            self._dtype or "float32",
            tuple(self._parameters),
            tuple(self._moments),
            frozenset(self._overwritten),
            0 if self._calls is None else self._calls.count,
            0 if self._calls is None else self._calls.rounds,
            " ".join(self._saved),
            self._left_over.unused(),
        )

    def _saving(self, save: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(save)
        def saving(value: Any, *args: Any, **kwargs: Any) -> None:
            with unwatched():
                values = map(value_of, _torch.tensors_in(value, most=_SAVED))
                self._saved += [f"{sum(array('d', one.sums)):.6e}" for one in values if one is not None]
            save(value, *args, **kwargs)

        return saving

    def _returning(self, grad: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(grad)
        def returning(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._returns = False
            gradients = grad(outputs, inputs, *args, **kwargs)
            if self._returns and not self._backwards and not _torch.is_transformed():
                self._returns = False  # under a mode, PyTorch calls this function from within it
                asked = [inputs] if torch.is_tensor(inputs) else list(inputs)
                if all(map(torch.is_tensor, asked)):
                    self._keep(self._returned, "grad", list(gradients), self._labels_of(asked))
            return gradients

        return returning

    def look_at_end(self, main: Any) -> None:
        """Record the variables of the module ``main`` when the program has reached its end."""
        module = Space(Scope(vars(main).get("__file__") or "<string>", "<module>"), dict(vars(main)), frozenset())
        # Functions have ended, but the values of their variables may have changed after the last look.
        self._look([module, *(one for one in self._lasting if one.scope.function != "<module>")], is_end=True)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            # Those of a compiled step, which is a part of a graph.
            return
        if self._compiling is not None and self._made[_key(_parameters(optimizer))] >= self._compiling.rounds > 0:
            self._end()
        if not _has_closure(args, kwargs):
            self._keep_step(optimizer)
        else:
            self._left_over.open_closures += 1

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if _has_closure(args, kwargs):
            self._left_over.open_closures -= 1
            # The gradients are those computed by the closure's last call.
            self._keep_step(optimizer)
        parameters = _parameters(optimizer)
        key = _key(parameters)
        with unwatched():
            values = [value_of(one) for one in parameters]
        self._parameters.append(Parameters(key, tuple(one for one in values if one is not None)))
        self._made[key] += 1
        if self._calls is not None:
            self._calls.step()
        self._ends_with_backward = False
        if self._is_enough():
            self._end()

    def _end(self) -> None:
        self._was_ended = True
        raise EnoughSteps(0)

    def _is_over(self) -> bool:
        """Whether a comparison of compiled code has seen its rounds when one more backward is about to begin."""
        wanted = self._compiling
        if wanted is None or not wanted.rounds:
            return False
        many = self._made.values()
        # A compiler that traces a backward also begins one, of a loss without a value.
        begun = len(self._begun)
        rounds = min(many) if many else begun // _BACKWARDS_A_ROUND
        return rounds >= wanted.rounds or 0 < wanted.backwards <= begun

    def _is_enough(self) -> bool:
        if self._compiling is not None and self._compiling.rounds:
            # There may be another optimizer that has not stepped yet.
            return min(self._made.values()) >= self._compiling.rounds and self._made.total() > 1
        if self._limit and self._made.total() >= self._limit:
            return True
        if self._until and all(self._made[key] >= many for key, many in self._until):
            return True
        if not self._enough_seconds or time.perf_counter() - self._began < self._enough_seconds:
            return False
        since = [self._made[key] - self._made_before[key] for key in self._made]
        return self._begun_count > self._past and min(since) >= _ROUNDS_PAST and min(self._made.values()) >= ROUNDS

    def _keep_step(self, optimizer: Optimizer) -> None:
        parameters = _parameters(optimizer)
        key = _key(parameters)
        grads = [p.grad for p in parameters]
        if self._compiling is not None:
            self.names.setdefault(key, self._names_of(parameters))
        self._keep(self._steps, key, grads)
        # A gradient that is released after accumulation is not lost.
        stepped = {id(grad) for grad in grads}
        self._overwritten.update(name for name, one in self._added_to if id(one) in stepped)
        self._added_to.clear()
        self._left_over.step(optimizer, key)

    def before_backward(self, entry: RawBackward, *_: Any) -> None:
        """Hook for the entry of every backward that begins."""
        if torch.compiler.is_compiling():
            # Traced, not run; reads of its tensors would become part of the graph.
            return
        if self._is_over():
            self._end()
        self._begun.extend(_scalars(entry.outputs))
        self._begun_count += 1
        if self._begun_count == self._past:
            self._made_before = Counter(self._made)
        # Called from gradsan, which the program called.
        spaces = spaces_of(sys._getframe(1))
        if self._compiling is not None:
            self._name(spaces)
        self._look(spaces)
        if entry.accumulates:
            self._hold_gradients(spaces, entry.outputs)

    def after_backward(self, entry: RawBackward) -> None:
        """Hook for the entry of every backward that ended."""
        if torch.compiler.is_compiling():
            return
        outputs, accumulates = entry.outputs, entry.accumulates
        self._returns = not accumulates
        self._losses.extend(_scalars(outputs))
        if accumulates:
            leaves = _leaves(outputs)
            self._left_over.backward(leaves)
            self._ends_with_backward = True
            labels = self._labels_of(leaves)
            if self._compiling is not None:
                self.names.update((label, (name,)) for label, name in zip(labels, self._names_of(leaves), strict=True))
            self._keep(self._backwards, "backward", [leaf.grad for leaf in leaves], labels)
            self._added_to += [(name, one) for name, one, version in self._held if one._version != version]
        self._held.clear()

    def _name(self, spaces: list[Space]) -> None:
        if not self._named or self._begun_count <= ROUNDS:
            for name, one in tensors_of(spaces):
                if one.is_leaf and one.requires_grad:
                    self._named.setdefault(id(one), name.partition(": ")[2].replace("._orig_mod", ""))

    def _names_of(self, leaves: list[torch.Tensor]) -> tuple[str, ...]:
        return tuple(self._named.get(id(one), f"{tuple(one.shape)}") for one in leaves)

    def _hold_gradients(self, spaces: list[Space], outputs: Any) -> None:
        """Note the gradients that the program holds by a name of its own while a backward may accumulate into them."""
        grads = {id(leaf.grad) for leaf in _leaves(outputs) if leaf.grad is not None}
        if grads and self._has_time():
            self._held = [(name, one, one._version) for name, one in tensors_of(spaces) if id(one) in grads]

    def _look(self, spaces: list[Space], *, is_end: bool = False) -> None:
        """Record the values of the program's variables now."""
        steps = tuple(sorted(self._made.items()))
        ordinal = self._ordinals[steps]
        self._ordinals[steps] += 1
        # Later backwards of a round are not compared where steps delimit the rounds.
        is_wanted = is_end or (len(self._moments) < _MOST_MOMENTS and not (steps and ordinal))
        # Also without time for their values: at the end, those of an earlier call would be another round's.
        self._lasting = lasting(spaces)
        if is_wanted and (is_end or self._has_time()):
            began = time.perf_counter()
            with unwatched():
                values, passing = values_of(spaces)
                states = random_states()
            drawn = self._draws.counts()
            self._moments.append(Moment(steps, ordinal, values, passing, states, drawn, is_end, self._begun_count))
            self._looked_for += time.perf_counter() - began

    def _has_time(self) -> bool:
        elapsed = time.perf_counter() - self._began
        return self._looked_for < _FREE_SECONDS + _SHARE_OF_TIME * elapsed or self._made.total() <= ROUNDS

    def _keep(self, records: list[Gradients], key: str, gradients: list[Any], labels: tuple[str, ...] = ()) -> None:
        if self._bytes < _BYTES_KEPT:
            with unwatched():
                values = tuple(_numbers(gradient) for gradient in gradients)
            for one in gradients:
                name = "" if one is None else str(one.dtype).removeprefix("torch.")
                if _COARSENESS.get(name, 0) > _COARSENESS.get(self._dtype, 0):
                    self._dtype = name
            self._bytes += sum(len(value[1]) for value in values if value is not None)
            records.append(Gradients(key, values, labels))

    def _labels_of(self, leaves: list[torch.Tensor]) -> tuple[str, ...]:
        """The label of each leaf: its shape and its first recorded values, whatever the order of the graph."""
        for leaf in leaves:
            if leaf not in self._labels:
                look = _look(leaf)
                self._numbers[look] = self._numbers.get(look, 0) + 1
                self._labels[leaf] = f"{look} {self._numbers[look]}"
        return tuple(self._labels[leaf] for leaf in leaves)


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _key(parameters: list[torch.Tensor]) -> str:
    return "step " + ";".join("x".join(map(str, p.shape)) for p in parameters)


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # The optimizer itself is the first of the arguments.
    given = args[1] if len(args) > 1 else kwargs.get("closure")
    return given is not None


def _scalars(outputs: Any) -> list[float]:
    found: list[float] = []
    for output in outputs:
        if torch.is_tensor(output) and output.numel() == 1:
            with contextlib.suppress(RuntimeError):
                found.append(float(output.detach()))
    return found


def _numbers(gradient: Any) -> tuple[tuple[int, ...], bytes, float] | None:
    if gradient is None:
        return None
    with torch.no_grad():
        own = _own_part(gradient.detach())
        dense = own.to_dense() if own.layout is not torch.strided else own
        flat = torch.view_as_real(dense.resolve_conj()).reshape(-1) if dense.is_complex() else dense.reshape(-1)
        flat = flat.to("cpu", torch.float64)
        norm = float(torch.linalg.vector_norm(flat)) if flat.numel() else 0.0
        kept = flat[:: math.ceil(flat.numel() / _NUMBERS_KEPT)] if flat.numel() > _NUMBERS_KEPT else flat
        return tuple(gradient.shape), bytes(kept.contiguous().numpy().tobytes()), norm


def _own_part(tensor: torch.Tensor) -> Any:
    """This process's part of a distributed tensor; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _look(leaf: torch.Tensor) -> str:
    numbers: list[Any] = []
    # A parameter gathered from its shards has no memory while its module does not run.
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        own = _own_part(leaf.detach())
        flat = own.reshape(-1) if own.layout is torch.strided else own.to_dense().reshape(-1)
        numbers = flat[:: max(1, flat.numel() // _NUMBERS_LOOKED_AT)].tolist()
    return f"{tuple(leaf.shape)} {leaf.dtype} {zlib.crc32(repr(numbers).encode())}"


def _leaves(outputs: Any) -> list[Any]:
    """The leaves that a backward reaches, in an order that the structure of the graph determines."""
    seen: set[Any] = set()
    found: list[Any] = []
    stack = [node for output in reversed(outputs) if (node := getattr(output, "grad_fn", None)) is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if torch.is_tensor(leaf):
            found.append(leaf)
        stack.extend(child for child, _ in reversed(node.next_functions) if child is not None)
    return found
