"""What the program itself calls a tensor: a search through the variables that are alive when a report is made."""

from __future__ import annotations

import dis
import functools
import gc
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from gradsan.capture import _torch
from gradsan.capture.stacks import is_user_file
from gradsan.model import Name

_MOST_OBJECTS = 20_000
_DEEPEST = 5
_NOT_SEARCHED = (
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.CodeType,
    types.FrameType,
    type,
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    torch.optim.Optimizer,
    torch.Generator,
    torch.dtype,
    torch.device,
    torch.Size,
)
# A module's own bookkeeping; parameters, buffers and submodules are reached through its public iterators.
_MODULE_INTERNALS = frozenset(vars(nn.Module()))


class Found(NamedTuple):
    """A tensor reached from a variable: the expression that leads to it, how, and how far the search had to go.

    ``passing`` says that the variable is one of a ``for`` loop: it names another tensor in the next round.
    """

    path: str
    tensor: Any
    origin: str
    depth: int
    passing: bool = False


def names_of(tensor: Any, frame: Any) -> tuple[Name, ...]:
    """Names by which the user's frames from ``frame`` outwards reach the memory of ``tensor``, best first.

    An expression that covers just the same part of the storage beats one that covers another part; a parameter's
    name within its module beats others, a loop's variable is beaten by all; a nearer frame beats a farther one, a short
    expression a long one.
    """
    storage = _torch.storage_identity(tensor)
    extent = _extent(tensor)
    ranked = []
    for order, found in enumerate(_search(frame, lambda t: _torch.storage_identity(t) == storage)):
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
    return _search(frame, wanted)


def name_of_output(node: Any, frame: Any) -> str | None:
    """The expression by which the user's frames hold a tensor that ``node`` (an autograd Node) produced."""
    best = min(
        _search(frame, lambda t: t.requires_grad and not t.is_leaf and t.grad_fn is node),
        key=lambda found: (found.depth, len(found.path)),
        default=None,
    )
    return best.path if best else None


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


def _search(frame: Any, wanted: Callable[[Any], bool]) -> Iterator[Found]:
    """Breadth-first through the variables of the user's frames; every object once, at most ``_MOST_OBJECTS``."""
    queue: deque[tuple[str, Any, int]] = deque()
    seen: set[int] = set()
    passing: set[str] = set()
    for space, loop_variables in _spaces(frame):
        for name, value in space.items():
            if not name.startswith("__"):
                queue.append((name, value, 0))
        passing.update(loop_variables)
    visited = 0
    while queue and visited < _MOST_OBJECTS:
        path, value, depth = queue.popleft()
        if isinstance(value, _NOT_SEARCHED):
            continue
        visited += 1
        if torch.is_tensor(value):
            # One tensor may have several names; all of them are wanted.
            if _matches(value, wanted):
                yield Found(path, value, "variable", depth, path in passing)
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield from _in_module(path, value, depth, wanted, queue)
        elif depth < _DEEPEST:
            queue.extend((inner, item, depth + 1) for inner, item in _parts(path, value))


def _spaces(frame: Any) -> list[tuple[dict[str, Any], frozenset[str]]]:
    """The locals and globals of the user's frames from ``frame`` outwards, each with its loop variables."""
    frames = []
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    of_modules = {id(one.f_globals): _loop_variables(one.f_code) for one in frames if one.f_code.co_name == "<module>"}
    spaces: list[tuple[dict[str, Any], frozenset[str]]] = []
    for one in frames:
        if one.f_locals is not one.f_globals:
            spaces.append((dict(one.f_locals), _loop_variables(one.f_code)))
        if not any(one.f_globals is known.f_globals for known in frames[: frames.index(one)]):
            spaces.append((dict(one.f_globals), of_modules.get(id(one.f_globals), frozenset())))
    return spaces


@functools.lru_cache(maxsize=1024)
def _loop_variables(code: types.CodeType) -> frozenset[str]:
    """The variables that the ``for`` loops of a function or module give values to."""
    names: set[str] = set()
    awaited = 0
    for instruction in dis.get_instructions(code):
        if instruction.opname == "FOR_ITER":
            awaited = 1
        elif awaited and instruction.opname.startswith("UNPACK"):
            awaited += int(instruction.arg or 0) - 1
        elif awaited and instruction.opname.startswith("STORE_"):
            stored = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            names.update(str(name) for name in stored)
            awaited = max(0, awaited - len(stored))
        elif instruction.opname not in ("CACHE", "EXTENDED_ARG"):
            awaited = 0
    return frozenset(names)


def _matches(tensor: Any, wanted: Callable[[Any], bool]) -> bool:
    try:
        return wanted(tensor)
    except RuntimeError:
        return False


def _in_module(
    path: str, module: nn.Module, depth: int, wanted: Callable[[Any], bool], queue: deque[tuple[str, Any, int]]
) -> Iterator[Found]:
    for iterator in (module.named_parameters, module.named_buffers):
        for name, tensor in iterator(remove_duplicate=False):
            if _matches(tensor, wanted):
                yield Found(f"{path}.{name}", tensor, "module", depth)
    for name, inner in module.named_modules():
        prefix = f"{path}.{name}" if name else path
        for attribute, value in vars(inner).items():
            if attribute not in _MODULE_INTERNALS:
                queue.append((f"{prefix}.{attribute}", value, depth + 1))


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in list(value.items()):
            if isinstance(key, (str, int)):
                shown = f'"{key}"' if isinstance(key, str) else str(key)
                yield f"{path}[{shown}]", item
    elif isinstance(value, (list, tuple, deque)):
        fields = getattr(value, "_fields", None)
        for position, item in enumerate(list(value)):
            yield (f"{path}.{fields[position]}" if fields else f"{path}[{position}]"), item
    elif hasattr(value, "__dict__") and _is_plain_object(value):
        for attribute, item in list(vars(value).items()):
            yield f"{path}.{attribute}", item


def _is_plain_object(value: Any) -> bool:
    """Objects of the user's own classes and of the libraries built on torch; not interpreter or torch internals."""
    module = type(value).__module__
    return module.partition(".")[0] not in {"builtins", "torch", "numpy", "threading", "logging", "tqdm", "rich"}


def _modules_alive(storage: int) -> Iterator[Found]:
    """Modules that no user frame reaches any more, named by their class."""
    for candidate in gc.get_objects():
        # A proxy's __class__ may run code or raise; only true modules are asked.
        if not issubclass(type(candidate), nn.Module) or type(candidate).__module__.startswith("torch."):
            continue
        for iterator in (candidate.named_parameters, candidate.named_buffers):
            for name, tensor in iterator():
                if _torch.storage_identity(tensor) == storage:
                    yield Found(f"{type(candidate).__name__}.{name}", tensor, "module", name.count("."))
