"""GS210 to GS212: checkpointed functions and custom Functions whose inputs or kept tensors changed.

GS210: a checkpointed function read another value when it was recomputed in backward.

GS211: a custom Function kept a tensor as an attribute of ctx, and it was written before backward.

GS212: the forward of a custom Function wrote its input in place and did not mark it dirty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gradsan import source
from gradsan.diagnose import build, value_fixes
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis, Label, Message, Site


def checkpoint_closure(facts: Facts) -> Diagnosis | None:
    """Recognise a write or rebinding of a checkpointed function's closure before its recomputation."""
    conflict = facts.conflict
    if conflict.bypass != "checkpoint_closure":
        return None
    path = conflict.save.slot
    before, now = conflict.rebound or ("?", "?")
    values = {"function": _called(facts), "name": facts.name if path else "?", "before": before, "now": now}
    kind = "_unknown" if path is None else "_rebound" if conflict.rebound is not None else ""
    found = build.diagnosis(
        facts,
        "GS210",
        "checkpoint_closure",
        severity="note" if conflict.unchanged else "error" if conflict.certain else "warning",
        values=values,
        labels=_labels(facts, values),
        fixes=value_fixes.for_checkpoint(facts),
        notes=(Message("note.recomputed_the_same"),) if conflict.unchanged else (),
    )
    return replace(
        found,
        title=Message(f"title.checkpoint_closure{kind}", found.title.values),
        explanation=Message(f"explanation.checkpoint_closure{kind}", found.title.values),
        # A checkpoint saves no such value: that is its purpose.
        tensor=None if path is None or found.tensor is None else replace(found.tensor, op=None, operand=None),
    )


def _called(facts: Facts) -> str | Message:
    name = facts.conflict.save.node or "?"
    return Message("label.checkpointed_lambda") if name.endswith("<lambda>") else name


def _labels(facts: Facts, values: Mapping[str, object]) -> tuple[Label, ...]:
    conflict = facts.conflict
    call, use = conflict.save.site.shown_frame, conflict.use.site.shown_frame
    changed = label_texts.written(facts, facts.writes)
    if conflict.rebound is not None and call is not None and conflict.save.slot is not None:
        places = source.rebound_at(call, conflict.save.slot, use)
        message = Message("label.rebound", values)
        for frame in places:
            role = "written" if len(places) == 1 else "suspect"
            changed += (Label(role, frame, message, "=", Site((frame,))),)  # type: ignore[arg-type]
    return (
        *label_texts.at("saved", conflict.save.site, Message("label.checkpoint_call", values), op="checkpoint"),
        *changed,
        *label_texts.at("used", conflict.use.site, Message("label.recomputed", values), op=conflict.use.via),
    )


def context_attribute(facts: Facts) -> Diagnosis | None:
    """Recognise a written attribute of ctx, for which no version is checked."""
    conflict = facts.conflict
    if conflict.bypass != "context_attribute":
        return None
    kept = f"ctx.{conflict.save.slot}"
    site = conflict.function_site
    definition = site.frames[-1] if site is not None and site.frames else None
    # The tensor's own name, where the forward keeps a variable: "running, kept by RunningMean as mean".
    own = source.name_kept(definition, conflict.save.slot or "") if definition is not None else None
    if not conflict.names:
        facts = replace(facts, name=own or kept)
    values = {"function": facts.op, "attribute": kept, "name": facts.name}
    written = label_texts.written(facts, facts.writes)
    attribute = (conflict.save.slot or "").partition(".")[0].partition("[")[0]
    assigned = source.kept_on_context(definition, attribute) if definition is not None else None
    where = (
        ()
        if assigned is None
        else (Label("note", assigned, Message("label.kept_here", values), None, Site((assigned,))),)
    )
    found = build.diagnosis(
        facts,
        "GS211",
        "context_attribute",
        severity="note" if facts.is_false_alarm else "error",
        values=values,
        labels=(
            *label_texts.at(
                "saved", conflict.save.site, Message("label.kept_on_context", values), op=conflict.save.node
            ),
            *where,
            *written,
            *label_texts.at("used", conflict.use.site, Message("label.context_read", values), op=conflict.use.via),
        ),
        fixes=value_fixes.for_context(facts),
    )
    return replace(found, tensor=None if found.tensor is None else replace(found.tensor, name=own or kept))


def missing_mark_dirty(facts: Facts) -> Diagnosis | None:
    """Recognise an input overwritten by a Function and used again with the graph it had before."""
    conflict = facts.conflict
    if conflict.bypass != "missing_mark_dirty":
        return None
    function = conflict.bridge.older if conflict.bridge is not None else "?"
    inner = conflict.save.slot
    values = {"function": function, "name": facts.name, "op": facts.op}
    found = build.diagnosis(
        facts,
        "GS212",
        "missing_mark_dirty",
        severity="warning",
        values=values,
        labels=(
            *label_texts.at("note", conflict.alias_site, Message("label.given_to_function", values)),
            *label_texts.written(facts, facts.writes),
            *label_texts.at(
                "saved", conflict.save.site, Message("label.used_with_old_graph", values), op=conflict.save.node
            ),
            *label_texts.at("used", conflict.use.site, Message("label.old_graph_walked", values), op=conflict.use.via),
        ),
        fixes=value_fixes.for_unmarked(facts),
    )
    return replace(
        found, tensor=None if found.tensor is None else replace(found.tensor, name=inner or found.tensor.name)
    )
