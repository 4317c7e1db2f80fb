"""GS206: a saved value was running statistics updated by a kernel that does not count."""

from __future__ import annotations

from gradsan.diagnose import past_counter
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis

CODE = "GS206"
SLUG = "statistics"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise a silent conflict whose write went this way."""
    return past_counter.diagnosis(facts, CODE, SLUG)
