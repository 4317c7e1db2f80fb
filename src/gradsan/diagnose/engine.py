"""Evidence → Diagnosis: every conflict goes to the first cause that recognises it, every failure to its row's causes.

Equal findings are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradsan.diagnose import failures, nonfinite, unrecorded
from gradsan.diagnose.causes import CAUSES
from gradsan.diagnose.facts import examine
from gradsan.diagnose.history import events_of, joined, way_of, way_of_failure
from gradsan.model import Conflict, Diagnosis, Evidence, Failure, Message, Moment, PathNode


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
    return _with_shared_writes(tuple(found.values()))


def _with_shared_writes(found: tuple[Diagnosis, ...]) -> tuple[Diagnosis, ...]:
    """``found``, in which a finding says so whose write is that of an earlier one of another code."""
    codes: dict[object, str] = {}
    said: list[Diagnosis] = []
    for one in found:
        lines = {(label.frame.file, label.frame.line) for label in one.labels if label.role == "written"}
        others = dict.fromkeys(codes[line] for line in lines if line in codes and codes[line] != one.code)
        notes = tuple(Message("note.same_write", {"code": code}) for code in others)
        said.append(replace(one, notes=(*one.notes, *notes)) if notes else one)
        for line in lines:
            codes.setdefault(line, one.code)
    return tuple(said)


def _explain(conflict: Conflict, moments: Sequence[Moment]) -> Diagnosis:
    facts = examine(conflict)
    for cause in CAUSES:
        diagnosis = cause(facts)
        if diagnosis is not None:
            events, left_out = events_of(facts, moments)
            way = _named(way_of(facts), diagnosis)
            diagnosis = replace(diagnosis, events=events, events_left_out=left_out, way=way)
            recorded = conflict.confidence == "recorded"
            return diagnosis if recorded else unrecorded.of_conflict(diagnosis, conflict)
    raise AssertionError("the last cause, unknown_writer, takes every conflict")


def _named(way: tuple[PathNode, ...], diagnosis: Diagnosis) -> tuple[PathNode, ...]:
    """``way`` with what the diagnosis calls the tensor of its bridge, where no live variable is that tensor."""
    said = (label.message.values.get("bridge") for label in diagnosis.labels if label.role == "bridge")
    name = next((one for one in said if isinstance(one, str)), None)
    return tuple(replace(one, name=name) if one.kind == "bridge" and one.name is None else one for one in way)


def _explain_failure(failure: Failure) -> Diagnosis | None:
    diagnosis = failures.explain(failure)
    if diagnosis is not None and not diagnosis.way:
        carries = any(label.role == "bridge" and label.message.key == "label.bridge" for label in diagnosis.labels)
        diagnosis = replace(diagnosis, way=_named(way_of_failure(failure, carries=carries), diagnosis))
    if diagnosis is None or failure.confidence == "recorded":
        return diagnosis
    return unrecorded.of_failure(diagnosis, failure.confidence)


def _identity(diagnosis: Diagnosis) -> object:
    """What makes two findings the same: cause, severity, the same lines in the same roles; whatever counts, steps."""
    places = tuple((label.role, label.frame.file, label.frame.line) for label in diagnosis.labels)
    return diagnosis.code, diagnosis.silent, diagnosis.severity, places
