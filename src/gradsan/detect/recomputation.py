"""Recomputation of a checkpointed call compared with its forward: the values it reads, and fingerprints of its saves.

checkpoint itself compares saved with recomputed tensors by shape, dtype and device. In deep mode a fingerprint is
attached to that metadata, to know whether the recomputation gave the same values. checkpoint's verdict is unaffected.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from gradsan import _torch
from gradsan.detect.memory import Noted, Notes, Overwritten
from gradsan.graph import conflicts, naming
from gradsan.model import Conflict, Name, Region, Save, TensorInfo
from gradsan.originals.originals import fits_its_memory
from gradsan.record import ledger
from gradsan.record.log import Log, RawStack, RawWrite, logged_writes
from gradsan.record.patches import Patches
from gradsan.record.stacks import definition_site, is_of_program, symbolise
from gradsan.record.steps import StepLog

BYPASS = "checkpoint_closure"
_SHOWN_OF_ONE_CALL = 8
_LONGEST = 40


class Mark(NamedTuple):
    """The value of a name: a noted tensor, an object (``weak``, and what is ``like`` it), or a plain ``value``."""

    kind: str
    noted: Noted | None = None
    weak: Any = None
    value: Any = None
    like: Any = None


class Call(NamedTuple):
    """A checkpointed call whose backward is still to come. ``values`` are fingerprints of its results, in deep mode.

    ``inputs`` are those of its arguments if saved-tensor hooks of the program's keep them. ``own`` are its writes to
    what it reaches, by the path there.
    """

    name: str
    code: Any
    stack: RawStack
    clock: int
    marks: dict[str, Mark]
    values: tuple[Fingerprint | None, ...] = ()
    inputs: tuple[Fingerprint | None, ...] = ()
    own: Mapping[str, tuple[RawWrite, ...]] = MappingProxyType({})


class Change(NamedTuple):
    """A name whose value has changed: ``written``, or bound anew (``rebound``: the old and the new value)."""

    path: str
    value: Any
    written: Overwritten | None = None
    rebound: tuple[str, str] | None = None


def marks_of(notes: Notes, function: Any, arguments: Mapping[str, Any]) -> dict[str, Mark]:
    """Return the values that ``function`` reads now. Raises :class:`gradsan.graph.reached.TooMuchError`."""
    things = _lasting(notes, function, arguments)
    return {path: mark for path, value in things.items() if (mark := _mark(notes, value)) is not None}


def compare(notes: Notes, call: Call, function: Any, arguments: Mapping[str, Any]) -> list[Change]:
    """Return the changes since the call, one per writer. Parts of a replaced value are left out."""
    found: list[Change] = []
    rebound: list[str] = []
    writers: set[Any] = set()
    things = _lasting(notes, function, arguments)
    for path, mark in call.marks.items():
        if path not in things or any(path.startswith((f"{one}.", f"{one}[")) for one in rebound):
            continue
        value = things[path]
        if value is arguments.get(path) and torch.is_tensor(value):
            # checkpoint keeps it, may return it as another object, and checks its version.
            is_noted = mark.noted is not None and mark.noted.storage == _torch.storage_or_none(value)
            written = notes.changed(mark.noted, value) if is_noted and mark.noted is not None else None
            change = None if written is None else Change(path, value, written)
        else:
            change = _change(notes, mark, path, value)
        if change is None:
            continue
        if change.rebound is not None:
            rebound.append(path)
            writer: Any = path.rpartition(".")[2]
        else:
            writes = change.written.writes if change.written is not None else ()
            writer = writes[0].site if writes else None
        if writer not in writers and len(found) < _SHOWN_OF_ONE_CALL:
            writers.add(writer)
            found.append(change)
    return found


def own_writes(log: Log, marks: Mapping[str, Mark], since: int) -> dict[str, tuple[RawWrite, ...]]:
    """Return the program's writes since a function began, by the path that leads to the written tensor from it."""
    paths = {mark.noted.storage: path for path, mark in list(marks.items())[::-1] if mark.noted is not None}
    found: dict[str, list[RawWrite]] = {}
    for raw in logged_writes(log, since) if paths else ():
        if raw.storage in paths and is_of_program(raw.stack):
            found.setdefault(paths[raw.storage], []).append(raw)
    return {path: tuple(raws) for path, raws in found.items()}


def changed_itself(call: Call) -> list[Change]:
    """Return what the function had written itself, as the change that made its recomputation another one."""
    found = []
    for path, raws in call.own.items():
        noted = call.marks[path].noted
        value = None if noted is None else noted.weak()
        if noted is not None and value is not None:
            writes = tuple(map(ledger.as_write, raws))
            found.append(Change(path, value, Overwritten(_info(value), writes, noted.version, None, 0)))
    return found


def conflict_of(core: Log, steps: StepLog, call: Call, change: Change | None, *, same: bool | None) -> Conflict:
    """Return the conflict of one change; of None: the recomputation gave other values for an unknown reason.

    ``same`` is the result of the fingerprints, None where values were not compared. Then it is not
    certain that plain numbers matter, which the Nodes of the forward may have kept, or state that the function updates
    itself.
    """
    written = change.written if change is not None else None
    value = change.value if change is not None else None
    names: tuple[Name, ...] = ()
    if torch.is_tensor(value):
        names = naming.names_of(value, sys._getframe(1))
    if change is not None and not names:
        names = (Name(change.path, "variable"),)
    info = written.info if written is not None else _info(value)
    version = written.version if written is not None else 0
    return Conflict(
        save=Save(
            clock=call.clock,
            site=symbolise(call.stack),
            tensor=info,
            version=0,
            node=call.name,
            slot=change.path if change is not None else None,
            step=conflicts.steps_before(steps, call.clock, core.steps),
        ),
        writes=written.writes if written is not None else (),
        use=conflicts.use_of(core, steps.current_backward(), version),
        names=names,
        unexplained=written.unexplained if written is not None else 0,
        raised=False,
        bypass=BYPASS,
        alias_site=written.bypass if written is not None else None,
        rebound=change.rebound if change is not None else None,
        function_site=definition_site(call.code) if call.code is not None else None,
        unchanged=same is True,
        certain=same is False or not (_is_plain(value) or (written is not None and _by_itself(call, written))),
    )


def _by_itself(call: Call, written: Overwritten) -> bool:
    """Whether the checkpointed function wrote it itself, in another call."""
    if call.code is None or not written.writes:
        return False
    own = definition_site(call.code).frames[0]
    return all(
        any(frame.file == own.file and frame.function == own.function for frame in write.site.frames)
        for write in written.writes
    )


def name_of(function: Any) -> str:
    """Return the program's name of a function; of a module, its class."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    owner = getattr(function, "__self__", None)
    if isinstance(function, nn.Module):
        return type(function).__name__
    if isinstance(owner, nn.Module) and getattr(function, "__name__", "") in _torch.MODULE_CALLS:
        return type(owner).__name__
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return str(name).rpartition("<locals>.")[2]


def code_of(function: Any) -> Any:
    """Return the code that a call of ``function`` runs, as far as known; None where it is no Python code."""
    if isinstance(function, functools.partial):
        return code_of(function.func)
    if isinstance(function, nn.Module):
        return getattr(type(function).forward, "__code__", None)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module) and getattr(function, "__name__", "") in _torch.MODULE_CALLS:
        return code_of(owner)
    return getattr(function, "__code__", None)


def _lasting(notes: Notes, function: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that ``function`` reads now, by the path that leads to each from it.

    Parameters of FSDP1 are left out: they are other tensors in other memory after each gathering.
    """
    from gradsan.graph.reached import reached

    return {
        path: notes.lasting(value) if torch.is_tensor(value) else value
        for path, value in reached(function, arguments).items()
        if not torch.is_tensor(value) or not _torch.is_of_flat_parameter(value)
    }


def _is_plain(value: Any) -> bool:
    from gradsan.graph.reached import PLAIN

    return isinstance(value, PLAIN)


def _mark(notes: Notes, value: Any) -> Mark | None:
    if torch.is_tensor(value):
        noted = notes.note(value)
        return None if noted is None else Mark("tensor", noted, value=shown(value))
    if _is_plain(value):
        return Mark("value", value=value)
    try:
        return Mark("object", weak=_torch.weak_tensor(value), value=shown(value), like=_likeness(value))
    except TypeError:
        return None


def _change(notes: Notes, mark: Mark, path: str, value: Any) -> Change | None:
    if mark.kind == "value":
        same = type(mark.value) is type(value) and (mark.value == value or mark.value != mark.value)
        return None if same else Change(path, value, rebound=(shown(mark.value), shown(value)))
    if mark.noted is None:
        same = mark.weak() is value or (mark.like is not None and mark.like == _likeness(value))
        return None if same else Change(path, value, rebound=(mark.value, shown(value)))
    before = mark.noted.weak()
    if before is not None and torch.is_tensor(value) and (before is value or _same_place(before, value)):
        written = notes.changed(mark.noted, value)
        return None if written is None else Change(path, value, written)
    return Change(path, value, rebound=(mark.value, shown(value)))


def _likeness(value: Any) -> Any:
    """Return what another object must equal to do the same: a function's code, or plain attributes; None if unknown.

    What a function closes over, and the arguments of a partial, are noted and compared by paths of their own.
    """
    if isinstance(value, functools.partial):
        inner = _likeness(value.func)
        return None if inner is None else (inner, len(value.args), frozenset(value.keywords))
    if isinstance(value, types.FunctionType):
        return value.__code__
    plain = {} if isinstance(value, nn.Module) else getattr(value, "__dict__", {})
    return (type(value), dict(plain)) if plain and all(map(_is_plain, plain.values())) else None


def _same_place(one: Any, other: Any) -> bool:
    """Whether two tensors are the same elements of the same memory with the same counter value."""
    if _torch.storage_or_none(one) != _torch.storage_or_none(other) or one.shape != other.shape:
        return False
    if one.storage_offset() != other.storage_offset() or one.stride() != other.stride():
        return False
    return bool(one._version == other._version) and one.dtype == other.dtype


def shown(value: Any) -> str:
    """Return a value in a few words of code."""
    if torch.is_tensor(value):
        return f"{type(value).__name__}{tuple(value.shape)}"
    if _is_plain(value):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
    if isinstance(value, (list, tuple, dict)):
        return type(value).__name__
    return name_of(value) if callable(value) else type(value).__name__


def _info(value: Any) -> TensorInfo:
    if torch.is_tensor(value):
        return conflicts.tensor_info(value, was_leaf=value.is_leaf)
    return TensorInfo((), type(value).__name__, "cpu", 0, Region(0, (), (), 1))


# Kernels without a fixed order of summation differ by about the last digit.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


class Fingerprint(NamedTuple):
    """Sums over a tensor: enough to distinguish values, not enough to reconstruct them."""

    sums: tuple[float, ...]
    size: float
    tolerance: float

    def differs(self, other: Fingerprint) -> bool:
        """Whether two tensors had other values, beyond the rounding of sums."""
        allowed = self.tolerance * max(self.size, other.size)
        pairs = zip(self.sums, other.sums, strict=False)
        return any((one != another and not abs(one - another) <= allowed) and one == one for one, another in pairs)


def fingerprint(tensor: torch.Tensor) -> Fingerprint | None:
    """Return the fingerprint of a tensor; None where it has no ordinary memory, or lost it.

    Kernels keep workspaces as bytes, which need not be reproducible. Sharded training frees the memory of
    parameters before checkpoint compares.
    """
    if not torch.is_tensor(tensor) or not _torch.has_elements(tensor):
        return None
    if tensor.dtype is torch.uint8 or not fits_its_memory(tensor):
        return None
    with torch.no_grad(), _torch.hushed():
        try:
            return _sums_of(tensor.detach())
        except RuntimeError:
            # A device may lack operators, or free memory.
            return None if tensor.is_cpu else _sums_of(tensor.detach().cpu())


def _sums_of(tensor: torch.Tensor) -> Fingerprint:
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    tolerance = _TOLERANCE.get(flat.dtype, 0.0)
    flat = flat.to(torch.float64)
    parts = flat, flat[::2], flat[::3], flat[: flat.numel() // 2]
    return Fingerprint(tuple(float(one.sum()) for one in parts), float(flat.abs().sum()), tolerance)


class Tally:
    """Results of checkpoint's comparisons in this thread since :meth:`begin`."""

    def __init__(self) -> None:
        self._local = threading.local()

    def begin(self) -> None:
        """Reset the counts."""
        self._local.compared, self._local.different = 0, []

    def add(self, saved: object, different: bool) -> None:
        """Count one comparison; ``saved`` is the forward's stand-in for the tensor."""
        self._local.compared = self.compared + 1
        self._local.different = [*self.different, saved] if different else self.different

    @property
    def compared(self) -> int:
        """The number of compared tensors."""
        return getattr(self._local, "compared", 0)

    @property
    def different(self) -> list[object]:
        """The stand-ins, from the forward, of the tensors that differed."""
        return getattr(self._local, "different", [])


class _Metadata(dict):  # type: ignore[type-arg]
    """checkpoint's metadata of a tensor, with the same equality; comparing it also compares fingerprints."""

    __slots__ = ("fingerprint", "tally")
    __hash__ = None

    fingerprint: Fingerprint | None
    tally: Tally

    def __ne__(self, other: object) -> bool:
        if isinstance(other, _Metadata) and self.fingerprint is not None and other.fingerprint is not None:
            self.tally.add(self, self.fingerprint.differs(other.fingerprint))
        return dict.__ne__(self, other)

    def __eq__(self, other: object) -> bool:
        return not self != other


def compare_values(patches: Patches, wanted: Callable[[torch.Tensor], bool], tally: Tally) -> None:
    """Make checkpoint compare values that are ``wanted``, until ``patches`` is undone; ``tally`` counts them."""
    checks = _torch.determinism_checks()
    for name, extract in list(checks.items()):
        if not isinstance(extract(torch.empty(0)), dict):
            continue

        def watched(tensor: torch.Tensor, extract: Any = extract) -> Any:
            found = extract(tensor)
            if not wanted(tensor):
                return found
            metadata = _Metadata(found)
            metadata.tally, metadata.fingerprint = tally, fingerprint(tensor)
            return metadata

        checks[name] = watched
        patches.on_undo(lambda name=name, extract=extract: checks.__setitem__(name, extract))  # type: ignore[misc]
