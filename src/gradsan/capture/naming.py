"""What the program itself calls a tensor: a search through the variables that are alive when a report is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from gradsan.capture import _torch, graphs
from gradsan.capture.alive import modules_alive
from gradsan.capture.variables import Found, Scope, search
from gradsan.model import Held, Name

_MOST_HELD = 64


def names_of(tensor: Any, frame: Any) -> tuple[Name, ...]:
    """Names by which the user's frames from ``frame`` outwards reach the memory of ``tensor``, best first.

    An expression that covers just the same part of the storage beats one that covers another part; a parameter's
    name within its module beats others, a loop's variable is beaten by all; a nearer frame beats a farther one, a short
    expression a long one.
    """
    storage = _torch.storage_identity(tensor)
    extent = _extent(tensor)
    ranked = []
    for order, found in enumerate(search(frame, lambda t: _torch.storage_identity(t) == storage)):
        same_part = _extent(found.tensor) == extent
        ranked.append(((not same_part, found.origin != "module", found.passing, found.depth, order), found))
    if not ranked:
        ranked = [((False, False, False, 0, 0), found) for found in _modules_alive(storage)]
    names: dict[str, Name] = {}
    for _, found in sorted(ranked, key=lambda item: item[0]):
        names.setdefault(found.path, Name(found.path, found.origin, _kind(found)))  # type: ignore[arg-type]
    return tuple(names.values())[:8]


def find(frame: Any, wanted: Callable[[Any], bool]) -> Iterator[Found]:
    """The tensors for which ``wanted`` holds that the user's frames from ``frame`` outwards reach."""
    return search(frame, wanted)


def name_of_output(node: Any, frame: Any) -> str | None:
    """The expression by which the user's frames hold a tensor that ``node`` (an autograd Node) produced."""
    best = min(
        search(frame, lambda t: t.requires_grad and not t.is_leaf and t.grad_fn is node),
        key=lambda found: (found.depth, len(found.path)),
        default=None,
    )
    return best.path if best else None


def held_graphs(node: Any, frame: Any) -> tuple[Held, ...]:
    """The live variables of the user's frames from which the graph leads back to ``node``; nearer ones first."""
    found = list(search(frame, lambda t: t.requires_grad and not t.is_leaf and t.grad_fn is not None))
    leading = graphs.lead_to([one.tensor.grad_fn for one in found], node)
    held = (
        Held(one.path, one.scope.file, one.scope.function, one.within, one.container)
        for one in found
        if one.tensor.grad_fn in leading
    )
    return tuple(dict.fromkeys(held))[:_MOST_HELD]


def _kind(found: Found) -> str:
    tensor = found.tensor
    if isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
        return "parameter"
    if found.origin == "module":
        return "buffer"
    return "data" if tensor.is_leaf and not tensor.requires_grad else "value"


def _extent(tensor: Any) -> tuple[int, int]:
    try:
        return tensor.storage_offset(), tensor.numel()
    except (RuntimeError, NotImplementedError):
        return 0, 0


def _modules_alive(storage: int) -> Iterator[Found]:
    """Modules that no user frame reaches any more, named by their class."""
    for candidate in modules_alive():
        for iterator in (candidate.named_parameters, candidate.named_buffers):
            for name, tensor in iterator():
                if _torch.storage_identity(tensor) == storage:
                    path = f"{type(candidate).__name__}.{name}"
                    yield Found(path, tensor, "module", name.count("."), Scope("", ""))
