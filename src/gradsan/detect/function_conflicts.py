"""Conflicts of custom Functions as plain data, and the attributes of ``ctx`` that a backward reads."""

from __future__ import annotations

import sys
import threading
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan._collector import cached_by_class
from gradsan.detect.memory import Noted, Overwritten
from gradsan.graph import conflicts, naming
from gradsan.graph.bytecode import functions_of, getattr_static, reads_of, values_read
from gradsan.model import Bridge, Conflict, Name, Region, Save, Site, TensorInfo, Write
from gradsan.record.ledger import call_that_made
from gradsan.record.log import Log, RawStack
from gradsan.record.stacks import definition_site, symbolise
from gradsan.record.steps import BackwardRecord, StepLog

CONTEXT, UNMARKED = "context_attribute", "missing_mark_dirty"


_BYTES_OF_AN_ARRAY = 2**20


class NotedArray:
    """A NumPy array of the program's own memory at some moment, by a checksum: no log has what writes it.

    ``written`` is the call of a Function, its clock and stack, during which it was written; None where that is unknown.
    """

    __slots__ = ("_checksum", "version", "weak", "written")

    def __init__(self, array: Any) -> None:
        self.weak, self.version = weakref.ref(array), 0
        self._checksum = zlib.crc32(array.tobytes())
        self.written: tuple[int, RawStack] | None = None

    @property
    def is_changed(self) -> bool:
        """Whether the array lives, and has other bytes."""
        array = self.weak()
        return array is not None and zlib.crc32(array.tobytes()) != self._checksum

    def overwritten(self, array: Any) -> Overwritten | None:
        """Return what is known of the writes; None where there were none."""
        if not self.is_changed:
            return None
        region = Region(0, array.shape, tuple(one // array.itemsize for one in array.strides), array.itemsize)
        info = TensorInfo(array.shape, str(array.dtype), "cpu", 0, region)
        if self.written is None:
            return Overwritten(info, (), 0, None, 1)
        clock, stack = self.written
        write = Write(clock=clock, site=symbolise(stack), op="apply", kind="op", version=None, region=None)
        return Overwritten(info, (write,), 0, write.site, 0)


def noted_array(value: Any) -> NotedArray | None:
    """Note an array; None for a large one, and one of objects."""
    is_small = type(value).__name__ == "ndarray" and value.nbytes <= _BYTES_OF_AN_ARRAY
    return NotedArray(value) if is_small and not value.dtype.hasobject else None


def _references_to(attributes: dict[str, Any]) -> dict[str, int]:
    return {name: sys.getrefcount(value) for name, value in attributes.items()}


_OF_THE_DICT = _references_to({"": object()})[""]
"""What is counted of a value that only its dict has."""


def held_alone(attributes: dict[str, Any]) -> set[str]:
    """The arrays that only ``ctx`` has, by attribute: nothing but backward can write their memory."""
    counts = _references_to(attributes)
    arrays = (name for name, value in attributes.items() if type(value).__name__ == "ndarray" and value.base is None)
    return {name for name in arrays if counts[name] <= _OF_THE_DICT}


class Kept(NamedTuple):
    """What a Function has left on ``ctx``, by (attribute, note). ``code`` is that of its forward."""

    name: str
    code: Any
    stack: RawStack
    clock: int
    values: tuple[tuple[str, Noted | NotedArray], ...]
    number: int


@dataclass(slots=True, eq=False)
class Unmarked:
    """An input that a forward has overwritten and not marked dirty.

    ``edge`` and ``whole`` are the ends of the edges by which users of the input, and of its base, depend on the
    graph; ``number`` is that of the Function's Node, ``rounds`` the backward calls in which it was checked.
    """

    name: str
    code: Any
    parameter: str | None
    position: int
    stack: RawStack
    clock: int
    thread: int
    owner: weakref.ref[threading.Thread]
    number: int
    edge: tuple[int, int]
    whole: tuple[int, int] | None
    weak: Any
    overwritten: Overwritten
    version: int
    rounds: list[int] = field(default_factory=list)


def of_kept(
    core: Log,
    steps: StepLog,
    backward: BackwardRecord,
    node: Node,
    kept: Kept,
    path: str,
    noted: Noted | NotedArray,
    overwritten: Overwritten,
) -> Conflict:
    """Return the conflict of a tensor, or array, that was kept as ``ctx.<path>`` and written since."""
    tensor = noted.weak() if isinstance(noted, Noted) else None
    return Conflict(
        save=Save(
            clock=kept.clock,
            site=symbolise(kept.stack),
            tensor=overwritten.info,
            version=noted.version,
            node=node.name(),
            slot=path,
            sequence=kept.number,
            step=conflicts.steps_before(steps, kept.clock, core.steps),
        ),
        writes=overwritten.writes,
        use=conflicts.use_of(core, backward, overwritten.version),
        names=() if tensor is None else naming.names_of(tensor, sys._getframe(1)),
        unexplained=overwritten.unexplained,
        root_sequence=backward.root_sequence,
        raised=False,
        log_was_cut=core.lost_writes_after(kept.clock),
        bypass=CONTEXT,
        alias_site=overwritten.bypass,
        function_site=None if kept.code is None else definition_site(kept.code),
    )


def of_unmarked(core: Log, steps: StepLog, backward: BackwardRecord, unmarked: Unmarked, use: Any) -> Conflict:
    """Return the conflict of an input that a Function has overwritten and the Node ``use`` took afterwards.

    ``save`` is the later use, ``alias_site`` the call of the Function, ``slot`` the name of the input in forward.
    """
    tensor = unmarked.weak()
    number = _torch.node_sequence(use) or 0
    made = call_that_made(core, number, unmarked.thread)
    clock, site = (unmarked.clock, Site()) if made is None else (made.clock, symbolise(made.stack))
    names: tuple[Name, ...] = () if tensor is None else naming.names_of(tensor, sys._getframe(1))
    return Conflict(
        save=Save(
            clock=clock,
            site=site,
            tensor=unmarked.overwritten.info,
            version=unmarked.version,
            node=use.name(),
            slot=unmarked.parameter,
            sequence=number,
            step=conflicts.steps_before(steps, clock, core.steps),
        ),
        writes=unmarked.overwritten.writes,
        use=conflicts.use_of(core, backward, unmarked.overwritten.version),
        names=names,
        unexplained=unmarked.overwritten.unexplained,
        root_sequence=backward.root_sequence,
        bridge=Bridge(older=unmarked.name, younger=use.name()),
        raised=False,
        log_was_cut=core.lost_writes_after(clock),
        bypass=UNMARKED,
        alias_site=symbolise(unmarked.stack),
        function_site=None if unmarked.code is None else definition_site(unmarked.code),
    )


_DEEPEST, _ITEMS = 3, 64
_NO_HOLDERS = (torch.nn.Module, ModuleType, FunctionType, type)
"""Types without tensors, or with state of their own that changes in use, parameters above all."""


def kept_values(kind: Any, attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, and NumPy arrays, that a Function keeps on ``ctx`` and its backward reads, with their paths.

    They are searched in lists, tuples and dicts, and in the attributes of an object that backward reads by name.
    """
    names, codes = _read_of_context(kind), _codes_of_backward(kind)
    for name, value in attributes.items():
        if names is None or name in names:
            yield from _values_in(name, value, codes)


def holds(attributes: dict[str, Any], value: Any) -> bool:
    """Whether the attributes still hold a tensor, or an array."""
    return any(one is value for _, one in _values_in("", attributes, None))


def _values_in(
    path: str, value: Any, codes: tuple[CodeType, ...] | None, depth: int = 0, is_inside: bool = False
) -> Iterator[tuple[str, Any]]:
    memory = value
    while type(memory).__name__ == "ndarray":
        memory = memory.base
    if _torch.is_tensor(memory):
        value = memory
    if _torch.is_tensor(value) or type(value).__name__ == "ndarray":
        yield path, value
    elif depth >= _DEEPEST:
        return
    elif isinstance(value, (list, tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in list(items)[:_ITEMS]:
            yield from _values_in(f"{path}[{key!r}]", item, codes, depth + 1, is_inside)
    elif not is_inside:
        for name, item in _attributes_of(value):
            if codes is None or any(values_read(code, name) for code in codes):
                yield from _values_in(f"{path}.{name}", item, codes, depth + 1, True)


def _attributes_of(value: Any) -> list[tuple[str, Any]]:
    """Return the first attributes of an object of the program's, slots included, without running code."""
    kind: Any = type(value)
    if kind.__module__.partition(".")[0] in ("builtins", "torch") or isinstance(value, _NO_HOLDERS):
        return []
    own = getattr_static(kind, "__dict__")
    found = [] if own is None else list(own.__get__(value, kind).items())[:_ITEMS]
    for name in getattr_static(kind, "__slots__") or ():
        slot = getattr_static(kind, name) if isinstance(name, str) else None
        if isinstance(slot, _MEMBER) and len(found) < _ITEMS:
            try:
                found.append((name, slot.__get__(value, kind)))
            except AttributeError:
                continue
    return found


class _Slotted:
    __slots__ = ("one",)


_MEMBER = type(_Slotted.one)  # type: ignore[attr-defined]


@cached_by_class
def _codes_of_backward(kind: Any) -> tuple[CodeType, ...]:
    functions = [one for name in ("backward", "vjp") for one in functions_of(getattr_static(kind, name))]
    return tuple(one.__code__ for one in functions if one.__module__.partition(".")[0] != "torch")


@cached_by_class
def _read_of_context(kind: Any) -> frozenset[str] | None:
    """Return the attributes of ``ctx`` whose values a Function's backward reads; None where that is undecided."""
    names: set[str] = set()
    codes = _codes_of_backward(kind)
    for code in codes:
        context = code.co_varnames[0] if code.co_argcount else None
        found = reads_of(code).own.get(context, frozenset()) if context is not None else None
        if found is None:
            return None
        names |= {name for name in found if values_read(code, name)}
    return frozenset(names) if codes else None
