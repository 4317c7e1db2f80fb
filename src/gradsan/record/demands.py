"""Demands of a stretch of watching beyond reports: stopping the program, and the scope of healing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gradsan._errors import HaltError
from gradsan.model import Conflict, Failure, Message
from gradsan.record.steps import RawBackward

FOUND_AT_WRITE = "write"
"""``Use.via`` of a conflict that was found at the write: no backward has asked for the value."""


class Asked(NamedTuple):
    """Demands of one stretch of watching.

    ``stops`` returns the message with which a finding stops the program, None to go on; ``early``: stop at the
    write. ``heals`` says which conflicts are healed (None: all); ``max_bytes`` bounds the memory of healing.
    """

    stops: Callable[[Conflict | Failure], Message | None] | None = None
    early: bool = False
    heals: Callable[[Conflict], bool] | None = None
    max_bytes: int | None = None


class Demands:
    """Combined demands of all running stretches."""

    def __init__(self) -> None:
        self._stretches: list[tuple[int, str, Asked]] = []
        self._halted: Message | None = None

    def begin(self, number: int, mode: str, asked: Asked) -> None:
        """Add the demands of a stretch that begins."""
        if not self._stretches:
            self._halted = None
        self._stretches.append((number, mode, asked))

    def end(self, number: int) -> None:
        """Remove the demands of a stretch that has ended."""
        self._stretches = [one for one in self._stretches if one[0] != number]

    @property
    def stop(self) -> bool:
        """Whether a stretch wants the program stopped."""
        return any(asked.stops is not None for _, _, asked in self._stretches)

    @property
    def early(self) -> bool:
        """Whether a stretch wants it stopped at the write."""
        return any(asked.early for _, _, asked in self._stretches)

    @property
    def max_bytes(self) -> int | None:
        """The tightest bound on the memory of healing."""
        bounds = [asked.max_bytes for _, mode, asked in self._stretches if mode == "heal"]
        return min((bound for bound in bounds if bound is not None), default=None)

    @property
    def heals(self) -> Callable[[Conflict], bool] | None:
        """A predicate for conflicts to heal: those that any healing stretch wants; None for all."""
        wanted = [asked.heals for _, mode, asked in self._stretches if mode == "heal"]
        scopes = [scope for scope in wanted if scope is not None]
        if len(scopes) < len(wanted) or not scopes:
            return None
        return lambda conflict: any(scope(conflict) for scope in scopes)

    def on_new(self, found: Conflict | Failure) -> None:
        """Stop the program at a finding if a stretch wants it.

        Where PyTorch stops it anyway, PyTorch's error comes first; a program that catches it is stopped at
        its next backward.

        Raises:
            HaltError: with the message of the stretch that wants it.
        """
        for _, _, asked in self._stretches:
            words = None if asked.stops is None else asked.stops(found)
            if words is not None:
                self._halted = words
                if not found.raised or (isinstance(found, Conflict) and found.use.via == FOUND_AT_WRITE):
                    raise HaltError(words)

    def before_backward(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stop a program that has caught its halt; the arguments are those of ``listeners.BeforeBackward``.

        Raises:
            HaltError: as ``on_new``.
        """
        if self._halted is not None:
            raise HaltError(self._halted)


class Found(list[Any]):
    """List of findings that calls ``on_new`` with each new one; errors of ``on_new`` propagate to the program."""

    def __init__(self, on_new: Callable[[Any], None]) -> None:
        super().__init__()
        self._on_new = on_new

    def append(self, found: Any) -> None:
        """Append a finding, and call ``on_new``."""
        super().append(found)
        self._on_new(found)
