"""Reports of several ranks or runs merged into one: equal findings are counted once, with their sources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gradsan.model import Copies, Diagnosis, Message, Program, Report, Seen

_NEVER = 2**62


@dataclass(frozen=True, slots=True)
class _Found:
    source: str
    order: int
    diagnosis: Diagnosis


def merged(reports: Sequence[tuple[str, Report]]) -> Report:
    """Return one report for several, each with the name of its file; a single one is returned unchanged.

    Two findings are equal if they have the same code and severity, and the same lines in the same roles. The first one
    is kept, with the sum of the counts, and ``sources`` names the files that had it. First is the one with the fewest
    optimizer steps before the use of the value (the clocks of two processes cannot be compared), then the one named
    first.

    Raises:
        ValueError: if there is no report.
    """
    if not reports:
        raise ValueError("no report")
    if len(reports) == 1:
        return reports[0][1]
    groups: dict[object, list[_Found]] = {}
    for order, (source, report) in enumerate(reports):
        for diagnosis in report.diagnoses:
            groups.setdefault(identity(diagnosis), []).append(_Found(source, order, diagnosis))
    each = [report for _, report in reports]
    return Report(
        program=_program(each),
        seen=_seen(each),
        diagnoses=tuple(_one(found, len(reports)) for found in groups.values()),
        gradsan=_versions(report.gradsan for report in each) or "",
        torch=_versions(report.torch for report in each),
        python=_versions(report.python for report in each) or "",
        mode=each[0].mode,
        next=tuple(dict.fromkeys(command for one in each for command in one.next)),
    )


def identity(diagnosis: Diagnosis) -> object:
    """Return a key that is the same for equal findings: code, severity, and the lines by role.

    One line may be wrong in the first round and, compared, harmless in the second: an error and a note.
    """
    places = tuple((label.role, label.frame.file, label.frame.line) for label in diagnosis.labels)
    # Without places only the words distinguish findings.
    words = () if places else (diagnosis.title.key, str(diagnosis.title.values))
    return diagnosis.code, diagnosis.silent, diagnosis.severity, places, words


def _one(found: list[_Found], files: int) -> Diagnosis:
    ordered = sorted(found, key=lambda one: (_steps_before(one.diagnosis), one.order))
    first = ordered[0].diagnosis
    sources = tuple(dict.fromkeys(source for one in ordered for source in (one.diagnosis.sources or (one.source,))))
    had = len({one.order for one in found})
    values = {"first": sources[0], "count": had, "total": files}
    known = _steps_before(first) < _NEVER
    note = Message("report.first_of_steps", {**values, "step": _steps_before(first)}) if known else None
    return replace(
        first,
        count=sum(one.diagnosis.count for one in found),
        notes=(*first.notes, note or Message("report.first_of", values)),
        sources=sources,
    )


def _steps_before(diagnosis: Diagnosis) -> int:
    return min((event.step for event in diagnosis.events if event.kind == "used"), default=_NEVER)


def _program(reports: Sequence[Report]) -> Program:
    failed = [report.program for report in reports if report.program.outcome == "failed"]
    return failed[0] if failed else reports[0].program


def _seen(reports: Sequence[Report]) -> Seen:
    spots = {str((spot.key, spot.values)): spot for report in reports for spot in report.seen.blind_spots}
    return Seen(
        saves=sum(report.seen.saves for report in reports),
        writes=sum(report.seen.writes for report in reports),
        backwards=sum(report.seen.backwards for report in reports),
        steps=sum(report.seen.steps for report in reports),
        blind_spots=tuple(spots.values()),
        processes=sum(report.seen.processes for report in reports),
        copies=_copies([one for report in reports for one in report.seen.copies]),
    )


def _copies(found: Sequence[Copies]) -> tuple[Copies, ...]:
    of_devices = {one.device: [other for other in found if other.device == one.device] for one in found}
    return tuple(
        Copies(device, max(one.bytes for one in ones), sum(one.left_out for one in ones))
        for device, ones in of_devices.items()
    )


def _versions(found: Iterable[str | None]) -> str | None:
    return ", ".join(dict.fromkeys(version for version in found if version is not None)) or None
