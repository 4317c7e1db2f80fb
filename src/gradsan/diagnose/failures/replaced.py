"""Parameters that replaced those of an optimizer, given to it; parameters, or what it was given, that are results."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gradsan import source
from gradsan.diagnose.failures import parts, statements
from gradsan.diagnose.value_fixes import written_with_graph
from gradsan.model import Diagnosis, Failure, Fix, Frame, Lines


def parameter_result(failure: Failure) -> Diagnosis | None:
    """GS314 for a parameter that is no leaf any more when its module is given it again: ``self.weight += a @ b``."""
    in_forward = any(one.function.endswith("._call_impl") and not one.is_user for one in failure.site.frames)

    def fixes(values: Mapping[str, object]) -> tuple[Fix, ...]:
        anew = (parts.fix("compute_in_forward", "changed", values),) if in_forward else ()
        return (*anew, *written_with_graph(str(values["name"]), [failure.site], None))

    return statements.stopped(
        failure,
        "GS314",
        "data_replaced",
        words="parameter_result",
        label="label.parameter_assigned",
        explanation="explanation.parameter_result",
        fixes=fixes,
    )


def result_optimized(failure: Failure) -> Diagnosis | None:
    """GS321: the leaf alone where nothing else holds it, else that one is for the optimizer."""
    target, made = failure.clue("target"), failure.clue("made")
    frame, name = failure.site.user_frame, "" if target is None else target.name or ""
    leaf = None if target is None else target.values.get("leaf")

    def fixes(values: Mapping[str, object]) -> tuple[Fix, ...]:
        if isinstance(leaf, str):
            given = (source.read_instead(one, name, leaf) for one in reversed(failure.site.user_frames))
            frames = zip(reversed(failure.site.user_frames), given, strict=True)
            lines = next((source.changed_lines(one.file, change) for one, change in frames if change is not None), ())
            return (parts.fix("give_leaf", "changed", {**values, "leaf": leaf}, lines=lines),)
        bound = source.definition_of(frame, name) if frame is not None else None
        at = bound.frame if bound is not None else None if made is None or made.site is None else made.site.user_frame
        return (Fix.worded("help.leaf_alone", dict(values), source.changed_at(at, source.leaf_alone)),)

    return statements.stopped(failure, "GS321", "result_optimized", role="used", fixes=fixes)


def given_to_optimizer(failure: Failure) -> Lines:
    """All new parameters added to the optimizer, right after the last of the statements that set them on the model.

    With the options of the groups that the old ones are in.
    """
    frame, lost = failure.site.user_frame, failure.clues_of("replaced")
    holder = None if frame is None else source.method_receiver(frame)
    found = [None if frame is None or not one.name else _set_at(frame, one.name) for one in lost]
    known = [one for one in found if one is not None]
    if frame is None or holder is None or not known or len(known) < len(found):
        return ()
    place = max((one for _, one in known), key=lambda one: one.line)
    if any(one.file != place.file or not source.in_same_loops(one, place) for _, one in known):
        return ()
    if any(one != place and source.is_conditional(one) for _, one in known):
        return ()
    groups: dict[object, dict[str, None]] = {}
    for clue, (given, _) in zip(lost, known, strict=True):
        groups.setdefault(clue.values.get("group"), {})[given] = None
    if sum(map(len, groups.values())) > len({given for given, _ in known}):
        return ()  # a module whose weight and bias are in two groups
    options = [f'{_options(holder, group)}"params": {_joined(list(given))}' for group, given in groups.items()]
    change = source.added_to_optimizer(place, frame, holder, options)
    return source.changed_lines(place.file, change)


def _options(holder: str, group: object) -> str:
    return "" if group is None else f"**{holder}.param_groups[{group}], "


def _joined(given: list[str]) -> str:
    return given[0] if len(given) == 1 else f"[{', '.join(_spread(one) for one in given)}]"


def _spread(given: str) -> str:
    return given[1:-1] if given.startswith("[") else f"*{given}"


def _parts(path: str) -> list[str]:
    """``net.head`` and ``net`` of ``net.head.weight``, after that itself."""
    names = path.split(".")
    return [".".join(names[:many]) for many in range(len(names), 0, -1)]


def _set_at(frame: Frame, path: str) -> tuple[str, Frame] | None:
    """What holds the new parameter ``path``, as it is given to an optimizer, and the one statement that sets it."""
    bound = source.assignments(frame, path)
    part = next((one for one, _ in bound), path)
    places = [place for one, place in bound if one == part]
    is_own = any(source.in_same_function(place, frame) for place in places)
    inner = [one for one in _parts(path) if len(one) >= len(part) + is_own]
    called = ((one, source.set_by_call(frame, one)) for one in inner)
    part, places = next(((one, [place]) for one, place in called if place is not None), (part, places))
    if len(places) != 1:
        return None
    place = places[0]
    # What every round makes anew would be added in every round.
    if source.in_one_loop(place, frame) and not source.is_conditional(place):
        return None
    # A parameter that was bound itself is passed as it is; its owner is a module, unless it is a list or a dict.
    bound_name, name = (re.sub(r"\W+", ".", one).strip(".") for one in (part, path))
    if path[len(part) :].startswith("["):
        return None
    return f"[{part}]" if bound_name == name else f"{part}.parameters()", place
