"""Common parts of every conflict's diagnosis, its timeline, and the path to its Node."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.facts import Facts, writing_thread
from gradsan.diagnose.names import inputs_with_names, producer
from gradsan.model import (
    Conflict,
    Deviation,
    Diagnosis,
    Event,
    EventKind,
    Failure,
    Fix,
    Gradient,
    Label,
    Message,
    Moment,
    NamedTensor,
    Passed,
    PathClue,
    PathNode,
    Severity,
    TensorInfo,
    Why,
)

_ERRORS_SHOWN = 5
COLLECTED = "note.one_tensor_collected"
"""The key of the note that a container holds the written tensor several times."""
OVERLAPPING = "note.written_within_itself"
"""The key of the note that several elements of what was written are one number in memory."""


def diagnosis(
    facts: Facts,
    code: str,
    cause: str,
    *,
    values: Mapping[str, object] | None = None,
    title: str | None = None,
    explanation: str | None = None,
    severity: Severity = "error",
    labels: tuple[Label, ...] | None = None,
    fixes: tuple[Fix, ...] = (),
    notes: tuple[Message, ...] = (),
) -> Diagnosis:
    """A diagnosis with the words of ``cause``, the usual labels, and the formula that needs the value.

    ``title`` and ``explanation`` are the keys of other words than the usual ones.
    """
    conflict = facts.conflict
    filled = {"name": facts.name, "op": facts.op, "operand": conflict.save.slot or "?", **(values or {})}
    return Diagnosis(
        code=code,
        cause=cause,
        severity=_severity(conflict, severity),
        silent=not conflict.raised and conflict.healed_bytes is None,
        title=Message(f"title.{title or cause}", filled),
        explanation=Message(f"explanation.{explanation or cause}", filled),
        labels=label_texts.standard(facts) if labels is None else labels,
        tensor=named_tensor(facts),
        why=why(facts),
        gradient=gradient(conflict),
        fixes=(*fixes, *_leave_uncompiled(facts)),
        notes=(*notes, *_collected(facts), *_overlapping(facts), *_measured(conflict), *_limits(facts)),
        count=conflict.count,
    )


def _collected(facts: Facts) -> tuple[Message, ...]:
    """The note on a list collected over iterations whose elements are all the one written tensor."""
    within = facts.conflict.collected_in
    return () if within is None else (Message(COLLECTED, {"collected": within, "name": facts.name}),)


def _overlapping(facts: Facts) -> tuple[Message, ...]:
    """The note on a write into memory that several elements of the written tensor share."""
    return (Message(OVERLAPPING, {"name": facts.name}),) if facts.writes_within_itself else ()


def _leave_uncompiled(facts: Facts) -> tuple[Fix, ...]:
    """The fix without the compiler, where the eager program has no conflict."""
    save = facts.conflict.save
    frame = save.site.shown_frame
    if save.compiled not in _ONLY_COMPILED or frame is None:
        return ()
    function = Message("help.leave_uncompiled", {"function": frame.function})
    return (Fix(kind="outside_of_compile", meaning="preserved", summary=function, applicability="manual"),)


_ONLY_COMPILED = {"again": "note.kept_again", "only": "note.kept_only_in_compiled"}


def _severity(conflict: Conflict, severity: Severity) -> Severity:
    """The severity in this run: an error that was healed is a warning, one that changes no gradient a note.

    Where PyTorch has stopped the program it is an error in any case.
    """
    if severity != "error" or conflict.raised:
        return severity
    if conflict.is_harmless:
        return "note"
    return "error" if conflict.healed_bytes is None else "warning"


def about(found: Diagnosis, name: str | Message) -> Diagnosis:
    """A diagnosis of a value used after it was changed: its name, and no formula that needs the old one."""
    tensor = found.tensor
    if tensor is not None and isinstance(name, str):
        tensor = replace(tensor, name=name)
    return replace(found, tensor=tensor, why=None)


def gradient(conflict: Conflict) -> Gradient:
    """The measured effect on the gradient."""
    return replace(_as_written(conflict), if_meant=conflict.if_meant)


def _as_written(conflict: Conflict) -> Gradient:
    error = None if conflict.deviation is None else conflict.deviation.largest
    if conflict.use.via == "write":
        return Gradient("unknown", error)
    if conflict.raised:
        return Gradient("raised", error)
    if conflict.healed_bytes is not None or conflict.unchanged:
        return Gradient("right", error)
    if error is None:
        return Gradient("unknown")
    return Gradient("wrong" if error else "right", error)


def _measured(conflict: Conflict) -> tuple[Message, ...]:
    """The notes on deep mode's comparisons and on heal mode's replacements."""
    notes = []
    if conflict.change is not None:
        change = conflict.change
        samples = "; ".join(f"{list(place)}: {old} -> {new}" for place, old, new in change.samples)
        values = {"count": change.changed, "total": change.total, "samples": samples}
        notes.append(Message("note.bytes_changed", values))
    if conflict.deviation is not None and conflict.deviation.errors:
        errors = ", ".join(f"{name} {error:.2g}" for name, error in conflict.deviation.errors[:_ERRORS_SHOWN])
        notes.append(Message("note.gradient_errors", {"errors": errors}))
    if conflict.if_meant is not None:
        notes.append(if_meant(conflict.if_meant))
    if conflict.is_harmless:
        notes.append(Message("note.gradients_unaffected"))
    if conflict.healed_bytes is not None:
        notes.append(Message("note.healed", {"bytes": conflict.healed_bytes}))
    return tuple(notes)


def if_meant(deviation: Deviation) -> Message:
    """The note on the gradients' error relative to those of the presumed intention."""
    errors = ", ".join(f"{name} {error:.2g}" for name, error in deviation.errors[:_ERRORS_SHOWN])
    return Message("note.if_meant", {"errors": errors})


def named_tensor(facts: Facts) -> NamedTensor:
    """The tensor as the report shows it."""
    save = facts.conflict.save
    shape, is_transposed = save.tensor.shape, facts.name_kind == "parameter" and _is_transposed(save.tensor)
    return NamedTensor(
        name=facts.name if isinstance(facts.name, str) else _producer(facts),
        shape=shape[::-1] if is_transposed else shape,
        dtype=save.tensor.dtype,
        device=save.tensor.device,
        # What a call has only read, it has not kept.
        op=save.node if save.slot else None,
        operand=save.slot,
        transposed=is_transposed,
    )


def _is_transposed(tensor: TensorInfo) -> bool:
    """Whether the saved tensor is the transposed view of a matrix, as linear saves its weight."""
    shape, strides = tensor.region.shape, tensor.region.strides
    return len(shape) == 2 and strides == (1, shape[0]) and shape != (1, 1)


def _producer(facts: Facts) -> str | None:
    """The operation that made an unnamed value; inside a compiled graph the call, whose result is another tensor."""
    name = producer(facts.conflict)
    return f"{name}(…)" if facts.in_compiled and name is not None else name


def why(facts: Facts) -> Why | None:
    """The formula that needs the value; None where the operation is not in the table."""
    need = facts.need
    if need is None or not need.formula:
        return None
    key = "why.result" if need.is_output else "why.operand"
    values = {
        "op": need.op,
        "formula": need.formula,
        "target": inputs_with_names(facts.conflict, need, need.shown),
        "name": facts.name,
    }
    others = [name for name in need.gradient_of if name not in need.shown]
    if others:
        key, values = f"{key}_and_others", {**values, "others": inputs_with_names(facts.conflict, need, others)}
    return Why(need.formula, Message(key, values))


def _limits(facts: Facts) -> tuple[Message, ...]:
    """The notes on facts missing from this diagnosis."""
    notes = []
    if facts.conflict.use.via == "write":
        notes.append(Message("note.found_at_write", {"name": facts.name}))
    if (elsewhere := writing_thread(facts)) is not None:
        notes.append(Message("note.other_thread", {"name": facts.name, "function": elsewhere}))
    if facts.is_undone:
        notes.append(Message("note.same_but_for_rounding", {"name": facts.name}))
    if facts.may_be_undone:
        notes.append(Message("note.may_be_undone", {"name": facts.name}))
    if facts.conflict.save.compiled in _ONLY_COMPILED:
        notes.append(Message(_ONLY_COMPILED[facts.conflict.save.compiled], {"name": facts.name}))
    if facts.in_compiled and not facts.updates:
        notes.append(Message("note.in_compiled", {"op": facts.op, "name": facts.name}))
    if facts.conflict.unexplained and facts.writes:
        notes.append(Message("note.unexplained", {"count": facts.conflict.unexplained}))
    if facts.conflict.log_was_cut:
        notes.append(Message("note.log_was_cut"))
    return tuple(notes)


LONGEST_REPEATED = 12
"""Largest number of Nodes in one iteration of a loop."""

_FIRST_SHOWN = 6
_LAST_SHOWN = 5
_FEWEST_ROUNDS = 3


def folded(nodes: Sequence[Passed]) -> tuple[PathNode, ...]:
    """``nodes`` in order; iterations of a loop become one entry, and of a long path both ends are kept."""
    keys = [(one.name, one.frame and (one.frame.file, one.frame.line)) for one in nodes]
    shown: list[PathNode] = []
    at = 0
    while at < len(nodes):
        length, rounds = _repeated(keys, at)
        part = nodes[at : at + length]
        lines = {key[1] for key in keys[at : at + length]}
        frame = part[0].frame if len(lines) == 1 else None
        if rounds == 1:
            shown.append(PathNode("node", part[0].name, frame=frame))
        else:
            name = " → ".join(one.name for one in part)
            shown.append(PathNode("repeat", name, count=rounds, frame=frame, nodes=length * rounds))
        at += length * rounds
    if len(shown) <= _FIRST_SHOWN + _LAST_SHOWN + 1:
        return tuple(shown)
    left_out = sum(one.nodes for one in shown[_FIRST_SHOWN:-_LAST_SHOWN])
    return (*shown[:_FIRST_SHOWN], PathNode("gap", nodes=left_out), *shown[-_LAST_SHOWN:])


def _repeated(keys: Sequence[object], at: int) -> tuple[int, int]:
    """The length of a repeated sequence of Nodes from ``at`` on, and its repetitions: most Nodes, shortest sequence."""
    best = (1, 1)
    for length in range(1, LONGEST_REPEATED + 1):
        rounds = 1
        while keys[at + rounds * length : at + (rounds + 1) * length] == keys[at : at + length]:
            rounds += 1
        if rounds >= _FEWEST_ROUNDS and length * rounds > best[0] * best[1]:
            best = (length, rounds)
    return best


_UNKNOWN = PathNode("gap", nodes=0)

EVENTS_KEPT = 2_000
"""Events that a diagnosis holds at most; the same finding a thousand times over has millions."""


def events_of(facts: Facts, moments: Sequence[Moment] = ()) -> tuple[tuple[Event, ...], int]:
    """The save, the writes to that memory, the backward that used it, and the run's steps and backwards in between.

    They are ordered by the run's clock; so are ``moments``. Of very many those in the middle are left
    out; the second result is their number.
    """
    conflict = facts.conflict
    save, use = conflict.save, conflict.use
    counting = {id(write) for write in facts.writes}
    events = [Event("saved", save.clock, save.step, save.node, save.version, save.site.shown_frame)]
    for write in conflict.writes:
        kind: EventKind = "step" if write.kind == "step" else "written"
        touches = id(write) in counting
        events.append(Event(kind, write.clock, write.step, write.op, write.version, write.site.shown_frame, touches))
    events += _around(conflict, moments)
    if use.via != "write":
        if not any(event.kind == "backward" for event in events):
            # The log of calls does not reach back that far; the one that failed is still known.
            events.append(Event("backward", use.clock, use.step, use.via, None, use.site.shown_frame))
        events.append(Event("used", use.clock, use.step, save.node, use.version, use.site.shown_frame))
    return _both_ends(sorted(events, key=lambda event: event.clock))


def _both_ends(events: list[Event]) -> tuple[tuple[Event, ...], int]:
    """``events`` without the excess in the middle, and the number of those left out."""
    left_out = len(events) - EVENTS_KEPT
    if left_out <= 0:
        return tuple(events), 0
    last = EVENTS_KEPT // 2
    return (*events[: EVENTS_KEPT - last], *events[-last:]), left_out


def _around(conflict: Conflict, moments: Sequence[Moment]) -> Iterator[Event]:
    """The events between save and use; a step that wrote this memory is among the writes already."""
    first = bisect_left(moments, conflict.save.clock, key=lambda moment: moment.clock)
    last = bisect_right(moments, conflict.use.clock, key=lambda moment: moment.clock)
    known = {write.clock for write in conflict.writes if write.kind == "step"}
    for moment in moments[first:last]:
        if moment.kind == "backward" or moment.clock not in known:
            touches = moment.kind == "backward"
            yield Event(moment.kind, moment.clock, moment.step, moment.op, None, moment.site.shown_frame, touches)


def path_of(facts: Facts) -> tuple[PathNode, ...]:
    """The path from the loss to the Node that saved the value, as far as it is known; empty without a Node.

    A tensor on the path is a bridge where it leads across an update of parameters, into the graph of an earlier step.
    """
    conflict = facts.conflict
    save, bridge = conflict.save, conflict.bridge
    if save.node is None:
        return ()
    over = (PathNode("bridge", bridge.name),) if bridge is not None and facts.updates else ()
    kept = PathNode("saved", save.node, save.step, frame=save.site.shown_frame)
    loss = PathNode("loss", None, conflict.use.step)
    if conflict.passed:
        return (loss, *_between(conflict.passed, over), kept)
    if bridge is None:
        return (loss, _UNKNOWN, kept)
    middle = (PathNode("node", bridge.younger), *over)
    older = () if bridge.older == save.node else (PathNode("node", bridge.older), _UNKNOWN)
    return (loss, _UNKNOWN, *middle, *older, kept)


def path_of_failure(failure: Failure, *, carries: bool) -> tuple[PathNode, ...]:
    """The path from the loss to the Node that an earlier backward freed; empty for another failure.

    ``carries`` says that a tensor of an earlier round leads there: it is a bridge.
    """
    clues = {
        clue.role: clue for clue in failure.clues if clue.role in ("path", "bridge", "saved", "needed", "freed_by")
    }
    path = clues.get("path")
    if not isinstance(path, PathClue) or not path.passed:
        return ()
    bridge, saved = clues.get("bridge"), clues.get("saved")
    over = (PathNode("bridge", bridge.name),) if bridge is not None and carries else ()
    steps = [clues[role].count("step") if role in clues else None for role in ("needed", "freed_by")]
    frame = None if saved is None else saved.shown_frame
    loss, kept = PathNode("loss", None, steps[0]), PathNode("saved", path.passed[-1].name, steps[1], frame=frame)
    return (loss, *_between(path.passed, over), kept)


def _between(passed: Sequence[Passed], over: tuple[PathNode, ...]) -> tuple[PathNode, ...]:
    """The Nodes between the loss and the last one, folded; ``over`` is where the path crosses into the old graph."""
    crossed = max((index for index, one in enumerate(passed) if one.is_younger), default=-1) + 1
    if not over or not 0 < crossed < len(passed):
        return folded(passed[:-1])
    return (*folded(passed[:crossed]), *over, *folded(passed[crossed:-1]))


def joined(known: Diagnosis, again: Diagnosis) -> tuple[tuple[Event, ...], int]:
    """The events of one finding observed twice, each once, and the largest number left out in the middle."""
    events = sorted(dict.fromkeys((*known.events, *again.events)), key=lambda event: event.clock)
    kept, left_out = _both_ends(events)
    return kept, known.events_left_out + again.events_left_out + left_out
