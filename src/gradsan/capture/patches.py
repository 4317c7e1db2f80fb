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

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``; undoing restores it, or removes it where it was only inherited."""
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT), value))
        setattr(owner, name, value)

    def on_undo(self, action: Callable[[], None]) -> None:
        """Run ``action`` when everything is undone."""
        self._actions.append(action)

    def undo(self) -> None:
        """Put everything back, the last replaced first. What someone else replaced since is left alone."""
        while self._replaced:
            owner, name, own, value = self._replaced.pop()
            if vars(owner).get(name, _ABSENT) is not value:
                continue
            if own is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        while self._actions:
            self._actions.pop()()
