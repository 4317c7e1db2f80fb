"""GS420, GS421, GS422 and GS409: leaves that were lost, parameters without a gradient, graphs that grow.

PyTorch says nothing of the first three. A lost leaf and a growing graph are warnings. A parameter without a gradient
may be meant so, and is a note, unless the optimizer gets none at all, or a forward reads the parameter, but only past
its graph.
"""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.failures import parts
from gradsan.diagnose.levels import place
from gradsan.model import Clue, Diagnosis, Failure, Message, NamedTensor

ROWS = ("leaf_lost", "parameter_not_reached", "graph_grows", "grad_of_non_leaf")


def match(failure: Failure) -> Diagnosis | None:
    """Every failure of these rows."""
    if failure.row == "leaf_lost":
        return _lost(failure)
    if failure.row == "graph_grows":
        return _grows(failure)
    if failure.row == "grad_of_non_leaf":
        return _non_leaf(failure)
    return _not_reached(failure)


def _lost(failure: Failure) -> Diagnosis:
    parameter, holder, replaced = (parts.clue(failure, role) for role in ("parameter", "holder", "replaced"))
    values = {"name": _name(parameter), "holder": _name(holder)}
    was_computed = replaced is not None and replaced.site is not None
    return parts.diagnosis(
        failure,
        "GS420",
        "leaf_lost",
        values=values,
        severity="warning",
        explanation="explanation.leaf_lost_step" if was_computed else "explanation.leaf_lost_moved",
        labels=(
            *parts.label_of(replaced, "created", "label.leaf_lost_at", values),
            *label_room.at("used", failure.site, Message("label.not_reached_step", values)),
        ),
        tensor=_tensor(parameter),
        fixes=(parts.fix("update_in_place", "changed", values),)
        if was_computed
        else (parts.fix("give_to_optimizer", "preserved", values),),
        notes=(Message("note.who_holds", values),),
    )


def _not_reached(failure: Failure) -> Diagnosis:
    parameter, holder = parts.clue(failure, "parameter"), parts.clue(failure, "holder")
    counts = {} if parameter is None else parameter.values
    is_all = bool(counts) and counts["missing"] == counts["total"]
    values = {
        "name": _name(parameter),
        "holder": _name(holder),
        "missing": counts.get("missing", "?"),
        "total": counts.get("total", "?"),
    }
    read = parts.clue(failure, "read")
    if read is not None:
        return _read_past_graph(failure, read, {**values, "read": read.name}, _tensor(parameter))
    return parts.diagnosis(
        failure,
        "GS421",
        "parameter_not_reached",
        values=values,
        severity="warning" if is_all else "note",
        labels=label_room.at("used", failure.site, Message("label.not_reached_step", values)),
        tensor=_tensor(parameter),
        fixes=(parts.fix("use_it", "changed", values),),
    )


def _read_past_graph(failure: Failure, read: Clue, values: dict[str, object], tensor: NamedTensor | None) -> Diagnosis:
    frame = place(read.site) if read.site is not None else None
    change = None if frame is None else source.read_with_graph(frame)
    lines = () if frame is None or change is None else source.changed_lines(frame.file, change)
    return parts.diagnosis(
        failure,
        "GS421",
        "parameter_not_reached",
        values=values,
        severity="warning",
        explanation="explanation.parameter_read_past_graph",
        labels=(
            *parts.label_of(read, "created", "label.read_past_graph", values),
            *label_room.at("used", failure.site, Message("label.not_reached_step", values)),
        ),
        tensor=tensor,
        fixes=(parts.fix("read_with_graph", "changed", values, lines=lines),),
    )


def _grows(failure: Failure) -> Diagnosis:
    grown = parts.clue(failure, "grown")
    facts = {} if grown is None else grown.values
    values = {
        "name": _name(grown),
        "rounds": facts.get("rounds", "?"),
        "depth": facts.get("nodes", "?"),
        "bytes": _bytes(facts.get("bytes_per_round", 0)),
    }
    return parts.diagnosis(
        failure,
        "GS422",
        "graph_grows",
        values=values,
        severity="warning",
        labels=(
            *parts.label_of(grown, "bridge", "label.grows_by", values),
            *label_room.at("used", failure.site, Message("label.loss_at")),
        ),
        tensor=None,
        fixes=(parts.fix("detach_kept", "changed", values),),
        notes=(Message("note.graph_growth", {**values, "bytes": _bytes(facts.get("bytes", 0))}),),
    )


def _non_leaf(failure: Failure) -> Diagnosis:
    made = parts.clue(failure, "made")
    values = {"name": _name(made), "op": parts.op_of(made)}
    is_update = made is not None and bool(made.values.get("is_update"))
    return parts.diagnosis(
        failure,
        "GS409",
        "gradient_of_non_leaf",
        values=values,
        severity="warning" if is_update else "note",
        labels=(
            *parts.label_of(made, "created", "label.lost_by_update" if is_update else "label.made_by", values),
            *label_room.at("used", failure.site, Message("label.read_grad", values)),
        ),
        tensor=_tensor(made),
        fixes=(parts.fix("update_in_place", "changed", values),)
        if is_update
        else (parts.fix("retain_grad", "preserved", values),),
    )


def _name(found: Clue | None) -> str | Message:
    return found.name if found is not None and found.name else Message("label.the_tensor")


def _tensor(found: Clue | None) -> NamedTensor | None:
    if found is None or "shape" not in found.values or not found.name:
        return None
    return NamedTensor(found.name, found.values["shape"], found.values["dtype"], found.values["device"], None, None)


def _bytes(count: int) -> str:
    """A number of bytes as people write it."""
    size = float(max(count, 0))
    for unit in ("B", "KB", "MB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GB"
