"""Names of a tensor in the program, and the live modules and optimizers that own parameters."""

from __future__ import annotations

import collections
import numbers
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from gradsan import _torch
from gradsan._collector import kinds_below, objects_of
from gradsan.graph import walk
from gradsan.graph.live import value_of
from gradsan.graph.variables import Found, Scope, kind_of, modules_in, parts_of, search, search_in, spaces_of
from gradsan.model import Clue, Held, Layer, Name, Site
from gradsan.record.stacks import definition_site, file_of, is_user_file

_MOST_HELD = 64
COLLECTING = frozenset({"list", "deque", "dict", "defaultdict", "tuple"})
"""Containers in which programs collect tensors, as :func:`~gradsan.graph.variables.kind_of` names them."""


def names_of(tensor: torch.Tensor, frame: FrameType | None) -> tuple[Name, ...]:
    """Return names by which the user's frames from ``frame`` outwards hold the memory of ``tensor``, best first.

    An expression for the same part of the storage ranks before one for another part; a parameter's name within its
    module before others, a loop variable last; a nearer frame before a farther one, a short expression before a
    long one.
    """
    storage = _torch.storage_identity(tensor)
    return _ranked(tensor, storage, search(frame, lambda t: _torch.storage_identity(t) == storage))


def _ranked(tensor: torch.Tensor, storage: Any, found: Iterable[Found]) -> tuple[Name, ...]:
    extent = _extent(tensor)
    ranked = []
    for order, one in enumerate(found):
        same_part = _extent(one.tensor) == extent
        ranked.append(((not same_part, one.origin != "module", one.passing, one.depth, order), one))
    if not ranked:
        ranked = [((False, False, False, 0, 0), one) for one in _modules_alive(storage)]
    names: dict[str, Name] = {}
    for _, one in sorted(ranked, key=lambda item: item[0]):
        names.setdefault(one.path, Name(one.path, one.origin, _kind(one)))  # type: ignore[arg-type]
    return tuple(names.values())[:8]


def name_of(tensor: torch.Tensor, frame: FrameType | None) -> str | None:
    """Return the best of these names; None where there is none."""
    names = names_of(tensor, frame)
    return names[0].text if names else None


def find(frame: FrameType | None, wanted: Callable[[Any], bool]) -> Iterator[Found]:
    """Yield the tensors for which ``wanted`` is true that the user's frames from ``frame`` outwards hold."""
    return search(frame, wanted)


def has_graph(tensor: torch.Tensor) -> bool:
    """Whether a tensor found in a running program has a grad_fn; views whose own may not be asked for have none."""
    return tensor.requires_grad and not _torch.is_view_of_written(tensor) and tensor.grad_fn is not None


def collected_in(storage: int, frame: FrameType | None) -> str | None:
    """The container that holds one part of that memory several times: all its elements are the last write."""
    found = search(frame, lambda one: _torch.storage_or_none(one) == storage and not _torch.is_trainable_leaf(one))
    times = collections.Counter((one.within, _part_of(one.tensor)) for one in found if one.container in COLLECTING)
    return next((within for (within, _), many in times.items() if many > 1), None)


def _part_of(tensor: torch.Tensor) -> Hashable:
    """The elements of its memory that a tensor shows, which a view of another shape may show, too."""
    return (tensor.storage_offset(), tensor.numel()) if tensor.is_contiguous() else id(tensor)


def name_of_output(node: Node, frame: FrameType | None) -> str | None:
    """Return the expression by which the user's frames hold an output of ``node`` (an autograd Node)."""
    return names_of_outputs([node], frame).get(node)


def names_of_outputs(nodes: Iterable[Node], frame: FrameType | None) -> dict[Node, str]:
    """Return such expressions for several Nodes; the frames are searched once."""
    wanted = set(nodes)
    best: dict[Node, Found] = {}
    for found in search(frame, lambda t: t.requires_grad and not t.is_leaf and t.grad_fn in wanted):
        node: Any = found.tensor.grad_fn
        if node not in best or (found.depth, len(found.path)) < (best[node].depth, len(best[node].path)):
            best[node] = found
    return {node: found.path for node, found in best.items()}


def parameter_over(node: Node, frame: FrameType | None) -> str | None:
    """Return the name of a live parameter whose graph leads back to ``node``: it was written with a graph."""
    found = [one for one in search(frame, lambda t: t.grad_fn is not None) if isinstance(one.tensor, nn.Parameter)]
    leading = walk.lead_to(walk.roots_of(one.tensor for one in found), node) if found else ()
    return next((one.path for one in found if one.tensor.grad_fn in leading), None)


def held_graphs(nodes: Sequence[Node], frame: FrameType | None, moment: int, order: Sequence[Node]) -> tuple[Held, ...]:
    """Return the live variables of the user's frames whose graph leads back to one of ``nodes``; nearer ones first.

    Those made by a Node numbered below ``moment`` are old; without a Node in ``order``, the graph of the backward, they
    are left out: a log of losses.
    """

    def wanted(tensor: torch.Tensor) -> bool:
        return tensor.requires_grad and not tensor.is_leaf and tensor.grad_fn is not None

    found = list(search(frame, wanted))
    leading = walk.lead_to(walk.roots_of(one.tensor for one in found), *nodes)
    if not any(one.around and one.tensor.grad_fn in leading for one in found):
        from gradsan.graph.bytecode import spaces_of_objects

        found += search_in(spaces_of_objects(), wanted)
        leading = walk.lead_to(walk.roots_of(one.tensor for one in found), *nodes)
    ways: dict[tuple[int, ...], Found] = {}
    for one in found:  # an attribute of one object, by the first of the ways of its function that lead to it
        holder = one.around[-1][1] if one.container == "object" else one
        ways.setdefault((id(one.tensor), id(holder), hash(one.scope)), one)
    old = {node for node in leading if (_torch.node_sequence(node) or moment) < moment}
    unused = old.difference(order)
    held = (
        Held(
            one.path,
            one.scope.file,
            one.scope.function,
            one.within,
            one.container,
            one.tensor.grad_fn in old,
            _was_rewritten(one.tensor),
            tuple(_layer(path, value) for path, value in one.around),
        )
        for one in ways.values()
        if one.tensor.grad_fn in leading and one.tensor.grad_fn not in unused
    )
    return tuple(dict.fromkeys(held))[:_MOST_HELD]


def numbers_in(frame: FrameType | None) -> frozenset[str]:
    """Return the names, and attributes of objects, bound to numbers or text alone in the frames of the user.

    Lists and tuples of such count, and tensors of integers: nothing of them has a graph.
    """
    bound = [pair for space in spaces_of(frame) for pair in space.variables.items()]
    bound += [part for name, value in bound if kind_of(value) == "object" for part in parts_of(name, value)]
    others = {name for name, value in bound if not _is_number(value)}
    return frozenset(name for name, _ in bound) - others


_MOST_NUMBERS = 100_000


def _is_number(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return 0 < len(value) <= _MOST_NUMBERS and all(isinstance(one, numbers.Number | str) for one in value)
    if torch.is_tensor(value):
        return not (value.is_floating_point() or value.is_complex())
    return isinstance(value, numbers.Number | str)


def _was_rewritten(tensor: torch.Tensor) -> bool:
    try:
        return bool(tensor._version)
    except RuntimeError:
        return False


def _layer(path: str, value: Any) -> Layer:
    kind = kind_of(value)
    items = () if kind == "object" else value.values() if isinstance(value, dict) else value
    is_frozen = bool(getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False))
    methods = [one for one in vars(type(value)).values() if isinstance(one, FunctionType)] if kind == "object" else []
    made_by = (file_of(methods[0].__code__), type(value).__name__) if methods else ("", "")
    return Layer(path, kind, tuple(sorted({_kind_of_item(item) for item in list(items)})), is_frozen, made_by)


def _kind_of_item(item: Any) -> str:
    if item is None or torch.is_tensor(item):
        return "none" if item is None else "tensor"
    kind = kind_of(item)
    return "other" if kind == "object" else kind


def _kind(found: Found) -> str:
    tensor = found.tensor
    if _torch.is_refused(tensor):  # nor does it say whether it is a leaf
        return "value"
    if isinstance(tensor, nn.Parameter) or _torch.is_trainable_leaf(tensor):
        return "parameter"
    if found.origin == "module":
        return "buffer"
    return "data" if tensor.is_leaf and not tensor.requires_grad else "value"


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    try:
        return int(tensor.storage_offset()), tensor.numel()
    except RuntimeError:
        return 0, 0


def _modules_alive(storage: int) -> Iterator[Found]:
    """Yield tensors of modules that no user frame holds any more, named by their class."""
    for candidate in modules_alive():
        for iterator in (candidate.named_parameters, candidate.named_buffers):
            for name, tensor in iterator():
                if _torch.storage_identity(tensor) == storage:
                    path = f"{type(candidate).__name__}.{name}"
                    yield Found(path, tensor, "module", name.count("."), Scope("", ""))


def modules_alive(wanted: Callable[[type], bool] = lambda _: True) -> list[nn.Module]:
    """Return the live modules of those classes, torch's own left out, for which ``wanted`` is true."""
    return objects_of(
        {one for one in kinds_below(nn.Module) if not one.__module__.startswith("torch.") and wanted(one)}
    )


def all_modules_alive() -> list[nn.Module]:
    """Return the live modules, torch's own among them; some may not be complete yet."""
    return objects_of({nn.Module, *kinds_below(nn.Module)})


def frozen_beside(owned: set[int], models: Iterable[nn.Module]) -> list[Any]:
    """Return the parameters with ``requires_grad=False`` of those models that have some of ``owned`` (ids)."""
    beside = [held for held in map(list, (one.parameters() for one in models)) if any(id(one) in owned for one in held)]
    return [one for held in beside for one in held if not one.requires_grad]


def optimizers_alive() -> list[Optimizer]:
    """Return the live optimizers."""
    return [one for one in objects_of(kinds_below(Optimizer)) if hasattr(one, "param_groups")]


def owner_in(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the innermost module of the program's own classes on the path ``name`` (``block.0.weight``), and the rest.

    ``module`` itself and the whole name if all others are torch's.
    """
    parts = name.split(".")
    found, rest = module, name
    at: Any = module
    for position, part in enumerate(parts[:-1]):
        at = dict(at.named_children()).get(part)
        if at is None:
            break
        if forward_of(at) is not None:
            found, rest = at, ".".join(parts[position + 1 :])
    return found, rest


def owner_of(path: str, frame: FrameType | None | None) -> tuple[nn.Module, str] | None:
    """Return the same for an expression (``net.block.0.weight``), evaluated in the frames from ``frame`` outwards."""
    parts, start = path.split("."), frame
    while frame is not None:
        for length in range(1, len(parts)):
            module = value_of(frame, ".".join(parts[:length]))
            if isinstance(module, nn.Module):
                return owner_in(module, ".".join(parts[length:]))
        frame = frame.f_back
    # The search names what only a library's objects hold by its class.
    of_class = (one for one in modules_in(start) if one.__class__.__name__ == parts[0])
    return next((owner_in(one, ".".join(parts[1:])) for one in of_class), None)


def forward_of(module: nn.Module) -> Site | None:
    """Return the definition of the forward of the program's own module; None for those of torch and other packages."""
    code = getattr(type(module).forward, "__code__", None)
    return None if code is None or not is_user_file(code.co_filename) else definition_site(code)


def clue_of(path: str | None, frame: FrameType | None | None, facts: Mapping[str, Any]) -> Clue:
    """Return the clue ``parameter`` for the tensor ``path``: at the forward of its owner, with ``facts``."""
    owner = None if path is None else owner_of(path, frame)
    if owner is None:
        return Clue("parameter", name=path, values=dict(facts))
    module, rest = owner
    values = {**facts, "owner": type(module).__name__, "attribute": rest.partition(".")[0]}
    return Clue("parameter", forward_of(module), name=path, values=values)
