"""GS216 for one tensor that the program treats as two.

A second name, a list, an argument; an operation of a tensor with itself; a module's state kept without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradsan import source
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.failures import parts
from gradsan.model import Diagnosis, Failure, Frame, Label, Lines, Message, NamedTensor, Site

_SHOWN = 40
"""Characters of a statement that a sentence quotes in full."""
_CLEARS = ("zero_", "_foreach_zero_", "fill_")
KEPT_GRADIENT = "kept_gradient_changed"
RETURNED = "results_are_one"


def _warning(
    failure: Failure,
    values: Mapping[str, object],
    *,
    labels: tuple[Label, ...],
    tensor: NamedTensor | None,
    lines: Lines = (),
    help_key: str,
) -> Diagnosis:
    """GS216 in the words of the failure's row, with a copy as the fix."""
    return parts.diagnosis(
        failure,
        "GS216",
        "forward_alias",
        values=values,
        words=failure.row,
        labels=labels,
        tensor=tensor,
        fixes=(parts.fix("copy_second_name", "changed", values, lines=lines, summary=help_key),),
    )


def second_name(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure as a warning."""
    bound, written, read = (failure.clue(role) for role in ("bound", "written", "read"))
    frame = None if written is None or written.site is None else written.site.user_frame
    if written is None or read is None or frame is None or not written.name or not read.name or bound is None:
        return None
    writer = _statement(frame) or label_texts.as_written(written.op)
    # The older name was meant to keep its values: in ``noisy = clean.add_(noise)`` it is ``clean``.
    names = (written.name, read.name) if written.values.get("is_result") else (read.name, written.name)
    values = {"name": names[0], "written": names[1], "writer": writer, "function": bound.name or ""}
    caller = bound.site.frames[-1] if bound.site is not None and bound.name else frame
    if failure.row == KEPT_GRADIENT:
        second = source.kept_gradient(frame, read.name)
    elif failure.row == RETURNED:
        second = None
    elif bound.name:
        second = source.argument_read_later(caller, read.name, True)
    else:
        keeper = bound.user_frame
        frames = () if keeper is None or written.site is None else written.site.frames
        caller = next((one for one in frames if keeper and source.in_same_function(one, keeper)), frame)
        is_own = caller == frame
        second = source.second_name(frame, written.name) if is_own else None
        second = second or (source.kept_as_best(frame, written.name) if is_own else None)
        second = second or source.collected_result(caller, read.name)
    lines = source.changed_lines(caller.file, source.copy_second_name(caller, second))
    help_key = {KEPT_GRADIENT: "help.gradient_copied", RETURNED: "help.result_copied"}.get(
        failure.row, "help.second_name_copied"
    )
    used = Message("label.new_value_used", {"name": names[0]})
    return _warning(
        failure,
        values,
        labels=(
            *parts.label_of(bound, "note", f"label.{failure.row}_bound", values),
            *parts.label_of(written, "written", f"label.{failure.row}_written", values),
            *parts.label_of(read, "saved", f"label.{failure.row}_read", values),
            *(() if failure.row == KEPT_GRADIENT else label_texts.at("used", failure.site, used)),
        ),
        tensor=parts.tensor_of(written, written.name if failure.row == "list_of_one" else names[0]),
        lines=lines,
        help_key=help_key,
    )


def _statement(frame: Frame | None) -> str | None:
    """The text of a short statement."""
    statement = None if frame is None else source.statement_at(frame)
    is_short = statement is not None and len(statement.text) <= _SHOWN and "\n" not in statement.text
    return statement.text if statement is not None and is_short else None


def overwritten_name(failure: Failure) -> Diagnosis | None:
    """GS216, a warning, for a name of memory that is filled with a value before the name is compared with it."""
    bound, written, read = (failure.clue(role) for role in ("bound", "written", "read"))
    frame = None if bound is None else bound.user_frame
    if bound is None or written is None or frame is None:
        return None
    values = {"name": written.name, "writer": _statement(written.user_frame) or label_texts.as_written(written.op)}
    return _warning(
        failure,
        values,
        labels=(
            *parts.label_of(bound, "created", "label.name_overwritten_bound", values),
            *parts.label_of(written, "written", "label.name_overwritten_written", values),
            *parts.label_of(read, "saved", "label.name_overwritten_read", values),
            *parts.used(failure, "label.new_value_used", values),
        ),
        tensor=parts.tensor_of(written, written.name),
        lines=source.changed_lines(frame.file, source.copy_where_bound(frame)),
        help_key="help.second_name_copied",
    )


def arrays(failure: Failure) -> Diagnosis | None:
    """GS216, a warning, for a list of tensors over the memory of one array."""
    bound = failure.clue("bound")
    if bound is None or not bound.name:
        return None
    values = {"name": bound.name}
    # A statement that hands the tensor on has no name for it but that of the array.
    array = None if bound.user_frame is None else source.first_argument(bound.user_frame)
    return _warning(
        failure,
        values,
        labels=(
            *parts.label_of(bound, "written", "label.arrays_are_one", values),
            *parts.used(failure, "label.new_value_used", values),
        ),
        tensor=parts.tensor_of(bound, parts.assigned_at(bound) or array),
        help_key="help.array_copied",
    )


def memory_of_array(failure: Failure) -> Diagnosis | None:
    """GS216, a warning, for a tensor that changes with an array over its memory and is read beside it."""
    bound, again, read = (failure.clue(role) for role in ("bound", "again", "read"))
    if bound is None or again is None or read is None or not bound.name:
        return None
    values = {"name": bound.name, "op": bound.op}
    return _warning(
        failure,
        values,
        labels=(
            *parts.label_of(bound, "note", "label.memory_of_array_bound", values),
            *parts.label_of(again, "note", "label.memory_of_array_again", values),
            *parts.label_of(read, "saved", "label.memory_of_array_read", values),
            *parts.used(failure, "label.new_value_used", values),
        ),
        tensor=parts.tensor_of(bound),
        help_key="help.memory_of_array",
    )


def gradients(failure: Failure) -> Diagnosis | None:
    """GS216, a warning, for a list that holds one gradient, or weight, in place of those of several rounds."""
    bound = failure.clue("bound")
    if bound is None or not bound.name:
        return None
    values = {"name": bound.name, "gradient": bound.op or "?", "times": bound.values["times"]}
    is_weight = failure.row == "weights_are_one"
    return _warning(
        failure,
        values,
        labels=(
            *parts.label_of(bound, "note", "label.weights_are_one_bound", values),
            *parts.used(failure, f"label.{failure.row}", values),
        ),
        tensor=parts.tensor_of(bound, bound.name if is_weight else bound.op),
        help_key="help.second_name_copied",
    )


def changed_default(failure: Failure) -> Diagnosis | None:
    """GS216, a warning, for the default value of an argument that every call changes in place."""
    bound, written = failure.clue("bound"), failure.clue("written")
    if bound is None or written is None:
        return None
    values = {"name": written.name, "function": bound.name, "writer": label_texts.as_written(written.op)}
    return _warning(
        failure,
        values,
        labels=(
            *parts.label_of(bound, "note", "label.default_changed_bound", values),
            *parts.label_of(written, "written", "label.default_changed_written", values),
            *parts.used(failure, "label.new_value_used", values),
        ),
        tensor=parts.tensor_of(written, written.name),
        help_key="help.default_changed",
    )


def shared_gradient(failure: Failure) -> Diagnosis | None:
    """GS216, a warning, for one tensor that is the gradient of two parameters, and is written for each."""
    gradient, second, written = (failure.clue(role) for role in ("gradient", "second", "written"))
    if gradient is None or second is None:
        return None
    values = {"name": gradient.name, "other": second.name}
    is_cleared = written is not None and written.op in _CLEARS
    words = "" if written is None else "_left" if is_cleared else "_stepped"
    return _warning(
        failure,
        values,
        labels=(
            *parts.label_of(
                written, "written", f"label.gradient_of_two_{'cleared' if is_cleared else 'written'}", values
            ),
            *parts.used(failure, f"label.gradient_of_two{words}", values),
        ),
        tensor=parts.tensor_of(gradient, gradient.op or gradient.name),
        help_key="help.gradient_of_two",
    )


def own_operand(failure: Failure) -> Diagnosis | None:
    """GS216, a warning, for an in-place operation or a difference of a tensor with itself under another name."""
    written, read, given = (failure.clue(role) for role in ("written", "read", "given"))
    if written is None or read is None:
        return None
    is_written = failure.row == "own_operand"
    values = {"name": read.name, "written": written.name, "writer": label_texts.as_written(written.op)}
    frame = written.user_frame
    kept = str(written.values.get("kept") or written.name)
    places = () if frame is None else source.assignments(frame, kept)
    changed = failure.clue("changed")
    writer = label_texts.as_written(None if changed is None else changed.op)
    return _warning(
        failure,
        values,
        labels=(
            *(
                label_texts.at("created", Site((places[0][1],)), Message("label.bound_as_another", {"name": kept}))
                if len(places) == 1 and given is None
                else parts.label_of(given, "created", "label.given_the_memory", {})
            ),
            *parts.label_of(changed, "written", "label.both_changed", {**values, "writer": writer}),
            *parts.label_of(written, "written" if is_written else "saved", f"label.{failure.row}", values),
            # Some are found where they are written, before any backward.
            *(
                ()
                if failure.site.user_frame == frame
                else parts.used(failure, "label.new_value_used", {"name": written.name})
            ),
        ),
        tensor=parts.tensor_of(written, kept),
        help_key="help.own_operand",
    )


def own_state(failure: Failure) -> Diagnosis | None:
    """GS216, a warning, for a network that is given its own state again and again, and has got no other."""
    written = failure.clue("written")
    if written is None:
        return None
    values = {"written": written.name, "writer": label_texts.as_written(written.op)}
    return _warning(
        failure,
        values,
        labels=parts.label_of(written, "written", "label.own_state", values),
        tensor=parts.tensor_of(written, written.name),
        help_key="help.own_state",
    )


def parameters(failure: Failure) -> Diagnosis | None:
    """GS216 for two parameters of an optimizer over one memory.

    They may be tied so on purpose: a note where their two updates make up that of one weight.
    """
    first, second, frame = failure.clue("parameter"), failure.clue("second"), failure.site.user_frame
    if first is None or second is None or frame is None or not first.name or not second.name:
        return None
    values = {"name": second.name, "other": first.name, "count": first.values["others"]}
    names = [whole for one in (second.name, f"self.{second.name.partition('.')[2]}") for whole in (one, f"{one}.data")]
    found = ((one, *pair) for one in names for pair in source.assignments(frame, one))
    bound = [place for one, part, place in found if part == one]
    made = label_texts.at("created", Site((bound[0],)), Message("label.given_the_memory")) if len(bound) == 1 else ()
    return parts.diagnosis(
        failure,
        "GS216",
        "forward_alias",
        values=values,
        severity="note" if first.values["is_linear"] else "warning",
        words=failure.row,
        labels=(*made, *parts.used(failure, "label.parameters_are_one", values)),
        tensor=parts.tensor_of(first, second.name),
        fixes=(parts.fix("copy_second_name", "changed", values, summary="help.parameters_copied"),),
    )


def kept_state(failure: Failure) -> Diagnosis | None:
    """GS216, a warning, for the state of a module that was kept without a copy."""
    bound, written = failure.clue("bound"), failure.clue("written")
    if bound is None or written is None or not written.name:
        return None
    values = {"name": written.name, "module": written.values["module"]}
    is_nested = bool(written.values.get("is_nested"))
    return _warning(
        failure,
        values,
        labels=(
            *parts.label_of(bound, "note", f"label.{failure.row}_bound", values),
            *parts.label_of(written, "written", f"label.{failure.row}_written", values),
        ),
        tensor=parts.tensor_of(written),
        help_key="help.optimizer_state_copied" if is_nested else "help.state_copied",
    )


def best_values(failure: Failure) -> Diagnosis | None:
    """GS216, a warning, for values that were kept as the best so far, and changed with every step since."""
    bound, read = failure.clue("bound"), failure.clue("read")
    if bound is None or read is None or not bound.name:
        return None
    values = {"name": bound.name, "owner": bound.op}
    return _warning(
        failure,
        values,
        labels=(
            *parts.label_of(bound, "note", f"label.{failure.row}_bound", values),
            *parts.label_of(read, "used", f"label.{failure.row}_read", values),
        ),
        tensor=parts.tensor_of(bound),
        help_key="help.state_copied",
    )


def shared_state(failure: Failure) -> Diagnosis | None:
    """GS216, a warning, for the state of an optimizer that another one has taken without a copy."""
    written = failure.clue("written")
    if written is None:
        return None
    values = {"name": written.name, "module": written.values["module"], "given": written.values["given"]}
    return _warning(
        failure,
        values,
        labels=parts.label_of(written, "written", f"label.{failure.row}", values),
        tensor=parts.tensor_of(written, written.name),
        help_key="help.optimizer_state_copied",
    )


def expanded_rows(failure: Failure) -> Diagnosis | None:
    """GS216, a warning, for a write to one row of an expanded tensor."""
    written = failure.clue("written")
    if written is None or written.user_frame is None or not written.name:
        return None
    places = [place for part, place in source.assignments(written.user_frame, written.name) if part == written.name]
    values = {"name": written.name, "rows": written.values["rows"]}
    made = label_texts.at("created", Site((places[0],)), Message("label.rows_expanded")) if len(places) == 1 else ()
    return _warning(
        failure,
        values,
        labels=(*made, *parts.label_of(written, "written", f"label.{failure.row}", values)),
        tensor=parts.tensor_of(written, written.name),
        help_key="help.rows_repeated",
    )
