"""What a second backward through a freed graph is about, by role, and the form that GS401 to GS404 share.

The causes themselves are in ``second_backward.py`` and ``shared_forward.py``.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gradsan import source
from gradsan.diagnose import carriers, needs
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.failures import parts
from gradsan.diagnose.value_fixes import LEFT_CONSTANT
from gradsan.model import Bridge, Clue, Diagnosis, Failure, Fix, Frame, Held, HeldClue, Label, Lines, Message, Site

CARRIED = ("GS401", "freed_state_carried_over", "label.bridge")
SHARED = ("GS402", "forward_shared_by_two_backwards", "label.shared_by_both")
ONCE = ("GS403", "graph_built_once", "label.built_once")
SAME = ("GS404", "same_loss_twice", None)
"""Code and slug of each cause, and the words at the tensor between both graphs."""

COMPUTED_ONCE_TOO = "label.built_once_before"
_SHORT = 40
COSTS, GROWS = "note.retain_graph_costs", "note.retain_graph_grows"
BECOMES_GS110, KEEPS_OLD = "note.retain_graph_becomes_gs110", "note.retain_graph_keeps_old"


@dataclass(frozen=True, slots=True)
class Case:
    """The clues by role, and the name of the tensor between both graphs."""

    failure: Failure
    needed: Clue
    freed_by: Clue
    bridge: Clue
    carrier: carriers.Carrier | None
    name: str | Message
    bound_at: Frame | None
    saved: Clue | None = None

    @property
    def updated(self) -> Site | None:
        """The site where parameters were updated between the two backwards."""
        clue = self.failure.clue("updated")
        return None if clue is None else clue.site

    @property
    def if_kept(self) -> str:
        """The note on what ``retain_graph`` would lead to, where parameters were updated in between."""
        clue = self.failure.clue("updated")
        operands = None if clue is None else clue.values.get("operands")
        if not isinstance(operands, tuple):
            return KEEPS_OLD  # it is not known what the update changed
        is_stale = any(needs.has_saved_written(name, states) for name, states in operands)
        return BECOMES_GS110 if is_stale else KEEPS_OLD if operands else COSTS


def case_of(failure: Failure, needed: Clue, freed_by: Clue, bridge: Clue, is_carried: bool = False) -> Case:
    """Make the case of a failure: of a carried state with the variable that carries it, else with a name, if any."""
    carrier = None
    if is_carried and needed.site is not None:
        taken = tuple(one.site for one in failure.clues_of("bridge_taken") if one.site is not None)
        made = tuple(one.site for one in failure.clues_of("bridge_made") if one.site is not None)
        between = Bridge(
            bridge.op or "?", str(bridge.values.get("younger", "")), bridge.name, taken, made, True, held_of(failure)
        )
        numbers = bridge.values.get("numbers")
        between = replace(between, numbers=numbers) if isinstance(numbers, frozenset) else between
        carrier = carriers.find(needed.site, between)
    if carrier is not None:
        return Case(failure, needed, freed_by, bridge, carrier, carrier.name, carrier.bound_at)
    bound = None if bridge.site is None else source.bound_name(bridge.site.user_frames)
    name: str | Message | None = bridge.name or (bound[0] if bound else None)
    if name is None and freed_by.values.get("same_loss"):
        frame = needed.shown_frame
        name = None if frame is None else source.method_receiver(frame)
    name = name or _result_at(bridge.user_frame) or Message("label.shared_value")
    return Case(failure, needed, freed_by, bridge, None, name, bound[1] if bound else None)


def _result_at(frame: Frame | None) -> Message | None:
    """What to call a value that no variable holds: the result of the short call that made it."""
    place = None if frame is None else source.expression_at(frame)
    is_short = place is not None and isinstance(place.node, ast.Call) and len(place.text) <= _SHORT
    return Message("label.result_of", {"call": place.text}) if place is not None and is_short else None


def diagnosis_of(
    case: Case,
    cause: tuple[str, str, str | None],
    fixes: tuple[Fix, ...],
    note: str = COSTS,
    *,
    explanation: str | None = None,
) -> Diagnosis:
    """Make the diagnosis of a cause, with the labels that all have: saved, bound, freed, updated, needed again."""
    code, slug, bridge = cause
    values = {"bridge": case.name, "name": case.name, "op": parts.op_of(case.bridge)}
    tensor = None
    if isinstance(case.name, str) and not (case.carrier and case.carrier.behind):
        tensor = replace(parts.tensor_of(case.bridge, case.name), op=case.bridge.op)
    saved = case.saved or case.failure.clue("saved")
    certain = bool(case.freed_by.values.get("certain"))
    labels = (
        *(_first_label(case) if cause is ONCE else ()),
        *(parts.label_of(saved, "saved", "label.kept_for_backward", {"op": parts.op_of(saved)}) if saved else ()),
        *_bridge_label(case, bridge, values),
        *parts.label_of(case.freed_by, "freed", "label.freed_here" if certain else "label.freed_here_probably", values),
        *parts.label_of(case.failure.clue("updated"), "note", "label.updated_between", {}),
        *parts.label_of(case.needed, "used", "label.walks_into_freed", values),
    )
    return parts.diagnosis(
        case.failure,
        code,
        slug,
        values=values,
        labels=labels,
        tensor=tensor,
        fixes=fixes,
        notes=(Message(note, values),),
        explanation=explanation,
    )


def _first_label(case: Case) -> tuple[Label, ...]:
    """The statement, before the one that bound the value, from which on its graph is gone."""
    frame = computed_before(case)
    if frame is None:
        return ()
    return (Label("note", frame, Message(COMPUTED_ONCE_TOO, {"name": case.name}), None, Site((frame,))),)


def computed_before(case: Case) -> Frame | None:
    """The statement that made the oldest freed value, before the one that bound the shared value, in its function."""
    first, bound_at = case.failure.clue("freed_first"), case.bound_at
    frames = () if first is None or first.site is None else first.site.user_frames
    own = [one for one in frames if bound_at is not None and source.in_same_function(one, bound_at)]
    return own[-1] if own and bound_at is not None and own[-1].line < bound_at.line else None


def _bridge_label(case: Case, key: str | None, values: Mapping[str, object]) -> tuple[Label, ...]:
    if key is None:
        return ()
    message = Message(key, dict(values))
    if case.bound_at is None:
        return label_texts.at("bridge", case.bridge.site, message, op=case.bridge.op)
    return (Label("bridge", case.bound_at, message, case.bridge.op, Site((case.bound_at,))),)


def keep_graph(case: Case) -> Fix:
    """``retain_graph=True`` in the earlier backward call."""
    site, shown = case.freed_by.site, case.freed_by.shown_frame
    frames = () if site is None else site.user_frames
    lines = source.keep_graph_from(frames if not frames or shown == frames[-1] or shown is None else (shown,))
    return parts.fix("retain_graph", "preserved", {"name": case.name}, lines=lines)


def for_gradient(case: Case, lines: Lines) -> tuple[Fix, ...]:
    """The graph kept for the second backward: that of the gradient recorded, or only the one behind it."""
    recorded = parts.fix("create_graph", "changed", {"name": Message("label.the_gradient")}, lines=lines)
    return recorded, replace(
        keep_graph(case), meaning="changed", how_changed=Message(LEFT_CONSTANT, {"name": case.name})
    )


def held_of(failure: Failure) -> tuple[Held, ...]:
    """The live variables whose graph leads back to the freed Node."""
    return tuple(one.held for one in failure.clues if isinstance(one, HeldClue))


def borrowed_of(failure: Failure) -> list[Bridge]:
    """The tensors that connect one of the losses to a network that it does not train."""
    found: list[Bridge] = []
    for one in failure.clues_of("borrowed"):
        number = one.values["number"]
        made, taken = (
            tuple(near.site for near in failure.clues_of(role) if near.site and near.values["number"] == number)
            for role in ("borrowed_made", "borrowed_taken")
        )
        found.append(Bridge(one.op or "?", "?", one.name, taken, made))
    return found
