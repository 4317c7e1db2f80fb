"""GS215, GS216 and GS403 without a saved value involved, and GS220 to GS222.

A loss changed past autograd; an input of an in-place layer read again; a constant term; a term whose
gradients are discarded; data that is scaled again in every epoch.

Autograd has computed what the program says. The intention is inferred from the source, and reported as such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from gradsan import source
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.collected import BuiltOnce, anew_or_cut
from gradsan.diagnose.failures import parts
from gradsan.diagnose.failures.unreached import term_uncut
from gradsan.model import Clue, Diagnosis, Failure, Fix, Frame, Lines, Message, Site

_ARITHMETIC = frozenset(
    {
        *("add_", "sub_", "mul_", "div_", "addcmul_", "addcdiv_", "lerp_"),
        *("__iadd__", "__isub__", "__imul__", "__itruediv__"),
    }
)
"""Operations applied to a loss on purpose; bounds and fills (``clamp_``, ``nan_to_num_``) may be for its display."""


def loss_changed(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure whose loss has a name: a warning if a term was added to it or it was scaled."""
    computed, written = failure.clue("computed"), failure.clue("written")
    if computed is None or written is None or not computed.name:
        return None
    values = {"name": computed.name, "writer": parts.writer(written, computed.name)}
    return parts.diagnosis(
        failure,
        "GS215",
        "no_grad_write",
        values=values,
        severity="warning" if _is_computed_on(written, computed.name) else "note",
        words="loss_changed",
        labels=(
            *parts.label_of(computed, "note", "label.loss_computed", values),
            *parts.label_of(written, "written", "label.loss_changed", values),
            *parts.used(failure, "label.loss_as_it_was", values),
        ),
        tensor=parts.tensor_of(computed),
        fixes=(parts.fix("out_of_place", "changed", values, summary="help.loss_recorded"),),
    )


def _is_computed_on(written: Clue, name: str) -> bool:
    if written.op != "data =":
        return written.op in _ARITHMETIC
    frame = written.shown_frame
    statement = None if frame is None else source.statement_at(frame)
    return statement is not None and any(
        one == name or one.startswith(f"{name}.") for one in source.consumed_names(statement)
    )


def value_changed(failure: Failure) -> Diagnosis | None:
    """Diagnose, as a warning, every such failure whose value has a name at the write."""
    computed, written, read = (failure.clue(role) for role in ("computed", "written", "read"))
    if computed is None or written is None or read is None or written.site is None:
        return None
    frame = written.site.shown_frame
    name = None if frame is None else source.written_expression(frame, written.op or "", ())
    if name is None and frame is not None:
        name = parts.assigned_at(computed) or source.handed_out(frame, written.op or "")
    name = (name or "").removesuffix(".data").removesuffix(".detach()")
    if not name:
        return None
    # Written by a second name, the value that autograd has computed is the one that is wrong.
    alias = None if frame is None else source.alias_of(frame, name)
    name = alias if alias is not None and alias == parts.assigned_at(computed) else name
    values = {"name": name, "writer": parts.writer(written, name)}
    by_array = () if read.site is None else label_texts.by_array(written.op, written.site, values, None, read.site)
    return parts.diagnosis(
        failure,
        "GS215",
        "no_grad_write",
        values=values,
        words="value_changed",
        labels=(
            *parts.label_of(computed, "note", "label.loss_computed", values),
            *(by_array or parts.label_of(written, "written", "label.loss_changed", values)),
            *parts.label_of(read, "saved", "label.value_read_changed", values),
            *parts.used(failure, "label.value_as_it_was", values),
        ),
        tensor=parts.tensor_of(computed, name),
        fixes=(parts.fix("out_of_place", "changed", values, summary="help.value_recorded"),),
    )


def input_reused(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure as a warning."""
    written, read = failure.clue("written"), failure.clue("read")
    if written is None or read is None or not read.name:
        return None
    values = {"name": read.name, "argument": written.name, "writer": written.op or "?"}
    return parts.diagnosis(
        failure,
        "GS216",
        "forward_alias",
        values=values,
        words="input_reused",
        labels=(
            *parts.label_of(written, "written", "label.input_changed", values),
            *parts.label_of(read, "saved", "label.input_read_again", values),
            *parts.used(failure, "label.new_value_used", {"name": read.name}),
        ),
        tensor=parts.tensor_of(written, read.name),
        fixes=(_layer_out_of_place(written, values),),
    )


def _layer_out_of_place(written: Clue, values: Mapping[str, object]) -> Fix:
    """The layer made with ``inplace=False``; a copy of its input, where the source does not show its construction."""
    frame = written.shown_frame
    kind = "disable_inplace_module"
    change = None if frame is None else source.inplace_false(frame)
    if change is None and frame is not None and written.name == source.first_argument(frame):
        copied = source.clone_given(frame, lambda call: next(iter(call.args), None))
        kind, change = ("clone_before_mutation", copied) if copied is not None else (kind, None)
    lines = () if change is None or frame is None else source.changed_lines(frame.file, change)
    return parts.fix(kind, "changed", values, lines=lines, summary="help.layer_out_of_place")


def saved_early(failure: Failure) -> Diagnosis | None:
    """A warning: GS212, where an input is not marked dirty, or GS211; a note, where it is: it may be meant."""
    applied, saved, written = (failure.clue(role) for role in ("applied", "saved", "written"))
    frame = None if written is None else written.user_frame
    if applied is None or saved is None or written is None or frame is None:
        return None
    is_dirty = bool(applied.values.get("is_dirty"))
    is_input = not (is_dirty or applied.values["is_own"])
    values = {"function": applied.name or "?", "name": saved.name or "?", "writer": label_texts.as_written(written.op)}
    change = source.copy_saved_early(frame, written.op or "")
    lines = source.changed_lines(frame.file, change)
    return parts.diagnosis(
        failure,
        "GS212" if is_input else "GS211",
        "missing_mark_dirty" if is_input else "context_attribute",
        values=values,
        severity="note" if is_dirty else "warning",
        words="saved_early",
        labels=(
            *(() if applied.values["is_own"] else parts.label_of(applied, "note", "label.given_to_function", values)),
            *parts.label_of(saved, "saved", "label.saved_early", values),
            *parts.label_of(written, "written", "label.written_after_save", values),
            *parts.used(failure, "label.saved_early_needed", values),
        ),
        tensor=parts.tensor_of(applied, saved.name),
        fixes=(parts.fix("copy_on_context", "changed", values, lines=lines, summary="help.save_a_copy"),),
    )


def built_once(failure: Failure) -> Diagnosis | None:
    """GS403 for a value whose reuse fails no backward: a warning, where it has a name."""
    built, updated, read = (failure.clue(role) for role in ("built", "updated", "read"))
    if built is None or updated is None or not built.name:
        return None
    values = {"name": built.name, "updater": label_texts.as_written(updated.name or "?")}
    words, kind = ("cast", "cast_each_round") if built.values["is_cast"] else ("value", "compute_each_round")
    made = () if built.site is None else built.site.user_frames
    cuts: tuple[Fix, ...] = ()
    if made and source.copies_parameter(made[-1]):
        used = None if failure.site is None else failure.site.shown_frame
        cuts = anew_or_cut(BuiltOnce(built.name, None, made, used))
    return parts.diagnosis(
        failure,
        "GS403",
        "graph_built_once",
        values=values,
        words=f"{words}_built_once",
        labels=(
            *parts.label_of(built, "created", f"label.{words}_built_once", values),
            *parts.label_of(updated, "written", "label.value_left_behind", values),
            *parts.label_of(read, "note", "label.value_read_as_then", values),
            *parts.used(failure, "label.value_of_first_round", values),
        ),
        tensor=parts.tensor_of(built),
        fixes=cuts or (parts.fix(kind, "changed", values),),
    )


def kept_for_all_calls(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure as a warning."""
    applied, again = failure.clue("applied"), failure.clue("again")
    if applied is None or again is None:
        return None
    values = {"function": applied.name or "?", "name": again.name or "?"}
    return parts.diagnosis(
        failure,
        "GS211",
        "context_attribute",
        values=values,
        words="kept_for_all_calls",
        labels=(
            *parts.label_of(applied, "saved", "label.kept_for_this_call", values),
            *parts.label_of(again, "written", "label.kept_for_next_call", values),
            *parts.used(failure, "label.kept_read_of_next", values),
        ),
        tensor=parts.tensor_of(applied, again.name),
        fixes=(parts.fix("save_for_each_call", "preserved", values),),
    )


def term_constant(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure as a warning."""
    asked = failure.clue("asked")
    frame = None if asked is None else asked.shown_frame
    lines = source.changed_at(frame, source.graph_for_gradient)
    return _constant_joined(failure, "asked", "term_is_constant", "gradient", "create_graph", lines)


def penalty_constant(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure: a warning; a note where the optimizer's weight decay may stand for it."""
    return _constant_joined(failure, "read", "penalty_is_constant", "penalty", "penalty_with_graph")


def term_cut(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure: a warning; a note where the program has detached what the term is made of."""
    read = failure.clue("read")
    words, kind = _CUT_WORDS.get(read.values.get("how") if read is not None else None, _CUT_WORDS["no_grad"])
    return _constant_joined(failure, "read", words, "sample" if kind == "sample_with_graph" else "cut_term", kind)


_CUT_WORDS: dict[object, tuple[str, str]] = {
    "no_grad": ("term_is_cut", "term_with_graph"),
    "detached": ("term_is_detached", "term_undetached"),
    "discrete": ("term_is_discrete", "smooth_term"),
    "flat": ("term_is_flat", "smooth_term"),
    "written": ("term_is_written", "term_out_of_place"),
    "number": ("term_is_number", "term_as_tensor"),
    "drawn": ("sample_is_constant", "sample_with_graph"),
}


def _made_number(computed: Clue) -> str | None:
    """``kl`` of ``kl.item()`` and ``float(kl)`` at the place of a clue, and of ``kl.detach()`` within a sum."""
    frame = computed.user_frame
    if frame is None or not (computed.values.get("how") == "number" or computed.values.get("is_each")):
        return None
    return source.first_argument(frame) if computed.op == "float" else source.method_receiver(frame)


def _written_name(computed: Clue) -> str | None:
    """``body.pos`` of ``body.pos.data.add_(step)`` at the place of a clue."""
    frame = computed.user_frame
    name = None if frame is None else source.written_expression(frame, computed.op or "")
    return None if name is None else name.removesuffix(".data")


def _with_graph(computed: Clue, joined: Frame | None, is_written: bool) -> Lines:
    """The lines with which a term takes part in the gradient, where its source shows how."""
    frames = () if computed.site is None else computed.site.user_frames
    if is_written:
        return source.changed_at(computed.user_frame, partial(source.recorded, op=computed.op or ""))
    how = computed.values.get("how")
    return source.graph_restored(frames, how if isinstance(how, str) else None, joined)


def _constant_joined(
    failure: Failure, role: str, words: str, noun: str, kind: str, lines: Lines = ()
) -> Diagnosis | None:
    """A constant computed at the clue of ``role`` that was added to the loss; ``noun`` is its name in the message."""
    computed, added = failure.clue(role), failure.clue("added")
    if computed is None or added is None:
        return None
    is_written = computed.values.get("how") == "written"
    name = _written_name(computed) if is_written else computed.name or _made_number(computed)
    if role == "asked" and computed.shown_frame is not None:
        name = name or source.element_named(computed.shown_frame)
    name = name or parts.assigned_at(computed)
    values = {"name": name or Message(f"label.the_{noun}"), "op": computed.op or ""}
    lines = lines or _with_graph(computed, added.user_frame, is_written)
    return parts.diagnosis(
        failure,
        "GS220",
        "term_is_constant",
        values=values,
        severity="note" if computed.values.get("is_decayed") or computed.values.get("how") == "detached" else "warning",
        words=words,
        labels=(
            *parts.without_graph(computed),
            *parts.label_of(
                computed,
                "written" if is_written else "created",
                "label.written_without_graph" if is_written else f"label.{noun}_without_graph",
                values,
            ),
            *parts.label_of(added, "note", "label.constant_added", values),
            *parts.used(failure, "label.constant_ignored", values),
        ),
        # A person calls the whole term by its name: the penalty, not the gradients or the norms that it is made of.
        tensor=parts.tensor_of(added) if added.name else parts.tensor_of(computed, name) if name else None,
        fixes=(parts.fix(kind, "changed", values, lines=lines),),
    )


def term_lost(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure: a warning where a value was detached; without one it may be intended."""
    term, reached, stepped = (failure.clue(role) for role in ("term", "reached", "stepped"))
    if term is None or stepped is None:
        return None
    term = _in_function_of(term, failure.site)
    name = term.name or parts.assigned_at(term)
    values = {
        "name": name or Message("label.the_term"),
        "reached": parts.name_of(reached, "label.the_tensor"),
        "optimizer": stepped.name,
    }
    return parts.diagnosis(
        failure,
        "GS221",
        "term_lost",
        values=values,
        severity="warning" if term.values["is_cut"] else "note",
        labels=(
            *parts.label_of(term, "created", "label.term_computed", values),
            *parts.used(failure, "label.term_fills", values),
            *parts.label_of(stepped, "note", "label.term_step", values),
        ),
        tensor=parts.tensor_of(term, name) if name else None,
        fixes=(*term_uncut(term, failure.site), parts.fix("keep_graph_of_term", "changed", values)),
    )


def term_left_out(failure: Failure) -> Diagnosis | None:
    """GS221: a warning where a sum with the term is bound anew before it is read; else it may be left out by intent."""
    term, overwritten = failure.clue("term"), failure.clue("overwritten")
    if term is None:
        return None
    values = {"name": term.name}
    return parts.diagnosis(
        failure,
        "GS221",
        "term_lost",
        values=values,
        severity="note" if overwritten is None else "warning",
        words="term_left_out" if overwritten is None else "term_overwritten",
        labels=(
            *parts.label_of(_in_function_of(term, failure.site), "created", "label.left_out_computed", values),
            *parts.label_of(overwritten, "written", "label.sum_overwritten", values),
            *parts.used(failure, "label.left_out_of", values),
        ),
        tensor=parts.tensor_of(term, term.name),
        fixes=(parts.fix("add_term", "changed", values),),
    )


def _in_function_of(found: Clue, used: Site) -> Clue:
    """The clue at the call by which the function at ``used`` had it computed, where one of its helpers did so."""
    frame = used.user_frame
    frames = () if found.site is None else found.site.frames
    at = [
        index
        for index, one in enumerate(frames)
        if frame is not None and (one.file, one.function) == (frame.file, frame.function)
    ]
    lifted = replace(found, site=Site(frames[: at[-1] + 1])) if at else found
    # A helper that computes the whole loss has its terms inside.
    is_whole = frame is not None and parts.assigned_at(lifted) == source.method_receiver(frame) is not None
    return found if is_whole else lifted


def data_changed(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure: a warning; a note where it may be a state that decays or drifts."""
    changed = failure.clues_of("changed")
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
    is_shifted = bool(facts.get("is_shifted"))
    words = "data_shifted_again" if is_shifted else "data_changed_again"
    words = {"noise": "noise_added_again", "random": "data_erased_again"}.get(str(facts.get("is_shifted")), words)
    help_words = "help.shift_out_of_place" if is_shifted else None
    return parts.diagnosis(
        failure,
        "GS222",
        "data_changed_again",
        values=values,
        severity="note" if facts["is_factor"] or facts.get("is_drift") else "warning",
        words=words,
        labels=(
            *{label.frame.line: label for label in labels}.values(),
            *parts.used(failure, "label.data_used_changed", values),
        ),
        tensor=parts.tensor_of(changed[0]),
        fixes=(parts.fix("scale_out_of_place", "changed", values, lines=_out_of_place(changed), summary=help_words),),
    )


def _out_of_place(changed: Sequence[Clue]) -> Lines:
    """The lines that compute new values instead of writing; empty where the source does not determine one of them."""
    lines: list[tuple[str, int, str]] = []
    for one in changed:
        frame = one.shown_frame
        change = None if frame is None else source.out_of_place(frame, one.op or "")
        if frame is None or change is None:
            return ()
        if source.written_for_caller(frame, one.op or ""):
            # The caller reads the written tensor: out of place, it would read the old values.
            return ()
        lines += [line for line in source.changed_lines(frame.file, change) if line not in lines]
    return tuple(lines)
