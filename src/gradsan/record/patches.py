"""Replaced attributes that are restored exactly as they were, C slots of types included.

While types are patched, read their attributes only by :func:`standing`.

``__setitem__`` of a mapping in C fills two slots: ``mp_ass_subscript``, and ``sq_ass_item``, which such a type
leaves empty. Setting the attribute fills both, and deleting it empties neither (``update_one_slot`` in
``Objects/typeobject.c``). A tensor with ``sq_item`` would be a sequence to ``PySequence_Check`` from then on: that is
how ``torch.tensor([scalar])`` would fail, for the rest of the process.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

ABSENT: Any = object()
"""In place of an attribute that its owner inherits, or does not have."""


def standing(owner: Any, name: str) -> Any:
    """Return ``owner.name``, without using up a version tag of a type's attribute cache; None if there is none.

    Reading an attribute of a type assigns it a version for CPython's caches, and the next replacement discards it.
    Since 3.13 a type has 1,000 of them (``MAX_VERSIONS_PER_CLASS``); once they are used up, its attributes are never
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


def are(members: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Whether ``members`` has all ``values``, and lacks those that are ABSENT. There are thousands of names."""
    return all(map(operator.is_, map(members.get, values, itertools.repeat(ABSENT)), values.values()))


class _Replaced(NamedTuple):
    """Attributes of one owner that were replaced together: by name, what the owner itself had, and what it has now."""

    owner: Any
    before: Mapping[str, Any]
    values: Mapping[str, Any]


class Patches:
    """Replaced attributes, to be restored when gradsan is switched off."""

    def __init__(self) -> None:
        self._replaced: list[_Replaced] = []
        self._actions: list[Callable[[], None]] = []
        self._spared: Spared = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``; undoing restores it, or deletes it where it was only inherited."""
        self.set_all(owner, {name: value})

    def set_all(self, owner: Any, values: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> None:
        """Replace the attributes of ``owner`` that ``values`` names; ``before`` is what it has, where that is known."""
        if before is None:
            members = vars(owner)
            before = {name: members.get(name, ABSENT) for name in values}
        self._replaced.append(_Replaced(owner, before, values))
        self._put(owner, values)

    @contextmanager
    def aside(self, which: Callable[[Any, Any, Any], bool]) -> Iterator[dict[int, Any]]:
        """Restore, for a while, the attributes for whose owner, original and replacement ``which`` is true.

        Yields the originals by the ``id`` of each replacement. Meanwhile other threads see the originals,
        too. Attributes undone in the meantime are not replaced again.
        """
        places: dict[tuple[int, str], tuple[Any, str, Any, Any]] = {}
        for owner, before, values in self._replaced:
            for name, value in values.items():
                # Of an attribute replaced twice, the first original and the last replacement count.
                original = places.get((id(owner), name), (owner, name, before[name], value))[2]
                places[id(owner), name] = (owner, name, original, value)
        chosen = {
            key: (owner, name, original, value)
            for key, (owner, name, original, value) in places.items()
            if original is not ABSENT and which(owner, original, value)
        }
        originals = {
            id(value): chosen[id(owner), name][2]
            for owner, _, values in self._replaced
            for name, value in values.items()
            if (id(owner), name) in chosen
        }
        changed = [place for place in chosen.values() if vars(place[0]).get(place[1]) is place[3]]
        for owner, name, original, _ in changed:
            self._put(owner, {name: original})
        try:
            yield originals
        finally:
            still = {id(value) for one in self._replaced for value in one.values.values()}
            for owner, name, original, value in changed:
                if id(value) in still and vars(owner).get(name) is original:
                    self._put(owner, {name: value})

    def on_undo(self, action: Callable[[], None]) -> None:
        """Run ``action`` when everything is undone."""
        self._actions.append(action)

    def undo(self) -> None:
        """Restore everything, the last replaced first; attributes that others have replaced since are left alone."""
        while self._replaced:
            owner, before, values = self._replaced.pop()
            members = vars(owner)
            own = before
            if not are(members, values):
                own = {name: before[name] for name, value in values.items() if members.get(name, ABSENT) is value}
            self._put(owner, own)
        self._spared.clear()
        while self._actions:
            self._actions.pop()()

    def _put(self, owner: Any, values: Mapping[str, Any]) -> None:
        if isinstance(owner, ModuleType) and type(owner).__setattr__ is ModuleType.__setattr__:
            # There are thousands, and a module's attributes are its dictionary.
            members = vars(owner)
            # Another thread must never find ABSENT there.
            there = {name: value for name, value in values.items() if value is not ABSENT}
            members.update(there)
            for name in values.keys() - there.keys() if len(there) < len(values) else ():
                del members[name]
            return
        for name, value in values.items():
            if name in _BESIDE:
                with kept(owner, name, self._spared):
                    _write(owner, name, value)
            else:
                _write(owner, name, value)


def _write(owner: Any, name: str, value: Any) -> None:
    if value is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


_WORD = ctypes.sizeof(ctypes.c_void_p)
# Counted in words from the end of an object's head of variable size (``PyTypeObject``), then within the two suites.
_AS_SEQUENCE, _AS_MAPPING = 10, 11
_BESIDE = {"__getitem__": (3, 1), "__setitem__": (5, 2), "__delitem__": (5, 2)}

Spared = list["weakref.ref[type]"]
"""Classes whose slot was filled before anything was replaced."""


@contextmanager
def kept(owner: Any, name: str, spared: Spared) -> Iterator[None]:
    """Preserve the other slot of ``name``, in ``owner`` and its subclasses, while ``owner.name`` is changed.

    Does nothing where ``name`` has no such slot, where the type is no mapping in C, and where CPython's types are
    not laid out as expected. Classes whose slot is filled already are added to ``spared``, and classes in it
    are left alone; pass the same list when the attribute is restored.
    """
    if name not in _BESIDE or not isinstance(owner, type) or not _layout_is_known() or not _is_empty(owner, name):
        yield
        return
    known = {id(kind) for kind in (one() for one in spared) if kind is not None}
    # On restoring, a filled slot of a subclass belongs to a class made in the meantime.
    is_way_back = name in vars(owner)
    for kind in () if is_way_back else _descendants(owner):
        if _filled(kind, name) and id(kind) not in known:
            spared.append(weakref.ref(kind))
            known.add(id(kind))
    yield
    standing = _resolved(owner, name)
    for kind in _descendants(owner):
        if id(kind) not in known and _resolved(kind, name) is standing and _filled(kind, name):
            _place(kind, name).value = None


def _is_empty(kind: type, name: str) -> bool:
    """Whether the sequence slot is empty while the mapping slot is filled."""
    mapping = _words(kind, _AS_MAPPING)
    return mapping is not None and bool(mapping[_BESIDE[name][1]]) and not _filled(kind, name)


def _filled(kind: type, name: str) -> bool:
    sequence = _words(kind, _AS_SEQUENCE)
    return sequence is not None and bool(sequence[_BESIDE[name][0]])


def _words(kind: type, suite: int) -> Any:
    """The function pointers of a suite of slots; None where the type has none."""
    address = ctypes.c_void_p.from_address(id(kind) + object.__basicsize__ + (1 + suite) * _WORD).value
    return None if address is None else (ctypes.c_void_p * 6).from_address(address)


def _place(kind: type, name: str) -> ctypes.c_void_p:
    words = _words(kind, _AS_SEQUENCE)
    return ctypes.c_void_p.from_address(ctypes.addressof(words) + _BESIDE[name][0] * _WORD)


def _resolved(kind: type, name: str) -> Any:
    """Return an attribute from the MRO, unbound and without using up a type's version tag."""
    return next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), None)


def _descendants(kind: type) -> list[type]:
    """Return ``kind`` and all its subclasses, direct or not."""
    found: dict[int, type] = {}
    waiting = [kind]
    while waiting:
        one = waiting.pop()
        if id(one) not in found:
            found[id(one)] = one
            waiting += type.__subclasses__(one)
    return list(found.values())


@functools.lru_cache(maxsize=1)
def _layout_is_known() -> bool:
    """Whether CPython's types are laid out as expected, tested on two classes."""

    class Plain:
        pass

    class Sequence:
        def __getitem__(self, key: Any) -> Any:
            return key

    if sys.implementation.name != "cpython":
        return False
    return (
        _filled(Sequence, "__getitem__") and not _filled(Sequence, "__setitem__") and not _filled(Plain, "__getitem__")
    )
