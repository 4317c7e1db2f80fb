"""GS203: a saved value was written outside PyTorch: NumPy, DLPack, a buffer, a pointer, another process."""

from __future__ import annotations

from gradsan.diagnose import fixes, past_counter
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis

CODE = "GS203"
SLUG = "memory_alias"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise a silent conflict whose write went this way."""
    return past_counter.diagnosis(facts, CODE, SLUG, instead=fixes.copy_handed_out(facts))
