"""GS202: a saved value was written through .data, whose counter is another one."""

from __future__ import annotations

from dataclasses import replace

from gradsan.diagnose import past_counter, value_fixes
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis, Fix, Message

CODE = "GS202"
SLUG = "data_attribute"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise a silent conflict whose write went this way."""
    found = past_counter.diagnosis(facts, CODE, SLUG)
    save = facts.conflict.save
    has_graph = save.is_output or (save.tensor.requires_grad and not save.tensor.is_leaf)
    if found is None or not has_graph or facts.conflict.unchanged:
        return found
    # What was written has a graph: the write may have been meant as a part of it, and no copy makes it one.
    recorded = value_fixes.recorded(facts, facts.name)
    return replace(found, fixes=(*recorded, *map(_leaving_it_unrecorded, found.fixes)))


def _leaving_it_unrecorded(fix: Fix) -> Fix:
    if fix.meaning != "preserved":
        return fix
    return replace(fix, meaning="changed", how_changed=Message("help.left_unrecorded_how", fix.summary.values))
