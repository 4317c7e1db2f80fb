"""GS202: a saved value was written through .data, whose counter is another one."""

from __future__ import annotations

from gradsan.diagnose import past_counter
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis

CODE = "GS202"
SLUG = "data_attribute"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise a silent conflict whose write went this way."""
    return past_counter.diagnosis(facts, CODE, SLUG)
