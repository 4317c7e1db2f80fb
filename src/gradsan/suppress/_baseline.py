"""A baseline: the findings that are known already, so that a check only fails for new ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from gradsan.model import Diagnosis
from gradsan.source.tree import source_line

_SCHEMA = "gradsan.baseline/1"


def fingerprint(diagnosis: Diagnosis) -> str:
    """What stays the same of a finding while its file is edited: code, roles, file names, text of the lines."""
    parts = [diagnosis.code]
    for label in diagnosis.labels:
        frame = label.frame
        text = (source_line(frame.file, frame.line) or "").strip()
        parts.append(f"{label.role} {Path(frame.file).name} {frame.function} {text}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def read_baseline(file: Path) -> dict[str, str]:
    """The fingerprints of a baseline file, each with the code that it stands for.

    Raises:
        OSError: where the file cannot be read.
        ValueError: where it is no baseline.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("schema") != _SCHEMA:
        raise ValueError(str(file))
    return {str(known["fingerprint"]): str(known["code"]) for known in content["known"]}


def write_baseline(file: Path, diagnoses: Iterable[Diagnosis]) -> None:
    """Write what is known from now on. Raises OSError where that cannot be done."""
    known = {fingerprint(diagnosis): diagnosis.code for diagnosis in diagnoses}
    rows = [{"code": code, "fingerprint": mark} for mark, code in sorted(known.items())]
    file.write_text(json.dumps({"schema": _SCHEMA, "known": rows}, indent=1) + "\n", encoding="utf-8")
