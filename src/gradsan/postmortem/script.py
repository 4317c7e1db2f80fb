"""Script of a post-mortem reading: operations in the order in which they would happen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gradsan.model import Frame

EVENTS_KEPT = 8_000

EventKind = Literal["op", "write", "step", "backward"]


class EnoughError(Exception):
    """The script is full; reading ends here."""


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """One thing that happens at ``frames`` (outermost first).

    ``name`` is what is called (``sigmoid``, ``add_``, ``SGD``). ``operands``, one by one, and ``result`` are the memory
    it reads and makes, ``written`` what it changes, ``leaves`` the real storages of parameters among the operands.
    ``bound`` are the names that its statement gives its result to. ``records`` tells whether autograd would record it.
    ``retain_graph`` is that of a backward. ``expanded`` tells that what is written was expanded.
    """

    kind: EventKind
    frames: tuple[Frame, ...]
    name: str
    operands: tuple[frozenset[int], ...] = ()
    result: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()
    leaves: frozenset[int] = frozenset()
    bound: tuple[str, ...] = ()
    records: bool = True
    retain_graph: bool = False
    expanded: bool = False

    @property
    def place(self) -> Frame | None:
        """The deepest frame of the user's own code."""
        return next((frame for frame in reversed(self.frames) if frame.is_user), None)


@dataclass(slots=True)
class Script:
    """The events, oldest first; at most ``EVENTS_KEPT``.

    ``repeated`` are the last rounds of loops, each as (first event, event after the last): a loop may go round more
    often than it is read. ``known`` says of real storages by which numbers the script knows them.
    """

    events: list[Event] = field(default_factory=list)
    repeated: list[tuple[int, int]] = field(default_factory=list)
    known: dict[int, frozenset[int]] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Put ``event`` at the end. Raises EnoughError where the script is full."""
        if len(self.events) >= EVENTS_KEPT:
            raise EnoughError
        self.events.append(event)

    def note_round(self, first: int) -> None:
        """Remember that what was added from the event ``first`` on was a loop's last round."""
        if len(self.events) > first:
            self.repeated.append((first, len(self.events)))
