"""Findings of ``gradsan lint``: with syntax trees as analysed, without them as stored and shown, and as diagnoses."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gradsan import __version__
from gradsan.model import Diagnosis, Fix, Frame, Gradient, Label, Message, Program, Report, Seen, Severity, Site


@dataclass(frozen=True, slots=True)
class Place:
    """A place involved in a fault: its role (``saved``, ``written``, ``used`` …), its syntax, its function's name."""

    role: str
    node: ast.AST
    function: str


@dataclass(frozen=True, slots=True)
class Hit:
    """A fault at ``at``: its code and cause, whether it is certain, the values of its sentence, and other places.

    ``fix`` names the change that repairs it, ``""`` where none is certain.
    """

    code: str
    slug: str
    at: Place
    is_sure: bool
    values: Mapping[str, object] = field(default_factory=dict)
    places: tuple[Place, ...] = ()
    fix: str = ""

    @property
    def key(self) -> tuple[str, int, int]:
        """The key of equal findings: the code and the position."""
        node = self.at.node
        return self.code, getattr(node, "lineno", 1), getattr(node, "col_offset", 0)


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in the linted file: its role, and lines and columns in characters from 1, the end exclusive."""

    role: str
    line: int
    column: int
    end_line: int
    end_column: int
    function: str


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Whole lines to change: those from ``line`` on that read ``old`` become ``new``.

    ``is_certain``: they remove the fault and change nothing else; ``--fix`` writes such lines.
    """

    kind: str
    line: int
    old: str
    new: str
    is_certain: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault found in a file. ``values`` fill its sentence, ``lint.<slug>``."""

    code: str
    slug: str
    is_sure: bool
    at: Spot
    values: Mapping[str, str | int]
    spots: tuple[Spot, ...] = ()
    suggestion: Suggestion | None = field(default=None)


def as_record(finding: Finding) -> dict[str, Any]:
    """A finding as JSON data."""
    return asdict(finding)


def of_record(record: Mapping[str, Any]) -> Finding:
    """The finding from a record of :func:`as_record`. Raises KeyError and TypeError for anything else."""
    suggestion = record["suggestion"]
    return Finding(
        record["code"],
        record["slug"],
        record["is_sure"],
        Spot(**record["at"]),
        record["values"],
        tuple(Spot(**one) for one in record["spots"]),
        None if suggestion is None else Suggestion(**suggestion),
    )


_WARNED = frozenset({"GS202", "GS203", "GS210", "GS214", "GS409", "GS420", "GS422"})


def diagnosis_of(finding: Finding, file: Path) -> Diagnosis:
    """A finding in ``file`` as a diagnosis, inferred instead of observed. Its last label is the place of the fault."""
    place = str(file.absolute())
    severity: Severity = "warning" if finding.code in _WARNED or finding.code.startswith("GS7") else "error"
    spots = finding.spots
    if not any(_is_at(spot, finding.at) and spot.role in ("used", "written") for spot in spots):
        spots = (*spots, replace(finding.at, role="used"))
    elif not any(_is_at(spot, finding.at) and spot.role == "used" for spot in spots):
        # Show the place to be changed, not the statement that passes the value on.
        spots = tuple(spot for spot in spots if spot.role != "used")
    labels = [_label(spot, place) for spot in spots]
    said = Message(f"lint.{finding.slug}", dict(finding.values))
    return Diagnosis(
        finding.code,
        finding.slug,
        severity,
        severity == "warning",
        said,
        Message("lint.explanation", {"code": finding.code}),
        tuple(labels),
        gradient=Gradient("unknown"),
        fixes=_fixes(finding, place),
        confidence="likely" if finding.is_sure else "possible",
    )


def report_of(diagnoses: Sequence[Diagnosis], argv: Sequence[str]) -> Report:
    """The report of a run of ``gradsan lint``."""
    program = Program(tuple(argv), "finished")
    version = ".".join(map(str, sys.version_info[:3]))
    return Report(
        gradsan=__version__,
        torch=None,
        python=version,
        mode="lint",
        program=program,
        seen=Seen(),
        diagnoses=tuple(diagnoses),
    )


def _is_at(spot: Spot, at: Spot) -> bool:
    return (spot.line, spot.column) == (at.line, at.column)


def _label(spot: Spot, file: str) -> Label:
    frame = Frame(file, spot.line, spot.function, spot.column, spot.end_line, spot.end_column, True)
    role = spot.role or "note"
    return Label(role, frame, Message(f"lint.role.{role}"), site=Site((frame,)))  # type: ignore[arg-type]


def _fixes(finding: Finding, file: str) -> tuple[Fix, ...]:
    made = finding.suggestion
    if made is None:
        return ()
    gone = [(file, made.line + index, "") for index in range(1, len(made.old.split("\n")))]
    return (
        Fix(
            made.kind,
            "preserved" if made.is_certain else "changed",
            Message(f"lint.fix.{made.kind}"),
            how_changed=None if made.is_certain else Message("lint.fix_how"),
            applicability="automatic" if made.is_certain else "review",
            lines=((file, made.line, made.new), *gone),
        ),
    )
