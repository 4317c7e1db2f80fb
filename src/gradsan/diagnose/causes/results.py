"""GS101 to GS105: a saved value was overwritten by an operation of the program's.

GS102: the user's in-place operation changed an operand that another operation saved.

GS101: the user's in-place operation changed an operation's saved result (sigmoid, exp, softmax, relu …).

GS103: the writer is a module or functional with ``inplace=True``.

GS104: one tensor is filled by indexed writes, and slices of it were saved in between.

GS105: a saved tensor that needs no gradient (ids, a mask, a batch) was edited before the backward that reads it.
"""

from __future__ import annotations

import math

from gradsan import source
from gradsan.diagnose import build, fixes
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.facts import Facts, renormalises
from gradsan.model import Diagnosis, Message, Write


def operand_overwritten(facts: Facts) -> Diagnosis | None:
    """Recognise a saved operand that was written."""
    if not facts.writes:
        return None
    explanation = "operand_overwritten_in_compiled" if facts.in_compiled else _kept_by_compiler(facts)
    if explanation is None and facts.conflict.save.slot is None:
        explanation = "operand_overwritten_in_list"
    found = fixes.instead_of_overwriting(facts)
    notes: tuple[Message, ...] = ()
    if any(renormalises(write) for write in facts.writes):
        # The lookup itself writes, so that there is no line to change.
        found = tuple(fix for fix in found if fix.lines)
        notes = (Message("note.max_norm_renormalises", {"name": facts.name}),)
    return build.diagnosis(facts, "GS102", "operand_overwritten", explanation=explanation, fixes=found, notes=notes)


def result_overwritten(facts: Facts) -> Diagnosis | None:
    """Recognise a saved result that was written."""
    if not facts.writes or not facts.conflict.save.is_output:
        return None
    explanation = "result_overwritten_in_compiled" if facts.in_compiled else _kept_by_compiler(facts)
    return build.diagnosis(
        facts, "GS101", "result_overwritten", explanation=explanation, fixes=fixes.instead_of_overwriting(facts)
    )


def _kept_by_compiler(facts: Facts) -> str | None:
    """The words for a tensor that a compiled graph saves but the operation itself does not."""
    save = facts.conflict.save
    return "overwritten_kept_by_compiler" if save.compiled and save.slot is None else None


def inplace_module(facts: Facts) -> Diagnosis | None:
    """Recognise a first write from inside ``torch.nn``'s modules or functionals."""
    first = facts.first
    if first is None or not is_inplace_flag(first):
        return None
    writer = module_name(first)
    return build.diagnosis(
        facts, "GS103", "inplace_module", values={"writer": writer}, fixes=fixes.disable_inplace_module(facts, writer)
    )


def is_inplace_flag(write: Write) -> bool:
    """Whether an ``inplace=True`` made the write: one of torch's layers called the operator, or code that names it."""
    if write.kind not in ("inplace", "op") or not write.op.endswith("_") or renormalises(write):
        return False
    inner = write.site.inner_frames
    return bool(inner) and (_is_layer_code(inner[-1].file) or source.names_in_function(inner[-1], "inplace"))


def module_name(write: Write) -> str:
    """The class of the innermost module, or the functional, that wrote: ``ReLU``, ``dropout``."""
    for frame in reversed(write.site.inner_frames):
        owner, _, method = frame.function.rpartition(".")
        if method == "forward" and owner:
            return owner.rpartition(".")[2]
    layers = [frame.function for frame in write.site.inner_frames if _is_layer_code(frame.file)]
    return layers[0].rpartition(".")[2] if layers else write.op.rstrip("_")


def _is_layer_code(file: str) -> bool:
    path = file.replace("\\", "/")
    return path.endswith("/torch/nn/functional.py") or "/torch/nn/modules/" in path


_INDEXED = {"__setitem__", "index_copy_", "index_put_", "index_add_", "index_fill_", "select_scatter_", "scatter_"}


def buffer_filled_in_loop(facts: Facts) -> Diagnosis | None:
    """Recognise indexed writes, repeated or in a loop, into a tensor of which a part was saved."""
    writes = facts.writes or facts.missed
    if not writes or not all(write.op in _INDEXED for write in writes) or facts.conflict.unexplained:
        return None
    first = writes[0]
    if not _saved_a_part(facts, first) or not _is_repeated(writes):
        return None
    key = "note.same_bytes_again" if facts.is_restored else "note.false_alarm_here"
    notes = (Message(key, {"name": facts.name}),) if facts.is_false_alarm else ()
    return build.diagnosis(
        facts,
        "GS104",
        "buffer_filled_in_loop",
        labels=label_texts.standard(facts, writes=writes),
        fixes=fixes.instead_of_filling(facts),
        notes=notes,
    )


def _saved_a_part(facts: Facts, write: Write) -> bool:
    """Whether the saved tensor is smaller than the tensor that was indexed."""
    region = write.region
    if region is None:
        return False
    saved = facts.conflict.save.tensor.shape
    return math.prod(saved) < math.prod(region.shape)


def _is_repeated(writes: tuple[Write, ...]) -> bool:
    lines = [(frame.file, frame.line) for write in writes if (frame := write.site.shown_frame) is not None]
    if len(set(lines)) < len(lines):
        return True
    frame = writes[0].site.shown_frame
    statement = source.statement_at(frame) if frame is not None else None
    return statement is not None and bool(statement.loops)


def input_changed_between_passes(facts: Facts) -> Diagnosis | None:
    """Recognise a written leaf without gradient."""
    tensor = facts.conflict.save.tensor
    if not facts.writes or tensor.requires_grad or not tensor.is_leaf:
        return None
    # A compiled graph keeps detached aliases, of its results too: they do not describe the saved tensor.
    if facts.in_compiled and facts.name_kind != "data":
        return None
    return build.diagnosis(
        facts, "GS105", "input_changed_between_passes", fixes=fixes.instead_of_overwriting(facts, copy_first=True)
    )
