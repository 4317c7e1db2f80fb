"""Custom Functions: tensors kept on ``ctx`` without ``save_for_backward``, and inputs written without ``mark_dirty``.

Autograd checks the version of tensors given to ``save_for_backward``, and of nothing else on ``ctx``. And it
connects an input that a forward has overwritten to the Function only if ``mark_dirty`` names it: otherwise later uses
of the input read new values and differentiate as if they were the old ones. Tensors given to ``save_for_backward``
are saved when forward has returned: what forward writes after that call is saved with the new values. All are
noted when ``apply`` returns and checked before a backward. What a backward returns is measured in
``function_backwards.py``. Only programs with custom Functions of their own pay.

Row: ``saved_early``. Roles: ``applied`` (the call of the Function; ``name`` of it; ``values``: ``shape``, ``dtype``,
``device``, ``is_own``, whether forward has made it, ``is_dirty``, whether mark_dirty names it), ``written`` (the write;
``name``; ``op``), ``saved``.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import Node

from gradsan import _torch, source
from gradsan._collector import cached_by_class
from gradsan.detect.meaning.changed_again import SCALES, SHIFTS
from gradsan.detect.memory import Noted, Notes
from gradsan.graph import walk
from gradsan.model import Clue, Failure, Site
from gradsan.record.detector import Detector, KnownConflicts, Run
from gradsan.record.log import RawStack, logged_writes
from gradsan.record.patches import Patches
from gradsan.record.stacks import symbolise
from gradsan.record.steps import BackwardRecord, RawBackward, read_backward

if TYPE_CHECKING:
    from gradsan.detect.function_backwards import FunctionBackwards
    from gradsan.detect.function_conflicts import Kept, NotedArray, Unmarked
    from gradsan.detect.one_tensor.function_places import KeptForAllCalls

Guard = Callable[[Callable[[], object]], None]

_UNMARKED_KEPT = 256
_ROUNDS_KEPT = 64
_LOOKED_AT_ALWAYS = 64


EARLY = "saved_early"
_CHANGES = SCALES | SHIFTS


class Before(NamedTuple):
    """State when a Function is about to be applied: clock, number of its Node, and its arguments by position.

    ``versions`` are those of arguments with a graph, None for others; ``copies`` are the bytes of those in exported
    memory.
    """

    clock: int
    number: int
    versions: list[int | None]
    copies: dict[int, Any]


class Functions(Detector):
    """Tensors kept and written by the program's custom Functions; conflicts go to ``findings``."""

    part = "functions"
    is_hushed = False

    def __init__(self, run: Run) -> None:
        self._found, self._listeners, self._guard = run.report, run.listeners, run.guard
        self._core, self._steps, self._notes, self._findings = (
            run.core,
            run.steps,
            run.get(Notes),
            run.get(KnownConflicts),
        )
        self._early: weakref.WeakKeyDictionary[Any, tuple[Clue, ...]] = weakref.WeakKeyDictionary()
        self._early_seen: set[Any] = set()
        self._backwards: FunctionBackwards | None = None
        self._kept: weakref.WeakKeyDictionary[Any, Kept] = weakref.WeakKeyDictionary()
        self._arrays: list[NotedArray] = []
        """The arrays that the last call of a Function has kept, which the next one may write."""
        self._unmarked: deque[Unmarked] = deque(maxlen=_UNMARKED_KEPT)
        self._places: KeptForAllCalls | None = None
        self._forwards: set[CodeType] = set()

    def forget(self) -> None:
        self._unmarked.clear()
        self._places = None
        self._arrays.clear()
        self._early.clear()
        self._early_seen.clear()
        self._backwards = None

    def install(self, patches: Patches, guard: Guard) -> None:
        """Watch ``Function.apply`` until ``patches`` is undone."""
        core = self._core
        owner, name, original = _torch.function_apply()

        def applies(args: tuple[Any, ...], _: dict[str, Any]) -> Any:
            if _torch.is_compiling():
                return None
            self._forwards |= _forward_codes(args[0])
            return None if _is_torchs(args[0]) or not _torch.is_grad_enabled() else self._before(args[1:])

        def applied(before: Any, args: tuple[Any, ...], _: dict[str, Any], result: Any) -> None:
            guard(lambda: self._applied(args[0], result, args[1:], before))

        patches.set(owner, name, classmethod(core.listener(original, applies, applied)))

    def before_backward(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the tensors that Functions of the graph behind the outputs have kept and written."""
        if not self._kept and not self._unmarked and not self._early and not self._has_places():
            return
        backward = read_backward(entry)
        changed = [
            (node, kept, found) for node, kept in self._kept_behind(backward) for found in self._changed(node, kept)
        ]
        if not changed and not self._unmarked and not self._early and not self._has_places():
            return
        inputs = tuple(args[3]) if len(args) > 3 and args[3] else ()
        order = walk.engine_order(backward.roots, inputs, backward.via == "backward")
        for node in [one for one in order if one in self._early] if self._early else ():
            clues = self._early.pop(node)
            self._found(Failure(EARLY, "", "", symbolise(entry.stack), clues, raised=False))
        if self._places is not None:
            self._places.before_backward(entry, order)
        if changed or self._unmarked:
            self._report_conflicts(backward, order, changed)

    def _report_conflicts(self, backward: BackwardRecord, order: list[Node], changed: list[Any]) -> None:
        from gradsan.detect import function_conflicts

        core, steps = self._core, self._steps
        for node, kept, (path, noted, overwritten) in changed:
            if node in order:
                writer = overwritten.writes[0].site if overwritten.writes else None
                self._findings.add(
                    (kept.stack, path, writer),
                    functools.partial(
                        function_conflicts.of_kept, core, steps, backward, node, kept, path, noted, overwritten
                    ),
                )
        uses = _uses_of(self._unmarked, order)
        for unmarked in list(self._unmarked):
            use = _used_after(unmarked, uses)
            if use is not None:
                self._findings.add(
                    (unmarked.stack, unmarked.position, use.name()),
                    functools.partial(function_conflicts.of_unmarked, core, steps, backward, unmarked, use),
                )
            unmarked.rounds.append(backward.clock)
            if (use is not None and not backward.retain_graph) or len(unmarked.rounds) >= _ROUNDS_KEPT:
                self._unmarked.remove(unmarked)

    def is_in_forward(self, stack: RawStack) -> bool:
        """Whether the forward of a Function made a call, of a compiled one too; since torch 2.14 apply has no frame."""
        return not self._forwards.isdisjoint(stack.codes)

    def _has_places(self) -> bool:
        return self._places is not None and self._places.has_any

    def _kept_behind(self, backward: BackwardRecord) -> list[tuple[Any, Kept]]:
        """Return Functions that keep tensors; only those of the graph where it is small, which are usually few."""
        if len(self._kept) > _LOOKED_AT_ALWAYS:
            nodes = walk.nodes_behind(backward.roots, _LOOKED_AT_ALWAYS)
            if nodes is not None:
                return [(node, self._kept[node]) for node in nodes if node in self._kept]
        return list(self._kept.items())

    def _before(self, args: tuple[Any, ...]) -> Before | None:
        if self._arrays:
            self._arrays = [one for one in self._arrays if not one.is_changed]
        try:
            # Inlined, because it runs at every call of every custom Function.
            versions = [
                one._version if isinstance(one, torch.Tensor) and one.requires_grad and not one.is_leaf else None
                for one in args
            ]
            copies = {} if self._notes.is_quiet else self._copies(args, versions)
            return Before(self._core.clock, _torch.sequence_number(), versions, copies)
        except RuntimeError:  # no versions within a transform
            return None

    def _copies(self, args: tuple[Any, ...], versions: list[int | None]) -> dict[int, Any]:
        found = (
            (position, self._notes.copy_of(args[position])) for position, one in enumerate(versions) if one is not None
        )
        return {position: copy for position, copy in found if copy is not None}

    def _applied(self, kind: Any, result: Any, args: tuple[Any, ...], before: Before) -> None:
        is_quiet = self._notes.is_quiet
        for position, version in enumerate(before.versions):
            if version is not None and (args[position]._version != version or not is_quiet):
                self._look_for_unmarked(kind, position, args[position], before)
        node = _node_of(result)
        if node is None or _torch.function_class(node) is not kind:
            return
        if self._backwards is None:
            from gradsan.detect.function_backwards import FunctionBackwards

            self._backwards = FunctionBackwards(self._core, self._guard, self._found)
        self._backwards.applied(kind, node, args, result)
        self._look_for_early(kind, node, args, before)
        tensors = [one for one in (*args, *_all_of(result)) if isinstance(one, torch.Tensor)]
        if self._places is None:
            from gradsan.detect.one_tensor.function_places import KeptForAllCalls

            self._places = KeptForAllCalls(self._found)
        self._places.applied(kind, node, tensors, functools.partial(self._core.stack, 1))
        if self._has_places():
            self._listeners.call_before_backward(self.before_backward)
        # Most Functions keep nothing there.
        if not (attributes := getattr(node, "__dict__", None)):
            return
        from gradsan.detect import function_conflicts

        stack, core = self._core.stack(1), self._core
        for one in self._arrays:
            one.written = (core.tick(), stack) if one.is_changed else None
        alone = function_conflicts.held_alone(attributes)
        kept: list[tuple[str, Any]] = [
            (path, noted)
            for path, value in function_conflicts.kept_values(kind, attributes)
            if path not in alone
            and (noted := self._notes.note(value) if _torch.is_tensor(value) else function_conflicts.noted_array(value))
            is not None
        ]
        self._arrays = [noted for _, noted in kept if isinstance(noted, function_conflicts.NotedArray)]
        if kept:
            self._listeners.call_before_backward(self.before_backward)
            number, code = _torch.node_sequence(node) or 0, forward_code(kind)
            self._kept[node] = function_conflicts.Kept(kind.__name__, code, stack, core.tick(), tuple(kept), number)

    def _look_for_early(self, kind: Any, node: Node, args: tuple[Any, ...], before: Before) -> None:
        """Check whether forward has written what it had given to ``save_for_backward``: an input, or its own."""
        raws = logged_writes(self._core, before.clock)
        given = {_torch.storage_or_none(one): at for at, one in enumerate(args) if raws and torch.is_tensor(one)}
        for raw in raws:
            if raw.stack in self._early_seen or raw.stack.codes[0] not in _forward_codes(kind):
                continue
            self._early_seen.add(raw.stack)
            at = given.get(raw.storage)
            written = symbolise(raw.stack)
            frame = written.user_frame
            early = None if frame is None else source.saved_early(frame, raw.op)
            if frame is None or early is None:
                continue
            # What is filled may have been given before it had values.
            if at is None and not (raw.op in _CHANGES and source.is_made_in_round(frame, early.name)):
                continue
            values: dict[str, Any] = {"shape": raw.shape, "dtype": "?", "device": "?", "is_own": at is None}
            if at is not None:
                if before.versions[at] is None:
                    continue
                values |= {**_torch.facts_of(args[at]), "is_dirty": _is_connected(args[at], before.number)}
            place = replace(frame, line=early.line, column=None, end_line=None, end_column=None)
            self._early[node] = (
                Clue("applied", symbolise(self._core.stack(1)), name=kind.__name__, values=values),
                Clue("saved", Site((*written.frames[: written.frames.index(frame)], place)), name=early.name),
                Clue("written", written, name=early.name, op=raw.op),
            )
            self._listeners.call_before_backward(self.before_backward)
            return

    def _look_for_unmarked(self, kind: Any, position: int, tensor: torch.Tensor, before: Before) -> None:
        if _is_connected(tensor, before.number):
            return
        version = before.versions[position] or 0
        storage = _torch.storage_or_none(tensor)
        noted = Noted(_torch.weak_tensor(tensor), version, storage, before.clock, before.copies.get(position))
        overwritten = self._notes.changed(noted, tensor)
        if overwritten is None:
            return
        from gradsan.detect.function_conflicts import Unmarked

        base = tensor._base
        whole = None if base is None or base.grad_fn is None else _edge(base)
        self._listeners.call_before_backward(self.before_backward)
        self._unmarked.append(
            Unmarked(
                name=kind.__name__,
                code=forward_code(kind),
                parameter=_parameter(kind, position),
                position=position,
                stack=self._core.stack(1),
                clock=self._core.clock,
                thread=threading.get_ident(),
                owner=weakref.ref(threading.current_thread()),
                number=before.number,
                edge=_edge(tensor),
                whole=whole,
                weak=_torch.weak_tensor(tensor),
                overwritten=overwritten,
                version=version,
                rounds=[],
            )
        )

    def _changed(self, node: Node, kept: Kept) -> Iterator[tuple[str, Any, Any]]:
        from gradsan.detect.function_conflicts import NotedArray, holds

        for path, noted in kept.values:
            value = noted.weak()
            if value is None:
                continue
            if isinstance(noted, NotedArray):
                overwritten = noted.overwritten(value)
            else:
                overwritten = self._notes.changed(noted, value)
            if overwritten is not None and holds(vars(node), value):
                yield path, noted, overwritten


def _all_of(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _node_of(result: Any) -> Any:
    for one in _all_of(result):
        if isinstance(one, torch.Tensor) and one.requires_grad and one.grad_fn is not None:
            return one.grad_fn
    return None


@cached_by_class
def _is_torchs(kind: Any) -> bool:
    """Whether a Function is PyTorch's own, which has its own checks (compiled functions, checkpoint, hooks)."""
    return str(kind.__module__).partition(".")[0] == "torch"


def _is_connected(tensor: torch.Tensor, first: int) -> bool:
    """Whether the history of a tensor was replaced since the Node numbered ``first``: it was marked dirty."""
    owner = tensor if tensor._base is None else tensor._base
    node = owner.grad_fn
    number = _torch.node_sequence(node)
    return number is not None and number >= first


def _edge(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the end of the edges of later uses of the tensor: number of its Node, and of the output."""
    return _torch.node_sequence(tensor.grad_fn) or -1, tensor.output_nr


def _uses_of(unmarked: Iterable[Unmarked], order: list[Node]) -> dict[tuple[int, int], list[tuple[int, int, Node]]]:
    """Return the Nodes that use the graphs which the overwritten inputs had before, by edge: place, number, Node."""
    uses: dict[tuple[int, int], list[tuple[int, int, Node]]] = {
        edge: [] for one in unmarked for edge in (one.edge, one.whole) if edge is not None
    }
    for place, node in enumerate(reversed(order) if uses else ()):
        number = _torch.node_sequence(node)
        for child, output in node.next_functions if number is not None else ():
            end = None if child is None else _torch.node_sequence(child)
            if end is not None and number is not None and (end, output) in uses:
                uses[end, output].append((place, number, node))
    return uses


def _used_after(unmarked: Unmarked, uses: dict[tuple[int, int], list[tuple[int, int, Node]]]) -> Node | None:
    """Return the first Node made after the Function that uses the graph which the overwritten input had before.

    A base overwritten through a view counts as used by any Node but a further view, which may be of another part.
    """
    # The ident of an ended thread is reused by another, whose Nodes are numbered from 0 again.
    if unmarked.owner() is not threading.current_thread():
        return None
    own = uses[unmarked.edge]
    if unmarked.whole is not None and unmarked.whole != unmarked.edge:
        own = own + [use for use in uses[unmarked.whole] if not _torch.makes_view(use[2])]
    return min((use for use in own if use[1] > unmarked.number), key=lambda use: use[0], default=(0, 0, None))[2]


def _methods(kind: Any, name: str) -> Iterable[Any]:
    """Return the functions behind a method of a Function: itself, and those that its decorators wrap."""
    from gradsan.graph.bytecode import functions_of, getattr_static

    return functions_of(getattr_static(kind, name))


@cached_by_class
def _forward_codes(kind: Any) -> frozenset[CodeType]:
    return frozenset(one.__code__ for one in _methods(kind, "forward"))


def forward_code(kind: Any) -> CodeType | None:
    """Return the code of a Function's forward, if it is the program's own."""
    own = [one for one in _methods(kind, "forward") if one.__module__.partition(".")[0] != "torch"]
    return own[-1].__code__ if own else None


def _parameter(kind: Any, position: int) -> str | None:
    """Return the name that the forward of a Function gives its argument at ``position``."""
    for function in _methods(kind, "forward"):
        code = function.__code__
        names = code.co_varnames[: code.co_argcount]
        # With a setup_context of the program's own, forward does not take ctx.
        is_split = any(one.__module__.partition(".")[0] != "torch" for one in _methods(kind, "setup_context"))
        if position + 1 - is_split < len(names):
            return str(names[position + 1 - is_split])
    return None
