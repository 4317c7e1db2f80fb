"""Stale saved tensors of a failed graph: the Node that stopped backward, its slot, and where it was made.

PyTorch's error does not name them. Where Python code read the saved tensor (a custom Function's ``backward``), the
frames of the error hold the Node. Else the Node is the first, in the engine's order, whose slot raises the same
message when it is read. Only slots without hooks are read: reading through hooks runs the program's code.
Where torch shows no saved tensors (before 2.10) ``_torch/saved.py`` finds both.

Sequence numbers are counted per thread. The thread of the backward is searched first; a Node that it did not make is
searched in the other threads' entries, and only taken where exactly one entry fits.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.graph import naming, walk
from gradsan.model import Region, TensorInfo
from gradsan.record import ledger
from gradsan.record.log import Log, RawStack, RawWrite, calls_near, logged_writes
from gradsan.record.steps import StepLog

_STALE = re.compile(
    r"one of the variables needed for gradient computation has been modified by an inplace operation: "
    r"\[(?P<type>\S+) (?P<sizes>\[[^\]]*\]|[\s\d]+\[[^\]]*\])\](?P<output>, which is output \d+ of (?P<maker>[^,]+),)?"
    r".*? is at version (?P<now>\d+); expected version (?P<saved>\d+) instead"
)

_MOST_BEHIND = 10_000


class Stale(NamedTuple):
    """A saved tensor whose version moved, as far as the graph shows.

    ``node`` is None where it is undecided which Node failed, ``slot`` where that Node shows none of its slots,
    ``tensor`` where no Node shows it. ``hidden`` are the Nodes that show no slots and may have saved it; ``kind`` is
    then the type of tensor in the message, and ``maker`` the Node there that computed it, if it has one.
    """

    node: Node | None
    slot: str | None
    tensor: torch.Tensor | None
    is_output: bool
    sizes: tuple[int, ...]
    saved_version: int
    version: int
    hidden: tuple[Any, ...] = ()
    kind: str = ""
    maker: str = ""


def is_version_error(error: BaseException) -> bool:
    """Whether an exception is PyTorch's version error."""
    return isinstance(error, RuntimeError) and _STALE.match(str(error)) is not None


def find_stale(
    roots: Iterable[Node],
    error: BaseException,
    inputs: tuple[Any, ...] = (),
    accumulates: bool = True,
    retain_graph: bool = True,
) -> Stale | None:
    """The saved tensor at which a backward from ``roots`` stopped with ``error``; None if it is no version error.

    ``inputs`` and ``accumulates`` as for :func:`gradsan.graph.walk.engine_order`.
    """
    said = _STALE.match(str(error))
    if said is None:
        return None
    for node in _in_frames(error, "_raw_saved_tensors"):
        found = _matching(node, said)
        if found is not None:
            return found
    for saved in _in_frames(error, "register_hooks", "unpack_hook"):
        tensor = _torch.packed_object(saved)
        if torch.is_tensor(tensor) and _is_meant(tensor, said):
            return Stale(None, None, tensor, False, _sizes(said), int(said["saved"]), int(said["now"]))
    hidden: list[Any] = []
    for node in walk.engine_order(roots, inputs, accumulates):
        if _torch.hides_saves(node):
            hidden.append(node)
            continue
        found = _matching(node, said)
        if found is not None:
            rivals = tuple(one for one in hidden if found.tensor is not None and _may_have_saved(one, found.tensor))
            return found._replace(node=None, slot=None, hidden=rivals) if rivals else found
        if not hidden:
            continue
        if _torch.was_freed(node):
            hidden.clear()  # the engine has passed them
        elif not retain_graph and _holds_something(node):
            break  # the engine did not get this far
    only = hidden[0] if len(hidden) == 1 else None
    versions = int(said["saved"]), int(said["now"])
    return Stale(only, None, None, False, _sizes(said), *versions, tuple(hidden), said["type"], said["maker"] or "")


def stale_errors(roots: Iterable[Node]) -> list[RuntimeError]:
    """Return the errors at which a backward from ``roots`` would stop, one for each stale saved tensor.

    Only PyTorch's own check of each slot is run; slots with hooks, and hidden ones, are not read.
    """
    found: dict[str, RuntimeError] = {}
    for node, _, _, error in _stale_slots(walk.engine_order(roots)):
        found.setdefault(f"{id(node)} {error}", error)
    return list(found.values())


def further_stale(roots: Iterable[Node], inputs: tuple[Any, ...] = (), accumulates: bool = True) -> Iterator[Stale]:
    """Yield the stale saved tensors in the order in which backward would read them.

    ``inputs`` and ``accumulates`` as for :func:`gradsan.graph.walk.engine_order`; checked as in ``stale_errors``.
    """
    for node, slot, tensor, error in _stale_slots(walk.engine_order(roots, inputs, accumulates)):
        said = _STALE.match(str(error))
        if said is None or _torch.sizes_of(tensor) != said["sizes"]:
            continue
        is_output = said["output"] is not None and not tensor.requires_grad
        yield Stale(node, slot, tensor, is_output, _sizes(said), int(said["saved"]), int(said["now"]))


def _stale_slots(order: Iterable[Node]) -> Iterator[tuple[Any, str, Any, RuntimeError]]:
    for node in order:
        for slot, saved in _torch.saved_slots(node):
            if _torch.is_hooked(saved):
                continue
            try:
                _torch.read_slot(node, slot.partition("[")[0])
            except RuntimeError as error:
                tensor = _torch.refused_tensor(node, slot, saved) if is_version_error(error) else None
                if torch.is_tensor(tensor):
                    # The frames of this search hold saved tensors; those of a backward would be the program's.
                    yield node, slot, tensor, error.with_traceback(None)


def _in_frames(error: BaseException, *attributes: str) -> Iterator[Any]:
    """Yield local values with ``attributes`` from the frames that the error passed, innermost first.

    Nodes of custom Functions have saved tensors, a SavedTensor (which checkpointing keeps) has hooks.
    """
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        for value in _torch.locals_of(frame).values():
            if all(hasattr(type(value), attribute) for attribute in attributes):
                yield value


def _is_meant(tensor: torch.Tensor, said: re.Match[str]) -> bool:
    return int(tensor._version) == int(said["now"]) and _torch.sizes_of(tensor) == said["sizes"]


def _matching(node: Node, said: re.Match[str]) -> Stale | None:
    """Return the slot of a Node that raises the same message."""
    version = int(said["now"])
    for slot, saved in _torch.saved_slots(node):
        tensor = _torch.packed_object(saved)
        # Comparing versions first avoids reading nearly every slot.
        if (torch.is_tensor(tensor) and tensor._version != version) or _torch.is_hooked(saved):
            continue
        if not _says(functools.partial(_torch.read_slot, node, slot.partition("[")[0]), said):
            continue
        tensor = _torch.refused_tensor(node, slot, saved)
        if tensor is None or tensor._version != version:
            continue
        is_output = said["output"] is not None and not tensor.requires_grad
        if _torch.sizes_of(tensor) == said["sizes"]:
            return Stale(node, slot, tensor, is_output, _sizes(said), int(said["saved"]), version)
    return None


def _says(read: Callable[[], Any], said: re.Match[str]) -> bool:
    try:
        read()
    except RuntimeError as error:
        return str(error).startswith(said[0])
    return False


def _sizes(said: re.Match[str]) -> tuple[int, ...]:
    """Return the sizes in the message; empty for a nested tensor, whose parts have sizes each."""
    if not said["sizes"].startswith("["):
        return ()
    return tuple(int(size) for size in re.findall(r"\d+", said["sizes"]))


def _holds_something(node: Node) -> bool:
    return any(_torch.packed_object(saved) is not None for _, saved in _torch.saved_slots(node))


def _may_have_saved(hidden: Any, tensor: torch.Tensor) -> bool:
    """Whether a Node that shows no slots has the tensor among its operands, and may have saved it.

    An in-place operation on a view is usually an assignment, which saves nothing.
    """
    if not tensor.requires_grad or _torch.is_copy_slices(hidden):
        return False
    makers = [child for child, _ in hidden.next_functions if child is not None]
    return any(maker is tensor.grad_fn or getattr(maker, "variable", None) is tensor for maker in makers)


def tensor_of(core: Log, stale: Stale, frame: FrameType) -> Any:
    """The fitting tensor among those the user's frames from ``frame`` outwards hold; None unless they share memory.

    It has the sizes and the version of the message, and is in the log or behind a hidden Node's edges.
    """

    def fits(tensor: torch.Tensor) -> bool:
        return tuple(tensor.shape) == stale.sizes and tensor._version == stale.version

    written = {raw.storage for raw in _last_writes(core) if raw.version == stale.version}
    makers = {child for node in stale.hidden for child, _ in node.next_functions if child is not None}
    leaves = {id(getattr(maker, "variable", None)) for maker in makers}
    by_storage: dict[int, tuple[bool, bool, Any]] = {}
    for found in naming.find(frame, fits):
        tensor = found.tensor
        storage = _torch.storage_identity(tensor)
        is_operand = id(tensor) in leaves or tensor.grad_fn in makers
        known = by_storage.get(storage, (False, False, tensor))
        by_storage[storage] = (known[0] or storage in written, known[1] or is_operand, tensor)
    evidence = list(by_storage.values())
    # Both kinds of evidence rank before one; without either, equal sizes are a coincidence.
    for best in (
        [tensor for logged, operand, tensor in evidence if logged and operand],
        [tensor for logged, operand, tensor in evidence if logged or operand],
    ):
        if best:
            return best[0] if len(best) == 1 else None
    return None


def last_write(core: Log, stale: Stale) -> RawWrite | None:
    """Return the last logged write that left its tensor with the sizes and version of the message."""
    for raw in _last_writes(core):
        if raw.version == stale.version and tuple(raw.shape) == stale.sizes and raw.strides is not None:
            return raw
    return None


class SavingWrite(NamedTuple):
    """An in-place operation that saved its own result, and where: ``ExpBackward0``, ``result``."""

    raw: RawWrite
    node: str
    slot: str


def saving_write(core: Log, stale: Stale) -> SavingWrite | None:
    """Return the in-place operation on a view whose Node, hidden in a CopySlices, saved the result: ``p[:2].exp_()``.

    It left the sizes and the saved version of the message, which names that Node as the tensor's maker (``Exp``,
    ``ExpBackward0``), or the view of it. None where lines of the program differ.
    """
    if stale.slot is not None or not stale.maker or not any(map(_torch.is_copy_slices, stale.hidden)):
        return None
    # A step of an optimizer is in another log.
    known = {raw.storage for raw in _last_writes(core) if raw.version is not None and raw.version <= stale.version}
    found = [
        SavingWrite(raw, *place)
        for raw in logged_writes(core)
        if raw.storage in known
        and raw.version == stale.saved_version
        and tuple(raw.shape) == stale.sizes
        and (place := _torch.slot_of_own_result(raw.op)) is not None
        and stale.maker.startswith(("AsStrided", place[0].removesuffix("Backward0")))
    ]
    return found[-1] if len({one.raw.stack for one in found}) == 1 else None


def described(core: Log, stale: Stale) -> TensorInfo:
    """Return the known metadata of a tensor that no variable holds any more."""
    own = saving_write(core, stale)
    raw = last_write(core, stale) if own is None else own.raw
    kind = getattr(torch, stale.kind.removeprefix("torch."), None)
    dtype = str(getattr(kind, "dtype", "")).removeprefix("torch.")
    device = "cpu" if dtype else ""
    if raw is None:
        return TensorInfo(stale.sizes, dtype, device, 0, Region(0, stale.sizes, (), 1), True, False)
    region = Region(raw.offset, raw.shape, raw.strides or (), raw.itemsize)
    return TensorInfo(stale.sizes, dtype, device, raw.storage, region, True, False)


def _last_writes(core: Log) -> list[RawWrite]:
    """Return the last write to each storage, the latest first."""
    last: dict[int, RawWrite] = {}
    for raw in reversed(logged_writes(core)):
        last.setdefault(raw.storage, raw)
    return list(last.values())


class Origin(NamedTuple):
    """The call that made a Node, or the one watched just before it where ``is_exact`` is False."""

    clock: int
    stack: RawStack
    thread: int
    is_exact: bool


def of_node(core: Log, steps: StepLog, node: Node, thread: int, stale: Stale, storage: int) -> Origin | None:
    """Return the call that made ``node``, which saved ``stale`` of ``storage``; ``thread`` is that of the backward."""
    number = _torch.node_sequence(node)
    if number is None:
        return None
    found: list[Origin] = []
    before: Origin | None = None
    for one in (thread, *(other for other in threads_of(core) if other != thread)):
        for first, end, clock, stack in calls_near(core, number, one):
            if first <= number < end:
                found.append(Origin(clock, stack, one, True))
            elif one == thread and end <= number:
                before = Origin(clock, stack, one, False)
    device = None if stale.tensor is None else stale.tensor.device
    engines = [Origin(clock, stack, one, True) for clock, stack, one in steps.made_by_engine.near(number, device)]
    if engines:
        # A Node of the engine's thread, or one of the calling thread with the same number.
        found = engines if _is_engines(steps, node, number, device) else [*found, *engines]
        since = ledger.version_since(core, steps, storage, stale.saved_version)
        latest = ledger.first_move(core, steps, storage, stale.saved_version, stale.version)
        found = [one for one in found if since < one.clock <= latest]
        return found[-1] if len({one.stack for one in found}) == 1 else None
    if len(found) > 1:
        latest = ledger.first_move(core, steps, storage, stale.saved_version, stale.version)
        # Where none was early enough, the log's entries for this address are of another storage.
        found = [one for one in found if one.clock <= latest] or found
    # Nearly every backward runs in the thread of its forward; only a Node unknown there may be another thread's.
    if found and (len(found) == 1 or found[0].thread == thread):
        return found[0]
    return before if not found else None


def _is_engines(steps: StepLog, node: Node, number: int, device: Any) -> bool:
    """Whether a thread of the engine has made ``node``: its graph has a younger Node of a calling thread's.

    Within one thread a Node is younger than all Nodes below it.
    """
    behind = walk.nodes_behind((node,), _MOST_BEHIND) or []
    numbers = [one for one in map(_torch.node_sequence, behind) if one is not None and one > number]
    return any(not steps.made_by_engine.near(one, device) for one in numbers)


def threads_of(core: Log) -> tuple[int, ...]:
    """Return the threads that made Nodes, if the core knows them; else all live ones."""
    said = getattr(core, "node_threads", None)
    return tuple(said()) if said else tuple(one.ident for one in threading.enumerate() if one.ident is not None)
