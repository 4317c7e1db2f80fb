"""GS215 and GS216 of what no saved value shows, and GS220 to GS222.

A loss changed past autograd; an input of an in-place layer read again; a term that is a constant; a term whose
gradients are thrown away; data that is scaled anew in every epoch.

Autograd has done what the program says. What was meant is read off the source, and said as such.
"""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.failures import parts
from gradsan.diagnose.levels import place
from gradsan.model import Clue, Diagnosis, Failure, Message, NamedTensor

LOSS_CHANGED_ROWS = ("loss_changed",)
_ARITHMETIC = frozenset(
    {
        "add_",
        "sub_",
        "mul_",
        "div_",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
        "addcmul_",
        "addcdiv_",
        "lerp_",
    }
)
"""What one does with a loss on purpose; bounds and fills (``clamp_``, ``nan_to_num_``) may be for its display."""


def loss_changed(failure: Failure) -> Diagnosis | None:
    """Every such failure whose loss has a name: a warning where something was added to the loss, or it was scaled."""
    computed, written = parts.clue(failure, "computed"), parts.clue(failure, "written")
    if computed is None or written is None or not computed.name:
        return None
    writer = f"{computed.name}.data = ..." if written.op == "data =" else label_texts.as_written(written.op)
    values = {"name": computed.name, "writer": writer}
    return parts.diagnosis(
        failure,
        "GS215",
        "no_grad_write",
        values=values,
        severity="warning" if _is_computed_on(written, computed.name) else "note",
        title="title.loss_changed",
        explanation="explanation.loss_changed",
        labels=(
            *parts.label_of(computed, "note", "label.loss_computed", values),
            *parts.label_of(written, "written", "label.loss_changed", values),
            *label_texts.at("used", failure.site, Message("label.loss_as_it_was", values)),
        ),
        tensor=_tensor(computed),
        fixes=(parts.fix("out_of_place", "changed", values, summary="help.loss_recorded"),),
    )


def _is_computed_on(written: Clue, name: str) -> bool:
    if written.op != "data =":
        return written.op in _ARITHMETIC
    frame = place(written.site) if written.site is not None else None
    statement = None if frame is None else source.statement_at(frame)
    return statement is not None and any(
        one == name or one.startswith(f"{name}.") for one in source.consumed_names(statement)
    )


INPUT_REUSED_ROWS = ("input_reused",)


def input_reused(failure: Failure) -> Diagnosis | None:
    """Every such failure: a warning."""
    written, read = parts.clue(failure, "written"), parts.clue(failure, "read")
    if written is None or read is None or not read.name:
        return None
    values = {"name": read.name, "argument": written.name, "writer": written.op or "?"}
    return parts.diagnosis(
        failure,
        "GS216",
        "forward_alias",
        values=values,
        severity="warning",
        title="title.input_reused",
        explanation="explanation.input_reused",
        labels=(
            *parts.label_of(written, "written", "label.input_changed", values),
            *parts.label_of(read, "saved", "label.input_read_again", values),
            *label_texts.at("used", failure.site, Message("label.new_value_used", {"name": read.name})),
        ),
        tensor=NamedTensor(
            read.name, written.values["shape"], written.values["dtype"], written.values["device"], None, None
        ),
        fixes=(parts.fix("inplace_false", "changed", values, summary="help.layer_out_of_place"),),
    )


TERM_CONSTANT_ROWS = ("term_is_constant",)


def term_constant(failure: Failure) -> Diagnosis | None:
    """Every such failure: a warning."""
    asked, added = parts.clue(failure, "asked"), parts.clue(failure, "added")
    if asked is None or added is None:
        return None
    frame = place(asked.site) if asked.site is not None else None
    statement = None if frame is None else source.statement_at(frame)
    names = [] if statement is None else source.assigned_names(statement)
    name: str | Message = names[0] if names else Message("label.the_gradient")
    values = {"name": name}
    return parts.diagnosis(
        failure,
        "GS220",
        "term_is_constant",
        values=values,
        severity="warning",
        labels=(
            *parts.label_of(asked, "created", "label.gradient_without_graph", values),
            *parts.label_of(added, "note", "label.constant_added", values),
            *label_texts.at("used", failure.site, Message("label.constant_ignored", values)),
        ),
        tensor=_tensor(asked, names[0]) if names else None,
        fixes=(parts.fix("create_graph", "changed", values),),
    )


TERM_LOST_ROWS = ("term_lost",)


def term_lost(failure: Failure) -> Diagnosis | None:
    """Every such failure: a warning."""
    term, reached, stepped = (parts.clue(failure, role) for role in ("term", "reached", "stepped"))
    if term is None or stepped is None:
        return None
    frame = place(term.site) if term.site is not None else None
    statement = None if frame is None else source.statement_at(frame)
    names = [term.name] if term.name else ([] if statement is None else source.assigned_names(statement))
    values = {
        "name": names[0] if names else Message("label.the_term"),
        "reached": reached.name if reached is not None and reached.name else Message("label.the_tensor"),
        "optimizer": stepped.name,
    }
    return parts.diagnosis(
        failure,
        "GS221",
        "term_lost",
        values=values,
        severity="warning",
        labels=(
            *parts.label_of(term, "created", "label.term_computed", values),
            *label_texts.at("used", failure.site, Message("label.term_fills", values)),
            *parts.label_of(stepped, "note", "label.term_step", values),
        ),
        tensor=_tensor(term, names[0]) if names else None,
        fixes=(parts.fix("keep_graph_of_term", "changed", values),),
    )


DATA_CHANGED_ROWS = ("data_changed_again",)


def data_changed(failure: Failure) -> Diagnosis | None:
    """Every such failure: a warning."""
    changed = parts.clues(failure, "changed")
    if not changed or not changed[0].name:
        return None
    facts = changed[0].values
    values = {
        "name": changed[0].name,
        "writer": ", ".join(dict.fromkeys(label_texts.as_written(one.op) for one in changed)),
        "times": facts["times"],
        "parts": facts["parts"],
    }
    labels = [label for one in changed for label in parts.label_of(one, "written", "label.data_changed_again", values)]
    return parts.diagnosis(
        failure,
        "GS222",
        "data_changed_again",
        values=values,
        severity="warning",
        labels=(
            *{label.frame.line: label for label in labels}.values(),
            *label_texts.at("used", failure.site, Message("label.data_used_changed", values)),
        ),
        tensor=NamedTensor(changed[0].name, facts["shape"], facts["dtype"], facts["device"], None, None),
        fixes=(parts.fix("scale_out_of_place", "changed", values),),
    )


def _tensor(found: Clue, name: str | None = None) -> NamedTensor:
    facts = found.values
    return NamedTensor(name or found.name, facts["shape"], facts["dtype"], facts["device"], None, None)
