"""Search for tensors through the user's live variables: locals, globals, containers, objects and modules."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import types
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from gradsan import _torch
from gradsan._imports import stored_in
from gradsan.graph.live import leads_through_library, loop_variables
from gradsan.record.stacks import file_of, is_user_file, qualified_name

_MOST_OBJECTS = 20_000
_DEEPEST = 5
_LONG_END, _SHORT_END = 256, 32
"""How many items at each end of a container a search looks at: a data set in a list may hold millions."""
_TENSORS_AT_END = _MOST_OBJECTS // 2
"""How many, where they are tensors themselves."""
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
    torch.dtype,
    torch.device,
    torch.Size,
)
# Exact classes, most of what programs hold: asking for these takes a tenth of ``isinstance``.
_PLAIN: frozenset[type] = frozenset(
    (str, bytes, int, float, complex, bool, type(None), types.FunctionType, types.ModuleType, type, torch.Generator)
)
# A module's own bookkeeping; parameters, buffers and submodules are reached through its public iterators.
_MODULE_INTERNALS = frozenset(vars(nn.Module()))


class Scope(NamedTuple):
    """Place of a variable: the file and the function (``<module>`` for a global)."""

    file: str
    function: str


class Found(NamedTuple):
    """A tensor reached from a variable: the expression that leads to it, how, and how far the search had to go.

    ``passing`` says that the variable is that of a ``for`` loop, which refers to another tensor in the next round.
    ``within`` is the expression that the tensor is an element or attribute of, ``container`` its kind; ``around`` are
    all containers of it, each with its expression, from the variable inwards.
    """

    path: str
    tensor: torch.Tensor
    origin: str
    depth: int
    scope: Scope
    passing: bool = False
    within: str | None = None
    container: str | None = None
    around: tuple[tuple[str, Any], ...] = ()


class Reached(NamedTuple):
    """A tensor, an array or a number reached from a variable; ``passing`` as in :class:`Found`."""

    path: str
    value: Any
    scope: Scope
    passing: bool


class _Step(NamedTuple):
    path: str
    value: Any
    depth: int
    scope: Scope
    within: str | None = None
    container: str | None = None
    around: tuple[tuple[str, Any], ...] = ()


class Space(NamedTuple):
    """The variables of a running function, or of a module, and its current line (0: none)."""

    scope: Scope
    variables: dict[str, Any]
    loop_variables: frozenset[str]
    line: int = 0


class _Place(NamedTuple):
    """A tensor at the end of a search's step, or within the module there, by its name in it."""

    step: _Step
    tensor: torch.Tensor
    passing: bool = False
    name: str | None = None

    def found(self) -> Found:
        path, _, depth, scope, within, container, around = self.step
        if self.name is None:
            return Found(path, self.tensor, "variable", depth, scope, self.passing, within, container, around)
        root = self.step.value.__class__.__name__ if leads_through_library(path, around) else path
        path = f"{root}.{_torch.name_in_module(self.name)}"
        owner, holder = path.rpartition(".")[0], self.step.value.get_submodule(self.name.rpartition(".")[0])
        around = (*around, (owner, holder))
        return Found(path, self.tensor, "module", depth, scope, False, owner, "object", around)


class _SharedSearches(threading.local):
    """Searches of one moment, shared by all who look: within a ``with`` block no variable changes."""

    depth = 0

    def __init__(self) -> None:
        self._known: dict[FrameType, tuple[list[_Place], Iterator[_Place]]] = {}

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if not self.depth:
            self._known.clear()

    def places(self, frame: FrameType | None) -> Iterator[_Place]:
        """Yield what a search from ``frame`` comes to, going on where an earlier one has ended."""
        user = frame
        while user is not None and not is_user_file(user.f_code.co_filename):
            user = user.f_back
        if not self.depth or user is None:
            yield from _places(spaces_of(frame))
            return
        known, rest = self._known.setdefault(user, ([], _places(spaces_of(user))))
        at = 0
        while True:
            if at == len(known):
                one = next(rest, None)
                if one is None:
                    return
                known.append(one)
            yield known[at]
            at += 1


SHARED = _SharedSearches()


def search(frame: FrameType | None, wanted: Callable[[Any], bool]) -> Iterator[Found]:
    """Search the variables of the user's frames breadth-first; every object once, at most ``_MOST_OBJECTS``."""
    for place in SHARED.places(frame):
        if _matches(place.tensor, wanted):
            yield place.found()


def modules_in(frame: FrameType | None) -> list[nn.Module]:
    """Return the modules with parameters or buffers that the user's variables lead to, without those inside of one."""
    return list({id(one.step.value): one.step.value for one in SHARED.places(frame) if one.name is not None}.values())


def search_in(spaces: Iterable[Space], wanted: Callable[[Any], bool]) -> Iterator[Found]:
    """Search as :func:`search` does, from the variables of ``spaces``."""
    return (place.found() for place in _places(list(spaces)) if _matches(place.tensor, wanted))


def _places(spaces: list[Space]) -> Iterator[_Place]:
    queue = deque(
        _Step(name, value, 0, space.scope)
        for space in spaces
        for name, value in space.variables.items()
        if type(value) not in _PLAIN and not name.startswith("__")
    )
    passing = {name for space in spaces for name in space.loop_variables}
    seen: set[int] = set()
    visited = 0
    while queue and visited < _MOST_OBJECTS:
        step = queue.popleft()
        path, value, depth, scope, _, _, around = step
        if type(value) in _PLAIN or isinstance(value, _NOT_SEARCHED):
            continue
        visited += 1
        if torch.is_tensor(value):
            # One tensor may have several names; all of them are yielded.
            yield _Place(step, value, path in passing)
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield from _in_module(step, queue)
        elif depth < _DEEPEST and len(queue) < _MOST_OBJECTS:
            place = (scope, path, kind_of(value), (*around, (path, value)))
            parts = parts_of(path, value, _PLAIN, ends=_LONG_END, of_tensors=_TENSORS_AT_END)
            queue.extend(_Step(inner, item, depth + 1, *place) for inner, item in parts)


def reached(spaces: Iterable[Space]) -> Iterator[Reached]:
    """Yield tensors, arrays and numbers of ``spaces``, breadth-first; of long lists both ends."""
    queue = deque(
        (_Step(name, value, 0, space.scope), name in space.loop_variables)
        for space in spaces
        for name, value in space.variables.items()
        if not name.startswith("__")
    )
    seen: set[int] = set()
    visited = 0
    while queue and visited < _MOST_OBJECTS:
        step, passing = queue.popleft()
        visited += 1
        value = step.value
        if _is_bookkeeping(step):
            continue
        if isinstance(value, int | float) or torch.is_tensor(value) or type(value).__name__ == "ndarray":
            yield Reached(step.path, value, step.scope, passing)
        elif step.depth < _DEEPEST and id(value) not in seen and (kept := _kept_by(value)):
            seen.add(id(value))
            place = (step.depth + 1, step.scope)
            queue.extend((_Step(f"{step.path}.{k}", v, *place), passing) for k, v in kept.items() if k[:2] != "__")
        elif not isinstance(value, _NOT_SEARCHED) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, nn.Module):
                inner: deque[_Step] = deque()
                for one in _in_module(step, inner):
                    yield Reached(
                        f"{step.path}.{_torch.name_in_module(one.name or '')}", one.tensor, step.scope, passing
                    )
                queue.extend((one, passing) for one in inner)
            elif step.depth < _DEEPEST and len(queue) < _MOST_OBJECTS:
                parts = parts_of(step.path, value, ends=_SHORT_END)
                queue.extend((_Step(path, item, step.depth + 1, step.scope), passing) for path, item in parts)


def _kept_by(value: Any) -> dict[str, Any]:
    """Return what the user's functions, generators, classes and modules keep from one call to the next."""
    if isinstance(value, types.FunctionType):
        code, held = value.__code__, dict(vars(value))
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # an empty cell
                held[name] = cell.cell_contents
        return held if is_user_file(code.co_filename) else {}
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return {} if frame is None or not is_user_file(frame.f_code.co_filename) else _torch.locals_of(frame)
    if not isinstance(value, (type, types.ModuleType)):
        return {}
    module = sys.modules.get(value.__module__) if isinstance(value, type) else value
    return dict(vars(value)) if is_user_file(stored_in(module).get("__file__") or "<frozen") else {}


def _is_bookkeeping(step: _Step) -> bool:
    """Whether it is a private attribute of PyTorch's own module, which the program neither reads nor writes."""
    holder = step.around[-1][1] if step.around else None
    is_torchs = isinstance(holder, nn.Module) and type(holder).__module__.partition(".")[0] == "torch"
    return is_torchs and not torch.is_tensor(step.value) and step.path.rpartition(".")[2].startswith("_")


def spaces_of(frame: FrameType | None) -> list[Space]:
    """Return the locals and globals of the user's frames from ``frame`` outwards.

    In a thread of the engine, the frames of the threads whose backward calls wait for it follow.
    """
    frames = []
    for innermost in (frame, *_torch.callers_of_engine(frame)):
        at = innermost
        while at is not None:
            if is_user_file(at.f_code.co_filename):
                frames.append(at)
            at = at.f_back
    of_modules = {id(one.f_globals): one for one in frames if one.f_code.co_name == "<module>"}
    spaces: list[Space] = []
    globals_seen: set[int] = set()
    for one in frames:
        code = one.f_code
        file = file_of(code)
        if not _torch.is_module_level(one):
            scope = Scope(file, qualified_name(code))
            spaces.append(Space(scope, _torch.locals_of(one), loop_variables(code), one.f_lineno))
        if id(one.f_globals) not in globals_seen:
            globals_seen.add(id(one.f_globals))
            module = of_modules.get(id(one.f_globals))
            loops, line = (loop_variables(module.f_code), module.f_lineno) if module is not None else (frozenset(), 0)
            spaces.append(Space(Scope(file, "<module>"), dict(one.f_globals), loops, line))
    return spaces


def _matches(tensor: torch.Tensor, wanted: Callable[[Any], bool]) -> bool:
    try:
        return wanted(tensor)
    except RuntimeError:
        return False


def _in_module(at: _Step, queue: deque[_Step]) -> Iterator[_Place]:
    module: nn.Module = at.value
    for iterator in (module.named_parameters, module.named_buffers):
        for name, tensor in iterator(remove_duplicate=False):
            yield _Place(at, tensor, False, name)
    around: dict[str, tuple[tuple[str, Any], ...]] = {}
    for name, inner in module.named_modules():
        prefix = f"{at.path}.{_torch.name_in_module(name)}".rstrip(".")
        # A module may list its inner ones by names of its own.
        outer = around.get(name.rpartition(".")[0], at.around) if name else at.around
        around[name] = (*outer, (prefix, inner))
        place = (at.scope, prefix, "object", around[name])
        for attribute, value in vars(inner).items():
            if attribute not in _MODULE_INTERNALS:
                queue.append(_Step(f"{prefix}.{attribute}", value, at.depth + 1, *place))


def kind_of(value: Any) -> str:
    """Return the kind of a container: of ``dict``, ``tuple``, ``list`` the exact one; ``deque``; else ``object``."""
    if isinstance(value, dict):
        return "defaultdict" if isinstance(value, defaultdict) else "dict"
    if isinstance(value, tuple):
        return "namedtuple" if hasattr(value, "_fields") else "tuple"
    if isinstance(value, deque):
        return "deque"
    return "list" if isinstance(value, list) else "object"


def parts_of(
    path: str, value: Any, but: Collection[type] = (), *, ends: int | None = None, of_tensors: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yield the items of a container, or the attributes of an object that may hold tensors, each with its path.

    Those of exactly the classes ``but`` are left out. Of a container of more than twice ``ends`` items, only as many at
    its beginning and at its end are looked at, and ``of_tensors`` where they are tensors.
    """
    if isinstance(value, dict):
        for _, (key, item) in _both_ends(dict.items(value), ends, of_tensors, lambda pair: torch.is_tensor(pair[1])):
            if isinstance(key, (str, int)) and type(item) not in but:
                shown = f'"{key}"' if isinstance(key, str) else str(key)
                yield f"{path}[{shown}]", item
    elif isinstance(value, (list, tuple, deque)):
        fields = getattr(value, "_fields", None)
        for position, item in _both_ends(value, ends, of_tensors):
            if type(item) not in but:
                yield (f"{path}.{fields[position]}" if fields else f"{path}[{position}]"), item
    elif _is_plain_object(value):
        for attribute, item in _attributes(value):
            if type(item) not in but:
                yield f"{path}.{attribute}", item


def _both_ends(
    items: Any, ends: int | None, of_tensors: int, is_tensor: Callable[[Any], bool] = torch.is_tensor
) -> list[tuple[int, Any]]:
    """Return the items of a container with their positions; of a longer one as :func:`parts_of` says."""
    length = len(items)
    if ends is None or length <= 2 * ends:
        return list(enumerate(list(items)))
    count = max(ends, of_tensors)
    first = enumerate([*itertools.islice(items, count)])
    last = enumerate([*itertools.islice(reversed(items), min(count, max(0, length - count)))])
    found = [(at, one) for at, one in first if at < ends or at >= length - ends or is_tensor(one)]
    at_end = [(length - 1 - at, one) for at, one in last if at < ends or is_tensor(one)]
    return [*found, *reversed(at_end)]


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes in the object's dictionary and in the slots of the user's own classes."""
    found = list(vars(value).items()) if hasattr(value, "__dict__") else []
    for owner in type(value).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        names = () if owner.__module__ in sys.stdlib_module_names else (slots,) if isinstance(slots, str) else slots
        for name in names:
            slot = owner.__dict__.get(name)
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):
                    found.append((name, slot.__get__(value)))
    return found


def _is_plain_object(value: Any) -> bool:
    """Whether an object is of the user's own classes or of libraries built on torch, not of tools that run programs."""
    package = type(value).__module__.partition(".")[0]
    return package in _HOLDS_ANYTHING or (package not in _HOLDS_NO_TENSOR and package not in sys.stdlib_module_names)


_HOLDS_ANYTHING = frozenset({"argparse", "collections", "contextlib", "functools", "queue", "types"})
"""Packages of Python whose objects hold values of the program."""
_HOLDS_NO_TENSOR = frozenset({"torch", "numpy", "tqdm", "rich", "gradsan", "_pytest", "pluggy", "xdist", "hypothesis"})
