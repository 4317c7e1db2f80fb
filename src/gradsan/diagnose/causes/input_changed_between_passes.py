"""GS105: a saved tensor that needs no gradient (ids, a mask, a batch) was edited before the backward that reads it."""

from __future__ import annotations

from gradsan.diagnose import build, fixes
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis

CODE = "GS105"
SLUG = "input_changed_between_passes"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise a written leaf without gradient."""
    tensor = facts.conflict.save.tensor
    if not facts.writes or tensor.requires_grad or not tensor.is_leaf:
        return None
    # A compiled graph keeps detached aliases, of its results too: they say nothing of what was saved.
    if facts.in_compiled and facts.name_kind != "data":
        return None
    return build.diagnosis(facts, CODE, SLUG, fixes=fixes.instead_of_overwriting(facts, copy_first=True))
