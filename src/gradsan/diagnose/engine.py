"""Evidence → Diagnosis: every conflict goes to the first cause that recognises it, every failure to its row's causes.

Equal findings are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradsan.diagnose import failures, nonfinite, unrecorded
from gradsan.diagnose.causes import CAUSES
from gradsan.diagnose.facts import examine
from gradsan.diagnose.history import events_of, joined, way_of
from gradsan.model import Conflict, Diagnosis, Evidence, Failure, Moment


def diagnose(evidence: Evidence) -> tuple[Diagnosis, ...]:
    """The diagnoses of everything captured: conflicts in the order in which they happened, then failures."""
    found: dict[object, Diagnosis] = {}
    explained = [_explain(conflict, evidence.moments) for conflict in evidence.conflicts]
    explained += [known for failure in evidence.failures if (known := _explain_failure(failure)) is not None]
    explained += [nonfinite.explain(one) for one in evidence.nonfinite]
    for diagnosis in explained:
        key = _identity(diagnosis)
        known = found.get(key)
        if known is not None:
            events, left_out = joined(known, diagnosis)
            count = known.count + diagnosis.count
            diagnosis = replace(known, count=count, events=events, events_left_out=left_out)
        found[key] = diagnosis
    return tuple(found.values())


def _explain(conflict: Conflict, moments: Sequence[Moment]) -> Diagnosis:
    facts = examine(conflict)
    for cause in CAUSES:
        diagnosis = cause(facts)
        if diagnosis is not None:
            events, left_out = events_of(facts, moments)
            diagnosis = replace(diagnosis, events=events, events_left_out=left_out, way=way_of(facts))
            recorded = conflict.confidence == "recorded"
            return diagnosis if recorded else unrecorded.of_conflict(diagnosis, conflict)
    raise AssertionError("the last cause, unknown_writer, takes every conflict")


def _explain_failure(failure: Failure) -> Diagnosis | None:
    diagnosis = failures.explain(failure)
    if diagnosis is None or failure.confidence == "recorded":
        return diagnosis
    return unrecorded.of_failure(diagnosis, failure.confidence)


def _identity(diagnosis: Diagnosis) -> object:
    """What makes two findings the same: cause, severity, the same lines in the same roles; whatever counts, steps."""
    places = tuple((label.role, label.frame.file, label.frame.line) for label in diagnosis.labels)
    return diagnosis.code, diagnosis.silent, diagnosis.severity, places
