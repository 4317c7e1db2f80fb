"""Compilation options of a trial, and the record of its compiled graphs. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Function = tuple[str, str]
"""File and name of a function that was compiled."""


@dataclass(frozen=True, slots=True)
class Compiling:
    """Options of how a run is compiled, and where it ends.

    ``backend`` replaces every backend of the program; ``none`` compiles nothing, an empty one leaves all as the program
    requests. ``rounds`` are the steps of each optimizer after which the run ends, ``backwards`` the backward calls (0:
    no such limit). Functions ``left_out`` are run as eager code. ``perturbs`` is the relative size of a change to every
    parameter, which shows how rounding grows. With ``examines`` each graph is compared by itself afterwards, for at
    most ``seconds``; with ``looks_for_writes``, also whether a write to an argument between its forward and its
    backward is noticed.
    """

    backend: str = ""
    rounds: int = 0
    backwards: int = 0
    left_out: tuple[Function, ...] = ()
    perturbs: float = 0.0
    examines: bool = False
    looks_for_writes: bool = False
    seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class Fragment:
    """The smallest part of a compiled graph that computes something else than eager code does.

    ``function`` was compiled by ``backend``; the operations ``ops`` are at ``place`` (file, line, text) in the module
    ``layer`` (a path, its class), both empty where they are not known. ``of_gradient`` says that a gradient differs,
    else a result does, by ``difference`` where ``allowed`` is rounding. ``also_aot``: the backend ``aot_eager``
    computes the same wrong value; ``draws``: random numbers are drawn in it. ``overwritten`` is the position of the
    argument whose overwriting between forward and backward is not noticed, None where nothing has to be overwritten.
    ``program`` is a program that reproduces it, ``inputs`` a file that it reads, both empty where there is none.
    """

    function: Function
    backend: str
    ops: tuple[str, ...]
    place: tuple[str, int, str] | None
    layer: tuple[str, str]
    of_gradient: bool
    difference: float
    allowed: float
    also_aot: bool
    draws: bool
    overwritten: int | None
    program: str
    inputs: bytes = b""


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of comparing each graph by itself: how many were, how many could not be, the first that differs."""

    graphs: int = 0
    left: int = 0
    fragment: Fragment | None = None


@dataclass(frozen=True, slots=True)
class Compiled:
    """The record of a run's compiled code.

    ``functions`` in the order of compilation, each with its display name in ``titles``, ``backends`` by
    name, ``graphs`` their number. ``draws`` are the operations in them that draw random numbers. ``coarsest`` is the
    coarsest dtype computed in, ``roundings`` the sum of the squared errors of rounding of a round's operations (see
    ``repair.compiled.counting``). ``at_limit``: some function was compiled so often that torch.compile gave it up.
    ``names`` are those of parameters, by the key of their optimizer, or by the label of a leaf.
    """

    functions: tuple[Function, ...] = ()
    titles: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    graphs: int = 0
    draws: tuple[str, ...] = ()
    coarsest: str = "float32"
    roundings: float = 0.0
    at_limit: bool = False
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    examined: Examined | None = None
