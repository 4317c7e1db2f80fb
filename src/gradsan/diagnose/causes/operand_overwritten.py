"""GS102: the user's in-place operation changed an operand that another operation saved."""

from __future__ import annotations

from gradsan.diagnose import build, fixes
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis

CODE = "GS102"
SLUG = "operand_overwritten"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise a saved operand that was written."""
    if not facts.writes:
        return None
    explanation = f"{SLUG}_in_compiled" if facts.in_compiled else None
    return build.diagnosis(facts, CODE, SLUG, explanation=explanation, fixes=fixes.instead_of_overwriting(facts))
