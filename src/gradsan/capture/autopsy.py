"""Reading a failed graph: which Node stopped backward, and which of its saved tensors is stale.

PyTorch's error does not say. Where Python code read the saved tensor (a custom Function's ``backward``), the frames of
the error hold the Node. Else the Node is the first, in the engine's order, whose slot raises the very same message when
it is read. Slots are only read where no hooks stand behind them: reading through hooks runs the program's code.
Where torch shows no saved tensors (before 2.10) ``_torch/saved.py`` finds out both.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from gradsan.capture import _torch, graphs

_STALE = re.compile(
    r"one of the variables needed for gradient computation has been modified by an inplace operation: "
    r"\[(?P<type>\S+) (?P<sizes>\[[^\]]*\])\](?P<output>, which is output \d+ of [^,]+,)?"
    r".*? is at version (?P<now>\d+); expected version (?P<saved>\d+) instead"
)


class Stale(NamedTuple):
    """A saved tensor whose version moved, as far as the graph tells.

    ``node`` is None where it is not decided which Node failed, ``slot`` where that Node shows none of its slots,
    ``tensor`` where no Node shows it. ``hidden`` are the Nodes that show no slots and may be the one.
    """

    node: Any
    slot: str | None
    tensor: Any
    is_output: bool
    sizes: tuple[int, ...]
    saved_version: int
    version: int
    hidden: tuple[Any, ...] = ()


def is_version_error(error: BaseException) -> bool:
    """Whether an exception is PyTorch's version check."""
    return isinstance(error, RuntimeError) and _STALE.match(str(error)) is not None


def find_stale(
    roots: Iterable[Any],
    error: BaseException,
    inputs: tuple[Any, ...] = (),
    accumulates: bool = True,
    retain_graph: bool = True,
) -> Stale | None:
    """The saved tensor at which a backward from ``roots`` stopped with ``error``; None if that is no version error.

    ``inputs`` and ``accumulates`` as for :func:`gradsan.capture.graphs.engine_order`.
    """
    told = _STALE.match(str(error))
    if told is None:
        return None
    for node in _in_frames(error, "_raw_saved_tensors"):
        found = _matching(node, told)
        if found is not None:
            return found
    for saved in _in_frames(error, "register_hooks", "unpack_hook"):
        tensor = _torch.packed_object(saved)
        if torch.is_tensor(tensor) and _is_told(tensor, told):
            return Stale(None, None, tensor, False, _sizes(told), int(told["saved"]), int(told["now"]))
    hidden: list[Any] = []
    for node in graphs.engine_order(roots, inputs, accumulates):
        if _torch.hides_saves(node):
            hidden.append(node)
            continue
        found = _matching(node, told)
        if found is not None:
            rivals = tuple(one for one in hidden if _may_have_saved(one, found.tensor))
            return found._replace(node=None, slot=None, hidden=rivals) if rivals else found
        if not hidden:
            continue
        if _torch.was_freed(node):
            hidden.clear()  # the engine came past them
        elif not retain_graph and _holds_something(node):
            break  # the engine did not come so far
    only = hidden[0] if len(hidden) == 1 else None
    return Stale(only, None, None, False, _sizes(told), int(told["saved"]), int(told["now"]), tuple(hidden))


def stale_errors(roots: Iterable[Any]) -> list[RuntimeError]:
    """The errors at which a backward from ``roots`` would stop, one for each saved tensor that is out of date.

    Nothing is run but PyTorch's own check of each slot; what hooks stand behind, and what a Node hides, is not asked.
    """
    found: dict[str, RuntimeError] = {}
    for node, _, _, error in _stale_slots(graphs.engine_order(roots)):
        found.setdefault(f"{id(node)} {error}", error)
    return list(found.values())


def further_stale(
    roots: Iterable[Any], storage: int, inputs: tuple[Any, ...] = (), accumulates: bool = True
) -> Iterator[Stale]:
    """The saved tensors in the memory ``storage`` that are out of date, in the order in which backward would ask.

    ``inputs`` and ``accumulates`` as for :func:`gradsan.capture.graphs.engine_order`; asked as in ``stale_errors``.
    """
    for node, slot, tensor, error in _stale_slots(graphs.engine_order(roots, inputs, accumulates)):
        told = _STALE.match(str(error))
        if told is None or _torch.storage_or_none(tensor) != storage or tuple(tensor.shape) != _sizes(told):
            continue
        is_output = told["output"] is not None and not tensor.requires_grad
        yield Stale(node, slot, tensor, is_output, _sizes(told), int(told["saved"]), int(told["now"]))


def _stale_slots(order: Iterable[Any]) -> Iterator[tuple[Any, str, Any, RuntimeError]]:
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
    """What has ``attributes`` in the frames that the error came through, innermost first.

    Nodes of custom Functions are known by what they saved, a saved tensor (which checkpointing keeps) by its hooks.
    """
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if all(hasattr(type(value), attribute) for attribute in attributes):
                yield value


def _is_told(tensor: Any, told: re.Match[str]) -> bool:
    return int(tensor._version) == int(told["now"]) and tuple(tensor.shape) == _sizes(told)


def _matching(node: Any, told: re.Match[str]) -> Stale | None:
    """The slot of a Node that raises what was told."""
    version = int(told["now"])
    for slot, saved in _torch.saved_slots(node):
        tensor = _torch.packed_object(saved)
        # Comparing versions first spares almost every slot the reading.
        if (torch.is_tensor(tensor) and tensor._version != version) or _torch.is_hooked(saved):
            continue
        if not _says(functools.partial(_torch.read_slot, node, slot.partition("[")[0]), told):
            continue
        tensor = _torch.refused_tensor(node, slot, saved)
        if tensor is None or tensor._version != version:
            continue
        is_output = told["output"] is not None and not tensor.requires_grad
        sizes = tuple(tensor.shape)
        if sizes == _sizes(told):
            return Stale(node, slot, tensor, is_output, sizes, int(told["saved"]), version)
    return None


def _says(read: Callable[[], Any], told: re.Match[str]) -> bool:
    try:
        read()
    except RuntimeError as error:
        return str(error).startswith(told[0])
    return False


def _sizes(told: re.Match[str]) -> tuple[int, ...]:
    return tuple(int(size) for size in re.findall(r"\d+", told["sizes"]))


def _holds_something(node: Any) -> bool:
    return any(_torch.packed_object(saved) is not None for _, saved in _torch.saved_slots(node))


def _may_have_saved(hidden: Any, tensor: Any) -> bool:
    """Whether a Node that shows no slots has the tensor among its operands, and may have saved it.

    An in-place operation on a view is mostly an assignment, which saves nothing.
    """
    if not tensor.requires_grad or _torch.is_copy_slices(hidden):
        return False
    makers = [child for child, _ in hidden.next_functions if child is not None]
    return any(maker is tensor.grad_fn or getattr(maker, "variable", None) is tensor for maker in makers)
