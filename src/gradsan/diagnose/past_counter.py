"""What the causes GS202 to GS208 share: a silent conflict, the way by which the write passed the counter, the door."""

from __future__ import annotations

from dataclasses import replace

from gradsan.diagnose import build, fixes
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis, Fix, Message, Severity


def diagnosis(facts: Facts, code: str, slug: str, instead: tuple[Fix, ...] = ()) -> Diagnosis | None:
    """The diagnosis of a silent conflict whose write went the way ``slug``; None for every other conflict.

    ``instead`` takes the place of the general advice for writes that has no line to change here.
    """
    if facts.conflict.raised or facts.conflict.way != slug:
        return None
    found = build.diagnosis(
        facts,
        code,
        slug,
        severity=_severity(facts),
        values={"writer": facts.first.op if facts.first is not None else "?"},
        labels=label_room.standard(facts, writes=facts.writes or facts.missed),
        explanation="written_unchanged" if facts.conflict.unchanged else None,
        fixes=(*instead, *(fix for fix in fixes.instead_of_overwriting(facts) if fix.lines or not instead)),
    )
    if not facts.conflict.unchanged:
        return found
    return replace(found, title=Message("title.written_unchanged", found.title.values))


def _severity(facts: Facts) -> Severity:
    if facts.is_false_alarm or facts.is_undone:
        return "note"
    return "warning" if facts.may_be_undone else "error"
