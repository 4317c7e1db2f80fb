"""Programs as data: each statement knows its Python text, and what it means where memory is never written.

A program is a tuple of statements. Rendered, it is ordinary Python that PyTorch runs, in-place writes and all; the
reference (``reference_run.py``) reads the same statements without ever writing. ``repr`` of a program is Python, too:
that is how a disagreement becomes a fixed case.
"""

from __future__ import annotations

from dataclasses import dataclass

PRELUDE = '''\
import copy

import numpy
import torch
import torch.nn.functional as F


def values(seed, *shape):
    """Numbers between 0.2 and 0.9, where nearly every function is smooth."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 0.7 + 0.2


def see(*leaves):
    """What the backward that has just ended has left in the leaves."""
    seen.append([None if leaf.grad is None else leaf.grad.clone() for leaf in leaves])


def take(*gradients):
    """What ``torch.autograd.grad`` gave."""
    seen.append([None if gradient is None else gradient.detach().clone() for gradient in gradients])


seen = []
'''


@dataclass(frozen=True)
class Tensor:
    """A tensor of its own memory; ``leaf``: it requires grad."""

    name: str
    shape: tuple[int, ...]
    seed: int
    leaf: bool = False

    def text(self) -> str:
        arguments = ", ".join(map(str, (self.seed, *self.shape)))
        return f"{self.name} = values({arguments})" + (".requires_grad_()" if self.leaf else "")


@dataclass(frozen=True)
class Compute:
    """A new tensor from others; ``expression`` writes nothing and gives no view."""

    name: str
    expression: str
    no_grad: bool = False

    def text(self) -> str:
        return _guarded(f"{self.name} = {self.expression}", self.no_grad)


@dataclass(frozen=True)
class View:
    """A view that autograd knows: ``of`` followed by ``way`` (``[1:]``, ``.t()``)."""

    name: str
    of: str
    way: str

    def text(self) -> str:
        return f"{self.name} = {self.of}{self.way}"


@dataclass(frozen=True)
class Alias:
    """The memory of ``of`` under another name that autograd does not know for a view of it.

    ``opened`` is how it is made (``{}.detach()``), ``way`` the view in it, for the reference only. ``keeps_graph``: its
    gradient still reaches ``of`` (``unsafe_chunk``). ``array``: it is a NumPy array.
    """

    name: str
    of: str
    opened: str
    way: str = ""
    keeps_graph: bool = False
    array: bool = False

    def text(self) -> str:
        return f"{self.name} = {self.opened.format(self.of)}"


@dataclass(frozen=True)
class Write:
    """Memory is overwritten by ``statement``.

    ``results`` are (name, expression of what its elements become), one for each tensor that is written. ``recorded``:
    autograd sees the write where grad mode is on; else it goes through an alias.
    """

    statement: str
    results: tuple[tuple[str, str], ...]
    recorded: bool = True
    no_grad: bool = False

    def text(self) -> str:
        return _guarded(self.statement, self.no_grad)


@dataclass(frozen=True)
class Replace:
    """``name.data = expression``: a leaf that nothing shares memory with gets other memory."""

    name: str
    expression: str

    def text(self) -> str:
        return f"{self.name}.data = {self.expression}"


@dataclass(frozen=True)
class Hook:
    """Gradients that pass ``name`` are multiplied by ``factor``."""

    name: str
    factor: float

    def text(self) -> str:
        return f"{self.name}.register_hook(lambda gradient: gradient * {self.factor})"


@dataclass(frozen=True)
class Backward:
    """``backward()`` of the scalar ``loss``; what the leaves then hold is part of the outcome."""

    loss: str
    leaves: tuple[str, ...]
    retain: bool = True

    def text(self) -> str:
        kept = "retain_graph=True" if self.retain else ""
        return f"({self.loss}).backward({kept}); see({', '.join(self.leaves)})"


@dataclass(frozen=True)
class Gradients:
    """``torch.autograd.grad`` of the scalar ``loss``; the gradients are part of the outcome."""

    loss: str
    inputs: tuple[str, ...]
    retain: bool = True

    def text(self) -> str:
        inputs = ", ".join(self.inputs)
        return f"take(*torch.autograd.grad({self.loss}, [{inputs}], retain_graph={self.retain}, allow_unused=True))"


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of leaves: a class of ``torch.optim`` with its options as text."""

    name: str
    kind: str
    leaves: tuple[str, ...]
    options: str

    def text(self) -> str:
        return f"{self.name} = torch.optim.{self.kind}([{', '.join(self.leaves)}], {self.options})"


@dataclass(frozen=True)
class Step:
    """``optimizer.step()``, or ``zero_grad()``."""

    optimizer: str
    call: str = "step"

    def text(self) -> str:
        return f"{self.optimizer}.{self.call}()"


Statement = Tensor | Compute | View | Alias | Write | Replace | Hook | Backward | Gradients | Optimizer | Step
Program = tuple[Statement, ...]


def body(program: Program) -> str:
    """The program's own lines, a statement each."""
    return "".join(statement.text() + "\n" for statement in program)


def source(program: Program) -> str:
    """The whole program as a file that runs by itself."""
    return f"{PRELUDE}\n{body(program)}"


def _guarded(statement: str, no_grad: bool) -> str:
    return f"with torch.no_grad(): {statement}" if no_grad else statement
