"""The meaning of a program, computed without writing any memory.

Each storage is a flat tensor that is never written. A write makes a new one: the written elements from the result of
the out-of-place operation, the rest from the old one. A view is read anew, by its shape, strides and offset, each time
it is asked for. Autograd therefore keeps only values that nobody can change.

Several *families* may share a storage: a tensor with its views, and what ``detach()``, ``.data`` or NumPy made of it.
Autograd follows a write in the family through which it was made. The others only get the new numbers, and so does the
family itself where grad mode was off: the gradient goes on to where it went before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy
import statements as s
import torch
import torch.nn.functional as F

TOLERANCE = 1e-9


class NotAProgramError(Exception):
    """A statement has no meaning here: numbers out of bounds, overlapping elements, a name that is missing."""


class NewNumbers(torch.autograd.Function):
    """Other numbers with the gradient of the old ones: what a write is that autograd does not follow."""

    @staticmethod
    def forward(ctx: Any, old: Any, new: Any) -> Any:
        return new.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, None


@dataclass
class Family:
    """A tensor with its views: the flat value, what of it a gradient hook sits on, and whether the tensor is a leaf."""

    value: Any
    hooked: Any
    is_leaf: bool = False


@dataclass
class Storage:
    """Memory, and the families that share it."""

    size: int
    families: list[Family]


@dataclass(frozen=True)
class Variable:
    """What a name stands for: elements of a storage, in a family."""

    storage: Storage
    family: Family
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_base: bool
    leaf: Any = None
    array: bool = False

    def read(self) -> Any:
        """Its value, with the graph that leads there."""
        return self.family.value.as_strided(self.shape, self.stride, self.offset)

    def places(self) -> Any:
        """Which elements of the storage it has."""
        return torch.arange(self.storage.size).as_strided(self.shape, self.stride, self.offset)


class Reader(Mapping[str, Any]):
    """The variables as values, read when an expression names them; NumPy arrays as tensors."""

    def __init__(self, variables: Mapping[str, Variable]) -> None:
        self._variables = variables

    def __getitem__(self, name: str) -> Any:
        return self._variables[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)


class Reference:
    """Runs statements one by one; a statement that is refused has changed nothing."""

    def __init__(self) -> None:
        names: dict[str, Any] = {}
        exec(s.PRELUDE, names)
        self._globals = {"torch": torch, "F": F, "numpy": numpy, "values": names["values"], "filled": _filled}
        self.variables: dict[str, Variable] = {}
        self.seen: list[list[Any]] = []
        self._accumulated: dict[str, Any] = {}
        self._optimizers: dict[str, tuple[tuple[str, ...], Any]] = {}

    def run(self, statement: s.Statement) -> None:
        """One statement; raises :class:`NotAProgramError` where it has no meaning."""
        try:
            getattr(self, f"_{type(statement).__name__.lower()}")(statement)
        except (RuntimeError, IndexError, KeyError, NameError, ValueError, TypeError) as error:
            raise NotAProgramError(f"{statement.text()}: {type(error).__name__}: {error}") from error

    def _evaluate(self, expression: str) -> Any:
        return eval(expression, self._globals, Reader(self.variables))

    def _new(self, value: Any, leaf: Any = None) -> Variable:
        """A storage of its own for ``value``, in the order in which PyTorch would lay it out."""
        order = sorted(range(value.dim()), key=lambda dim: (-value.stride(dim), dim))
        size, expected, dense = value.numel(), 1, True
        for dim in reversed(order):
            dense = dense and (value.shape[dim] == 1 or value.stride(dim) == expected)
            expected *= value.shape[dim]
        if not dense or value.storage_offset():
            value = value.clone(memory_format=torch.contiguous_format)
        flat = value.as_strided((size,), (1,))
        family = Family(flat, flat, leaf is not None)
        return Variable(Storage(size, [family]), family, tuple(value.shape), value.stride(), 0, True, leaf)

    def _tensor(self, statement: s.Tensor) -> None:
        value = self._globals["values"](statement.seed, *statement.shape)
        leaf = value.requires_grad_() if statement.leaf else None
        self.variables[statement.name] = self._new(value, leaf)

    def _compute(self, statement: s.Compute) -> None:
        with torch.set_grad_enabled(not statement.no_grad):
            value = self._evaluate(statement.expression)
        _check(value)
        # What PyTorch gives back as a view (einsum) loses its gradient hooks when it is written, as other views do.
        self.variables[statement.name] = replace(self._new(value), is_base=not value._is_view())

    def _view(self, statement: s.View) -> None:
        self._make_view(statement.name, self.variables[statement.of], statement.way)

    def _make_view(self, name: str, of: Variable, way: str) -> None:
        places = of.places()
        view = eval(f"places{way}", {"places": places, "torch": torch})
        if view.untyped_storage()._cdata != places.untyped_storage()._cdata:
            raise NotAProgramError(f"{way} copies")
        self.variables[name] = replace(
            of, shape=tuple(view.shape), stride=view.stride(), offset=view.storage_offset(), is_base=False, leaf=None
        )

    def _alias(self, statement: s.Alias) -> None:
        of = self.variables[statement.of]
        value = of.family.value if statement.keeps_graph else of.family.value.detach()
        family = Family(value, value)
        of.storage.families.append(family)
        alias = replace(of, family=family, leaf=None, is_base=True, array=statement.array)
        if statement.way:
            self._make_view(statement.name, alias, statement.way)
        else:
            self.variables[statement.name] = alias

    def _write(self, statement: s.Write) -> None:
        recorded = statement.recorded and not statement.no_grad
        written = []
        with torch.set_grad_enabled(recorded):
            for name, expression in statement.results:
                target = self.variables[name]
                places = target.places()
                if places.unique().numel() != places.numel():
                    raise NotAProgramError("elements that lie on each other")
                new = self._evaluate(expression)
                new = torch.as_tensor(new, dtype=torch.float64).expand(target.shape)
                _check(new)
                written.append((target, new))
        for target, new in written:
            self._store(target, new, recorded)

    def _store(self, target: Variable, new: Any, recorded: bool) -> None:
        # Not as_strided_scatter: its gradient for what was there is wrong in torch 2.13.
        family, places, flat = target.family, target.places().reshape(-1), new.reshape(-1)
        numbers = family.value.detach().index_copy(0, places, flat.detach())
        for other in target.storage.families:
            if other is family and recorded:
                other.value = other.hooked = family.value.index_copy(0, places, flat)
            elif other.value.requires_grad:
                other.value = NewNumbers.apply(other.value, numbers)
            else:
                other.value = other.hooked = numbers

    def _replace(self, statement: s.Replace) -> None:
        old = self.variables[statement.name]
        with torch.no_grad():
            new = self._evaluate(statement.expression)
        _check(new)
        value = NewNumbers.apply(old.family.value, new.contiguous().reshape(-1))
        family = Family(value, old.family.hooked, is_leaf=True)
        self.variables[statement.name] = replace(
            old, storage=Storage(new.numel(), [family]), family=family, stride=new.contiguous().stride(), offset=0
        )

    def _hook(self, statement: s.Hook) -> None:
        variable = self.variables[statement.name]
        if not variable.is_base or not variable.family.value.requires_grad:
            raise NotAProgramError("no base with a gradient")
        factor = statement.factor
        (variable.leaf if variable.leaf is not None else variable.family.hooked).register_hook(
            lambda gradient: gradient * factor
        )

    def _gradients_of(self, loss: str, leaves: list[Any]) -> list[Any]:
        value = self._evaluate(loss)
        found = list(torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True))
        for gradient in found:
            if gradient is not None:
                _check(gradient)
        return found

    def _backward(self, statement: s.Backward) -> None:
        leaves = [self.variables[name].leaf for name in statement.leaves]
        for name, gradient in zip(statement.leaves, self._gradients_of(statement.loss, leaves), strict=True):
            if gradient is not None:
                before = self._accumulated.get(name)
                self._accumulated[name] = gradient if before is None else before + gradient
        self.seen.append([self._accumulated.get(name) for name in statement.leaves])

    def _gradients(self, statement: s.Gradients) -> None:
        inputs = [self.variables[name].leaf for name in statement.inputs]
        self.seen.append(self._gradients_of(statement.loss, inputs))

    def _optimizer(self, statement: s.Optimizer) -> None:
        twins = [torch.nn.Parameter(self.variables[name].read().detach().clone()) for name in statement.leaves]
        kind = getattr(torch.optim, statement.kind)
        optimizer = eval(f"kind(twins, {statement.options})", {"kind": kind, "twins": twins})
        self._optimizers[statement.name] = (statement.leaves, optimizer)

    def _step(self, statement: s.Step) -> None:
        names, optimizer = self._optimizers[statement.optimizer]
        if statement.call == "zero_grad":
            for name in names:
                self._accumulated.pop(name, None)
            return
        twins = optimizer.param_groups[0]["params"]
        state = optimizer.state_dict()
        with torch.no_grad():
            for name, twin in zip(names, twins, strict=True):
                twin.copy_(self.variables[name].read())
                gradient = self._accumulated.get(name)
                twin.grad = None if gradient is None else gradient.clone()
        optimizer.step()
        try:
            for twin in twins:
                _check(twin)
        except NotAProgramError:
            optimizer.load_state_dict(state)
            raise
        for name, twin in zip(names, twins, strict=True):
            self._store(self.variables[name], twin.detach().clone(), recorded=False)


def _filled(tensor: Any, fill: Any, seed: int) -> Any:
    """The random numbers that ``fill`` writes into a tensor that lies as ``tensor`` does."""
    twin = torch.empty(0, dtype=tensor.dtype).set_(
        tensor.detach().untyped_storage().clone(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    torch.manual_seed(seed)
    fill(twin)
    return twin


def _check(value: Any, smallest: float = 1e-12, largest: float = 1e4) -> None:
    """Refuse what no comparison could be trusted with; what is smaller than ``smallest``, rounding has made of 0."""
    value = value.detach()
    is_rounding = (value != 0) & (value.abs() < smallest)
    if not bool(torch.isfinite(value).all()) or bool((value.abs() > largest).any()) or bool(is_rounding.any()):
        raise NotAProgramError("numbers out of bounds")


def differs(one: list[list[Any]], other: list[list[Any]], smallest: float = 1e-3) -> float:
    """How far apart two outcomes are: the largest difference, relative to the size of the gradient it is in.

    Gradients smaller than ``smallest`` are taken for as large.
    """
    worst = 0.0
    for left, right in zip(one, other, strict=False):
        for first, second in zip(left, right, strict=True):
            if first is None and second is None:
                continue
            first = torch.zeros_like(second) if first is None else first
            second = torch.zeros_like(first) if second is None else second
            same = (first == second) | (first.isnan() & second.isnan())
            size = max([smallest, 1e-300, *second[second.isfinite()].abs().flatten().tolist()])
            gap = float((first - second).masked_fill(same, 0.0).abs().max()) / size
            worst = max(worst, gap if gap == gap else float("inf"))
    return worst
