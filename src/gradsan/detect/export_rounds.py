"""Rounds in which the memory that a line hands out is compared: its first, and some later ones."""

from __future__ import annotations

FIRST, _AGAIN = 16, 4


class Schedule:
    """When to compare what a line exports: in its first rounds, and in each of them at the first backward calls.

    A round of a line begins where it is called after a backward. Both counts go on at 32, 64, 128 … for some more.
    """

    __slots__ = ("_backwards", "_begun", "_rounds")

    def __init__(self) -> None:
        self._rounds, self._backwards, self._begun = 0, -1, 0

    def call(self, backwards: int) -> None:
        """Count a call of the line when there have been so many backward calls."""
        if backwards != self._backwards:
            self._rounds += 1
            self._backwards = self._begun = backwards

    def is_due(self, backwards: int) -> bool:
        """Whether to compare until the backward call after so many."""
        return _is_early(self._rounds - 1) and (backwards - self._begun < FIRST or _is_early(backwards))


def _is_early(number: int) -> bool:
    """Whether ``number``, counted from 0, is one of the first, or among the first from a power of two on."""
    return number < FIRST or number - (1 << (number.bit_length() - 1)) < _AGAIN
