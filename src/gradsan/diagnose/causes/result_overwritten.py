"""GS101: the user's in-place operation changed an operation's saved result (sigmoid, exp, softmax, relu …)."""

from __future__ import annotations

from gradsan.diagnose import build, fixes
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis

CODE = "GS101"
SLUG = "result_overwritten"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise a saved result that was written."""
    if not facts.writes or not facts.conflict.save.is_output:
        return None
    explanation = f"{SLUG}_in_compiled" if facts.in_compiled else None
    return build.diagnosis(facts, CODE, SLUG, explanation=explanation, fixes=fixes.instead_of_overwriting(facts))
