"""GS207: a saved value was written by a collective of torch.distributed."""

from __future__ import annotations

from dataclasses import replace

from gradsan.diagnose import fixes, past_counter
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis, Message

CODE = "GS207"
SLUG = "collective"
_BUFFER_SYNC = "DistributedDataParallel.forward"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise a silent conflict whose write went this way: a call of the program's, or a sync of buffers."""
    found = past_counter.diagnosis(facts, CODE, SLUG)
    if found is None or facts.first is None or facts.first.op != _BUFFER_SYNC:
        return found
    return replace(
        found,
        explanation=Message("explanation.collective_of_buffers", found.explanation.values),
        fixes=fixes.keep_buffers_local(facts),
    )
