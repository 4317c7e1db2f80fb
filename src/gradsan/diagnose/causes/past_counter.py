"""GS202 to GS209, GS217 and GS219: a saved value was written past the version counter, or its memory was released.

GS202: a saved value was written through .data, which has a version counter of its own.

GS203: a saved value was written outside PyTorch: NumPy, DLPack, a buffer, a pointer, another process.

GS204: a saved value was written through another tensor made of the same storage, or through the storage itself.

GS205: a saved value was written by a fused optimizer, which does not bump the version counter.

GS206: a saved value was running statistics updated by a kernel that does not bump the version counter.

GS207: a saved value was written by a collective of torch.distributed.

GS208: a saved value was written by a kernel that does not declare the write.

GS219: a saved value was written that a compiled graph keeps without its version counter.

GS209: the memory of a saved value was released, and backward needs it.

GS217: fully_shard gathered for backward values that an update had changed since the forward.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from gradsan.diagnose import build, fixes, suspects, value_fixes
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.causes.updates import instead_of_update
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis, Fix, Message, Severity, Site


def diagnosis(facts: Facts, code: str, slug: str, instead: tuple[Fix, ...] = ()) -> Diagnosis | None:
    """The diagnosis of a silent conflict whose write bypassed the counter as ``slug`` says; None for others.

    ``instead`` replaces the general advice for writes without a line to change here.
    """
    if facts.conflict.raised or facts.conflict.bypass != slug:
        return None
    writes = facts.writes or facts.missed
    found = build.diagnosis(
        facts,
        code,
        slug,
        severity=_severity(facts),
        values={"writer": writes[0].op if writes else "?"},
        labels=label_texts.standard(facts, writes=writes),
        explanation="written_unchanged" if facts.conflict.unchanged else None,
        fixes=_fixes(facts, instead),
    )
    if not facts.conflict.unchanged:
        return found
    return replace(found, title=Message("title.written_unchanged", found.title.values))


def _fixes(facts: Facts, instead: tuple[Fix, ...]) -> tuple[Fix, ...]:
    if facts.name_kind == "parameter" and facts.updates and not instead:
        return instead_of_update(facts)
    general = fixes.instead_of_overwriting(facts)
    # Nothing has to change where the values are what they were.
    others = (fix for fix in general if fix.lines or not (instead or facts.conflict.unchanged))
    return (*instead, *(fix for fix in others if fix not in instead))


def _severity(facts: Facts) -> Severity:
    if facts.is_false_alarm or facts.is_undone:
        return "note"
    return "warning" if facts.may_be_undone else "error"


def data_attribute(facts: Facts) -> Diagnosis | None:
    """Recognise a silent write through ``.data``."""
    found = diagnosis(facts, "GS202", "data_attribute")
    save = facts.conflict.save
    has_graph = save.is_output or (save.tensor.requires_grad and not save.tensor.is_leaf)
    # A parameter is no result of a computation: writes to it cannot be recorded.
    if found is None or not has_graph or facts.conflict.unchanged or facts.name_kind == "parameter":
        return found
    # The written value has a graph: the write may have been meant as a part of it, which no copy achieves.
    others = [fix for fix in found.fixes if fix.kind != "record_the_change"]
    return replace(found, fixes=(*value_fixes.recorded(facts, facts.name), *map(_leaving_it_unrecorded, others)))


def _leaving_it_unrecorded(fix: Fix) -> Fix:
    if fix.meaning != "preserved":
        return fix
    return replace(fix, meaning="changed", how_changed=Message(value_fixes.LEFT_UNRECORDED, fix.summary.values))


def memory_alias(facts: Facts) -> Diagnosis | None:
    """Recognise a silent write outside PyTorch to exported memory."""
    found = diagnosis(facts, "GS203", "memory_alias", instead=fixes.copy_handed_out(facts))
    if found is None:
        return None
    *before, used = found.labels
    known = {(one.frame.file, one.frame.line) for one in before if one.role == "written"}
    others = [one for one in suspects.of_arrays(facts) if (one.frame.file, one.frame.line) not in known]
    return replace(found, labels=(*before, *others, used))


_BUFFER_SYNC = "DistributedDataParallel.forward"


def collective(facts: Facts) -> Diagnosis | None:
    """Recognise a silent write by a collective: a call of the program's, or a sync of buffers."""
    found = diagnosis(facts, "GS207", "collective")
    if found is None or facts.first is None or facts.first.op != _BUFFER_SYNC:
        return found
    return replace(
        found,
        explanation=Message("explanation.collective_of_buffers", found.explanation.values),
        fixes=fixes.advice(facts, "keep_buffers_local", "changed"),
    )


def statistics(facts: Facts) -> Diagnosis | None:
    """Recognise a silent update of running statistics: no copy and no new tensor would get them updated."""
    found = diagnosis(facts, "GS206", "statistics")
    if found is None:
        return None
    return replace(found, fixes=fixes.advice(facts, "backward_before_update", "preserved"))


WITHOUT_MORE = tuple(
    partial(diagnosis, code=code, slug=slug)
    for code, slug in (
        ("GS204", "storage_alias"),
        ("GS205", "fused_optimizer"),
        ("GS208", "kernel_without_schema"),
        ("GS219", "compiled_input"),
    )
)
"""The causes of which there is no more to say than how the write bypassed the counter."""


def storage_emptied(facts: Facts) -> Diagnosis | None:
    """Recognise a storage resized between save and use: its memory is missing, or replaced."""
    conflict = facts.conflict
    if conflict.bypass != "storage_emptied":
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
        fixes=fixes.advice(facts, "one_backward_each_forward" if by_sharding else "give_memory_back", "preserved"),
    )


def _gave_back(site: Site | None) -> bool:
    """Whether FullyShardedDataParallel released the memory, as it does at the end of each backward."""
    frames = () if site is None else site.frames
    return any("/torch/distributed/fsdp/" in frame.file.replace("\\", "/") for frame in frames)


def gathered_anew(facts: Facts) -> Diagnosis | None:
    """Recognise a sharded parameter that was written between the forward and the gathering for its backward."""
    if facts.conflict.bypass != "gathered_anew":
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
        fixes=(*fixes.advice(facts, "reorder_step", "changed"), *fixes.recompute_forward(facts)) if updates else (),
    )
