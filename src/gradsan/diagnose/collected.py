"""Help for lists that every round adds to, so that a backward walks back into the rounds before."""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose.levels import user_frames
from gradsan.model import Fix, Held, Message, Site


def forget_collected(used: Site, updated: Site | None, held: tuple[Held, ...]) -> Fix | None:
    """Empty, when the round is over, the list that holds what earlier rounds have added.

    ``used`` is the round's backward, ``updated`` its update of the parameters, ``held`` the live variables that lead to
    an earlier round. None where no list is among them that still holds what that round has added.
    """
    for one in held:
        if one.container not in ("list", "deque") or one.within is None or not one.is_old:
            continue
        for frame in reversed(user_frames(used)):
            if frame.file != one.file or frame.function.rpartition(".")[2] != one.function.rpartition(".")[2]:
                continue
            update = (
                next((at for at in user_frames(updated) if source.in_same_function(at, frame)), None)
                if updated
                else None
            )
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
