"""GS209 and GS217: the memory of a saved value was taken away, or filled anew.

GS209: the memory of a saved value was taken away, and backward needs it.

GS217: fully_shard gathered for backward what an update had changed since the forward.
"""

from __future__ import annotations

from gradsan.diagnose import build, fixes
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis, Message, Site


def storage_emptied(facts: Facts) -> Diagnosis | None:
    """Recognise that a storage was resized between save and use: its memory is missing, or other memory is there."""
    conflict = facts.conflict
    if conflict.way != "storage_emptied":
        return None
    is_missing = conflict.change is None
    by_sharding = is_missing and _gave_back(conflict.alias_site)
    return build.diagnosis(
        facts,
        "GS209",
        "storage_emptied",
        explanation="storage_given_back" if by_sharding else "storage_emptied" if is_missing else "storage_refilled",
        labels=(
            *label_texts.saved(facts),
            *label_texts.at("freed", conflict.alias_site, Message("label.emptied", {"name": facts.name}), op="resize_"),
            *label_texts.written(facts, [write for write in facts.writes if write.site != conflict.alias_site]),
            *label_texts.at("used", conflict.use.site, Message("label.used", {"op": facts.op}), op=conflict.use.via),
        ),
        fixes=fixes.one_backward_each_forward(facts) if by_sharding else fixes.give_memory_back(facts),
    )


def _gave_back(site: Site | None) -> bool:
    """Whether it was FullyShardedDataParallel that took the memory away, as it does at the end of each backward."""
    frames = () if site is None else site.frames
    return any("/torch/distributed/fsdp/" in frame.file.replace("\\", "/") for frame in frames)


def gathered_anew(facts: Facts) -> Diagnosis | None:
    """Recognise a sharded parameter that was written between the forward and the gathering for its backward."""
    if facts.conflict.way != "gathered_anew":
        return None
    updates = facts.updates
    writer = label_texts.update_name(facts, updates[0]) if updates else Message("label.some_writer")
    values = {"name": facts.name, "op": facts.op}
    return build.diagnosis(
        facts,
        "GS217",
        "gathered_anew",
        values={"update": writer},
        labels=label_texts.standard(facts, used=Message("label.used_as_gathered", values)),
        fixes=(*fixes.reorder_step(facts), *fixes.recompute_forward(facts)) if updates else (),
    )
