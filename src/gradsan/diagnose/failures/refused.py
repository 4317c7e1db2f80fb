"""Statements that PyTorch refuses as they stand, as a table: GS302, GS303, GS305, GS309 to GS319, GS503 to GS511.

How such a statement is found and shown is the same for all
(:func:`gradsan.diagnose.failures.statements.stopped`); a row of ``REFUSED`` holds what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gradsan import source
from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Fix, Message, Role

_Fixes = Callable[[Failure, Mapping[str, Any]], tuple[Fix, ...]]


@dataclass(frozen=True, slots=True)
class Refused:
    """One cause: its code and slug, the catalogue's rows, the role of the statement, and what to change.

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

    def explain(self, failure: Failure) -> Diagnosis:
        """The diagnosis of every such failure."""
        words: dict[str, Any] = {kind: f"{kind}.{failure.row}" for kind in self.words_of_row}
        return statements.stopped(
            failure,
            self.code,
            self.slug,
            role="written" if failure.row in self.writing_rows else self.role,
            fixes=lambda values: self.fixes(failure, values),
            notes=(Message(self.note),) if self.note else (),
            **words,
        )


def _advice(*kinds: str, changes: str = "", summary: str | None = None) -> _Fixes:
    """Advice without lines; ``changes`` is the kind that changes the gradients."""

    def fixes(_: Failure, values: Mapping[str, Any]) -> tuple[Fix, ...]:
        return tuple(
            parts.fix(kind, "changed" if kind == changes else "preserved", values, summary=summary) for kind in kinds
        )

    return fixes


def _under_no_grad(failure: Failure) -> statements.Lines:
    return statements.changed(failure, source.under_no_grad)


def _out_argument(failure: Failure, values: Mapping[str, Any]) -> tuple[Fix, ...]:
    """A parameter is updated, which autograd is not to record; anything else is a result that the loss may need."""
    target = parts.clue(failure, "target")
    facts = {} if target is None else target.values
    new = statements.without_out(failure, values)
    is_update = bool(facts.get("is_leaf") and facts.get("requires_grad"))
    unrecorded = parts.fix("no_grad", "preserved", values, lines=_under_no_grad(failure))
    if not is_update:
        how = Message("help.write_unrecorded_how", dict(values))
        unrecorded = replace(unrecorded, meaning="changed", how_changed=how)
    return (new, unrecorded) if new.lines and not is_update else (unrecorded, new)


def _one_of_several_views(failure: Failure, values: Mapping[str, Any]) -> tuple[Fix, ...]:
    new = statements.new_tensor(failure, values, of_view=True)
    return (*new, parts.fix("index_base_instead", "preserved", values))


def _unrecorded_view(failure: Failure, values: Mapping[str, Any]) -> tuple[Fix, ...]:
    return (
        parts.fix("move_view_out_of_no_grad", "preserved", values),
        parts.fix("no_grad", "changed", values, lines=_under_no_grad(failure), summary="help.write_unrecorded"),
        *statements.new_tensor(failure, values, of_view=True),
    )


def _overlap(failure: Failure, values: Mapping[str, Any]) -> tuple[Fix, ...]:
    return (parts.fix("clone_source", "preserved", values), *statements.new_tensor(failure, values)[:1])


def _new_tensor(failure: Failure, values: Mapping[str, Any]) -> tuple[Fix, ...]:
    return statements.new_tensor(failure, values)[:1]


def _flag(failure: Failure, values: Mapping[str, Any]) -> tuple[Fix, ...]:
    if failure.row == "flag_of_result":
        return (parts.fix("detach_result", "changed", values),)
    return (parts.fix("floating_first", "preserved", values),)


_INFERENCE = ("inference_written", "inference_saved", "inference_requires_grad", "inference_version")
_EXPORTS = ("numpy_requires_grad", "apply_requires_grad", "export_requires_grad")
_MUTATION_CONTEXTS = ("mutation_contexts_nested", "mutation_context_left")
_BOTH = ("label", "explanation")
_WITHOUT_CHECKPOINT = _advice("keep_graph_in_function", "without_checkpoint", changes="keep_graph_in_function")
_DEEPCOPY = _advice("detach_and_clone", changes="detach_and_clone", summary="help.detach_before_copy")

REFUSED = (
    Refused("GS302", "out_requires_grad", ("out_requires_grad",), _out_argument),
    Refused(
        "GS303",
        "one_of_several_views_written",
        ("multi_view_inplace",),
        _one_of_several_views,
        note="note.unsafe_views",
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
    Refused("GS319", "result_deepcopied", ("deepcopy_of_result",), _DEEPCOPY, role="used"),
    Refused(
        "GS503", "checkpoint_reentrant_grad", ("checkpoint_reentrant_grad",), _advice("not_reentrant"), role="used"
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
)
