"""Findings of a run: diagnoses, fixes and the report that presenters and repair work on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gradsan.model._events import Confidence, Deviation, Seen
from gradsan.model._nonfinite import Born, NonFiniteValue
from gradsan.model._sites import Frame, Message, Site

Severity = Literal["error", "warning", "note"]
Role = Literal["saved", "written", "used", "bridge", "created", "freed", "suspect", "note", "origin", "noticed", "path"]
Outcome = Literal["failed", "finished"]
GradientStatus = Literal["raised", "wrong", "right", "unknown"]
Applicability = Literal["automatic", "review", "manual"]
EventKind = Literal["saved", "written", "used", "step", "backward"]
PathNodeKind = Literal["loss", "gap", "node", "repeat", "bridge", "saved"]
ReportMode = Literal["watch", "deep", "heal", "nonfinite", "autopsy", "lint"]


@dataclass(frozen=True, slots=True)
class Label:
    """A place in the source that takes part in a diagnosis. ``frame`` is the user frame of ``site``."""

    role: Role
    frame: Frame
    message: Message
    op: str | None = None
    site: Site = field(default_factory=Site)


@dataclass(frozen=True, slots=True)
class Verification:
    """What was measured when a fix was tried; None where it was not.

    ``gradient_difference`` is relative to the healed original. ``time_ratio`` (bytes that operators wrote) and
    ``memory_ratio`` (the most bytes kept for backward at once) are relative to the leanest fix of the same search.
    ``training`` compares with the training of the healed original: ``same`` (gradients, parameters, what the program
    keeps, draws, losses, printed numbers), ``gradients`` (those are the same), ``changed``, ``rejected``; None where
    that is not known. ``differs_in`` names in what.
    """

    status: Literal["passed", "failed", "not_run"] = "not_run"
    detail: str = ""
    gradient_difference: float | None = None
    time_ratio: float | None = None
    memory_ratio: float | None = None
    training: Literal["same", "gradients", "changed", "rejected"] | None = None
    differs_in: tuple[str, ...] = ()


Lines = tuple[tuple[str, int, str], ...]
"""Changed lines: (file, line, what that one line becomes)."""


@dataclass(frozen=True, slots=True)
class Fix:
    """Something to change. ``lines`` are the concrete changed lines, where known."""

    kind: str
    meaning: Literal["preserved", "changed"]
    summary: Message
    how_changed: Message | None = None
    applicability: Applicability = "manual"
    lines: Lines = ()
    diff: str = ""
    verification: Verification = Verification()

    @classmethod
    def worded(
        cls, key: str, values: Mapping[str, object], lines: Lines = (), *, keeps: bool = False, kind: str = ""
    ) -> Fix:
        """A fix that nobody has run, with the sentence ``key``; one that changes the training also has ``<key>_how``.

        ``keeps`` says that the gradients stay those of the program as written. ``kind`` is the last part of the key
        where none is given.
        """
        return cls(
            kind=kind or key.rpartition(".")[2],
            meaning="preserved" if keeps else "changed",
            summary=Message(key, dict(values)),
            how_changed=None if keeps else Message(f"{key}_how", dict(values)),
            applicability="review" if lines else "manual",
            lines=lines,
        )


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """The tensor of a diagnosis as the report shows it.

    ``transposed`` says that it was kept transposed; ``shape`` is that of the program's own tensor.
    """

    name: str | None
    shape: tuple[int, ...]
    dtype: str
    device: str
    op: str | None
    operand: str | None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Why:
    """Why backward needs the value: the derivative formula, and a sentence."""

    formula: str | None
    text: Message


@dataclass(frozen=True, slots=True)
class Gradient:
    """What became of the gradient.

    ``if_meant`` is how far the gradients are from those of what the program presumably means, where that was measured.
    """

    status: GradientStatus
    relative_error: float | None = None
    if_meant: Deviation | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the memory of a diagnosis, or the step or backward around it, on the run's clock.

    ``step`` is the number of optimizer steps finished before it; ``op`` what was called, or the Node that saved;
    ``version`` the version counter afterwards (of a use: what backward found), None where it was not read.
    ``touches`` is False for a write to other elements of the same memory, and for a step that left this memory alone.
    """

    kind: EventKind
    clock: int
    step: int = 0
    op: str | None = None
    version: int | None = None
    frame: Frame | None = None
    touches: bool = True


@dataclass(frozen=True, slots=True)
class PathNode:
    """A part of the way from the loss to the Node that kept a value.

    ``gap`` stands for Nodes that are not shown, ``repeat`` for Nodes that follow each other ``count`` times. ``name``
    is the Node's, of a ``repeat`` those of one round, or what the program calls the tensor of a ``bridge``; ``step`` as
    in :class:`Event`. ``frame`` is the line whose call made the Node, ``nodes`` how many Nodes it stands for (0: not
    known).
    """

    kind: PathNodeKind
    name: str | None = None
    step: int | None = None
    count: int = 1
    frame: Frame | None = None
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class NonFiniteFacts:
    """What a diagnosis of GS6xx says of the value beside its places; ``why`` is one sentence.

    ``round`` counts from 0, ``elements`` of ``of`` were not finite, ``input_range`` are the smallest and the largest
    finite element of the operand that decided it.
    """

    born: Born
    op: str
    value: NonFiniteValue
    round: int
    elements: int
    of: int
    input_range: tuple[float, float] | None
    why: Message
    losses: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One finding: what happened, where, why, and what to change. Labels come in the order of events.

    ``events`` are those of its memory, by the clock, of very many the first and the last, between which
    ``events_left_out`` (of a finding met many times: at most) are missing; ``way`` leads from the loss to the Node that
    kept the value. Both are empty where they are not known. ``sources`` are the report files that had it, the first
    first, where several were merged.

    ``confidence`` says how the places are known: ``recorded`` as they happened; ``certain``, for they follow from the
    error and its graph; ``likely``, where the source leaves one line that fits; ``possible``, where it leaves several,
    or says little.
    """

    code: str
    cause: str
    severity: Severity
    silent: bool
    title: Message
    explanation: Message
    labels: tuple[Label, ...]
    tensor: NamedTensor | None = None
    why: Why | None = None
    gradient: Gradient = Gradient("unknown")
    fixes: tuple[Fix, ...] = ()
    notes: tuple[Message, ...] = ()
    count: int = 1
    events: tuple[Event, ...] = ()
    events_left_out: int = 0
    way: tuple[PathNode, ...] = ()
    sources: tuple[str, ...] = ()
    confidence: Confidence = "recorded"
    nonfinite: NonFiniteFacts | None = None

    def __str__(self) -> str:
        """The finding in a few lines, as the note on an exception has it, in the language of the environment."""
        from gradsan.present import short_note
        from gradsan.text import choose_language

        return short_note(self, choose_language("auto", os.environ))


@dataclass(frozen=True, slots=True)
class Program:
    """The program that was watched and how it ended. ``exception`` is (type name, message).

    ``ended`` is False in a report that was written while the program was still running. ``started`` is when watching
    began, in ISO 8601 with the offset of the place (``2026-05-01T09:30:00+02:00``), ``seconds`` how long the program
    was watched; None where nobody measured.
    """

    argv: tuple[str, ...] = ()
    outcome: Outcome = "finished"
    exception: tuple[str, str] | None = None
    ended: bool = True
    started: str | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a presenter needs. ``mode`` is how the program was looked at; in ``autopsy`` nothing was recorded."""

    program: Program
    seen: Seen
    diagnoses: tuple[Diagnosis, ...]
    gradsan: str
    torch: str | None
    python: str
    mode: ReportMode = "watch"
    next: tuple[str, ...] = ()
    """Commands that lead on from here: the page of each code, and the search for fixes where there are some."""
