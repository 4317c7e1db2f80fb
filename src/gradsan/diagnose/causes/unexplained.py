"""GS120, GS121 and GS201: a counter that moved without a change, an unknown writer, a check disabled by hooks.

GS201: saved-tensor hooks, the program's own or those of ``checkpoint``, switched PyTorch's check off, and a value they
keep was overwritten.

GS120: the version counter moved, and no saved byte has changed.

GS121: the version counter moved, and no write that gradsan logged accounts for it.
"""

from __future__ import annotations

from dataclasses import replace

from gradsan.diagnose import build, fixes, suspects
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.causes import results
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis, Fix, Message

_WORDS = {"kept_in_one_buffer": "hidden_in_one_buffer", "recomputed_and_overwritten": "hidden_in_recomputation"}


def hidden_by_saved_tensor_hooks(facts: Facts) -> Diagnosis | None:
    """Recognise a conflict under saved-tensor hooks. Writes to other bytes are no conflict at all there: a note."""
    if not facts.conflict.under_user_hooks:
        return None
    words = _WORDS.get(facts.conflict.bypass or "")
    return build.diagnosis(
        facts,
        "GS201",
        "hidden_by_saved_tensor_hooks",
        title=words,
        explanation=words,
        severity="note" if facts.is_false_alarm else "error",
        labels=label_texts.standard(facts, writes=facts.writes or facts.missed),
        fixes=_fixes(facts),
    )


def _fixes(facts: Facts) -> tuple[Fix, ...]:
    """What a program can do about its hooks; those of ``checkpoint`` are not its own, so the write has to go."""
    if facts.conflict.bypass != "recomputed_and_overwritten":
        return fixes.save_copy_in_hooks(facts, in_buffer=facts.conflict.bypass == "kept_in_one_buffer")
    if facts.first is not None and results.is_inplace_flag(facts.first):
        return fixes.disable_inplace_module(facts, results.module_name(facts.first))
    return fixes.instead_of_overwriting(facts)


def false_alarm(facts: Facts) -> Diagnosis | None:
    """Recognise that every logged write missed the saved bytes, or changed only shape and strides."""
    if not facts.is_false_alarm:
        return None
    shape_only = all(write.kind == "metadata" for write in facts.missed)
    key = "note.only_shape_changed" if shape_only else "note.other_bytes_written"
    if facts.is_restored:
        key = "note.same_bytes_again"
    found = build.diagnosis(
        facts,
        "GS120",
        "false_alarm",
        # The program was stopped anyway, so for its user this is an error until the alarm is removed.
        severity="error" if facts.conflict.raised else "note",
        labels=label_texts.standard(facts, writes=facts.missed),
        fixes=fixes.instead_of_overwriting(facts, copy_first=True),
        explanation="false_alarm_restored" if facts.is_restored else None,
        notes=(Message(key, {"name": facts.name}),),
    )
    return (
        replace(found, title=Message("title.false_alarm_restored", found.title.values)) if facts.is_restored else found
    )


def unknown_writer(facts: Facts) -> Diagnosis | None:
    """Accept every conflict that no other cause recognised, and rank the possible writers."""
    ranked = suspects.rank(facts)
    labels = (
        *label_texts.saved(facts),
        *(
            label
            for suspect in ranked
            for label in label_texts.at("suspect", suspect.site, Message(suspect.reason, {"name": facts.name}))
        ),
        *label_texts.at("used", facts.conflict.use.site, Message("label.used", {"op": facts.op})),
    )
    # Without a known save no source was searched for a writer.
    notes = () if ranked or not facts.conflict.save.site.frames else (Message("note.no_suspect"),)
    return build.diagnosis(
        facts,
        "GS121",
        "unknown_writer",
        values={"count": facts.conflict.unexplained},
        labels=labels,
        fixes=fixes.advice(facts, "find_writer", "preserved"),
        notes=notes,
    )
