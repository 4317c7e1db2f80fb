"""Conversion of lint findings to the report contract."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gradsan import __version__
from gradsan.lint._findings import Finding, Spot
from gradsan.model import Diagnosis, Fix, Frame, Gradient, Label, Message, Program, Report, Seen, Severity, Site

_WARNED = frozenset({"GS202", "GS203", "GS409", "GS420", "GS422"})


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
