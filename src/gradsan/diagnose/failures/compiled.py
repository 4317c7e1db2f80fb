"""GS505, GS515, GS516 and GS520: limits of torch.compile, and mutations that a custom operator did not declare.

GS515: torch.compile cannot compile a write to its inputs, or to values that backward receives.

GS505: torch.compile found, while it built the backward, a saved value that is overwritten.

GS516: a custom operator writes an argument that its schema declares read-only.

GS520: a compiled graph reuses memory that the program still needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gradsan import source
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.failures import parts, statements
from gradsan.diagnose.names import inputs_by_role
from gradsan.diagnose.needs import Need, need_of
from gradsan.model import Clue, Diagnosis, Failure, Label, Message, NamedTensor, Why


def compiled_input_unsupported(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure."""
    shares = failure.row == "compiled_inputs_share"
    named = "_named" if "one" in failure.values else ""
    return statements.stopped(
        failure,
        "GS515",
        "compiled_input_unsupported",
        role="used",
        label="label.compiled_overwritten",
        explanation=f"explanation.{failure.row}{named}",
        between=parts.labels_of(failure.clues_of("written"), "written", "label.input_written", {}),
        fixes=lambda values: (
            parts.fix("separate_inputs" if shares else "new_gradient", "preserved", values),
            parts.fix("outside_of_compile", "preserved", values),
        ),
    )


def compiled_overwritten(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure; with both lines where the traced graph was found."""
    save = failure.clue("saved")
    need = None if save is None or save.op is None else need_of(save.op, str(save.values["slot"]).partition("[")[0])
    name = _name(failure)
    target = {} if need is None else {"target": ", ".join(need.shown)}
    values = {"name": name or Message("label.unnamed"), "op": parts.op_of(save), **target}
    writes = failure.clues_of("written")
    found = parts.diagnosis(
        failure,
        "GS505",
        "compiled_overwritten",
        values=values,
        labels=(
            *_saved(save, need, values),
            *parts.labels_of(writes, "written", "label.written.op", values),
            *parts.used(failure, "label.compiled_overwritten", values),
        ),
        tensor=_tensor(save, name),
        fixes=(
            *statements.new_tensor_at(failure, writes, values),
            *(() if writes else (parts.fix("run_uncompiled", "preserved", values),)),
        ),
        notes=(Message("note.compile_does_not_repair"),),
    )
    return replace(found, why=_why(need, values))


def _name(failure: Failure) -> str | None:
    """The program's name for the value: where it is made, if a write uses it, too; else where it is written.

    The written tensor may be a view of it, under another name.
    """
    made = failure.clue("made")
    frames = () if made is None or made.site is None else made.site.frames
    bound = source.bound_name([frame for frame in frames if frame.is_user])
    targets = [name for write in failure.clues_of("written") if (name := parts.written_name(write)) is not None]
    if not targets or (bound is not None and bound[0] in targets):
        return None if bound is None else bound[0]
    return targets[0]


def _saved(save: Clue | None, need: Need | None, values: Mapping[str, object]) -> tuple[Label, ...]:
    kind = "plain" if need is None or not need.shown else "result" if need.is_output else "operand"
    if need is not None and need.shown:
        values = {**values, "target": inputs_by_role(need.shown, need.op, need)}
    return parts.label_of(save, "saved", f"label.saved.{kind}", values)


def _tensor(save: Clue | None, name: str | None) -> NamedTensor | None:
    if save is None:
        return None
    return NamedTensor(name, save.shape, save.dtype, save.device, save.op, str(save.values["slot"]))


def _why(need: Need | None, values: Mapping[str, object]) -> Why | None:
    if need is None or not need.formula:
        return None
    key = "why.result" if need.is_output else "why.operand"
    return Why(need.formula, Message(key, {**values, "op": need.op, "formula": need.formula}))


def undeclared_mutation(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure; with the operator's definition and its writes where it is Python."""
    operator = failure.clue("operator")
    values = {"op": parts.name_of(operator, "label.the_operator"), "argument": failure.values.get("argument", "?")}
    return statements.stopped(
        failure,
        "GS516",
        "undeclared_mutation",
        role="used",
        label="label.schema_checked",
        values=values,
        between=(
            *parts.label_of(operator, "note", "label.operator_defined", values),
            *(
                label
                for write in failure.clues_of("base_written")
                for label in parts.label_of(
                    write, "written", "label.written_in_operator", {**values, "by": label_texts.as_written(write.op)}
                )
            ),
        ),
        fixes=lambda _: (
            parts.fix("declare_mutation", "preserved", values),
            parts.fix("clone_in_operator", "preserved", values),
        ),
    )


REUSE_FIXES = {
    "donated_buffers": ("sum_losses", "donated_buffer_off"),
    "cudagraph_overwritten": ("clone_graph_result", "mark_step_begin"),
}


def compiled_memory_reused(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure."""
    return parts.diagnosis(
        failure,
        "GS520",
        "compiled_memory_reused",
        explanation=f"explanation.{failure.row}",
        labels=parts.used(failure, f"label.{failure.row}"),
        fixes=tuple(parts.fix(kind, "preserved", {}) for kind in REUSE_FIXES[failure.row]),
    )
