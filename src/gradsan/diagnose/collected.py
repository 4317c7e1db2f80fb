"""Help for what lists, objects and containers keep of earlier rounds, so that a backward walks back into these."""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose.levels import user_frames
from gradsan.model import Fix, Frame, Held, Message, Site


def forget_collected(used: Site, updated: Site | None, held: tuple[Held, ...]) -> Fix | None:
    """Empty, when the round is over, the list that holds what earlier rounds have added.

    ``used`` is the round's backward, ``updated`` its update of the parameters, ``held`` the live variables that lead to
    an earlier round. None where no list is among them that still holds what that round has added.
    """
    for one in held:
        if one.container not in ("list", "deque") or one.within is None or not one.is_old:
            continue
        for frame in reversed(user_frames(used)):
            if not _belongs(one, frame):
                continue
            update = _update_beside(frame, updated)
            found = source.forget_collected([frame] if update is None else [frame, update], one.within)
            if found is not None:
                change, text = found
                values = {"name": one.within, "text": text}
                return Fix(
                    "forget_collected",
                    "changed",
                    Message("help.forget_collected", values),
                    Message("help.forget_collected_how", values),
                    "review",
                    source.changed_lines(frame.file, change),
                )
    return None


def detach_collected(held: tuple[Held, ...]) -> Fix | None:
    """Add to a list that outlives the rounds what was computed, without its graph.

    None where what earlier rounds have left in a list (a replay of states) has no line that adds it.
    """
    old = [one for one in held if one.is_old and one.within is not None]
    files = {one.file for one in old}
    found = source.detach_collected(old[0].file, [one.path for one in old]) if len(files) == 1 else None
    if found is None:
        return None
    values = {"bridge": ", ".join(found[1])}
    return Fix(
        "detach_carried_state",
        "changed",
        Message("help.detach_carried_state", values),
        Message("help.detach_carried_state_how", values),
        "review",
        source.changed_lines(old[0].file, found[0]),
    )


def detach_held(
    used: Site, updated: Site | None, held: tuple[Held, ...], known: str | None = None, *, or_renewed: bool = False
) -> Fix | None:
    """Cut off what the live variables ``held`` keep of earlier rounds, by one line behind the round.

    ``used`` is the round's backward, ``updated`` its update of the parameters. ``known`` is the variable for which the
    source tells a line already: that line stands unless the variable holds containers of which the source does not
    tell. With ``or_renewed`` what this round has put into an object in the place of the old counts as kept, too. None
    where nothing is kept in an attribute or a container that the function of a backward's frame names.
    """
    for frame in reversed(user_frames(used)):
        mine = [one for one in held if _belongs(one, frame) and (_is_kept(one) or (or_renewed and _in_object(one)))]
        if known is not None:
            mine = [one for one in mine if one.path.startswith(f"{known}[") and _is_nested(one)]
        if not mine:
            continue
        at = _update_beside(frame, updated)
        found = source.detach_held([frame] if at is None else [frame, at], mine)
        if found is None:
            return None
        change, names = found
        values = {"bridge": ", ".join(names)}
        return Fix(
            "detach_carried_state",
            "changed",
            Message("help.detach_carried_state", values),
            Message("help.detach_carried_state_how", values),
            "review",
            source.changed_lines(frame.file, change),
        )
    return None


def _is_kept(held: Held) -> bool:
    """Whether it outlives the round: an element that an earlier one has left, or what an object keeps writing into."""
    return bool(held.around) and (held.is_old or (held.is_rewritten and held.container == "object"))


def _in_object(held: Held) -> bool:
    return any(layer.kind == "object" for layer in held.around)


def _is_nested(held: Held) -> bool:
    """Whether an element of the variable is no tensor, so that a plain ``detach()`` of each would fail."""
    layers = [one for one in held.around if one.kind != "object"]
    return len(layers) > 1 or any(set(one.items) != {"tensor"} for one in layers)


def _belongs(held: Held, frame: Frame) -> bool:
    return held.file == frame.file and held.function.rpartition(".")[2] == frame.function.rpartition(".")[2]


def _update_beside(frame: Frame, updated: Site | None) -> Frame | None:
    """The frame of the update of the parameters in the function of ``frame``."""
    frames = () if updated is None else user_frames(updated)
    return next((one for one in frames if source.in_same_function(one, frame)), None)
