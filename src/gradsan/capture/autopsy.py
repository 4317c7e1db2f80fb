"""Reading a failed graph: which Node stopped backward, and which of its saved tensors is stale.

PyTorch's error does not say. The engine runs Nodes from the youngest to the oldest, so the one that failed is the
youngest whose slot raises the very same message when it is read. Slots are only read where no hooks stand behind them:
reading through hooks runs the program's code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from gradsan.capture import _torch

_STALE = re.compile(
    r"one of the variables needed for gradient computation has been modified by an inplace operation: "
    r"\[(?P<type>\S+) (?P<sizes>\[[^\]]*\])\].*? is at version (?P<now>\d+); expected version (?P<saved>\d+) instead"
)


class Stale(NamedTuple):
    """A saved tensor whose version moved. ``node``, ``slot`` and ``tensor`` are None where no Node shows it."""

    node: Any
    slot: str | None
    tensor: Any
    sizes: tuple[int, ...]
    saved_version: int
    version: int


def is_version_error(error: BaseException) -> bool:
    """Whether an exception is PyTorch's version check."""
    return isinstance(error, RuntimeError) and _STALE.match(str(error)) is not None


def find_stale(roots: tuple[Any, ...], error: BaseException) -> Stale | None:
    """The saved tensor at which a backward from ``roots`` stopped with ``error``; None if that is no version error."""
    told = _STALE.match(str(error))
    if told is None:
        return None
    wanted = str(error).partition("Hint")[0]
    first: Stale | None = None
    for node in youngest_first(roots):
        for stale, message in stale_slots(node):
            if message.partition("Hint")[0] == wanted:
                return stale
            first = first or stale
    if first is not None:
        return first
    sizes = tuple(int(size) for size in re.findall(r"\d+", told["sizes"]))
    return Stale(None, None, None, sizes, int(told["saved"]), int(told["now"]))


def youngest_first(roots: tuple[Any, ...]) -> list[Any]:
    """All Nodes that backward from ``roots`` can reach, in the order in which the engine runs them."""
    seen = set(roots)
    stack = list(roots)
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return sorted((node for node in seen if _torch.node_sequence(node) is not None), key=_by_age)


def _by_age(node: Any) -> int:
    return -(_torch.node_sequence(node) or 0)


def stale_slots(node: Any) -> Iterator[tuple[Stale, str]]:
    """The stale slots of a Node, each with PyTorch's message for it."""
    for slot, saved in _torch.saved_slots(node):
        tensor = _torch.packed_object(saved)
        if not torch.is_tensor(tensor):
            continue  # freed, or behind hooks
        message = _read(node, slot.partition("[")[0])
        told = _STALE.match(message or "")
        if told is None:
            continue
        saved_version, version = int(told["saved"]), int(told["now"])
        # A list slot raises for its first stale member; the others are told from it by their version.
        if tensor._version == version:
            yield Stale(node, slot, tensor, tuple(tensor.shape), saved_version, version), message or ""


def _read(node: Any, slot: str) -> str | None:
    """What PyTorch says on reading a slot; None where it hands the tensor out."""
    try:
        getattr(node, slot if slot == "saved_tensors" else f"_saved_{slot}")
    except RuntimeError as error:
        return str(error)
    return None
