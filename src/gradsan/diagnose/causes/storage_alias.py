"""GS204: a saved value was written through another tensor made of the same storage, or through the storage itself."""

from __future__ import annotations

from gradsan.diagnose import past_counter
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis

CODE = "GS204"
SLUG = "storage_alias"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise a silent conflict whose write went this way."""
    return past_counter.diagnosis(facts, CODE, SLUG)
