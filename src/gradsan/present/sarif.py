"""Report as SARIF 2.1.0 (OASIS), which editors and code scanning services read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gradsan import text
from gradsan.model import Diagnosis, Fix, Frame, Label, Message, Report
from gradsan.present._fixes import Replacement, replacements_of
from gradsan.present._places import encodable, primary_label, shown_path, shown_stack, working_directory
from gradsan.source.tree import source_line


def _documentation() -> str:
    """Return the documentation URL of the installed package, with a final slash; ``""`` if it has none."""
    try:
        urls = metadata("gradsan").get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    named = dict(entry.split(", ", 1) for entry in urls if ", " in entry)
    return f"{named['Documentation'].rstrip('/')}/" if "Documentation" in named else ""


_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_ROOT = "SRCROOT"
_HOME = _documentation()
_TOP_LEVEL = ("saved", "written", "used")


def render_sarif(report: Report, *, language: str, cwd: Path | None = None) -> str:
    """Return a report as a SARIF log with one run, ending with a line break.

    A rule per code, with the page of ``gradsan explain`` as its help; a result per diagnosis: it is where the value
    was needed, the other labels are related locations, all of them in order a code flow, fixes are replacements
    of whole lines where these are known. Files below ``cwd`` (default: the process's own) are relative to ``SRCROOT``.
    """
    return json.dumps(as_log(report, language=language, cwd=cwd), ensure_ascii=False, indent=2) + "\n"


def as_log(report: Report, *, language: str, cwd: Path | None = None) -> dict[str, Any]:
    """Return the content of :func:`render_sarif` as dictionaries, lists, strings and numbers."""
    writer = _Writer(language, working_directory(cwd))
    codes = sorted({diagnosis.code for diagnosis in report.diagnoses})
    run = {
        "tool": {
            "driver": {
                "name": "gradsan",
                "semanticVersion": report.gradsan,
                **({"informationUri": _HOME} if _HOME else {}),
                "rules": [writer.rule(code, report.diagnoses) for code in codes],
            }
        },
        "invocations": [writer.invocation(report)],
        "originalUriBaseIds": {_ROOT: {"description": {"text": "the working directory of the program"}}},
        "columnKind": "unicodeCodePoints",
        "results": [writer.result(diagnosis, codes) for diagnosis in report.diagnoses],
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


class _Writer:
    def __init__(self, language: str, cwd: Path | None) -> None:
        self._language = language
        self._cwd = cwd

    def rule(self, code: str, diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
        entry = next((entry for entry in text.codes(self._language) if entry.code == code), None)
        if entry is None:
            first = next(diagnosis for diagnosis in diagnoses if diagnosis.code == code)
            return {"id": code, "name": first.cause, "shortDescription": self._message(first.title)}
        page = text.page(code, self._language)
        more = text.say(Message("sarif.help_uri_note", {"code": code}), self._language)
        return {
            "id": code,
            "name": entry.slug,
            "shortDescription": {"text": entry.title},
            "help": {"text": f"{entry.title} ({more})", "markdown": page},
            **({"helpUri": f"{_HOME}reference/codes/{code}.html"} if _HOME else {}),
        }

    def invocation(self, report: Report) -> dict[str, Any]:
        program = report.program
        made: dict[str, Any] = {"executionSuccessful": program.outcome == "finished"}
        if program.argv:
            made["arguments"] = [encodable(word) for word in program.argv]
        if program.exception is not None:
            kind, words = program.exception
            made["exitCodeDescription"] = encodable(f"{kind}: {words}")
        notes = [{"level": "note", "message": self._message(spot)} for spot in report.seen.blind_spots]
        if notes:
            made["toolExecutionNotifications"] = notes
        return made

    def result(self, diagnosis: Diagnosis, codes: Sequence[str]) -> dict[str, Any]:
        primary = primary_label(diagnosis)
        others = [label for label in diagnosis.labels if label is not primary]
        words = [diagnosis.explanation, *([diagnosis.why.text] if diagnosis.why else []), *diagnosis.notes]
        said = dict.fromkeys(self._say(message) for message in (diagnosis.title, *words))
        made: dict[str, Any] = {
            "ruleId": diagnosis.code,
            "ruleIndex": codes.index(diagnosis.code),
            "level": diagnosis.severity,
            "message": {"text": "\n".join(said)},
            "locations": [self._location(primary)] if primary else [],
            "occurrenceCount": diagnosis.count,
            "partialFingerprints": {"gradsanPlaces/v1": self._fingerprint(diagnosis)},
            "properties": {
                "cause": diagnosis.cause,
                "silent": diagnosis.silent,
                "gradient": diagnosis.gradient.status,
                **({"sources": list(diagnosis.sources)} if diagnosis.sources else {}),
            },
        }
        if others:
            made["relatedLocations"] = [
                {"id": number, **self._location(label), "message": self._message(label.message)}
                for number, label in enumerate(others, 1)
            ]
        if diagnosis.labels:
            made["codeFlows"] = [{"threadFlows": [{"locations": self._flow(diagnosis)}]}]
        stack = self._stack(primary) if primary else None
        if stack:
            made["stacks"] = [stack]
        fixes: list[dict[str, Any]] = []
        for fix in map(self._fix, diagnosis.fixes):
            # SARIF requires distinct entries.
            if fix is not None and fix not in fixes:
                fixes.append(fix)
        if fixes:
            made["fixes"] = fixes
        return made

    def _flow(self, diagnosis: Diagnosis) -> list[dict[str, Any]]:
        flow: list[dict[str, Any]] = []
        for order, label in enumerate(diagnosis.labels, 1):
            step: dict[str, Any] = {
                "location": {**self._location(label), "message": self._message(label.message)},
                "executionOrder": order,
                "kinds": [label.role],
                "importance": "essential" if label.role in _TOP_LEVEL else "important",
            }
            stack = self._stack(label)
            if stack:
                step["stack"] = stack
            flow.append(step)
        return flow

    def _fingerprint(self, diagnosis: Diagnosis) -> str:
        """Return a hash of the code and the text of the lines, so that lines added above do not change it."""
        parts = [diagnosis.code, str(diagnosis.silent)]
        for label in diagnosis.labels:
            frame = label.frame
            line = (source_line(frame.file, frame.line) or str(frame.line)).strip()
            parts += [label.role, shown_path(frame.file, self._cwd), frame.function, line]
        if not diagnosis.labels:
            parts.append(self._say(diagnosis.title))
        return hashlib.sha256("\0".join(parts).encode("utf-8", "backslashreplace")).hexdigest()[:32]

    def _location(self, label: Label) -> dict[str, Any]:
        return {
            "physicalLocation": {
                "artifactLocation": self._artifact(label.frame.file),
                "region": _region(label.frame),
            },
            "logicalLocations": [{"name": encodable(label.frame.function), "kind": "function"}],
        }

    def _stack(self, label: Label) -> dict[str, Any] | None:
        frames = shown_stack(label.site)
        if not frames:
            return None
        # SARIF has the innermost frame first.
        return {"frames": [{"location": self._frame(frame)} for frame in reversed(frames)]}

    def _frame(self, frame: Frame) -> dict[str, Any]:
        place = {"artifactLocation": self._artifact(frame.file), "region": {"startLine": frame.line}}
        return {
            "physicalLocation": place,
            "logicalLocations": [{"name": encodable(frame.function), "kind": "function"}],
        }

    def _fix(self, fix: Fix) -> dict[str, Any] | None:
        replacements = replacements_of(fix, self._cwd)
        if not replacements:
            return None
        files = dict.fromkeys(replacement.file for replacement in replacements)
        return {
            "description": self._message(fix.summary),
            "artifactChanges": [
                {
                    "artifactLocation": self._artifact(file),
                    "replacements": [_replacement(one) for one in replacements if one.file == file],
                }
                for file in files
            ],
        }

    def _artifact(self, file: str) -> dict[str, Any]:
        shown = shown_path(file, self._cwd)
        path = Path(shown)
        if path.is_absolute():
            return {"uri": f"file://{quote(path.as_posix(), errors='surrogateescape')}"}
        return {"uri": quote(shown.replace("\\", "/"), errors="surrogateescape"), "uriBaseId": _ROOT}

    def _say(self, message: Message) -> str:
        return encodable(text.say(message, self._language))

    def _message(self, message: Message) -> dict[str, Any]:
        return {"text": self._say(message)}


def _region(frame: Frame) -> dict[str, Any]:
    region: dict[str, Any] = {"startLine": frame.line}
    end_line = max(frame.end_line or frame.line, frame.line)
    if frame.column is not None and frame.column >= 1:
        region["startColumn"] = frame.column
        if frame.end_column is not None and (end_line > frame.line or frame.end_column > frame.column):
            region |= {"endLine": end_line, "endColumn": max(frame.end_column, 1)}
    source = source_line(frame.file, frame.line)
    if source is not None and end_line == frame.line:
        region["snippet"] = {"text": encodable(source)}
    return region


def _replacement(one: Replacement) -> dict[str, Any]:
    new = "\n".join(one.new)
    if one.count and one.new:
        region = {"startLine": one.line, "endLine": one.line + one.count - 1}
        return {"deletedRegion": region, "insertedContent": {"text": encodable(new)}}
    region = {"startLine": one.line, "startColumn": 1, "endLine": one.line + one.count, "endColumn": 1}
    made: dict[str, Any] = {"deletedRegion": region}
    if one.new:
        made["insertedContent"] = {"text": encodable(f"{new}\n")}
    return made
