"""Every C slot of a type, read where CPython keeps it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from typing import Any

_WORD = ctypes.sizeof(ctypes.c_void_p)
# The members of PyTypeObject after the head that every object of variable size has (Include/cpython/object.h).
_MEMBERS = (
    *("tp_name", "tp_basicsize", "tp_itemsize", "tp_dealloc", "tp_vectorcall_offset", "tp_getattr", "tp_setattr"),
    *("tp_as_async", "tp_repr", "tp_as_number", "tp_as_sequence", "tp_as_mapping", "tp_hash", "tp_call", "tp_str"),
    *("tp_getattro", "tp_setattro", "tp_as_buffer", "tp_flags", "tp_doc", "tp_traverse", "tp_clear"),
    *("tp_richcompare", "tp_weaklistoffset", "tp_iter", "tp_iternext", "tp_methods", "tp_members", "tp_getset"),
    *("tp_base", "tp_dict", "tp_descr_get", "tp_descr_set", "tp_dictoffset", "tp_init", "tp_alloc", "tp_new"),
    *("tp_free", "tp_is_gc", "tp_bases", "tp_mro", "tp_cache", "tp_subclasses", "tp_weaklist", "tp_del"),
    *("tp_version_tag", "tp_finalize", "tp_vectorcall"),
)
_NUMBER = (
    "add",
    "subtract",
    "multiply",
    "remainder",
    "divmod",
    "power",
    "negative",
    "positive",
    "absolute",
    "bool",
    "invert",
    "lshift",
    "rshift",
    "and",
    "xor",
    "or",
    "int",
    "reserved",
    "float",
    "inplace_add",
    "inplace_subtract",
    "inplace_multiply",
    "inplace_remainder",
    "inplace_power",
    "inplace_lshift",
    "inplace_rshift",
    "inplace_and",
    "inplace_xor",
    "inplace_or",
    "floor_divide",
    "true_divide",
    "inplace_floor_divide",
    "inplace_true_divide",
    "index",
    "matrix_multiply",
    "inplace_matrix_multiply",
)
_SEQUENCE = ("length", "concat", "repeat", "item", "slice", "ass_item", "ass_slice", "contains")
_SUITES = {
    "tp_as_async": ("am_", ("await", "aiter", "anext", "send")),
    "tp_as_number": ("nb_", _NUMBER),
    "tp_as_sequence": ("sq_", (*_SEQUENCE, "inplace_concat", "inplace_repeat")),
    "tp_as_mapping": ("mp_", ("length", "subscript", "ass_subscript")),
    "tp_as_buffer": ("bf_", ("getbuffer", "releasebuffer")),
}
# What changes whenever any attribute is set, or any subclass made, and says nothing of how the type behaves.
_MOVING = {"tp_cache", "tp_subclasses", "tp_version_tag", "tp_weaklist"}
_VERSION_FLAGS = 1 << 19 | 1 << 4 | 1 << 3  # valid version tag; bookkeeping of inline values


def _words(address: int, count: int) -> list[int]:
    return [value or 0 for value in (ctypes.c_void_p * count).from_address(address)]


def slots_of(kind: type) -> dict[str, int]:
    """The value of every slot of ``kind`` by its name in C, and its flags."""
    head = object.__basicsize__ + _WORD
    found = dict(zip(_MEMBERS, _words(id(kind) + head, len(_MEMBERS)), strict=True))
    for suite, (prefix, names) in _SUITES.items():
        values = _words(found[suite], len(names)) if found[suite] else [0] * len(names)
        found.update({prefix + name: value for name, value in zip(names, values, strict=True)})
    found["tp_flags"] &= ~_VERSION_FLAGS
    return {name: value for name, value in found.items() if name not in _MOVING}


def descendants(kind: type) -> list[type]:
    """``kind`` and every class below it."""
    found, waiting = [], [kind]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.append(one)
            waiting += type.__subclasses__(one)
    return found


def all_slots(kinds: Iterable[type]) -> dict[tuple[type, str], int]:
    """The slots of many types."""
    return {(kind, name): value for kind in kinds for name, value in slots_of(kind).items()}


def changed(before: dict[tuple[type, str], int], after: dict[tuple[type, str], int]) -> set[tuple[str, str]]:
    """(type, slot) of what differs."""
    return {(kind.__qualname__, name) for (kind, name), value in before.items() if after[kind, name] != value}


def touched_types(patches: Any) -> list[type]:
    """Every type of which an attribute is replaced now, and those below them."""
    owners = {owner for owner, *_ in patches._replaced if isinstance(owner, type)}
    return list({kind: None for owner in sorted(owners, key=repr) for kind in descendants(owner)})


def is_cpython() -> bool:
    """Whether types are laid out so."""
    return sys.implementation.name == "cpython"
