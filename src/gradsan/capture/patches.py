"""A list of replaced attributes that can be put back, in reverse order, exactly as they were.

Where types are patched, nothing on the way may read an attribute of theirs but by :func:`standing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gradsan.capture import type_slots

_ABSENT = object()


def standing(owner: Any, name: str) -> Any:
    """What ``owner.name`` gives, read without a trace in the caches of a type; None where there is nothing.

    A type whose attribute is read takes a version for CPython's caches, and the next replacement throws it away. Since
    3.13 a type has 1,000 of them (``MAX_VERSIONS_PER_CLASS``); once they are used up, what is read from it is never
    cached again, in the whole process. Putting wrappers into hundreds of names must not cost one for each.
    """
    if not isinstance(owner, type):
        return getattr(owner, name, None)
    for kind in owner.__mro__:
        if name in vars(kind):
            found = vars(kind)[name]
            bind = getattr(type(found), "__get__", None)
            return found if bind is None else bind(found, None, owner)
    return getattr(owner, name, None)


class Patches:
    """Attributes replaced while gradsan is on."""

    def __init__(self) -> None:
        """Start with nothing replaced."""
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._actions: list[Callable[[], None]] = []
        self._spared: type_slots.Spared = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``; undoing restores it, or removes it where it was only inherited."""
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT), value))
        self._put(owner, name, value)

    @contextmanager
    def aside(self, which: Callable[[Any, Any], bool]) -> Iterator[dict[int, Any]]:
        """Put back, for a while, those attributes for whose owner and original ``which`` holds.

        Gives the originals by the ``id`` of all that stood in their places. Meanwhile other threads meet the originals,
        too. What was undone in the meantime is not replaced again.
        """
        places: dict[tuple[int, str], tuple[Any, str, Any, Any]] = {}
        originals: dict[int, Any] = {}
        for owner, name, own, value in self._replaced:
            # Of what was replaced twice, the first original and the last replacement count.
            original = places.get((id(owner), name), (owner, name, own, value))[2]
            if which(owner, original) and original is not _ABSENT:
                places[id(owner), name] = (owner, name, original, value)
                originals[id(value)] = original
        changed = [place for place in places.values() if vars(place[0]).get(place[1]) is place[3]]
        for owner, name, original, _ in changed:
            self._put(owner, name, original)
        try:
            yield originals
        finally:
            still = {id(value) for *_, value in self._replaced}
            for owner, name, original, value in changed:
                if id(value) in still and vars(owner).get(name) is original:
                    self._put(owner, name, value)

    def on_undo(self, action: Callable[[], None]) -> None:
        """Run ``action`` when everything is undone."""
        self._actions.append(action)

    def undo(self) -> None:
        """Put everything back, the last replaced first. What someone else replaced since is left alone."""
        while self._replaced:
            owner, name, own, value = self._replaced.pop()
            if vars(owner).get(name, _ABSENT) is not value:
                continue
            self._put(owner, name, own)
        self._spared.clear()
        while self._actions:
            self._actions.pop()()

    def _put(self, owner: Any, name: str, value: Any) -> None:
        with type_slots.kept(owner, name, self._spared):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
