"""NaN and Inf findings as plain data: where the first harmful one was made, and how far it spread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradsan.model._sites import Site

Born = Literal["forward", "backward", "update", "data", "unknown"]
NonFiniteSeen = Literal["before", "during", "after", "untraced", "other_rank"]
"""When parameters were found not finite without a search: before the noticed backward, after the backward of a loss
that was not finite, or only at the end. In a search: gradients were ``untraced``, or came from another rank.
"""
NonFiniteValue = Literal["nan", "inf", "-inf"]


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor operand of the operation.

    ``argument`` is its position in the call, or its keyword; ``name`` that of a live variable that holds it. ``at`` is
    the element that belongs to the first non-finite result, as text (``"0.0"``), and ``index`` its position; both None
    where the shapes do not tell. ``low`` and ``high`` are its smallest and largest finite element. ``kind`` is the
    non-finite value in it, None where all were finite.
    """

    argument: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    name: str | None = None
    index: tuple[int, ...] | None = None
    at: str | None = None
    low: float | None = None
    high: float | None = None
    kind: NonFiniteValue | None = None


@dataclass(frozen=True, slots=True)
class Birth:
    """The operation that made a non-finite value of finite ones, or let one in; ``unknown`` where none was searched.

    ``op`` is the called operation (``log``, ``__truediv__``), for a backward the Node, for an update the optimizer;
    ``site`` where: for a backward the line of the forward operation, None where it is not known. ``value`` is the first
    non-finite element, at ``index`` of a result of ``shape``; ``elements`` of ``of`` are not finite. ``redrawn``: these
    elements are those of another run of a compiled function, with other random numbers.
    """

    born: Born
    op: str
    site: Site | None
    value: NonFiniteValue
    index: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    elements: int = 0
    of: int = 0
    operands: tuple[Operand, ...] = ()
    name: str | None = None
    scalars: tuple[tuple[str, str], ...] = ()
    redrawn: bool = False


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A NaN or Inf that reached parameters, gradients or the loss.

    ``noticed`` is the backward call of the first affected round, ``consumed`` the step or statement that wrote it
    into parameters, None where none has. ``parameters`` are the names of those that it reached first.
    ``round`` counts from 0: optimizer steps that ended before, or backward calls where there is no optimizer. ``path``
    are the operations through which the value spread, starting with the birth, as (operation, site).
    ``seen`` is None where the birth was searched; ``spoilt`` is the number of non-finite parameters. ``reached``:
    ``parameters``, ``gradients`` (no step has taken them), ``loss`` (the gradients were finite all the same),
    ``stopped`` (an exception ended the backward, or the program, while it was there).
    """

    birth: Birth
    round: int
    noticed: Site | None = None
    consumed: Site | None = None
    consumer: str | None = None
    parameters: tuple[str, ...] = ()
    path: tuple[tuple[str, Site], ...] = ()
    reached: Literal["parameters", "gradients", "loss", "stopped"] = "parameters"
    losses: tuple[float, ...] = ()
    seen: NonFiniteSeen | None = None
    spoilt: int = 0
    count: int = 1
