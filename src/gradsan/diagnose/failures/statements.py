"""Statements that PyTorch rejects: common parts of their diagnoses, and a table of those with a single cause.

The statement is found and shown in the same way for all (:func:`stopped`); a row of ``REFUSED`` holds the differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gradsan import source
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.failures import parts
from gradsan.model import Clue, Diagnosis, Failure, Fix, Frame, Label, Lines, Message, NamedTensor, Role, Severity, Site


def op_shown(target: Clue | None) -> str:
    """The operation as spelled in source: ``+=`` for ``__iadd__``."""
    return "?" if target is None or not target.op else label_texts.as_written(target.op)


def known_as(target: Clue | None) -> tuple[Message, ...]:
    """The tensor's name in its module, where the source has another one."""
    other = "" if target is None else target.values.get("known_as", "")
    if target is None or not other or other == target.name:
        return ()
    return (Message("note.known_as", {"name": target.name, "known_as": other}),)


def named_tensor(target: Clue | None) -> NamedTensor | None:
    """The tensor as the report shows it; None where it was not found."""
    if target is None or "shape" not in target.values:
        return NamedTensor(target.name, (), "?", "cpu", None, None) if target is not None and target.name else None
    return NamedTensor(target.name, target.shape, target.dtype, target.device, None, None)


def created(failure: Failure, target: Clue | None) -> tuple[Label, ...]:
    """The label where the tensor was made: at the recorded operation, else at the assignment in the source."""
    made, name, frame = failure.clue("made"), parts.name_of(target), failure.site.user_frame
    found = None if frame is None or target is None or target.name is None else source.definition_of(frame, target.name)
    if made is not None and made.site is not None and (found is None or not found.is_loop):
        return parts.label_of(made, "created", "label.made", {"name": name, "op": parts.op_of(made)})
    if found is None:
        return ()
    key = "label.taken_in_turn" if found.is_loop else "label.bound"
    return at_frame("created", found.frame, Message(key, {"name": name, "value": found.value}))


def at_frame(role: Role, frame: Frame, message: Message) -> tuple[Label, ...]:
    """A label at a frame that was found in the source."""
    return label_texts.at(role, Site((frame,)), message)


def changed(failure: Failure, suggest: Callable[[Frame], source.Change | None]) -> Lines:
    """The lines changed by ``suggest`` for the failing statement."""
    return _lines_and_notes(failure, suggest)[0]


def new_tensor(failure: Failure, values: Mapping[str, object], *, of_view: bool = False) -> tuple[Fix, ...]:
    """Compute a new tensor, or write into a copy; the one with a concrete line first, none for an unnamed tensor.

    ``of_view`` says that the written tensor is a view: its base then keeps its values.
    """
    target = failure.clue("target")
    if target is None or not target.name:
        return ()
    op = target.op or ""
    fixes = []
    frame = failure.site.user_frame
    if frame is not None and source.written_for_others(frame, op):
        # A rebound loop variable would not change the list.
        rebuilt = () if of_view else changed(failure, partial(source.rebuilt_list, op=op, are_results=True))
        return () if of_view else (parts.fix("out_of_place", "preserved", values, lines=rebuilt),)
    for kind, suggest in (("out_of_place", _new_value), ("clone_before_mutation", source.clone_before)):
        lines, is_hidden = _lines_and_notes(failure, partial(suggest, op=op))
        fix = parts.fix(kind, "changed" if of_view or is_hidden else "preserved", values, lines=lines)
        if of_view:
            fix = replace(fix, how_changed=Message("help.base_keeps_values", dict(values)))
        fixes.append(fix)
    return tuple(sorted(fixes, key=lambda fix: not fix.lines))


def new_tensors(failure: Failure, values: Mapping[str, object]) -> tuple[Fix, ...]:
    """The suggestions of :func:`new_tensor`, with the same for other leaves that statements of the block write next."""
    fixes, frame, leaves = new_tensor(failure, values), failure.site.user_frame, _leaves_beside(failure)
    for again in source.written_behind(frame, leaves) if frame is not None else ():
        fixes = tuple(replace(fix, lines=(*fix.lines, *_written_alike(fix, again))) for fix in fixes)
    return fixes


def _written_alike(fix: Fix, frame: Frame) -> Lines:
    """The lines of the same fix for the write at ``frame``."""
    written, suggest = source.writing_at(frame), _new_value if fix.kind == "out_of_place" else source.clone_before
    # A projection and a new filling are meant for the leaf itself.
    if written is None or not fix.lines:
        return ()
    change = source.under_no_grad(frame) if written.op in parts.FOR_LEAF else suggest(frame, written.op)
    return tuple(one for one in source.changed_lines(frame.file, change) if one not in fix.lines)


def _leaves_beside(failure: Failure) -> tuple[str, ...]:
    target = failure.clue("target")
    beside = () if target is None else target.values.get("leaves_beside", ())
    return tuple(map(str, beside)) if isinstance(beside, list | tuple) else ()


def new_tensor_at(failure: Failure, writes: Sequence[Clue], values: Mapping[str, object]) -> tuple[Fix, ...]:
    """The suggestions of :func:`new_tensor` for the first of ``writes`` with a site, none for an unnamed tensor."""
    first = next((write for write in writes if write.site is not None), None)
    name = values["name"]
    if first is None or first.site is None or not isinstance(name, str):
        return ()
    target = Clue("target", first.site, name=name, op=first.op)
    return new_tensor(replace(failure, site=first.site, clues=(target,)), values)


def without_out(failure: Failure, values: Mapping[str, object]) -> Fix:
    """Bind the result instead of ``out=``; without a line where others would see the old value."""
    op = "" if (target := failure.clue("target")) is None else target.op or ""
    lines, is_hidden = _lines_and_notes(
        failure, lambda frame: source.out_of_place(frame, op) or source.element_out_of_place(frame, op)
    )
    return parts.fix("out_of_place", "preserved", values, lines=() if is_hidden else lines, summary="help.without_out")


def _new_value(frame: Frame, op: str) -> source.Change | None:
    return source.out_of_place(frame, op) or source.part_out_of_place(frame, op)


def _lines_and_notes(failure: Failure, suggest: Callable[[Frame], source.Change | None]) -> tuple[Lines, bool]:
    """The changed lines, and whether others would still see the old values."""
    frame = failure.site.user_frame
    change = None if frame is None else suggest(frame)
    if frame is None or change is None:
        return (), False
    return source.changed_lines(frame.file, change), bool(change.notes)


def stopped(
    failure: Failure,
    code: str,
    slug: str,
    *,
    role: Role = "written",
    label: str | None = None,
    explanation: str | None = None,
    between: tuple[Label, ...] = (),
    fixes: Callable[[Mapping[str, object]], tuple[Fix, ...]] = lambda values: (),
    notes: tuple[Message, ...] = (),
    values: Mapping[str, object] | None = None,
    severity: Severity = "error",
    words: str | None = None,
) -> Diagnosis:
    """The diagnosis of a rejected statement: where its tensor was made, the labels ``between``, the statement.

    The words are those of ``slug``: ``title``, ``explanation``, and ``label`` at the statement, with {name} and {op}.
    """
    target = failure.clue("target")
    op = op_shown(target) if target is not None else failure.values.get("op", "?")
    filled = {"name": parts.name_of(target), "op": parts.op_said(op), **(values or {})}
    filled |= {key: one for key, one in target.values.items() if key == "copied_beside"} if target is not None else {}
    here, suggested = Message(label or f"label.{slug}", {**failure.values, **filled}), fixes(filled)
    if layer := parts.layer_out_of_place(failure, filled):
        suggested = (*layer, *(one for one in suggested if one.kind != layer[0].kind))
    return parts.diagnosis(
        failure,
        code,
        slug,
        values=filled,
        severity=severity,
        words=words,
        explanation=explanation,
        labels=(*created(failure, target), *between, *label_texts.at(role, failure.site, here, op=op)),
        tensor=named_tensor(target),
        fixes=suggested,
        notes=(*known_as(target), *notes),
    )


_Fixes = Callable[[Failure, Mapping[str, object]], tuple[Fix, ...]]


@dataclass(frozen=True, slots=True)
class Refused:
    """One cause: its code and slug, the catalogue's rows, the role of the statement, and its fixes.

    ``words_of_row`` names the sentences (``label``, ``explanation``) that each row has of its own; ``writing_rows`` are
    those whose statement writes although ``role`` says otherwise.
    """

    code: str
    slug: str
    rows: tuple[str, ...]
    fixes: _Fixes
    role: Role = "written"
    words_of_row: tuple[str, ...] = ()
    writing_rows: tuple[str, ...] = ()
    note: str = ""
    severity: Severity = "error"

    def explain(self, failure: Failure) -> Diagnosis:
        """The diagnosis of every such failure."""
        words = {kind: f"{kind}.{failure.row}" for kind in self.words_of_row}
        return stopped(
            failure,
            self.code,
            self.slug,
            role="written" if failure.row in self.writing_rows else self.role,
            fixes=lambda values: self.fixes(failure, values),
            notes=(Message(self.note),) if self.note else (),
            severity=self.severity,
            label=words.get("label"),
            explanation=words.get("explanation"),
        )


def _advice(*kinds: str, changes: str = "", summary: str | None = None) -> _Fixes:
    """Advice without lines; ``changes`` is the kind that changes the gradients."""

    def fixes(_: Failure, values: Mapping[str, object]) -> tuple[Fix, ...]:
        return tuple(
            parts.fix(kind, "changed" if kind == changes else "preserved", values, summary=summary) for kind in kinds
        )

    return fixes


def under_no_grad(failure: Failure) -> Lines:
    """The refused write under ``no_grad``, and with it the others of the same update."""
    return changed(failure, partial(source.under_no_grad, leaves=_leaves_beside(failure)))


def _out_argument(failure: Failure, values: Mapping[str, object]) -> tuple[Fix, ...]:
    """A parameter is updated, which autograd must not record; anything else is a result that the loss may need."""
    target = failure.clue("target")
    facts = {} if target is None else target.values
    unrecorded = parts.fix("no_grad", "preserved", values, lines=under_no_grad(failure))
    if facts.get("is_leaf") and facts.get("requires_grad") and not facts.get("value_learns"):
        return (unrecorded,)  # a new tensor would be no leaf
    how, new = Message("help.write_unrecorded_how", dict(values)), without_out(failure, values)
    unrecorded = replace(unrecorded, meaning="changed", how_changed=how)
    return (new, unrecorded) if new.lines else (unrecorded, new)


def _one_of_several_views(failure: Failure, values: Mapping[str, object]) -> tuple[Fix, ...]:
    frame, index = failure.site.user_frame, parts.fix("index_base_instead", "preserved", values)
    for key, collect in (
        ("parts_collected", source.parts_collected),
        ("named_parts_joined", source.named_parts_joined),
    ):
        if frame is not None and (new := collect(frame, str(values["name"]))):
            return (parts.fix("out_of_place", new.meaning, values, lines=new.lines, summary=f"help.{key}"), index)
    return (*new_tensor(failure, values, of_view=True), index)


def _unrecorded_view(failure: Failure, values: Mapping[str, object]) -> tuple[Fix, ...]:
    moved = parts.fix("move_view_out_of_no_grad", "preserved", values)
    if (target := failure.clue("target")) is not None and target.values.get("value_learns"):
        return (moved,)  # unrecorded, or written elsewhere, what it is computed from would not be trained
    return (
        moved,
        parts.fix("no_grad", "changed", values, lines=under_no_grad(failure), summary="help.write_unrecorded"),
        *new_tensor(failure, values, of_view=True),
    )


def _overlap(failure: Failure, values: Mapping[str, object]) -> tuple[Fix, ...]:
    copied = parts.fix("clone_before_mutation", "preserved", values, lines=changed(failure, source.clone_source))
    return (*new_tensor(failure, values)[:1], replace(copied, summary=Message("help.clone_source")))


def _new_tensor(failure: Failure, values: Mapping[str, object]) -> tuple[Fix, ...]:
    return new_tensor(failure, values)[:1]


def _not_reentrant(failure: Failure, values: Mapping[str, object]) -> tuple[Fix, ...]:
    lines = changed(failure, lambda frame: source.add_keyword(frame, "use_reentrant", "False"))
    return (parts.fix("not_reentrant", "preserved", values, lines=lines),)


def _deepcopy(failure: Failure, values: Mapping[str, object]) -> tuple[Fix, ...]:
    """A copy of the tensor itself may be what a loss trains; one within an object is not even read, mostly."""
    detached = parts.fix("detach_and_clone", "changed", values, summary="help.detach_before_copy")
    target, made = failure.clue("target"), failure.clue("made")
    if target is not None and target.values.get("is_copied_itself"):
        return (parts.fix("clone_for_copy", "preserved", values), detached)
    kept = None if made is None or made.site is None else made.site.user_frame
    attribute, files = str(values["name"]).rpartition(".")[2], None if target is None else target.values.get("files")
    files = map(str, files) if isinstance(files, list | tuple) else ()
    change = None if kept is None else source.detach_unread(kept, attribute, files)
    if kept is None or change is None:
        return (detached,)
    return (Fix.worded("help.detach_kept", values, source.changed_lines(kept.file, change)), detached)


def _flag(failure: Failure, values: Mapping[str, object]) -> tuple[Fix, ...]:
    if failure.row == "flag_of_result":
        return (parts.fix("detach_result", "changed", values),)
    if isinstance(values["name"], str):
        return (parts.fix("floating_first", "preserved", values), parts.fix("leave_flag_out", "preserved", values))
    lines = changed(failure, source.floating_from_start)
    words = "help.floating_from_start" if lines else "help.floating_or_without_gradient"
    return (parts.fix("floating_first", "preserved", values, lines=lines, summary=words),)


_INFERENCE = ("inference_written", "inference_saved", "inference_requires_grad", "inference_version")
_EXPORTS = ("numpy_requires_grad", "apply_requires_grad", "export_requires_grad")
_MUTATION_CONTEXTS = ("mutation_contexts_nested", "mutation_context_left")
_BOTH = ("label", "explanation")
_WITHOUT_CHECKPOINT = _advice("keep_graph_in_function", "without_checkpoint", changes="keep_graph_in_function")

REFUSED = (
    Refused("GS302", "out_requires_grad", ("out_requires_grad",), _out_argument),
    Refused(
        "GS303",
        "one_of_several_views_written",
        ("multi_view_inplace",),
        _one_of_several_views,
        note="note.unsafe_views",
    ),
    Refused(
        "GS307", "mark_dirty_misused", ("dirty_not_returned",), _advice("return_dirty"), words_of_row=("explanation",)
    ),
    Refused(
        "GS307",
        "mark_dirty_misused",
        ("dirty_view_of_several",),
        _advice("clone_before_mutation", summary="help.clone_input"),
        words_of_row=("explanation",),
    ),
    Refused("GS305", "unrecorded_view_written", ("unrecorded_view_inplace",), _unrecorded_view),
    Refused("GS309", "written_from_itself", ("source_overlap",), _overlap),
    Refused("GS310", "view_detached_in_place", ("view_detached",), _advice("detach_out_of_place", "zero_grad_to_none")),
    Refused(
        "GS312",
        "inference_tensor_used",
        _INFERENCE,
        _advice("clone_inference_tensor", "no_grad_not_inference"),
        role="used",
        words_of_row=_BOTH,
        writing_rows=("inference_written",),
    ),
    Refused("GS313", "resized_with_grad", ("resize_requires_grad",), _advice("slice_or_pad")),
    Refused(
        "GS314",
        "data_replaced",
        ("data_not_floating", "data_incompatible"),
        _advice("new_parameter"),
        words_of_row=("explanation",),
    ),
    Refused(
        "GS316", "result_does_not_fit", ("result_dtype", "result_shape"), _new_tensor, words_of_row=("explanation",)
    ),
    Refused(
        "GS317",
        "export_requires_grad",
        _EXPORTS,
        _advice("detach_to_read", "detach_and_clone"),
        role="used",
        note="note.detached_memory_is_shared",
    ),
    Refused(
        "GS318",
        "requires_grad_flag",
        ("flag_of_result", "flag_of_integer"),
        _flag,
        role="used",
        words_of_row=("explanation",),
    ),
    Refused("GS319", "result_deepcopied", ("deepcopy_of_result",), _deepcopy, role="used"),
    Refused(
        "GS501",
        "saved_tensor_hook_misused",
        ("pack_hook_writes",),
        _advice("clone_in_hook"),
        role="used",
        words_of_row=_BOTH,
    ),
    Refused(
        "GS501",
        "saved_tensor_hook_misused",
        ("unpack_hook_result",),
        _advice("unpack_a_tensor"),
        role="used",
        words_of_row=_BOTH,
    ),
    Refused("GS504", "checkpoint_needless", ("checkpoint_needless",), _WITHOUT_CHECKPOINT, role="used"),
    Refused("GS506", "custom_op_aliases", ("custom_op_aliases",), _advice("clone_output"), role="used"),
    Refused("GS507", "transform_writes_captured", ("transform_writes_captured",), _advice("pass_and_return")),
    Refused("GS508", "vmap_writes_smaller", ("vmap_writes_smaller",), _advice("out_of_place", "made_like_mapped")),
    Refused(
        "GS511",
        "mutation_context_misplaced",
        _MUTATION_CONTEXTS,
        _advice("one_context"),
        role="used",
        words_of_row=_BOTH,
        note="note.heal_does_it",
    ),
    # The gradients of both forms are the same where both work.
    Refused(
        "GS518", "checkpoint_form_not_said", ("checkpoint_form_not_said",), _not_reentrant, role="used", severity="note"
    ),
)
