"""Candidates that cannot be run here: of a job of several processes, all of which would have to run each together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gradsan.model import Diagnosis, Fix, Message
from gradsan.repair.patch import Patch, PatchError
from gradsan.source.tree import source_line


def untried(fault: Diagnosis, most: int, cwd: Path | None) -> Diagnosis:
    """``fault`` with up to ``most`` fixes as diffs against the files on disk, of which nothing is claimed.

    Those that cannot be laid over the files are left as advice.
    """
    shown: list[Fix] = []
    advice: list[Fix] = []
    diffs: set[str] = set()
    for fix in fault.fixes:
        diff = _diff(fix, cwd)
        if not diff or len(shown) >= most:
            advice.append(replace(fix, lines=()))
        elif diff not in diffs:
            diffs.add(diff)
            how = fix.how_changed or Message("fix.not_run_how")
            shown.append(replace(fix, lines=(), diff=diff, meaning="changed", how_changed=how, applicability="review"))
    return replace(fault, fixes=(*shown, *advice))


def why_untried(faults: Sequence[Diagnosis]) -> Message:
    """Why no candidate was run for the last of ``faults``, and what a person can do."""
    fault = faults[-1]
    library = next((fix for fix in fault.fixes if fix.kind == "change_library"), None)
    if library is not None:
        return Message("fix.none_tried_library", library.summary.values)
    places = [label.frame for label in fault.labels if label.role in ("written", "saved")]
    if places and all(source_line(one.file, one.line) is None for one in places):
        return Message("fix.none_tried_no_source", {"file": places[0].file})
    return Message("fix.none_tried")


def _diff(fix: Fix, cwd: Path | None) -> str:
    try:
        return Patch().with_lines(fix.lines).diff(cwd) if fix.lines else ""
    except PatchError:
        return ""
