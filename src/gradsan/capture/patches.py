"""A list of replaced attributes that can be put back, in reverse order, exactly as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """Attributes replaced while gradsan is on."""

    def __init__(self) -> None:
        """Start with nothing replaced."""
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._actions: list[Callable[[], None]] = []
        self._suspended = False

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``; undoing restores it, or removes it where it was only inherited."""
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT), value))
        setattr(owner, name, value)

    def on_undo(self, action: Callable[[], None]) -> None:
        """Run ``action`` when everything is undone."""
        self._actions.append(action)

    def suspend(self) -> None:
        """Put the originals back for a while (nothing where they already are)."""
        if self._suspended:
            return
        self._suspended = True
        for owner, name, own, value in reversed(self._replaced):
            if vars(owner).get(name, _ABSENT) is not value:
                continue
            if own is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

    def resume(self) -> None:
        """Put the replacements in again after :meth:`suspend`."""
        if not self._suspended:
            return
        self._suspended = False
        for owner, name, own, value in self._replaced:
            if vars(owner).get(name, _ABSENT) is own:
                setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back for good, the last replaced first. What someone else replaced since is left alone."""
        self.suspend()
        self._suspended = False
        self._replaced.clear()
        while self._actions:
            self._actions.pop()()
