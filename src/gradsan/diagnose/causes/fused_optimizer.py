"""GS205: a saved value was written by a fused optimizer, which does not count."""

from __future__ import annotations

from gradsan.diagnose import past_counter
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis

CODE = "GS205"
SLUG = "fused_optimizer"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise a silent conflict whose write went this way."""
    return past_counter.diagnosis(facts, CODE, SLUG)
