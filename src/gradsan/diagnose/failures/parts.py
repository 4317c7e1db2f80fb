"""Common parts of a failure's diagnosis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from gradsan import source
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.build import if_meant
from gradsan.diagnose.needs import op_name
from gradsan.model import (
    Clue,
    Diagnosis,
    Failure,
    Fix,
    Gradient,
    Label,
    Lines,
    LiveClue,
    Message,
    NamedTensor,
    Role,
    Severity,
    Site,
)

PROJECTING = frozenset({"clamp_", "clamp_max_", "clamp_min_", "clip_", "renorm_"})
FILLING = frozenset({"fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "__setitem__", "fill_diagonal_"})
FOR_LEAF = PROJECTING | FILLING


def live(failure: Failure) -> list[LiveClue]:
    """The live variables of the functions around a failure, the outermost first."""
    return [one for one in failure.clues if isinstance(one, LiveClue)]


def op_of(found: Clue | None) -> str:
    """The plain name of a clue's operation: ``silu`` of ``SiluBackward0``."""
    return op_name(found.op) if found is not None and found.op else "?"


def label_of(found: Clue | None, role: Role, key: str, values: Mapping[str, object]) -> tuple[Label, ...]:
    """A label at a clue's frame; empty where the clue is missing or has no frame."""
    return () if found is None else label_texts.at(role, found.site, Message(key, dict(values)), op=found.op)


def labels_of(found: Iterable[Clue], role: Role, key: str, values: Mapping[str, object]) -> tuple[Label, ...]:
    """A label at the frame of each clue, each line once; ``{op}`` is what the clue did, as spelled in source."""
    labels: dict[tuple[str, int], Label] = {}
    for one in found:
        for label in label_of(one, role, key, {**values, "op": label_texts.as_written(one.op)}):
            labels.setdefault((label.frame.file, label.frame.line), label)
    return tuple(labels.values())


def used(failure: Failure, key: str, values: Mapping[str, object] | None = None) -> tuple[Label, ...]:
    """A label at the statement or the backward that failed, or that used the wrong value."""
    return label_texts.at("used", failure.site, Message(key, dict(values or {})))


def without_graph(found: Clue) -> tuple[Label, ...]:
    """The label of the ``no_grad`` around the place of a clue whose graph was left there."""
    frames = () if found.site is None or found.values.get("how") != "no_grad" else found.site.user_frames
    around = source.context_around(frames, frozenset({"no_grad", "inference_mode"}))
    return () if around is None else label_texts.at("note", Site((around[0],)), Message("label.gradients_off"))


def name_of(found: Clue | None, otherwise: str = "label.unnamed") -> str | Message:
    """The name of a clue, or the words ``otherwise`` for one without a name."""
    return found.name if found is not None and found.name else Message(otherwise)


def writer(found: Clue, name: str | None = None) -> str:
    """The write of a clue as spelled in source; ``name`` is that of the written tensor."""
    return f"{name or found.name}.data = ..." if found.op == "data =" else label_texts.as_written(found.op)


def written_name(found: Clue) -> str | None:
    """The name under which the statement at a clue's frame writes."""
    frame = found.user_frame
    written = None if frame is None else source.writing_at(frame)
    return None if written is None else written.target


def tensor_of(found: Clue, name: str | None = None) -> NamedTensor:
    """The tensor of a clue with ``shape``, ``dtype`` and ``device``; its own name where none is passed."""
    return NamedTensor(name or found.name, found.shape, found.dtype, found.device, None, None)


def assigned_at(found: Clue) -> str | None:
    """The name bound by the statement at a clue's frame."""
    frame = found.shown_frame
    statement = None if frame is None else source.statement_at(frame)
    names = [] if statement is None else source.assigned_names(statement)
    return names[0] if names else None


def fix(
    kind: str,
    meaning: Literal["preserved", "changed"],
    values: Mapping[str, object],
    *,
    lines: Lines = (),
    summary: str | None = None,
) -> Fix:
    """A suggestion with the words ``help.<kind>`` (or ``summary``), and with ``…_how`` where the gradients change."""
    return Fix.worded(summary or f"help.{kind}", values, lines, keeps=meaning == "preserved", kind=kind)


def op_said(op: object) -> object:
    """``op``; where it is not known, words for one."""
    return Message("label.some_operation") if op == "?" else op


def diagnosis(
    failure: Failure,
    code: str,
    cause: str,
    *,
    values: Mapping[str, object] | None = None,
    severity: Severity | None = None,
    labels: tuple[Label, ...] = (),
    tensor: NamedTensor | None = None,
    fixes: tuple[Fix, ...] = (),
    notes: tuple[Message, ...] = (),
    words: str | None = None,
    title: str | None = None,
    explanation: str | None = None,
) -> Diagnosis:
    """A diagnosis with the title and the explanation of ``words``, by default of ``cause``.

    ``values`` fill them, beside the groups of the row's pattern. What PyTorch does not report is a warning.
    """
    words, silent = words or cause, not failure.raised and not failure.message
    filled = {**failure.values, **(values or {})}
    return Diagnosis(
        code=code,
        cause=cause,
        severity=severity or ("warning" if silent else "error"),
        silent=silent,
        title=Message(title or f"title.{words}", filled),
        explanation=Message(explanation or f"explanation.{words}", filled),
        labels=labels,
        tensor=tensor,
        gradient=Gradient("raised" if failure.raised else "unknown", if_meant=failure.if_meant),
        fixes=fixes,
        notes=notes if failure.if_meant is None else (if_meant(failure.if_meant), *notes),
        count=failure.count,
    )


def layer_out_of_place(failure: Failure, values: Mapping[str, object]) -> tuple[Fix, ...]:
    """Turn ``inplace=True`` off where a file of the user's makes the layer of torch's whose forward wrote."""
    below = next((one for one in reversed(failure.site.frames) if one.function.endswith(".forward")), None)
    if below is None or below.is_user or "/torch/nn/modules/" not in below.file.replace("\\", "/"):
        return ()
    layer, files = below.function.split(".")[-2], dict.fromkeys(one.file for one in reversed(failure.site.user_frames))
    changes = ((file, source.inplace_layer_false(file, layer)) for file in files)
    lines = next((found for file, change in changes if (found := source.changed_lines(file, change))), ())
    return (fix("disable_inplace_module", "preserved", values, lines=lines),) if lines else ()
