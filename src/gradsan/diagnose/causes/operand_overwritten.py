"""GS102: the user's in-place operation changed an operand that another operation saved."""

from __future__ import annotations

from gradsan.diagnose import build, fixes
from gradsan.diagnose.facts import Facts, renormalises
from gradsan.model import Diagnosis, Message

CODE = "GS102"
SLUG = "operand_overwritten"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise a saved operand that was written."""
    if not facts.writes:
        return None
    explanation = f"{SLUG}_in_compiled" if facts.in_compiled else None
    found = fixes.instead_of_overwriting(facts)
    notes: tuple[Message, ...] = ()
    if any(renormalises(write) for write in facts.writes):
        # Who writes is the lookup itself, so that there is no line to write otherwise.
        found = tuple(fix for fix in found if fix.lines)
        notes = (Message("note.max_norm_renormalises", {"name": facts.name}),)
    return build.diagnosis(facts, CODE, SLUG, explanation=explanation, fixes=found, notes=notes)
