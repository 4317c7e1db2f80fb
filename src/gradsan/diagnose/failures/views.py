"""GS301, GS304, GS306, GS307, GS311, GS315 and GS320: leaves, views and results that cannot be written in place.

GS306: a view that came out of a custom Function, or through a module's backward hook, was written.

GS304: a view that autograd cannot rebase is used after its base was written.

GS307: a tensor that a custom Function declares with ``mark_dirty`` is not returned.

GS320: a ``__torch_dispatch__`` answered a view operation with a tensor that cannot become a view.

GS311: ``detach_()`` on a tensor that an operation had saved.

GS315: an in-place activation whose backward cannot be computed from its result.

GS301: a leaf that requires grad was written in place where autograd records.

The fix depends on the purpose of the write: an update or an initialisation belongs under ``no_grad``; a part of the
computation makes a new tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gradsan import heuristics, source
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.failures import parts, statements
from gradsan.diagnose.failures.expanded import copy_where_made
from gradsan.model import Clue, Diagnosis, Failure, Fix, Message


def function_view_written(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure."""
    modules = failure.clues_of("hooked_module")
    is_hook = failure.values.get("op", "").startswith("BackwardHookFunction")
    notes = [
        Message(
            f"note.hooked_module_{'certain' if clue.values.get('certain') else 'possible'}",
            {"module": clue.name or clue.values.get("module", "?"), "kind": clue.values.get("module", "?")},
        )
        for clue in (modules if is_hook else ())
    ]
    return statements.stopped(
        failure,
        "GS306",
        "function_view_written",
        values={"maker": failure.values.get("op") or Message("label.a_function")},
        explanation=f"explanation.function_view_written_{'hook' if is_hook else 'function'}",
        fixes=lambda values: (
            *statements.new_tensor(failure, values, of_view=True),
            *(
                (
                    parts.fix("disable_inplace_module", "preserved", values),
                    parts.fix("tensor_hook", "preserved", values),
                )
                if is_hook
                else ()
            ),
        ),
        notes=tuple(notes),
    )


def view_base_written(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure."""
    writes = tuple(
        label
        for clue in failure.clues_of("base_written")
        for label in parts.label_of(clue, "written", "label.base_written", {"op": label_texts.as_written(clue.op)})
    )
    is_recorded = failure.row == "multi_view_base_written"
    return statements.stopped(
        failure,
        "GS304",
        "view_base_written",
        role="used",
        label="label.stale_view_used",
        explanation=f"explanation.view_base_written_{'several' if is_recorded else 'unrecorded'}",
        between=writes,
        fixes=lambda values: (
            parts.fix("out_of_place", "preserved", values, summary="help.base_out_of_place"),
            parts.fix("view_after_write", "changed", values),
        ),
        notes=(Message("note.hides_version_error"),) if is_recorded else (),
    )


def dirty_not_input(failure: Failure) -> Diagnosis:
    """Diagnose a tensor marked dirty that was no input: PyTorch only warns of it."""
    function = failure.clue("definition")
    values = {"function": parts.name_of(function, "label.a_function")}
    return statements.stopped(
        failure,
        "GS307",
        "mark_dirty_misused",
        role="used",
        words=failure.row,
        values=values,
        between=parts.label_of(function, "note", "label.forward_defined", values),
        fixes=lambda _: (parts.fix("drop_mark_dirty", "preserved", values),),
        severity="warning",
    )


def view_not_fresh(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure; with the class whose ``__torch_dispatch__`` ran, where a variable knows it."""
    dispatcher = failure.clue("dispatcher")
    values = {} if dispatcher is None else {"class": dispatcher.name}
    return statements.stopped(
        failure,
        "GS320",
        "view_not_fresh",
        role="used",
        explanation=f"explanation.{failure.row}",
        between=parts.label_of(dispatcher, "note", "label.dispatcher", values),
        fixes=lambda filled: (parts.fix("fresh_view", "preserved", filled),),
    )


def saved_tensor_detached(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure."""
    return statements.stopped(
        failure,
        "GS311",
        "saved_tensor_detached",
        role="used",
        between=parts.labels_of(failure.clues_of("detached"), "written", "label.detached_in_place", {}),
        fixes=lambda values: (parts.fix("detach_out_of_place", "preserved", values),),
    )


def negative_slope_in_place(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure."""
    forward = failure.clue("forward")
    return statements.stopped(
        failure,
        "GS315",
        "negative_slope_in_place",
        role="used",
        between=parts.label_of(forward, "written", "label.activated_in_place", {}),
        fixes=lambda values: (parts.fix("disable_inplace_module", "preserved", values),),
    )


def leaf_written(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure."""
    target = failure.clue("target")
    name = parts.name_of(target)
    again = failure.clue("checkpointed")
    purpose = _purpose(failure) if again is None else "checkpoint"
    values: dict[str, object] = {"name": name, "op": statements.op_shown(target)}
    if again is not None:
        values["function"] = again.name
    is_view = again is None and _is_view_of_leaf(failure)
    kind = "leaf_written"
    if again is None and _is_older_view(failure):
        kind = "older_view_written"
    elif is_view:
        kind = "leaf_view_written"
    return parts.diagnosis(
        failure,
        "GS301",
        "leaf_written",
        values=values,
        title=f"title.{kind}",
        explanation=f"explanation.{kind}" if kind != "leaf_written" else f"explanation.leaf_written_as_{purpose}",
        labels=(
            *statements.created(failure, target),
            *label_texts.at(
                "written", failure.site, Message("label.leaf_written", values), op=statements.op_shown(target)
            ),
            *parts.label_of(failure.clue("rerun"), "used", "label.checkpoint_differs", values),
        ),
        tensor=statements.named_tensor(target),
        fixes=_fixes(failure, purpose, values),
        notes=(*_owner(target, is_view), *_notes(purpose, values)),
    )


def _is_view_of_leaf(failure: Failure) -> bool:
    """Whether the written tensor is not a leaf itself but a view of one, made by an operation before this statement."""
    target = failure.clue("target")
    return failure.row == "leaf_view_inplace" and target is not None and target.values.get("is_leaf") is False


def _is_older_view(failure: Failure) -> bool:
    """Whether PyTorch takes a view for a leaf: its base got a graph by a write through another view, made beside it."""
    target = failure.clue("target")
    return failure.row == "leaf_inplace" and target is not None and target.values.get("is_leaf") is False


def _owner(target: Clue | None, is_view: bool) -> tuple[Message, ...]:
    known = statements.known_as(target)
    return tuple(Message("note.view_of_leaf", note.values) for note in known) if is_view else known


def _notes(purpose: str, values: Mapping[str, object]) -> tuple[Message, ...]:
    if purpose == "checkpoint":
        return (Message("note.written_input_runs_twice", dict(values)),)
    return (Message("note.data_hides_writes", {"name": values["name"]}),)


def _purpose(failure: Failure) -> str:
    """``update``, ``initialisation`` or ``computation``: the purpose of the write by the source and the tensor."""
    frame, target = failure.site.user_frame, failure.clue("target")
    facts = {} if target is None else target.values
    if frame is not None and source.clears_its_condition(frame):
        return "initialisation"
    # An update by gradients with a graph of their own is part of the training: the inner step of MAML.
    if facts.get("value_learns") or _is_of_layer(failure):
        return "computation"
    if frame is not None and source.reads_gradient(frame, or_beside=True, followed=True):
        return "update"
    in_setup = frame is not None and heuristics.sets_up(frame.function)
    if not in_setup and facts.get("is_leaf") is not False and _is_taken(failure):
        return "computation"
    if not in_setup and _is_view_of_leaf(failure) and _is_for_forward(failure):
        return "computation"
    if not in_setup and frame is not None and source.runs_again_after_backward(frame, _op(failure)):
        return "update"
    if facts.get("has_grad") or (facts.get("is_parameter") and facts.get("backwards")):
        return "update"
    if not in_setup and _is_by_second_name(failure):
        return "computation"
    if in_setup or facts.get("is_parameter") or _op(failure) in parts.FILLING:
        return "initialisation"
    return "computation"


def _is_of_layer(failure: Failure) -> bool:
    """Whether a layer or a function of a package wrote its input, and the statement uses what it returned.

    Its gradient is wanted, however it uses memory: without autograd, ``y = relu(x)`` would have that of ``y = x``. Not
    so for ``w = hardtanh(w)`` in each round, which keeps a leaf within bounds.
    """
    frame, frames = failure.site.user_frame, failure.site.frames
    below = frames[max((at for at, one in enumerate(frames) if one.is_user), default=len(frames)) + 1 :]
    is_layer = any(
        one.function.endswith("._call_impl") or one.file.replace("\\", "/").endswith("torch/nn/functional.py")
        for one in below
    )
    if not is_layer or frame is None or source.is_call_alone(frame):
        return False
    target, statement = failure.clue("target"), source.statement_at(frame)
    name = None if target is None else target.name
    # A leaf that each round makes is another one.
    is_kept = statement is not None and bool(statement.loops) and name in source.assigned_names(statement)
    return not (is_kept and name is not None and source.definition_of(frame, name) is None)


def _is_repeated_by_forwards(failure: Failure) -> bool:
    """Whether a forward adds to its parameter, scales or rounds it: kept, that would be done again in each forward."""
    target = failure.clue("target")
    facts = {} if target is None else target.values
    is_own = bool(facts.get("is_parameter")) and facts.get("is_leaf") is not False
    return is_own and _is_in_forward(failure) and _op(failure) not in parts.FOR_LEAF


def _op(failure: Failure) -> str:
    target = failure.clue("target")
    return "" if target is None else target.op or ""


def _is_for_forward(failure: Failure) -> bool:
    """Whether a view of a leaf is written for the rest of the forward, and not for the leaf.

    That holds where a module's forward goes on with the view alone, and of a view that repeats the leaf (``expand``).
    """
    target, made, frame = failure.clue("target"), failure.clue("made"), failure.site.user_frame
    name = None if target is None else target.name
    if frame is None or name is None or _op(failure) in parts.PROJECTING or not source.reads_later(frame, name):
        return False
    if _is_expanded(made):
        return True
    # A view that is filled needs nothing of the leaf: the values are meant for that.
    return _is_in_forward(failure) and _op(failure) not in parts.FILLING and _is_base_read(failure) is False


def _is_expanded(made: Clue | None) -> bool:
    return made is not None and (made.op or "").startswith("Expand")


def _is_in_forward(failure: Failure) -> bool:
    """Whether the failure is below a call of a module."""
    return any(one.function.endswith("._call_impl") and not one.is_user for one in failure.site.frames)


def _is_base_read(failure: Failure) -> bool | None:
    """Whether the function reads, after the write to ``w = self.weight.view(-1)``, ``self.weight``; None if unknown."""
    target, frame = failure.clue("target"), failure.site.user_frame
    bound = None if frame is None or target is None else source.definition_of(frame, target.name or "")
    base = re.match(r"[\w.]+(?=\.\w+\(|\[)", bound.value) if bound is not None else None
    return None if frame is None or base is None else source.reads_later(frame, base[0])


def _is_by_second_name(failure: Failure) -> bool:
    """Whether ``w``, bound to ``self.weight``, is written and read afterwards: the new value is meant for that name."""
    target, frame = failure.clue("target"), failure.site.user_frame
    name = None if target is None else target.name
    if frame is None or name is None or not name.isidentifier() or _op(failure) in parts.FOR_LEAF:
        return False
    made = source.definition_of(frame, name)
    path = [] if made is None or made.is_loop else made.value.split(".")
    is_second = len(path) > 1 and all(one.isidentifier() for one in path)
    return is_second and source.is_read_afterwards(frame)


def _is_taken(failure: Failure) -> bool:
    """Whether the statement uses the result of the write, which a second write would change.

    A projection (``w = self.w.clamp_(0, 1)``) may be meant for the written tensor.
    """
    frame, op = failure.site.user_frame, _op(failure)
    if frame is None or op in parts.FOR_LEAF:
        return False
    return source.computes_with_result(frame, op)


def _fixes(failure: Failure, purpose: str, values: Mapping[str, object]) -> tuple[Fix, ...]:
    if purpose != "checkpoint" and _is_older_view(failure):
        again = statements.changed(failure, lambda frame: source.view_again(frame, str(values["name"])))
        return (parts.fix("view_again", "preserved", values, lines=again),)
    outside = parts.fix("no_grad", "preserved", values, lines=statements.under_no_grad(failure))
    new = statements.new_tensors(failure, values)
    frame = failure.site.user_frame
    # Bound to the name of the leaf, the result would be computed from again in the next round.
    is_repeated = frame is not None and source.runs_again_on_result(frame, _op(failure))
    if purpose == "computation" and _is_taken(failure):
        lines = statements.changed(failure, lambda frame: source.result_out_of_place(frame, _op(failure)))
        alone = (parts.fix("out_of_place", "preserved", values, lines=lines),)
        # A leaf that an optimizer is given later must stay one.
        is_alone = is_repeated or not any(one.lines for one in new)
        new = alone if is_alone else (*new, *(one for one in alone if one.lines))
    if purpose == "update":
        frame, target = failure.site.user_frame, failure.clue("target")
        # Noise beside an update by gradients may also be added to a new tensor, as long as nothing trains the old one.
        is_noise = frame is not None and target is not None and not source.reads_gradient(frame, followed=True)
        also = new if is_noise and target is not None and not target.values.get("is_parameter") else ()
        return (outside, *also, parts.fix("optimizer_step", "preserved", values))
    if purpose != "computation" and _is_repeated_by_forwards(failure):
        own = parts.fix(
            "out_of_place",
            "preserved",
            values,
            lines=statements.changed(failure, source.own_name_in_forward),
            summary="help.own_name_in_forward",
        )
        return (own, Fix.worded("help.no_grad_in_forward", values, outside.lines, kind="no_grad"))
    if purpose == "initialisation":
        target = failure.clue("target")
        return (outside,) if target is not None and target.values.get("is_parameter") else (outside, *new)
    # The value computed from the leaf is meant to be differentiated: without autograd it would not be.
    if _is_of_layer(failure):
        return _of_layer(failure, new, values)
    target = failure.clue("target")
    # A second name is meant for a computation, which in the parameter itself would be repeated in every forward.
    learns = (target is not None and bool(target.values.get("value_learns"))) or _is_by_second_name(failure)
    if _is_view_of_leaf(failure) and _is_base_read(failure) and not learns:
        return (outside,)
    if purpose != "checkpoint" and _is_view_of_leaf(failure) and _is_expanded(failure.clue("made")):
        new = (*(one for one in copy_where_made(failure, values) if one.lines), *new)
    if purpose == "checkpoint" or learns or _is_view_of_leaf(failure):
        return new
    return (outside, *new) if _is_for_caller(failure) else (*new, outside)


def _of_layer(failure: Failure, new: tuple[Fix, ...], values: Mapping[str, object]) -> tuple[Fix, ...]:
    """``inplace=False`` in the layer, or no ``inplace=True`` for a function; else a copy is given to it."""
    layer = parts.layer_out_of_place(failure, values)
    if not layer and not any(one.lines for one in new):
        return (parts.fix("disable_inplace_module", "preserved", values), *new)
    return (*layer, *(one for one in new if one.lines or not layer))


def _is_for_caller(failure: Failure) -> bool:
    frame = failure.site.user_frame
    return frame is not None and source.written_for_caller(frame, _op(failure))


def parameter_assigned(failure: Failure) -> Diagnosis | None:
    """GS314 for a parameter that is assigned a tensor: an update, or a part of what is differentiated.

    A new parameter would be none of those that an optimizer has: the old one gets the value where its shape allows.
    """
    target, frame = failure.clue("target"), failure.site.user_frame
    facts = {} if target is None else target.values
    is_of_shape, in_init = facts.get("is_of_shape"), frame is not None and frame.function.endswith("__init__")
    lines = source.changed_at(frame, source.assigned_in_place) if is_of_shape else ()
    is_tied = in_init and bool(facts.get("has_graph")) and not lines

    def fixes(values: Mapping[str, object]) -> tuple[Fix, ...]:
        if facts.get("value_learns"):
            return (parts.fix("functional_fast_weights", "changed", values),)
        copied = lines or (source.changed_at(frame, source.assigned_by_copy) if is_of_shape else ())
        kept = (parts.fix("update_in_place", "changed", values, lines=copied),) if copied else ()
        if is_tied or (_is_in_forward(failure) and facts.get("has_graph")):
            # Written into the parameter, noise or a rounded weight would be there in the next forward.
            return (parts.fix("compute_in_forward", "changed", values),)
        made = source.changed_at(frame, source.assigned_as_parameter) if in_init else ()
        return kept or (parts.fix("new_parameter", "preserved", values, lines=made),)

    return statements.stopped(
        failure,
        "GS314",
        "data_replaced",
        words="parameter_assigned",
        label="label.parameter_assigned",
        explanation="explanation.parameter_assigned",
        fixes=fixes,
    )
