"""The garbage collector: paused for a block, the live objects that it knows, and a cache that keeps none alive."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

_GENERATIONS, _MORE = 3, 64
_Result = TypeVar("_Result")


class CollectorPaused:
    """Context manager: in its block the collector of this process, all threads of it, does not run by itself."""

    __slots__ = ("_was_enabled",)

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was_enabled:
            gc.enable()


def objects_of(kinds: set[type]) -> list[Any]:
    """Return the live objects of exactly these classes, by a walk of the heap.

    The list of ``gc.get_objects()`` is made, read and freed within one call into C, so that no other thread runs while
    it is there: it may hold a tuple that another thread is still filling, and the ``tuple(…)`` of a program raises
    SystemError where somebody else refers to its result. The type is compared, as ``__class__`` may run code.
    """
    if not kinds:
        return []
    # Missing: three times as slow.
    try:
        from gradsan.record._native import objects_of as walk
    except ImportError:
        walk = _walk
    with CollectorPaused():
        return walk(kinds)


def kinds_below(kind: Any) -> set[Any]:
    """Return the classes derived from ``kind``, itself left out."""
    found: set[Any] = set()
    waiting = [kind]
    while waiting:
        inner = [one for one in type.__subclasses__(waiting.pop()) if one not in found]
        found.update(inner)
        waiting += inner
    return found


def _walk(kinds: set[type]) -> list[Any]:
    found: list[Any] = []
    for generation in range(_GENERATIONS):
        # Both list the same objects in the same order, the second one a few more at its end. Each must come to its
        # end: a list that is not read to its end is kept by the iterator over it, which is one of its objects.
        objects = itertools.chain(_members(generation), itertools.repeat(None, _MORE))
        found += itertools.compress(objects, map(kinds.__contains__, map(type, _members(generation))))
    return list({id(one): one for one in found if one is not None}.values())


def _members(generation: int) -> Iterator[Any]:
    """Iterate over the objects of a generation; they are listed when the first one is asked for."""
    listing = iter(partial(gc.get_objects, generation), None)
    return itertools.chain.from_iterable(itertools.islice(listing, 1))


def cached_by_class(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Keep the results of ``function``, whose first argument is a class, until the class is gone.

    ``functools.lru_cache`` would keep a class that was defined in a function, and all that its methods close over. No
    result may refer to the class; its functions do, where they use ``super()``.
    """
    results: dict[int, dict[tuple[Any, ...], _Result]] = {}
    alive: dict[int, weakref.ref[Any]] = {}

    def forget(key: int) -> None:
        results.pop(key, None)
        alive.pop(key, None)

    @functools.wraps(function)
    def cached(kind: Any, *args: Any) -> _Result:
        key = id(kind)
        known = results.get(key)
        if known is None:
            alive[key] = weakref.ref(kind, lambda _: forget(key))
            known = results.setdefault(key, {})
        elif args in known:
            return known[args]
        result = known[args] = function(kind, *args)
        return result

    return cached
