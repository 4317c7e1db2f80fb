"""GS209: the memory of a saved value was taken away, and backward needs it."""

from __future__ import annotations

from gradsan.diagnose import build, fixes
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis, Message, Site

CODE = "GS209"
SLUG = "storage_emptied"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise that a storage was resized between save and use: its memory is missing, or other memory is there."""
    conflict = facts.conflict
    if conflict.way != SLUG:
        return None
    is_missing = conflict.change is None
    by_sharding = is_missing and _gave_back(conflict.alias_site)
    return build.diagnosis(
        facts,
        CODE,
        SLUG,
        explanation="storage_given_back" if by_sharding else SLUG if is_missing else "storage_refilled",
        labels=(
            *label_room.saved(facts),
            *label_room.at("freed", conflict.alias_site, Message("label.emptied", {"name": facts.name}), op="resize_"),
            *label_room.written(facts, [write for write in facts.writes if write.site != conflict.alias_site]),
            *label_room.at("used", conflict.use.site, Message("label.used", {"op": facts.op}), op=conflict.use.via),
        ),
        fixes=fixes.one_backward_each_forward(facts) if by_sharding else fixes.give_memory_back(facts),
    )


def _gave_back(site: Site | None) -> bool:
    """Whether it was FullyShardedDataParallel that took the memory away, as it does at the end of each backward."""
    frames = () if site is None else site.frames
    return any("/torch/distributed/fsdp/" in frame.file.replace("\\", "/") for frame in frames)
