"""Report for programs: the JSON contract ``gradsan.report/1``, described by ``report.schema.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradsan import text
from gradsan.model import (
    Deviation,
    Diagnosis,
    Event,
    Fix,
    Frame,
    Label,
    NamedTensor,
    NonFiniteFacts,
    PathNode,
    Program,
    Report,
    Seen,
    Verification,
)
from gradsan.present._fixes import diff_of
from gradsan.present._places import shown_path, shown_stack, working_directory
from gradsan.source.tree import source_line

SCHEMA = "gradsan.report/1"

_LINES_AROUND = 2
_MARKED_LINES_KEPT = 30


def render_json(report: Report, *, language: str, cwd: Path | None = None) -> str:
    """Return a report as JSON text, ending with a line break; equal reports give equal text.

    Files are relative to ``cwd`` (default: the process's own) if they lie below it. Lines and columns count from 1
    and ``end_column`` is exclusive; they are null if unknown, as is ``source`` if the line cannot be read.
    Numbers that are not finite are null.
    """
    return json.dumps(as_dict(report, language=language, cwd=cwd), ensure_ascii=False, allow_nan=False, indent=2) + "\n"


def as_dict(report: Report, *, language: str, cwd: Path | None = None) -> dict[str, Any]:
    """Return the content of :func:`render_json` as dictionaries, lists, strings and numbers."""
    cwd = working_directory(cwd)
    return {
        "schema": SCHEMA,
        "gradsan": report.gradsan,
        "torch": report.torch,
        "python": report.python,
        "mode": report.mode,
        "program": _program(report.program),
        "seen": _seen(report.seen, language),
        "diagnoses": [_diagnosis(diagnosis, language, cwd) for diagnosis in report.diagnoses],
        "next": [_text(command) for command in report.next],
    }


def _program(program: Program) -> dict[str, Any]:
    exception = None
    if program.exception is not None:
        kind, message = program.exception
        exception = {"type": kind, "message": _text(message)}
    return {
        "argv": [_text(word) for word in program.argv],
        "outcome": program.outcome,
        "exception": exception,
        "ended": program.ended,
        "started": program.started,
        "seconds": _finite(program.seconds),
    }


def _seen(seen: Seen, language: str) -> dict[str, Any]:
    return {
        "saves": seen.saves,
        "writes": seen.writes,
        "backwards": seen.backwards,
        "steps": seen.steps,
        "processes": seen.processes,
        "copies": [{"device": one.device, "bytes": one.bytes, "left_out": one.left_out} for one in seen.copies],
        "blind_spots": [_text(text.say(spot, language)) for spot in seen.blind_spots],
    }


def _diagnosis(diagnosis: Diagnosis, language: str, cwd: Path | None) -> dict[str, Any]:
    why = diagnosis.why
    return {
        "code": diagnosis.code,
        "cause": diagnosis.cause,
        "severity": diagnosis.severity,
        "silent": diagnosis.silent,
        "count": diagnosis.count,
        "title": _text(text.say(diagnosis.title, language)),
        "explanation": _text(text.say(diagnosis.explanation, language)),
        "tensor": None if diagnosis.tensor is None else _tensor(diagnosis.tensor),
        "labels": [_label(label, language, cwd) for label in diagnosis.labels],
        "why": None if why is None else {"formula": why.formula, "text": _text(text.say(why.text, language))},
        "gradient": {
            "status": diagnosis.gradient.status,
            "relative_error": _finite(diagnosis.gradient.relative_error),
            "if_meant": None if diagnosis.gradient.if_meant is None else _if_meant(diagnosis.gradient.if_meant),
        },
        "fixes": [_fix(fix, language, cwd) for fix in diagnosis.fixes],
        "notes": [_text(text.say(note, language)) for note in diagnosis.notes],
        "events": [_event(event, cwd) for event in diagnosis.events],
        "events_left_out": diagnosis.events_left_out,
        "way": [_path_node(path_node, cwd) for path_node in diagnosis.way],
        "sources": [_text(source) for source in diagnosis.sources],
        "confidence": diagnosis.confidence,
        "nonfinite": None if diagnosis.nonfinite is None else _nonfinite(diagnosis.nonfinite, language),
    }


def _if_meant(deviation: Deviation) -> dict[str, Any]:
    return {
        "relative_error": _finite(deviation.largest),
        "gradients": [{"name": _text(name), "relative_error": _finite(error)} for name, error in deviation.errors],
    }


def _nonfinite(facts: NonFiniteFacts, language: str) -> dict[str, Any]:
    return {
        "born": facts.born,
        "op": facts.op,
        "value": facts.value,
        "round": facts.round,
        "elements": facts.elements,
        "of": facts.of,
        "input_range": None if facts.input_range is None else [_finite(bound) for bound in facts.input_range],
        "why": _text(text.say(facts.why, language)),
        "losses": [_finite(loss) for loss in facts.losses],
    }


def _event(event: Event, cwd: Path | None) -> dict[str, Any]:
    frame = event.frame
    return {
        "kind": event.kind,
        "clock": event.clock,
        "step": event.step,
        "op": event.op,
        "version": event.version,
        "file": None if frame is None else _text(shown_path(frame.file, cwd)),
        "line": None if frame is None else frame.line,
        "touches": event.touches,
    }


def _path_node(path_node: PathNode, cwd: Path | None) -> dict[str, Any]:
    frame = path_node.frame
    return {
        "kind": path_node.kind,
        "name": path_node.name,
        "step": path_node.step,
        "count": path_node.count,
        "nodes": path_node.nodes,
        "file": None if frame is None else _text(shown_path(frame.file, cwd)),
        "line": None if frame is None else frame.line,
    }


def _tensor(tensor: NamedTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "op": tensor.op,
        "operand": tensor.operand,
        "transposed": tensor.transposed,
    }


def _label(label: Label, language: str, cwd: Path | None) -> dict[str, Any]:
    frame = label.frame
    source = source_line(frame.file, frame.line)
    return {
        "role": label.role,
        "file": _text(shown_path(frame.file, cwd)),
        "line": frame.line,
        "column": frame.column,
        "end_line": frame.end_line,
        "end_column": frame.end_column,
        "function": frame.function,
        "source": None if source is None else _text(source.strip()),
        "lines": [{"line": line, "text": _text(words)} for line, words in _lines_around(frame)],
        "message": _text(text.say(label.message, language)),
        "op": label.op,
        "stack": [_frame(frame, cwd) for frame in shown_stack(label.site)],
    }


def _lines_around(frame: Frame) -> list[tuple[int, str]]:
    """Return the marked lines and their neighbours, as (number, line), for readers without the files."""
    last = min(max(frame.end_line or frame.line, frame.line), frame.line + _MARKED_LINES_KEPT)
    numbers = range(max(frame.line - _LINES_AROUND, 1), last + _LINES_AROUND + 1)
    return [(number, line) for number in numbers if (line := source_line(frame.file, number)) is not None]


def _frame(frame: Frame, cwd: Path | None) -> dict[str, Any]:
    source = source_line(frame.file, frame.line)
    return {
        "file": _text(shown_path(frame.file, cwd)),
        "line": frame.line,
        "function": frame.function,
        "column": frame.column,
        "text": None if source is None else _text(source),
        "user": frame.is_user,
    }


def _fix(fix: Fix, language: str, cwd: Path | None) -> dict[str, Any]:
    return {
        "kind": fix.kind,
        "meaning": fix.meaning,
        "how_changed": None if fix.how_changed is None else _text(text.say(fix.how_changed, language)),
        "applicability": fix.applicability,
        "summary": _text(text.say(fix.summary, language)),
        "lines": [
            {"file": _text(shown_path(file, cwd)), "line": line, "text": _text(new)} for file, line, new in fix.lines
        ],
        "diff": _text(diff_of(fix, cwd)),
        "verification": _verification(fix.verification),
    }


def _verification(verification: Verification) -> Mapping[str, Any]:
    return {
        "status": verification.status,
        "detail": _text(verification.detail),
        "gradient_difference": _finite(verification.gradient_difference),
        "time_ratio": _finite(verification.time_ratio),
        "memory_ratio": _finite(verification.memory_ratio),
        "training": verification.training,
        "differs_in": [_text(name) for name in verification.differs_in],
    }


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _text(words: str) -> str:
    """Return ``words`` without lone surrogates (from undecodable file names), which UTF-8 cannot carry."""
    return words.encode("utf-8", "backslashreplace").decode("utf-8")
