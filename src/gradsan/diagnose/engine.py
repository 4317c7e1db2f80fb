"""Diagnosis of evidence: every conflict goes to the first cause that recognises it, every failure to its row's causes.

Equal findings are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gradsan import source
from gradsan.diagnose import failures, nonfinite
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.build import events_of, joined, path_of, path_of_failure
from gradsan.diagnose.causes import CAUSES
from gradsan.diagnose.completed import Namesakes, completed, of_one_line
from gradsan.diagnose.facts import examine
from gradsan.model import Confidence, Conflict, Diagnosis, Evidence, Failure, Label, Message, Moment, PathNode

ASKED = "autopsy"
"""``Use.via`` where no backward has run: the user requested a check of what would fail."""

_KEPT = 5
# Their steps and counts are known only where the run was watched.
_BARE = {"label.counted": "what", "label.in_step": "what"}
_ACROSS = {"label.used_across_step": "label.autopsy.used_across_step"}
_UNKNOWN = "unknown_writer"


def of_conflict(diagnosis: Diagnosis, conflict: Conflict) -> Diagnosis:
    """The diagnosis with suspects for writes, the certainty of each place, and without unobserved events."""
    confidence = conflict.confidence
    labels = [_bare(label) for label in diagnosis.labels]
    saved = [label for label in labels if label.role == "saved"]
    written = [replace(label, role="suspect") for label in labels if label.role == "written"]
    rest = [label for label in labels if label.role not in ("saved", "written")]
    if conflict.use.via == ASKED:
        rest = [_asked(label) if label.role == "used" else label for label in rest]
    also = [
        replace(label, message=saved[0].message)
        for site in conflict.also_saved_at
        for label in label_texts.at("saved", site, Message("label.unnamed"), op=conflict.save.node)
        if saved
    ]
    sure: Confidence = "likely" if not also else "possible"
    kept = (
        *(_as_sure(label, sure) for label in (*saved, *also)),
        *(_as_sure(label, confidence) for label in written[:_KEPT]),
        *rest,
    )
    notes = (*diagnosis.notes, Message(f"note.autopsy.{confidence}"))
    explanation = diagnosis.explanation
    if diagnosis.cause == _UNKNOWN:
        moves = conflict.use.version - conflict.save.version
        explanation = Message(f"explanation.autopsy.{_UNKNOWN}", {**explanation.values, "count": moves})
    return replace(diagnosis, explanation=explanation, labels=kept, notes=notes, events=(), confidence=confidence)


def of_failure(diagnosis: Diagnosis, confidence: Confidence) -> Diagnosis:
    """The diagnosis with a note where places were inferred from the source."""
    notes = diagnosis.notes
    if confidence != "certain":
        notes = (*notes, Message(f"note.autopsy.{confidence}"))
    return replace(diagnosis, notes=notes, confidence=confidence)


def _asked(label: Label) -> Label:
    op = label.message.values.get("op")
    return label if op is None else replace(label, message=Message("label.autopsy.would_use", {"op": op}))


def _bare(label: Label) -> Label:
    message = label.message
    while message.key in _BARE and isinstance(inner := message.values[_BARE[message.key]], Message):
        message = inner
    if message.key in _ACROSS:
        message = Message(_ACROSS[message.key], {"bridge": message.values["bridge"]})
    return replace(label, message=message)


def _as_sure(label: Label, confidence: Confidence) -> Label:
    if confidence in ("recorded", "certain"):
        return label
    return replace(label, message=Message(f"label.autopsy.{confidence}", {"what": label.message}))


def diagnose(evidence: Evidence) -> tuple[Diagnosis, ...]:
    """The diagnoses of everything captured: conflicts in the order in which they happened, then failures."""
    return source.on_own_lines(evidence, _diagnose)


def _diagnose(evidence: Evidence) -> tuple[Diagnosis, ...]:
    found: dict[object, Diagnosis] = {}
    namesakes: dict[object, Namesakes] = {}
    explained = [_explain(conflict, evidence.moments) for conflict in evidence.conflicts]
    explained += [known for failure in evidence.failures if (known := _explain_failure(failure)) is not None]
    explained += [nonfinite.explain(one) for one in evidence.nonfinite]
    for number, diagnosis in enumerate(explained):
        key = _identity(diagnosis)
        known = found.get(key)
        if known is not None:
            events, left_out = joined(known, diagnosis)
            count = known.count + diagnosis.count
            if number < len(evidence.conflicts):
                known = namesakes.setdefault(key, Namesakes(known)).added(known, diagnosis)
            diagnosis = replace(known, count=count, events=events, events_left_out=left_out)
        found[key] = diagnosis
    told = _with_shared_writes(_without_consequences(of_one_line(tuple(found.values()))))
    return tuple(map(source.with_imports, told))


def _without_consequences(found: tuple[Diagnosis, ...]) -> tuple[Diagnosis, ...]:
    """``found`` without parameters that have no gradients (GS421), where another finding shows why.

    It shows who cleared them, what was put into the model after an optimizer of frozen tensors had been made, or where
    the values that were computed from them are written past autograd.
    """
    starved = {
        (one.title.values["name"], label.frame.file, label.frame.line)
        for one in found
        if one.cause == "gradient_thrown_away" and one.severity == "warning"
        for label in one.labels
        if label.role == "note"
    }
    made = {place for one in found if one.cause == "parameter_without_optimizer" for place in _created(one)}
    written = [
        (values["parameter"], count)
        for values in (one.title.values for one in found if one.cause == "parameter_not_reached")
        if "parameter" in values and isinstance(count := values["parameters"], int)
    ]

    def is_consequence(one: Diagnosis) -> bool:
        # Several optimizers may step in one line: match the tensor that both findings name, and one optimizer alone.
        name = one.tensor and one.tensor.name
        used = {(name, label.frame.file, label.frame.line) for label in one.labels if label.role == "used"}
        is_unreached = one.cause == "parameter_not_reached"
        left, missing = one.title.values.get("name"), one.title.values.get("missing")
        if is_unreached and isinstance(missing, int) and any(left == own and missing <= n for own, n in written):
            return True
        is_starved = is_unreached and one.severity == "warning" and one.count == 1
        return is_starved and bool(used & starved or _created(one) & made)

    return tuple(one for one in found if not is_consequence(one))


def _created(one: Diagnosis) -> set[tuple[str, int]]:
    return {(label.frame.file, label.frame.line) for label in one.labels if label.role == "created"}


def _with_shared_writes(found: tuple[Diagnosis, ...]) -> tuple[Diagnosis, ...]:
    """``found``, with a note on findings whose write is that of an earlier one of another code."""
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
            path = _named(path_of(facts), diagnosis)
            diagnosis = replace(diagnosis, events=events, events_left_out=left_out, way=path)
            diagnosis = completed(diagnosis, [_explain(one, ()) for one in conflict.further])
            recorded = conflict.confidence == "recorded"
            return diagnosis if recorded else of_conflict(diagnosis, conflict)
    raise AssertionError("the last cause, unknown_writer, takes every conflict")


def _named(path: tuple[PathNode, ...], diagnosis: Diagnosis) -> tuple[PathNode, ...]:
    """``path`` with the diagnosis's name for the tensor of its bridge, where no live variable is that tensor."""
    said = (label.message.values.get("bridge") for label in diagnosis.labels if label.role == "bridge")
    name = next((one for one in said if isinstance(one, str)), None)
    return tuple(replace(one, name=name) if one.kind == "bridge" and one.name is None else one for one in path)


def _explain_failure(failure: Failure) -> Diagnosis | None:
    diagnosis = failures.explain(failure)
    if diagnosis is not None and not diagnosis.way:
        carries = any(label.role == "bridge" and label.message.key == "label.bridge" for label in diagnosis.labels)
        diagnosis = replace(diagnosis, way=_named(path_of_failure(failure, carries=carries), diagnosis))
    if diagnosis is None or failure.confidence == "recorded":
        return diagnosis
    return of_failure(diagnosis, failure.confidence)


def _identity(diagnosis: Diagnosis) -> object:
    """The key of equal findings: cause, severity, the same lines in the same roles; regardless of counts, steps."""
    places = tuple((label.role, label.frame.file, label.frame.line) for label in diagnosis.labels)
    return diagnosis.code, diagnosis.silent, diagnosis.severity, places


def strictly(diagnoses: Iterable[Diagnosis]) -> tuple[Diagnosis, ...]:
    """The same findings, with every note raised to a warning."""
    return tuple(replace(one, severity="warning") if one.severity == "note" else one for one in diagnoses)
