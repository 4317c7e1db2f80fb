"""GS201: the program's own saved-tensor hooks switched PyTorch's check off, and a value they keep was overwritten."""

from __future__ import annotations

from gradsan.diagnose import build, fixes
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis

CODE = "GS201"
SLUG = "hidden_by_saved_tensor_hooks"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise a conflict under the user's own hooks. Writes to other bytes are no conflict at all there: a note."""
    if not facts.conflict.under_user_hooks:
        return None
    return build.diagnosis(
        facts,
        CODE,
        SLUG,
        severity="note" if facts.is_false_alarm else "error",
        labels=label_room.standard(facts, writes=facts.writes or facts.missed),
        fixes=(*fixes.save_copy_in_hooks(facts), *fixes.instead_of_overwriting(facts)),
    )
