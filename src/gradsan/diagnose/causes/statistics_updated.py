"""GS112: running statistics or another buffer of a module were updated before the backward that reads them."""

from __future__ import annotations

from gradsan.diagnose import build, fixes
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis

CODE = "GS112"
SLUG = "statistics_updated"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise a saved buffer of floating-point statistics."""
    if not facts.writes:
        return None
    slot = facts.conflict.save.slot or ""
    is_statistics = slot.startswith("running_")
    is_float_buffer = facts.name_kind == "buffer" and "int" not in facts.conflict.save.tensor.dtype
    if not is_statistics and not is_float_buffer:
        return None
    return build.diagnosis(
        facts,
        CODE,
        SLUG,
        fixes=(*fixes.update_outside_graph(facts), *fixes.instead_of_overwriting(facts, copy_first=True)),
    )
