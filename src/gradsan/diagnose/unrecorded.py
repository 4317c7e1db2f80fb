"""Diagnosis of a run that nobody watched; what is only read off the source is marked so."""

from __future__ import annotations

from dataclasses import replace

from gradsan.diagnose import labels as label_texts
from gradsan.model import Confidence, Conflict, Diagnosis, Label, Message

ASKED = "autopsy"
"""``Use.via`` where no backward has run: someone asked what one would stop at."""

_KEPT = 5
# What these say of steps and counts is known only where the run was watched.
_BARE = {"label.counted": "what", "label.in_step": "what"}
_ACROSS = {"label.used_across_step": "label.autopsy.used_across_step"}
_UNKNOWN = "unknown_writer"


def of_conflict(diagnosis: Diagnosis, conflict: Conflict) -> Diagnosis:
    """The diagnosis with suspects for writes, each place as sure as it is, and without events that nobody saw."""
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
    """The diagnosis with a note where places were read off the source."""
    notes = diagnosis.notes
    if confidence != "certain":
        notes = (*notes, Message(f"note.autopsy.{confidence}"))
    return replace(diagnosis, notes=notes, confidence=confidence)


def _asked(label: Label) -> Label:
    op = label.message.values.get("op")
    return label if op is None else replace(label, message=Message("label.autopsy.would_use", {"op": op}))


def _bare(label: Label) -> Label:
    message = label.message
    while message.key in _BARE:
        message = message.values[_BARE[message.key]]
    if message.key in _ACROSS:
        message = Message(_ACROSS[message.key], {"bridge": message.values["bridge"]})
    return replace(label, message=message)


def _as_sure(label: Label, confidence: Confidence) -> Label:
    if confidence in ("recorded", "certain"):
        return label
    return replace(label, message=Message(f"label.autopsy.{confidence}", {"what": label.message}))
