"""State of a run: seeds, values of variables, random draws, and gradients left at its end.

A dropout's mask does not count: it is drawn again wherever a forward runs again, as everybody expects.

A backward after the only step of an optimizer leaves gradients that no step has used. Whether the next round
clears them first, a run of one round shows only if it has done so itself.

The generators of Python, NumPy and PyTorch take entropy from the system where nobody seeds them, and some programs seed
them with the time. In a trial they get numbers that are the same in the next one: the global generators at the start, a
generator that the program makes or seeds without a number at that moment; seeds that are a time or a process id
are replaced, too. Any other seed stays as it is.
"""

from __future__ import annotations

import array
import contextlib
import functools
import math
import os
import random
import sys
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from gradsan import _torch
from gradsan._imports import call_after_import
from gradsan.graph.naming import optimizers_alive
from gradsan.graph.variables import Space, reached
from gradsan.repair.trials.trial import Standing, Value
from gradsan.source.flow.rounds import of_one_round

_PARTS = 256
_MOST_ELEMENTS = 1 << 24
"""Elements of a tensor that are read; of larger ones evenly spaced elements."""
_MEASURED: tuple[type[BaseException], ...] = (RuntimeError, TypeError, ValueError)
_LARGEST_COUNT = 1 << 40
"""Largest integer taken for a count; larger ones are addresses and times."""


def lasting(spaces: Iterable[Space]) -> list[Space]:
    """``spaces`` with those variables whose values may change after this moment: objects, lists, no graphs."""
    return [one._replace(variables={k: v for k, v in one.variables.items() if _lasts(v)}) for one in spaces]


def _lasts(value: Any) -> bool:
    if torch.is_tensor(value):
        return not value.requires_grad
    return not isinstance(value, bool | int | float)


def values_of(spaces: Iterable[Space]) -> tuple[dict[str, Value], frozenset[str]]:
    """The values that ``spaces`` reach, by ``function: expression``, and the names of those that are transient.

    A transient name begins with a loop variable, or is one that every round binds before it alone reads it: it
    refers to something else in the next round. So does the gradient of a leaf that no optimizer has (0 where there is
    none): only an update by hand would read it.
    """
    trained = {id(leaf) for one in optimizers_alive() for leaf in _torch.parameters_of(one)}
    found: dict[str, Value] = {}
    passing: set[str] = set()
    spaces = list(spaces)
    bound = {space.scope: of_one_round(space.scope.file, space.line) for space in spaces if space.line}
    for one in reached(spaces):
        value = value_of(one.value)
        if value is not None:
            name = f"{one.scope.function}: {one.path}"
            found.setdefault(name, value)
            if one.passing or one.path in bound.get(one.scope, ()):
                passing.add(name)
            if value.standing == "leaf" and id(one.value) not in trained:
                gradient = value_of(0.0 if one.value.grad is None else one.value.grad)
                found.setdefault(f"{name}.grad", gradient or value)
                passing.add(f"{name}.grad")
    return found, frozenset(passing)


def tensors_of(spaces: Iterable[Space]) -> Iterator[tuple[str, Any]]:
    """The tensors that ``spaces`` reach, with their names as in :func:`values_of`."""
    for one in reached(spaces):
        if torch.is_tensor(one.value):
            yield f"{one.scope.function}: {one.path}", one.value


def value_of(thing: Any) -> Value | None:
    """``thing`` as a Value; None for anything but a tensor, array or number, or if it cannot be read."""
    if isinstance(thing, bool | int | float):
        is_address = isinstance(thing, int) and abs(thing) > _LARGEST_COUNT
        return None if is_address else _of_number(thing)
    with contextlib.suppress(*_MEASURED), _torch.hushed(), torch.no_grad():
        if torch.is_tensor(thing):
            return _of_tensor(thing)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(thing, numpy.ndarray) and thing.dtype.kind in "fiub":
            memory = int(thing.__array_interface__["data"][0])
            return _of_strided(torch.from_numpy(thing.copy()), str(thing.dtype), "plain", memory)
    return None


def random_states() -> Mapping[str, int]:
    """Checksums of the states of the global random generators."""
    found = {"random": zlib.crc32(repr(random.getstate()).encode())}
    with _torch.hushed():
        found["torch"] = zlib.crc32(bytes(torch.get_rng_state().numpy()))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = zlib.crc32(repr(numpy.random.get_state(legacy=False)["state"]).encode())
    return found


def _of_number(number: float) -> Value:
    value = float(number)
    size = abs(value)
    kind = type(number).__name__
    return Value((), kind, zlib.crc32(repr(value).encode()), array.array("d", [value, size]).tobytes())


def _of_tensor(tensor: torch.Tensor) -> Value | None:
    standing: Standing = "leaf" if tensor.requires_grad else "plain"
    if tensor.grad_fn is not None:
        standing = "graph"
    own = getattr(tensor, "to_local", lambda: tensor)().detach()
    if own.is_meta or getattr(own, "is_quantized", False):
        return None
    dense = own.to_dense() if own.layout is not torch.strided else own
    memory = _torch.storage_or_none(own)
    return _of_strided(dense, str(tensor.dtype).removeprefix("torch."), standing, int(memory or 0))


def _of_strided(tensor: torch.Tensor, dtype: str, standing: Standing, memory: int) -> Value:
    shape = tuple(tensor.shape)
    flat = torch.view_as_real(tensor.resolve_conj()).reshape(-1) if tensor.is_complex() else tensor.reshape(-1)
    if flat.numel() > _MOST_ELEMENTS:
        flat = flat[:: math.ceil(flat.numel() / _MOST_ELEMENTS)]
    numbers = flat.to("cpu", torch.float64, copy=True)
    checksum = zlib.crc32(numbers.numpy().tobytes())
    count = numbers.numel()
    parts = min(_PARTS, count)
    if parts:
        length = math.ceil(count / parts)
        padded = torch.nn.functional.pad(numbers, (0, parts * length - count)).reshape(parts, length)
        sums = torch.stack([padded.sum(1), padded.abs().sum(1)], 1).reshape(-1)
    else:
        sums = numbers
    return Value(shape, dtype, checksum, bytes(sums.contiguous().numpy().tobytes()), standing, memory)


_FACTORIES = (
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("normal", "bernoulli", "multinomial", "poisson"),
)


class Draws:
    """Counter of random draws from :meth:`start` on."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def start(self) -> None:
        """Start counting, for as long as this process lives."""
        for name in _FACTORIES:
            setattr(torch, name, self._counting(getattr(torch, name), "random numbers"))
        call_after_import("torch.utils.data.dataloader", self._count_batches)

    def counts(self) -> Mapping[str, int]:
        """The number of draws so far, by kind."""
        return dict(self._counts)

    def _count_batches(self) -> None:
        iterator = sys.modules["torch.utils.data.dataloader"]._BaseDataLoaderIter
        iterator.__next__ = self._counting(iterator.__next__, "batches")

    def _counting(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def drawing(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._counts[kind] += 1
            return original(*args, **kwargs)

        return drawing


@dataclass(slots=True)
class _Stepped:
    key: str
    parameters: tuple[weakref.ref[Any], ...]
    began_cleared: bool
    steps: int = 0


class LeftOver:
    """Observer of ``zero_grad()``, of steps, and of the backwards whose gradients they clear or use."""

    def __init__(self) -> None:
        self._cleared: Any = WeakIdKeyDictionary()
        self._added: Any = WeakIdKeyDictionary()
        self._reached: set[int] = set()
        self._used: set[int] = set()
        self._backwards = 0
        self._last: Any = WeakIdKeyDictionary()
        self._has_own = self._has_stepped = False
        self.open_closures = 0
        """How many steps that were given a closure are running."""
        self._stepped: weakref.WeakKeyDictionary[Any, _Stepped] = weakref.WeakKeyDictionary()

    def start(self) -> None:
        """Start observing; classes with a ``zero_grad`` of their own are not observed."""
        for kind, parameters in ((torch.optim.Optimizer, _stepped_with), (torch.nn.Module, torch.nn.Module.parameters)):
            kind.zero_grad = self._noting(kind.zero_grad, parameters)  # type: ignore[method-assign]

    def backward(self, leaves: Iterable[Any]) -> None:
        """Note a backward that has added to the gradients of ``leaves``."""
        for leaf in leaves:
            self._added[leaf] = {*self._added.get(leaf, ()), self._backwards}
            self._reached.add(self._backwards)
            self._last[leaf] = None if leaf.grad is None else weakref.ref(leaf.grad)
        self._backwards += 1

    def unused(self) -> int:
        """How many backwards have had all their gradients cleared before a step used one of them.

        0 where a step used gradients that the program set itself: it may have kept those of any backward; and without a
        step of an optimizer, where an update by hand uses them.
        """
        is_unknown = self._has_own or not self._has_stepped
        return 0 if is_unknown else len(self._reached - self._used - set().union(*self._added.values()))

    def step(self, optimizer: Optimizer, key: str) -> None:
        """Note a step of ``optimizer``, before or after it."""
        self._has_stepped = True
        for one in _stepped_with(optimizer):
            self._used |= self._added.get(one, set())
            last = self._last.get(one)
            is_own = one.grad is not None and (last is None or last() is not one.grad)
            self._has_own |= is_own and bool((one.grad != 0).any())
        if optimizer not in self._stepped:
            parameters = list(_stepped_with(optimizer))
            was_cleared = any(one in self._cleared for one in parameters)
            self._stepped[optimizer] = _Stepped(key, tuple(map(weakref.ref, parameters)), was_cleared)
        self._stepped[optimizer].steps += 1

    def undecided(self) -> list[tuple[str, list[Any]]]:
        """Key and gradients of optimizers that made one step and were not seen to be cleared before."""
        found: list[tuple[str, list[Any]]] = []
        for one in self._stepped.values():
            parameters = [parameter for reference in one.parameters if (parameter := reference()) is not None]
            if one.steps == 1 and not one.began_cleared and len(parameters) == len(one.parameters):
                found.append((one.key, [parameter.grad for parameter in parameters]))
        return found

    def _noting(self, zero: Callable[..., None], parameters: Callable[[Any], Iterable[Any]]) -> Callable[..., None]:
        @functools.wraps(zero)
        def noting(owner: Any, *args: Any, **kwargs: Any) -> None:
            for one in parameters(owner):
                self._cleared[one] = True
                added = self._added.pop(one, set())
                # A closure clears what its step has used before.
                self._used |= added if self.open_closures else set()
            zero(owner, *args, **kwargs)

        return noting


def _stepped_with(optimizer: Optimizer) -> Iterable[Any]:
    return (one for group in optimizer.param_groups for one in group["params"])


_SEED = 0
_CLOSE_SECONDS = 100_000.0
_UNITS = (1.0, 1e3, 1e6, 1e9)
"""Units per second in which programs take the time as a seed."""
_fresh = count(1)


_SIZES, _OF_EACH = range(48, 513, 16), 2000


def shifted_addresses() -> list[bytes]:
    """Make small objects and keep every third or so: what the program makes then lies in the gaps, in another order.

    Which address is the lower one decides the order of a set of tensors, and by it that of a program's numbers. Two
    runs begun from one process have the same addresses, and would agree by that alone.
    """
    kept: list[bytes] = []
    number = 1
    for size in _SIZES:
        made = [bytes(size - 40) for _ in range(_OF_EACH)]
        for one in made:
            number = (number * 1103515245 + 12345) % 2147483648
            if number >> 16 & 3 == 0:
                kept.append(one)
    return kept


def seed_generators() -> None:
    """Seed Python's generator now, those of NumPy and PyTorch as soon as these have been imported."""
    random.seed(_SEED)
    seed = random.Random.seed

    def seeding(generator: random.Random, a: Any = None, version: int = 2) -> None:
        # Names of temporary files must differ in trials that run side by side.
        if sys._getframe(2).f_globals.get("__name__") != "tempfile":
            a = _settled(a)
        seed(generator, a, version)

    random.Random.seed = seeding  # type: ignore[method-assign, assignment]
    random.seed = _settling(random.seed)
    # Drawn from the system by programs that never seed it; ``os.urandom`` stays, as names and keys are made of it.
    system = random.Random(_SEED)
    random.SystemRandom.random = lambda self: system.random()  # type: ignore[method-assign]
    random.SystemRandom.getrandbits = lambda self, k: system.getrandbits(k)  # type: ignore[method-assign]
    call_after_import("numpy", _seed_numpy)
    call_after_import("torch", _seed_torch)


def _seed_numpy() -> None:
    numpy: Any = sys.modules["numpy"]
    numpy.random.seed(_SEED)
    # The source of entropy of every generator without a seed.
    bits: Any = sys.modules.get("numpy.random.bit_generator")
    if hasattr(bits, "randbits"):
        bits.randbits = lambda many: next(_fresh)
    for name in ("seed", "default_rng"):
        setattr(numpy.random, name, _settling(getattr(numpy.random, name)))


def _seed_torch() -> None:
    torch: Any = sys.modules["torch"]
    torch.manual_seed(_SEED)
    manual_seed = _settling(torch.manual_seed)

    @functools.wraps(torch.seed)
    def seed() -> int:
        number = next(_fresh)
        torch.random.manual_seed(number)
        return number

    for owner in (torch, torch.random):
        owner.manual_seed, owner.seed = manual_seed, seed


def _settling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def settling(*args: Any, **kwargs: Any) -> Any:
        if args:
            return original(_settled(args[0]), *args[1:], **kwargs)
        if "seed" in kwargs or "a" in kwargs:
            return original(**{key: _settled(value) for key, value in kwargs.items()})
        return original(*args, **kwargs) if original.__name__ == "default_rng" else original(next(_fresh))

    return settling


def _settled(seed: Any) -> Any:
    """``seed``, or the same number in every trial where it would differ in the next one."""
    if seed is None:
        return next(_fresh)
    if isinstance(seed, int | float) and (seed == os.getpid() or _is_time(float(seed))):
        return next(_fresh)
    return seed


def _is_time(seed: float) -> bool:
    now = time.time()
    return any(abs(seed / unit - now) < _CLOSE_SECONDS for unit in _UNITS)
