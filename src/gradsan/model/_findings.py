"""Findings of a run: diagnoses, fixes, and the report that presenters and repair work on.

Names and order of their fields are those of the JSON report (``present/json.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
    """A source location with a role in a diagnosis. ``frame`` is the user frame of ``site``."""

    role: Role
    frame: Frame
    message: Message
    op: str | None = None
    site: Site = field(default_factory=Site)


@dataclass(frozen=True, slots=True)
class Verification:
    """Measurements of a tried fix; None where something was not measured.

    ``gradient_difference`` is relative to the healed original. ``time_ratio`` (bytes that operators wrote) and
    ``memory_ratio`` (the most bytes kept for backward at once) are relative to the leanest fix of the same search.
    ``training`` compares with the training of the healed original: ``same`` (gradients, parameters, kept state, random
    draws, losses, printed numbers), ``gradients`` (only those are the same), ``changed``, ``rejected``; None where that
    is not known. ``differs_in`` names the differences.
    """

    status: Literal["passed", "failed", "not_run"] = "not_run"
    detail: str = ""
    gradient_difference: float | None = None
    time_ratio: float | None = None
    memory_ratio: float | None = None
    training: Literal["same", "gradients", "changed", "rejected"] | None = None
    differs_in: tuple[str, ...] = ()


Lines = tuple[tuple[str, int, str], ...]
"""Changed lines: (file, line, new text of that line)."""


@dataclass(frozen=True, slots=True)
class Fix:
    """A suggested change. ``lines`` are the concrete changed lines, where known."""

    kind: str
    meaning: Literal["preserved", "changed"]
    how_changed: Message | None = field(default=None, kw_only=True)
    applicability: Applicability = field(default="manual", kw_only=True)
    summary: Message
    lines: Lines = ()
    diff: str = ""
    verification: Verification = Verification()

    @classmethod
    def worded(
        cls, key: str, values: Mapping[str, object], lines: Lines = (), *, keeps: bool = False, kind: str = ""
    ) -> Fix:
        """Return a fix that nobody has run, with the sentence ``key``; if it changes the training, also ``<key>_how``.

        ``keeps`` says that the gradients stay those of the program as written. ``kind`` defaults to the last part of
        the key.
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

    ``transposed`` says that it was saved transposed; ``shape`` is that of the program's own tensor.
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
    """The reason why backward needs the value: the derivative formula, and a sentence."""

    formula: str | None
    text: Message


@dataclass(frozen=True, slots=True)
class Gradient:
    """Outcome of the conflict for the gradient.

    ``if_meant`` is the distance of the gradients from those of what was presumably meant, where that was measured.
    """

    status: GradientStatus
    relative_error: float | None = None
    if_meant: Deviation | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the memory of a diagnosis, or the step or backward around it, on the run's clock.

    ``step`` is the number of optimizer steps finished before it; ``op`` the called operation, or the Node that saved;
    ``version`` the version counter afterwards (for a use: as backward found it), None where it was not read.
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
    """A part of the path from the loss to the Node that saved a value.

    ``gap`` stands for Nodes that are not shown, ``repeat`` for Nodes that follow each other ``count`` times. ``name``
    is that of the Node, for a ``repeat`` those of one round, for a ``bridge`` the tensor's name in the program;
    ``step`` as in :class:`Event`. ``frame`` is the line whose call made the Node, ``nodes`` the number of Nodes it
    stands for (0: unknown)."""

    kind: PathNodeKind
    name: str | None = None
    step: int | None = None
    count: int = 1
    nodes: int = 1
    frame: Frame | None = None


@dataclass(frozen=True, slots=True)
class NonFiniteFacts:
    """Facts about the value of a GS6xx diagnosis, beside its places; ``why`` is one sentence.

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
    """One finding: what happened, where, why, and what to change. Labels are in the order of events.

    ``events`` are those of its memory, by clock; of very many, only the first and the last ones, with
    ``events_left_out`` missing in between (for a finding counted several times: at most); ``way`` is the path from the
    loss to the Node that kept the value. Both are empty where they are not known. ``sources`` are the report files that
    had it, the first first, where several were merged.

    ``confidence`` says how the places are known: ``recorded`` as they happened; ``certain``, since they follow from the
    error and its graph; ``likely``, where the source leaves one line that fits; ``possible``, where it leaves several,
    or decides little.
    """

    code: str
    cause: str
    severity: Severity
    silent: bool
    count: int = field(default=1, kw_only=True)
    title: Message
    explanation: Message
    tensor: NamedTensor | None = field(default=None, kw_only=True)
    labels: tuple[Label, ...]
    why: Why | None = None
    gradient: Gradient = Gradient("unknown")
    fixes: tuple[Fix, ...] = ()
    notes: tuple[Message, ...] = ()
    events: tuple[Event, ...] = ()
    events_left_out: int = 0
    way: tuple[PathNode, ...] = ()
    sources: tuple[str, ...] = ()
    confidence: Confidence = "recorded"
    nonfinite: NonFiniteFacts | None = None

    def with_frames(self, changed: Callable[[Frame], Frame]) -> Diagnosis:
        """Return the diagnosis with each frame of its labels and events replaced by ``changed`` of it."""
        labels = (
            replace(one, frame=changed(one.frame), site=Site(tuple(map(changed, one.site.frames))))
            for one in self.labels
        )
        events = (one if one.frame is None else replace(one, frame=changed(one.frame)) for one in self.events)
        return replace(self, labels=tuple(labels), events=tuple(events))

    def __str__(self) -> str:
        """Return the finding in a few lines, as in the note on an exception, in the language of the environment."""
        from gradsan.present import short_note
        from gradsan.text import choose_language

        return short_note(self, choose_language("auto", os.environ))


@dataclass(frozen=True, slots=True)
class Program:
    """The watched program and its end. ``exception`` is (type name, message).

    ``ended`` is False in a report that was written while the program was still running. ``started`` is when watching
    began, in ISO 8601 with UTC offset (``2026-05-01T09:30:00+02:00``), ``seconds`` how long the program
    was watched; None where that was not measured.
    """

    argv: tuple[str, ...] = ()
    outcome: Outcome = "finished"
    exception: tuple[str, str] | None = None
    ended: bool = True
    started: str | None = None
    seconds: float | None = None

    @classmethod
    def ended_by(cls, error: BaseException | None, argv: tuple[str, ...] = ()) -> Program:
        """Return a program that ``error`` has ended; None: it ran to its end."""
        if error is None:
            return cls(argv)
        try:
            words = str(error)
        except Exception:  # of the program's own class
            words = ""
        return cls(argv, "failed", (type(error).__name__, words))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a presenter needs. ``mode`` is the mode of watching; in ``autopsy`` nothing was recorded."""

    gradsan: str
    torch: str | None
    python: str
    mode: ReportMode = "watch"
    program: Program
    seen: Seen
    diagnoses: tuple[Diagnosis, ...]
    next: tuple[str, ...] = ()
    """Commands to run next: the page of each code, and the search for fixes where there are some."""
