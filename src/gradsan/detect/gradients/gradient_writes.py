"""Gradients that the program overwrites while backward runs, and other holders of such a gradient.

Autograd passes the same tensor to every branch that gets the same gradient (both sides of an addition). A write to
the gradient that a hook got changes the gradient of the other branch.

Another branch still needs it if the tensor has more references than without one; that count is
measured once (:func:`counts`), as it differs between kinds of hooks. Where torch does not give the
count, or only other tensors on the same memory could hold it, this stays undecided.

What backward was given as the gradient of an output is a tensor of the program's, which is passed on without a copy.
It is needed again if the function that called backward reads it later, or if a later backward is given it and nothing
has written it since.

Row: ``gradient_overwritten``. Roles: ``gradient`` (its name in the hook; ``op`` is the operation, ``site`` where;
``values``: ``shape``, ``dtype``, ``device``, ``shared``), ``branching`` (the operation that passes it to several;
``op`` is its Node), ``sibling`` (a live variable of the other branch), ``again`` (where the program's tensor is read
again; ``name``).

Each kind of hook is called by other code of torch's, which holds the gradient meanwhile, and differently so in each
version.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node

from gradsan import _torch, source
from gradsan.graph import naming, walk
from gradsan.model import Clue, Failure, Site
from gradsan.record.detector import Detector, Run
from gradsan.record.ledger import site_that_made
from gradsan.record.log import RawStack, logged_writes
from gradsan.record.recorder import FINDINGS_KEPT
from gradsan.record.stacks import is_own_file, is_user_file, symbolise
from gradsan.record.steps import RawBackward, as_backward, read_backward, running_here

ROW = "gradient_overwritten"
_ROOTS = 16
_BOUNDS = frozenset({"clamp_", "clamp_min_", "clamp_max_", "clip_", "nan_to_num_", "masked_fill_", "__setitem__"})
"""Operations that leave what is within their bounds as it was."""


class Given(NamedTuple):
    """A gradient that the engine gave to the program's code: its name there, and its count among the arguments."""

    path: str
    tensor: torch.Tensor
    kind: str
    times: int


class _Root(NamedTuple):
    """A tensor of the program's that a backward was given, ``name``, and that the line at ``stack`` wrote last."""

    tensor: _torch.weak_tensor
    name: str
    clock: int
    stack: RawStack


class GradientWrites(Detector):
    """Checks writes while a backward runs; findings go to ``found`` until it holds ``most``."""

    def __init__(self, run: Run) -> None:
        self._core, self._found, self._most = run.core, run.failures, FINDINGS_KEPT
        self._listeners = run.listeners
        self._known: dict[Any, int] = {}
        self._roots: dict[int, _Root] = {}

    def forget(self) -> None:
        self._known.clear()
        self._roots.clear()
        self._listeners.call_before_backward(self.before_backward, False)

    def on_write(self, tensor: torch.Tensor, op: str, stack: RawStack) -> None:
        """Check one write; as ``on_write`` of the core."""
        storage = _torch.storage_or_none(tensor)
        inside, engine = frames_inside()
        if not storage or (engine is None and self._is_elsewhere(inside)):
            return
        given = next(given_to_hook(inside, storage), None)
        if given is None or given.tensor.requires_grad:
            return
        roots = () if engine is None else _torch.gradients_given(engine)
        is_root = any(one is given.tensor for one in roots)
        held, alone = _torch.use_count(given.tensor), self._held_alone(given.kind)
        if held is not None and alone is not None and held < alone:
            return  # rebound: the engine does not hold this one
        is_shared = held is not None and alone is not None and held > alone + is_root
        self._keep(given, op, stack, is_shared or given.times > 1)
        if is_root and not is_shared and op not in _BOUNDS:
            self._note_root(given.tensor, engine, stack)

    def _note_root(self, tensor: torch.Tensor, engine: FrameType, stack: RawStack) -> None:
        """Report the write if the program reads the tensor again, by the name that it has where backward was called."""
        name, entry = naming.name_of(tensor, engine), running_here(self._core)
        if name is None or entry is None:
            return
        place = (site := symbolise(entry.stack)).user_frame
        line = None if place is None else source.read_behind(place, name)
        if place is not None and line is not None:
            at = Site((*site.frames[: site.frames.index(place)], replace(place, line=line, column=None)))
            self._tell_read(stack, Clue("again", at, name=name))
        elif len(self._roots) < _ROOTS:
            self._roots[id(tensor)] = _Root(_torch.weak_tensor(tensor), name, self._core.clock, stack)
            self._listeners.call_before_backward(self.before_backward)

    def before_backward(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report what is given to this backward as an earlier one has left it; as ``listeners.BeforeBackward``."""
        self._roots = {key: one for key, one in self._roots.items() if one.tensor() is not None}
        for tensor in _torch.tensors_in((args, kwargs)):
            root = self._roots.pop(id(tensor), None)
            if root is None or root.tensor() is not tensor:
                continue
            storage = _torch.storage_or_none(tensor)
            if not any(raw.storage == storage for raw in logged_writes(self._core, root.clock)):
                self._tell_read(root.stack, Clue("again", symbolise(entry.stack), name=root.name))
        self._listeners.call_before_backward(self.before_backward, bool(self._roots))

    def _tell_read(self, stack: RawStack, again: Clue) -> None:
        """Have the finding of a write say where its tensor is read again."""
        at = self._known.get(stack)
        known = self._found[at] if at is not None and at < len(self._found) else None
        if at is not None and known is not None and known.row == ROW and not known.values["shared"]:
            self._found[at] = replace(known, clues=(*known.clues, again), values={"shared": "yes"})

    def _held_alone(self, kind: str) -> int | None:
        core = self._core
        was_active, core.active = core.active, False
        try:
            return counts().get(kind)
        finally:
            core.active = was_active

    def _is_elsewhere(self, inside: list[Any]) -> bool:
        """Whether a Python thread wrote, not one of the engine's, where the hook is the outermost frame."""
        here = threading.get_ident()
        started = bool(inside) and inside[-1].f_code.co_filename == threading.__file__
        return started or any(one.thread == here for one in map(as_backward, self._core.running))

    def _keep(self, given: Given, op: str, stack: RawStack, is_shared: bool) -> None:
        found = self._found
        at = self._known.get(stack)
        known = found[at] if at is not None and at < len(found) and found[at].row == ROW else None
        if known is not None and at is not None and (not is_shared or known.values["shared"]):
            found[at] = replace(known, count=known.count + 1)
            return
        failure = self._failure(given, op, stack, is_shared)
        if failure is None:
            return
        if known is not None and at is not None:
            found[at] = replace(failure, count=known.count + 1)
        elif len(found) < self._most:
            self._known[stack] = len(found)
            found.append(failure)

    def _failure(self, given: Given, op: str, stack: RawStack, is_shared: bool) -> Failure | None:
        entry = running_here(self._core)
        if entry is None:
            return None
        tensor, node = given.tensor, _torch.current_node()
        values = {**_torch.facts_of(tensor), "kind": given.kind}
        clues = [Clue("gradient", symbolise(stack), name=given.path, op=op, values=values)]
        if is_shared and node is not None:
            clues += self._branching(read_backward(entry), node)
        shared = "yes" if is_shared else ""
        return Failure(ROW, "", "", symbolise(entry.stack), tuple(clues), {"shared": shared}, raised=False)

    def _branching(self, backward: Any, node: Node) -> Iterator[Clue]:
        """Yield the operation that passes one gradient to the branch of ``node`` and to another."""
        order = walk.engine_order(backward.roots)
        below = node
        for _ in order:
            above = {one for one in order for child, _ in one.next_functions if child is below}
            if len(above) != 1:
                return  # gradients from several Nodes are added up, in memory of its own
            (parent,) = above
            others = [child for child, _ in parent.next_functions if child is not None and child is not below]
            if not others:
                below = parent
                continue
            yield Clue("branching", site_that_made(self._core, parent, backward.thread), op=parent.name())
            name = _name_of(others[0], sys._getframe(1))
            if name is not None:
                yield Clue("sibling", name=name)
            return


def frames_inside() -> tuple[list[Any], Any]:
    """Return the frames that run inside a backward, innermost first, and the one that called the engine, if any.

    In a thread of the engine that is another thread's; where several wait for the engine, it is unknown.
    """
    inside: list[Any] = []
    innermost: Any = sys._getframe(2)
    frame = innermost
    while frame is not None and not _torch.is_engine_frame(frame):
        if not is_own_file(frame.f_code.co_filename):
            inside.append(frame)
        frame = frame.f_back
    callers = [] if frame is not None else _torch.callers_of_engine(innermost)
    return inside, callers[0] if len(callers) == 1 else frame


def given_to_hook(inside: list[Any], storage: int | None = None) -> Iterator[Given]:
    """Yield the tensors that the engine gave to the program's code, by the arguments of its outermost frame.

    With a ``storage``, those in that memory.
    """
    outer = list(reversed(inside))
    hooks = [frame for frame in outer if _torch.is_hook_frame(frame)]
    called = next((frame for frame in outer if is_user_file(frame.f_code.co_filename)), None)
    if called is None or outer[: outer.index(called)] != hooks[: outer.index(called)]:
        return
    arguments = list(_arguments(called))
    if storage is not None and storage not in map(_torch.storage_or_none, _torch.tensors_in(arguments)):
        return
    kind = kind_of([frame.f_code.co_filename for frame in hooks], [value for _, value in arguments])
    tensors = [one for position, (name, value) in enumerate(arguments) for one in _tensors_of(name, value, position)]
    if hooks:  # torch's frame holds what the engine gave: an argument that is bound anew is not among it
        held = _torch.locals_of(hooks[0])
        given = set(map(_torch.storage_or_none, _torch.tensors_in([held, vars(held["self"])])))
        tensors = [one for one in tensors if _torch.storage_or_none(one[1]) in given]
    for path, tensor, position, is_element in tensors:
        times = sum(other is tensor for _, other, _, _ in tensors)
        if storage is None or _torch.storage_or_none(tensor) == storage:
            yield Given(path, tensor, within(kind, position, is_element), times)


def _arguments(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a frame that are tensors, or tuples with tensors."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    values = _torch.locals_of(frame)
    for name in code.co_varnames[:count]:
        value = values.get(name)
        if _torch.is_tensor(value) or (isinstance(value, tuple) and any(map(_torch.is_tensor, value))):
            yield name, value


def _tensors_of(name: str, value: Any, position: int) -> Iterator[tuple[str, Any, int, bool]]:
    if _torch.is_tensor(value):
        yield name, value, position, False
        return
    for index, one in enumerate(value):
        if _torch.is_tensor(one):
            yield f"{name}[{index}]", one, position, True


def _name_of(node: Node, frame: FrameType) -> str | None:
    leaf = getattr(node, "variable", None)
    if leaf is None:
        return naming.name_of_output(node, frame)
    return naming.name_of(leaf, frame)


TENSOR, NODE, MODULE, FUNCTION = "hook", "node_hook", "module_hook", "function_backward"


def kind_of(files: list[str], arguments: list[Any]) -> str:
    """Return the kind of hook, by the files of torch's frames around it and by its arguments (tensors and tuples)."""
    if torch.autograd.function.__file__ in files:
        return FUNCTION
    tuples = sum(isinstance(one, tuple) for one in arguments)
    if files:
        return f"{MODULE}_{tuples}"
    return f"{NODE}_{tuples}" if tuples else TENSOR


def within(kind: str, position: int, is_element: bool) -> str:
    """Return the kind of one gradient of such a hook; ``position`` counts the arguments that have gradients."""
    return f"{kind}[{position}]" if is_element and kind != FUNCTION else kind


@functools.cache
def counts() -> dict[str, int]:
    """Return the reference count of an unshared gradient, by its kind; empty where torch has none. Nothing is saved."""
    found: dict[str, int] = {}
    with _torch.hushed(), torch.enable_grad():
        x = torch.ones(2, device="cpu", requires_grad=True)
        h: Any = x * 2
        module = _Doubling()
        _listen(found, h, module)
        for used in (h, module(x * 2), _doubled_by_function(found)(x * 2)):
            torch.autograd.grad((used * 2).sum(), x)
    return found


class _Doubling(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2


def _listen(found: dict[str, int], h: Any, module: nn.Module) -> None:
    def of_tensor(grad: Any) -> None:
        _note(found, TENSOR, (grad,))

    def before_node(outer: Any) -> None:
        _note(found, f"{NODE}_1[0]", outer)

    def after_node(inner: Any, outer: Any) -> None:
        _note(found, f"{NODE}_2[0]", inner)
        _note(found, f"{NODE}_2[1]", outer)

    def before_module(_: Any, outer: Any) -> None:
        _note(found, f"{MODULE}_1[0]", outer)

    def after_module(_: Any, inner: Any, outer: Any) -> None:
        _note(found, f"{MODULE}_2[0]", inner)
        _note(found, f"{MODULE}_2[1]", outer)

    h.register_hook(of_tensor)
    h.grad_fn.register_prehook(before_node)
    h.grad_fn.register_hook(after_node)
    module.register_full_backward_pre_hook(before_module)
    module.register_full_backward_hook(after_module)


def _doubled_by_function(found: dict[str, int]) -> Any:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            _note(found, FUNCTION, grads)
            return grads[0] * 2

    return Doubled.apply


def _note(found: dict[str, int], kind: str, given: tuple[Any, ...]) -> None:
    for one in given:
        count = None if one is None else _torch.use_count(one)
        if count is not None:
            found[kind] = count
