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
    return build.diagnosis(facts, CODE, SLUG, fixes=fixes.instead_of_overwriting(facts))
