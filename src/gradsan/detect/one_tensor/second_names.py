"""Tensors changed in place while a second name still refers to them: ``noisy = clean; noisy += noise``.

An assignment binds a name to the same tensor, a list keeps the same tensor, and so does the parameter of a function;
all are often taken for copies. Checked at the 1st, 2nd … 32nd backward of a line: the program's own in-place
writes since the round before, whose source binds another name to the written tensor and then reads both
(``loss(net(noisy), clean)``), adds it to a list in each round of a loop that never rebinds it
(``traj.append(pos); pos += step``), writes an element of ``[tensor] * n``, or has it as an argument that is returned,
or was passed to a ``forward``, and that the caller reads after the call, or as two arguments, the other of which the
function reads; or fills memory of its own and returns it,
again and again, while the caller keeps an earlier result by another name; or adds to the tensor that is a default
value of its function, call after call. Two parameters of one optimizer over one
memory, each with a gradient of its own, are checked at its first step.

Row ``parameters_are_one``: roles ``parameter`` (``name``; ``values``: ``shape``, ``dtype``, ``device``, ``others``, the
number of further pairs, ``is_linear``, whether two updates are that of the summed gradient) and ``second`` (``name``).
Rows: ``second_name_changed``, ``slices_overlap``, ``list_of_one``, ``argument_changed``, ``arguments_are_one``,
``results_are_one``, ``default_changed``. Roles: ``bound`` (where the second name was bound, the list got it, or the
function was called or defined; ``name`` of the function), ``written`` (the write; ``name``; ``op``; ``values``:
``shape``, ``dtype``, ``device``, ``is_result``, whether the second name refers to the result of an in-place method),
``read`` (``name``).
"""

from __future__ import annotations

import collections
import linecache
import re
import sys
from collections.abc import Hashable, Iterator
from dataclasses import replace
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch

from gradsan import _torch, source
from gradsan.detect.changed_values import ChangedValues
from gradsan.detect.exports import Exports
from gradsan.detect.meaning.callers_values import given_to, given_twice
from gradsan.graph import naming, walk
from gradsan.graph.live import value_of
from gradsan.heuristics import is_named_in_place
from gradsan.model import Clue, Failure, Frame, Site
from gradsan.record.detector import Finder, Run
from gradsan.record.ledger import QUIET_KINDS, as_write, site_that_made
from gradsan.record.log import Core, RawStack, RawWrite, backward_calls, logged_writes
from gradsan.record.stacks import is_of_program, is_user_file, symbolise
from gradsan.record.steps import RawBackward, read_backward

NAMED, LISTED, GIVEN = "second_name_changed", "list_of_one", "argument_changed"
RETURNED, PARAMETERS, DEFAULT = "results_are_one", "parameters_are_one", "default_changed"
TWICE = "arguments_are_one"
_ROUNDS = (1, 2, 4, 8, 16, 32)
_STACKS, _LINES, _NODES = 256, 2_000, 2_000
_ADDS_UP = frozenset({"add_", "sub_", "__iadd__", "__isub__", "index_add_", "scatter_add_", "logical_or_", "__ior__"})
_SECOND = re.compile(
    r"[\w\]]\s*=\s*\w+(\[[^]]*\])?(\.\w+\([^()]*\))*\s*(,|#|$)|=\s*\w+\.\w+_\(|\+=\s*\[|\.(append|appendleft|insert)\("
    r"|=\s*(\w+\.)?(copy|replace|dict|list)\(|=\s*\{\s*\*\*"
)


class SecondNames(Finder):
    """Reads the source of writes at new stacks; findings go to ``found``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._values = run.get(ChangedValues)
        self._seen, self._first = self._notes(set[Hashable]()), self._notes(set[Hashable]())
        self._read_to = 0
        self._waiting: list[tuple[Any, Failure]] = []

    def forget(self) -> None:
        super().forget()
        self._read_to = self._core.clock
        self._wait([])

    @_torch.hushed()
    def before_round(self, entry: RawBackward, rounds: int) -> None:
        if rounds not in _ROUNDS or len(self._seen) > _STACKS or _torch.is_compiling():
            return
        by_stack: dict[Any, list[RawWrite]] = collections.defaultdict(list)
        for raw in logged_writes(self._core, self._read_to):
            self._read_to = max(self._read_to, raw.clock)
            if raw.stack not in self._seen and raw.kind not in QUIET_KINDS and raw.storage:
                by_stack[raw.stack].append(raw)
        found = [(stack, one) for stack, raws in by_stack.items() for one in self._judge(entry, raws)]
        # In the first round there is no earlier result yet.
        self._seen.update((by_stack.keys() & self._first) | {stack for stack, _ in found})
        self._first |= by_stack.keys()
        self._wait(found)

    @_torch.hushed()
    def first_step(self, optimizer: Any) -> None:
        """Report two parameters with gradients of their own that are one memory, at an optimizer's first step."""
        known: dict[tuple[int, int, int], Any] = {}
        pairs: list[tuple[Any, Any]] = []
        for one in _torch.parameters_of(optimizer):
            storage = _torch.storage_or_none(one)
            if storage and one.grad is not None and one.numel():
                first = known.setdefault((storage, int(one.storage_offset()), one.numel()), one)
                if first is not one:
                    pairs.append((first, one))
        wanted = set(map(id, pairs[0] if pairs else ()))
        found = list(naming.find(sys._getframe(1), lambda one: id(one) in wanted)) if pairs else []
        paths = {id(one.tensor): one.path for one in sorted(found, key=lambda one: one.origin == "module")}
        if len(paths) == len(wanted) and pairs:
            is_linear = type(optimizer) is torch.optim.SGD and not any(
                group["weight_decay"] for group in optimizer.param_groups
            )
            values = {**_torch.facts_of(pairs[0][0]), "others": len(pairs) - 1, "is_linear": is_linear}
            names = [paths[id(one)] for one in pairs[0]]
            clues = (Clue("parameter", name=names[0], values=values), Clue("second", name=names[1]))
            self._found(Failure(PARAMETERS, "", "", symbolise(self._core.stack()), clues, raised=False))

    def _wait(self, found: list[tuple[Any, Failure]]) -> None:
        """Keep findings until this backward has ended: if it fails, its own diagnosis reports the write."""
        self._waiting = found
        self._listeners.call_after_backward(self.after_backward, bool(found))

    @_torch.hushed()
    def after_backward(self, entry: RawBackward) -> None:
        """Report the kept findings; as ``listeners.AfterBackward``."""
        found = self._waiting
        self._wait([])
        for stack, one in found:
            if not self._values.has_found(stack):
                self._found(one)

    def _judge(self, entry: RawBackward, raws: list[RawWrite]) -> Iterator[Failure]:
        last, stack = raws[-1], raws[0].stack
        if not is_of_program(stack):
            return
        found = self._second_name(raws, entry) if _may_have_second_name(stack) else None
        if last.is_parameter:
            # ``w = self.weight`` names a parameter to update it; only a difference of both shows that a copy was meant.
            found = found if found is not None and found.second.kind == "compared" else None
        else:
            found = found or self._default(last, entry) or _argument(last) or _twice(last) or _returned(last)
            if found is None and _is_written_again(raws):
                from gradsan.detect.one_tensor.lists_of_one import collected, repeated

                begun = max((one.clock for one in backward_calls(self._core) if one.clock < entry.clock), default=0)
                elements = collected(raws, sys._getframe(1))
                elements = elements or repeated([raw for raw in raws if raw.clock > begun], sys._getframe(1))
                found = None if elements is None else _Found(*elements)
        if found is None:
            return
        is_held = _is_held(found.second.name, last.storage, sys._getframe(1))
        # The source may show an argument where the function had made another tensor of it.
        is_open = found.second.kind in ("returned", "converted")  # a conversion may have copied
        if (is_open and not is_held) or (found.second.kind == "argument" and is_held is False):
            return
        tensors = naming.find(sys._getframe(1), lambda one: _torch.storage_or_none(one) == last.storage)
        held = next((one.tensor for one in tensors), None)
        facts = {"shape": last.shape, "dtype": "?", "device": "?"} if held is None else _torch.facts_of(held)
        values = {**facts, "is_result": found.second.kind == "result"}
        clues = (
            Clue("bound", found.call or at_line(found.written, found.frame, found.second.bound), name=found.function),
            Clue("written", found.written, name=found.name, op=last.op, values=values),
            Clue("read", at_line(found.written, found.frame, found.second.read), name=found.second.name),
        )
        yield Failure(_ROW_OF[found.second.kind], "", "", symbolise(entry.stack), clues, raised=False)

    def _second_name(self, raws: list[RawWrite], entry: RawBackward) -> _Found | None:
        written = symbolise(raws[0].stack)
        frame = written.user_frame
        name = None if frame is None else source.written_expression(frame, raws[0].op, ())
        second = None if frame is None or name is None else source.second_name(frame, name)
        if frame is not None and name is not None and second is None:
            second = source.shared_member(frame, name)
        if frame is not None and name is not None and second is None and _is_written_again(raws):
            second = source.kept_as_best(frame, name)
        if frame is None or name is None or second is None or (second.kind == "list" and not _is_written_again(raws)):
            return None
        if second.kind == "part":
            begun = max((one.clock for one in backward_calls(self._core) if one.clock < entry.clock), default=0)
            if not _starts_again([raw for raw in raws if raw.clock > begun]):
                return None
        # A number in a list, as a loss, is there to be shown.
        if second.name.endswith("]") and not raws[0].shape:
            return None
        return _Found(written, name, frame, second)

    def _default(self, raw: RawWrite, entry: RawBackward) -> _Found | None:
        """Return the default of an argument that each call has added to, none has filled anew, and the loss reads.

        A function may count its calls that way, keep a history of what it printed, or running statistics.
        """
        written = symbolise(raw.stack)
        code = next((one for one in raw.stack.codes if is_user_file(one.co_filename)), None)
        own = next((one for one in reversed(written.frames) if one.is_user), None)
        lines = {} if own is None or raw.op not in _ADDS_UP else source.computed_defaults(own)
        held = _defaults_of(code, sys._getframe(1)) if lines else {}
        tensors = {name: one for name, one in held.items() if name in lines and type(one) in _torch.PLAIN_TENSORS}
        name = next((name for name, one in tensors.items() if _torch.storage_or_none(one) == raw.storage), None)
        if own is None or name is None:
            return None
        raws = [one for one in logged_writes(self._core) if one.storage == raw.storage]
        calls = {one.clock for one in backward_calls(self._core) if raws[0].clock < one.clock < raw.clock}
        is_again = bool(calls) or (len(raws) > 1 and not source.is_in_loop(own))
        if (
            not is_again
            or any(one.op not in _ADDS_UP for one in raws)
            or source.is_running_state(own, name, frozenset(lines))
            or not self._is_in_loss(entry, written, own, name)
        ):
            return None
        return _Found(written, name, own, source.SecondName(name, "default", lines[name], own.line, None), own.function)

    def _is_in_loss(self, entry: RawBackward, written: Site, own: Frame, name: str) -> bool:
        """Whether Nodes of this backward were made where the function, or its caller, computes with ``name``."""
        lines, is_returned = source.lines_reading(own, name)
        places = {(own.file, line) for line in lines}
        at = written.frames.index(own)
        if is_returned and at:
            places.add((written.frames[at - 1].file, written.frames[at - 1].line))
        nodes = walk.engine_order(read_backward(entry).roots)[:_NODES] if places else []
        sites = (site_that_made(self._core, node, entry.thread) for node in nodes)
        return any((frame.file, frame.line) in places for site in sites if site is not None for frame in site.frames)


class _Found(NamedTuple):
    """The tensor ``written`` as ``name``, and its ``second`` name in the function at ``frame``."""

    written: Site
    name: str
    frame: Frame
    second: source.SecondName
    function: str | None = None
    call: Site | None = None


_ROW_OF = {
    **dict.fromkeys(("name", "compared", "result", "converted"), NAMED),
    **dict.fromkeys(("list", "part"), LISTED),
    "slice": "slices_overlap",
    "argument": GIVEN,
    "twice": TWICE,
    "returned": RETURNED,
    "default": DEFAULT,
}


def _defaults_of(code: Any, frame: FrameType | None) -> dict[str, Any]:
    """The tensors that are default values of the function with ``code``, by their arguments."""
    while frame is not None:
        spaces = (frame.f_globals, _torch.locals_of(frame)) if is_user_file(frame.f_code.co_filename) else ()
        values = [one for space in spaces for one in list(space.values())]
        values += [one for kind in values if isinstance(kind, type) for one in list(vars(kind).values())]
        for one in values:
            called = one.__func__ if isinstance(one, staticmethod | classmethod) else one
            if isinstance(called, FunctionType) and called.__code__ is code:
                names = code.co_varnames[: code.co_argcount]
                given = zip(reversed(names), reversed(called.__defaults__ or ()), strict=False)
                return {**dict(given), **(called.__kwdefaults__ or {})}
        frame = frame.f_back
    return {}


def _argument(raw: RawWrite) -> _Found | None:
    written = symbolise(raw.stack)
    for one in given_to(raw, written):
        own, caller = written.frames[one.position], written.frames[one.outer]
        is_returned = any(source.returns_argument(own, name) for name in (one.own, one.written))
        # A caller that names the argument a second time before the write takes that for a copy.
        is_taken_for_copy = is_returned and one.written != one.own
        may_be_second = one.is_forward or is_returned
        second = source.argument_read_later(caller, one.name, is_taken_for_copy) if may_be_second else None
        if second is not None:
            return _Found(written, one.own, caller, second, own.function)
    return None


def _twice(raw: RawWrite) -> _Found | None:
    """Return a tensor that is two arguments of the function that writes it."""
    written = symbolise(raw.stack)
    found = given_twice(raw, written)
    if found is None:
        return None
    position, outer, name, second = found
    own = written.frames[position]
    return _Found(written, name, own, second, own.function, Site(written.frames[: outer + 1]))


def _returned(raw: RawWrite) -> _Found | None:
    """Return a tensor that a function fills and returns, as it did before under another name."""
    written = symbolise(raw.stack)
    users = [at for at, frame in enumerate(written.frames) if frame.is_user]
    if len(users) < 2 or is_named_in_place(written.frames[users[-1]].function):
        return None
    own, caller = written.frames[users[-1]], written.frames[users[-2]]
    name = source.written_expression(own, raw.op, written.frames[users[-1] + 1 :])
    second = None if name is None or not source.returns_argument(own, name) else source.earlier_result(caller)
    return None if second is None or name is None else _Found(written, name, caller, second, own.function)


def _is_held(name: str, storage: int, frame: FrameType | None) -> bool | None:
    """Whether variables of that name in functions running at ``frame`` have that memory; None without such tensors."""
    found = None
    while frame is not None and not found:
        held = value_of(frame, name) if is_user_file(frame.f_code.co_filename) else None
        tensors = list(_torch.tensors_in(held, most=8))
        if tensors:
            found = any(_torch.storage_or_none(one) == storage for one in tensors)
        frame = frame.f_back
    return found


def _may_have_second_name(stack: RawStack) -> bool:
    """Whether the program's function at the top of ``stack`` has a line that binds a name to a name or fills a list."""
    code = stack.codes[0]
    first = code.co_firstlineno
    last = max((line for _, _, line in code.co_lines() if line is not None), default=first)
    lines = linecache.getlines(code.co_filename)[first - 1 : min(last, first + _LINES)]
    return any(map(_SECOND.search, lines))


def _is_written_again(raws: list[RawWrite]) -> bool:
    return len({raw.storage for raw in raws}) < len(raws)


def _starts_again(raws: list[RawWrite]) -> bool:
    """Whether these fill the same parts of one memory in turn, again and again, and do not stop after the last part.

    Each of several loops may fill all parts once.
    """
    parts = [(raw.storage, as_write(raw).region) for raw in raws]
    count = len(set(parts))
    is_cycle = all(one == before for one, before in zip(parts[count:], parts, strict=False))
    return len(parts) > count and is_cycle and (count == 1 or len(parts) % count > 0)


def at_line(site: Site, frame: Frame, line: int) -> Site:
    """Return the site of a line of the function of ``frame``."""
    if frame not in site.frames:
        return Site((frame,)) if line == frame.line else site
    if line == frame.line:
        return Site(site.frames[: site.frames.index(frame) + 1])
    frames = site.frames[: site.frames.index(frame)]
    return Site((*frames, replace(frame, line=line, column=None, end_line=None, end_column=None)))


class DetachedLeaves:
    """What ``detach`` gave of leaves: a second name that shows no other value until something writes it."""

    def __init__(self, run: Run) -> None:
        """Read later writes from the logs of ``run``."""
        self._core, self._steps = run.core, run.steps
        self._taken: dict[int, tuple[_torch.weak_tensor, int]] = {}

    def forget(self) -> None:
        """Drop all."""
        self._taken.clear()

    def note(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """Note the result of ``tensor.detach()`` if it is one."""
        if _torch.grad_fn_of(tensor) is None:
            self._taken[id(result)] = _torch.weak_tensor(result), self._core.clock

    def is_as_taken(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one that nothing has written since: a state that begins at a parameter's value."""
        known = self._taken.get(id(tensor))
        if known is None or known[0]() is not tensor:
            return False
        storage, steps = _torch.storage_or_none(tensor), (one for one in self._steps.steps if one.clock > known[1])
        written = {raw.storage for raw in logged_writes(self._core, known[1])}
        return storage not in written.union(*(one.storages for one in steps))


class Arrays:
    """NumPy arrays that are the memory of a tensor: ``anchor = p.detach().numpy()``, and tensors made of them."""

    def __init__(self, run: Run) -> None:
        """Read from the exports and the steps of ``run``."""
        self._exports, self._steps = run.get(Exports), run.steps

    def is_of(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether a tensor was made of an array over the other's memory, which a step has updated since."""
        if not self._exports.any or not one.is_cpu or not other.is_cpu or one.shape != other.shape:
            return False
        if _torch.memory_of(one) != _torch.memory_of(other) or one.storage_offset() != other.storage_offset():
            return False
        for storage in map(_torch.storage_or_none, (one, other)):
            export = self._exports.of(storage)
            taken = (record for record in self._steps.steps if export is not None and record.clock > export.taken > 0)
            if any(storage in record.storages for record in taken):
                return True
        return False


def facts_of_value(args: tuple[Any, ...], core: Core) -> dict[str, Any] | None:
    """Facts of the parameter that an operation reads, or of a value without a graph, such as ``p.detach()``."""
    leaf = next((one for one in args if type(one) is torch.nn.Parameter), None)
    if leaf is not None:
        return {**_torch.facts_of(leaf), "is_leaf": True}
    is_plain = bool(args) and type(args[0]) in _torch.PLAIN_TENSORS and not args[0].requires_grad
    return {**_torch.facts_of(args[0]), "is_leaf": False} if is_plain and is_of_program(core.stack(4)) else None
