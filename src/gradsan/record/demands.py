"""Demands of a stretch of watching beyond reports: to be stopped, and how far healing goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gradsan._errors import HaltError
from gradsan.model import Conflict, Failure, Message
from gradsan.record.steps import RawBackward

FOUND_AT_WRITE = "write"
"""``Use.via`` of a conflict that was found when its value was overwritten: no backward has asked for it."""


class Asked(NamedTuple):
    """What one stretch asks for.

    ``stops`` says of what was found with which words the program is to be stopped, None: not at all. ``early``: at the
    write. ``heals`` says which conflicts are healed, None: all; ``max_bytes`` bounds what healing keeps.
    """

    stops: Callable[[Conflict | Failure], Message | None] | None = None
    early: bool = False
    heals: Callable[[Conflict], bool] | None = None
    max_bytes: int | None = None


class Demands:
    """What is asked for just now, by all the stretches that run."""

    def __init__(self) -> None:
        """Nothing."""
        self._stretches: list[tuple[int, str, Asked]] = []
        self._halted: Message | None = None

    def begin(self, number: int, mode: str, asked: Asked) -> None:
        """The stretch of that number begins."""
        if not self._stretches:
            self._halted = None
        self._stretches.append((number, mode, asked))

    def end(self, number: int) -> None:
        """The stretch of that number has ended."""
        self._stretches = [one for one in self._stretches if one[0] != number]

    @property
    def stop(self) -> bool:
        """Whether one wants the program stopped."""
        return any(asked.stops is not None for _, _, asked in self._stretches)

    @property
    def early(self) -> bool:
        """Whether one wants it stopped at the write."""
        return any(asked.early for _, _, asked in self._stretches)

    @property
    def max_bytes(self) -> int | None:
        """The tightest bound on what healing keeps."""
        bounds = [asked.max_bytes for _, mode, asked in self._stretches if mode == "heal"]
        return min((bound for bound in bounds if bound is not None), default=None)

    @property
    def heals(self) -> Callable[[Conflict], bool] | None:
        """Whether a conflict is healed: where one of those that heal wants it so; None: every one is."""
        wanted = [asked.heals for _, mode, asked in self._stretches if mode == "heal"]
        scopes = [scope for scope in wanted if scope is not None]
        if len(scopes) < len(wanted) or not scopes:
            return None
        return lambda conflict: any(scope(conflict) for scope in scopes)

    def on_new(self, found: Conflict | Failure) -> None:
        """Stop the program at what was found, where one wants it.

        Where PyTorch stops it anyway, its error is left to come first; a program that goes on after it is stopped at
        its next backward.

        Raises:
            HaltError: with the words of the one that wants it.
        """
        for _, _, asked in self._stretches:
            words = None if asked.stops is None else asked.stops(found)
            if words is not None:
                self._halted = words
                if not found.raised or (isinstance(found, Conflict) and found.use.via == FOUND_AT_WRITE):
                    raise HaltError(words)

    def before_backward(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stop a program that has caught what was to stop it; the arguments are those of ``listeners.BeforeBackward``.

        Raises:
            HaltError: as ``on_new``.
        """
        if self._halted is not None:
            raise HaltError(self._halted)


class Found(list[Any]):
    """What was found in a run; ``on_new`` is called with each new one, and what it raises is for the program."""

    def __init__(self, on_new: Callable[[Any], None]) -> None:
        """Empty."""
        super().__init__()
        self._met = on_new

    def append(self, found: Any) -> None:
        """Add one, and call ``on_new``."""
        super().append(found)
        self._met(found)
