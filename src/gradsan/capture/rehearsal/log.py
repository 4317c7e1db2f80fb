"""The script and the graph as one log, which answers as the recorder's logs do."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import os
import traceback
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from gradsan import source
from gradsan.capture import _torch, variables
from gradsan.capture.backwards import PastBackward
from gradsan.capture.rehearsal.align import Made, places
from gradsan.capture.rehearsal.calls import definition_at
from gradsan.capture.rehearsal.script import EnoughError, Event, Script
from gradsan.capture.rehearsal.stems import fits, is_glue
from gradsan.capture.rehearsal.values import Namespace
from gradsan.capture.rehearsal.walk import Walk
from gradsan.capture.stacks import file_of, is_user_file
from gradsan.capture.steps import StepRecord
from gradsan.capture.values import tensor_of
from gradsan.model import Frame, Site
from gradsan.source.tree import read_source

_PAIRS = 300_000
_CELLS_READ = 40
_FEWEST_NODES, _MOST_NODES = 40, 240
_NEAR = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a Node may have been made: the event's number in the script, and how well both fit."""

    event: int
    score: float


class RehearsedLog:
    """What is asked of a recorder's core, its steps and its backwards, answered from the script.

    Clocks are places in the script, from 1. ``target`` is the real storage of the overwritten tensor, set by
    :meth:`look_for`.
    """

    running: tuple[Any, ...] = ()
    saves = 0
    writes_were_cut = False

    def __init__(
        self, script: Script, nodes: Sequence[Made], used: Frame | None, thread: int, ends_with_root: bool = False
    ) -> None:
        """Lay ``nodes`` beside ``script``, which is read as far as the backward at ``used``.

        ``ends_with_root`` tells that the last of ``nodes`` is the root of that backward.
        """
        self.events = _until(script.events, used)
        self._thread = thread
        self._nodes = list(nodes)
        found = places(self._nodes, self.events, _within(script.repeated, len(self.events)), ends_with_root)
        self._places = [[Place(column, score) for score, column in ways] for ways in found]
        self._row = {node.sequence: row for row, node in enumerate(self._nodes)}
        self._numbers = self._numbered()
        self._sites: dict[int, Site] = {}
        self._losses: dict[int, tuple[Any, ...]] = {}
        self.target = 0
        self._met: list[int] = []
        self._is_leaf = False
        self._later = 0
        self._shape: tuple[Any, ...] = (0, (), None, 1)
        self.clock = len(self.events) + 1
        self.write_count = sum(event.kind == "write" for event in self.events)
        self.backwards = sum(event.kind == "backward" for event in self.events)
        self.records = self._step_records()

    # ---- as a recorder's core

    @property
    def steps(self) -> int:
        """How many steps there were; of the records themselves see :attr:`records`."""
        return len(self.records)

    def stack(self) -> Site:
        """Nowhere: nothing was recorded."""
        return Site()

    def node_threads(self) -> tuple[int, ...]:
        """The one thread that is known of."""
        return (self._thread,)

    def nodes_near(self, sequence: int, thread: int) -> list[tuple[int, int, int, Site]]:
        """The operation that made the Node with this number, as a core tells it."""
        found, site = self.places_of(sequence), self._sites.get(sequence)
        if found:
            event = found[0].event
            return [(sequence, sequence + 1, event + 1, site or Site(self.events[event].frames))]
        return [] if site is None else [(sequence, sequence + 1, 0, site)]

    def ran_since(self, stack: Site, sequence: int, thread: int) -> bool:
        """Whether the operation at ``stack`` is met again, and made Nodes numbered ``sequence`` or later."""
        return any(
            event.frames == stack.frames and number > sequence
            for event, number in zip(self.events, self._numbers, strict=True)
            if event.kind in ("op", "write")
        )

    def writes(self) -> list[tuple[Any, ...]]:
        """The writes that may have met the overwritten tensor, as a core tells them."""
        found = [self._raw(number) for number in self._met if self.events[number].kind == "write"]
        if not self.target:
            found += [self._raw(number) for number, event in enumerate(self.events) if event.expanded]
        return found

    def _raw(self, number: int) -> tuple[Any, ...]:
        """One write as a core keeps it; of an expanded tensor only that is told of its shape."""
        event = self.events[number]
        offset, shape, strides, itemsize = (0, (2,), (0,), 1) if event.expanded else self._shape
        kind = "out" if not event.name.endswith("_") else "setitem" if event.name == "__setitem__" else "inplace"
        is_parameter = self._is_leaf and not event.records
        return (
            *(number + 1 + self._later, self.target, None, event.name, kind, offset, shape, strides, itemsize, None),
            *(Site(event.frames), self._numbers[number], event.records, is_parameter, self._steps_before(number)),
        )

    # ---- as a recorder's backwards

    def before_in_thread(self, clock: int) -> list[PastBackward]:
        """The backward calls of the script before the one that failed, oldest first."""
        return [
            PastBackward(
                number + 1,
                Site(event.frames),
                self._thread,
                event.retain_graph,
                "backward",
                self._numbers[number],
                self._numbers[number],
                self._steps_before(number),
                0,
                self._losses.get(number, ()),
            )
            for number, event in enumerate(self.events[:-1])
            if event.kind == "backward"
        ]

    # ---- what only this log is asked

    def places_of(self, sequence: int) -> list[Place]:
        """Where the Node with this number may have been made: each line once, best first."""
        row = self._row.get(sequence)
        if row is None:
            return []
        found: dict[tuple[Any, ...], Place] = {}
        for place in self._places[row]:
            frame = self.events[place.event].place
            key = (None,) if frame is None else (frame.file, frame.line)
            known = found.get(key)
            if known is None:
                found[key] = place
        return list(found.values())

    def know_place(self, sequence: int, site: Site) -> None:
        """Take ``site`` for the place where the Node with this number was made: anomaly mode has recorded it."""
        self._sites[sequence] = site
        own, row = site.user_frame, self._row.get(sequence)
        if own is not None and row is not None:
            places = [(self.events[one.event].place, one) for one in self._places[row]]
            self._places[row] = [
                one for place, one in places if place is not None and (place.file, place.line) == (own.file, own.line)
            ]

    def know_losses(self, frame: Any, roots: Sequence[Any]) -> None:
        """Find the losses of earlier backward calls among the live variables of ``frame``.

        ``roots`` are those of the backward that failed: a name that holds them now held another loss before.
        """
        for number, event in enumerate(self.events[:-1]):
            name = source.method_receiver(event.place) if event.kind == "backward" and event.place is not None else None
            loss = None if name is None or frame is None else tensor_of(frame, name)
            if loss is not None and loss.grad_fn is not None and loss.grad_fn not in roots:
                self._losses[number] = (functools.partial(_itself, loss),)

    def rivals(self, sequence: int) -> list[Place]:
        """Other lines that fit the Node with this number nearly as well as the best one."""
        found = self.places_of(sequence)
        return [one for one in found[1:] if one.score > found[0].score - _NEAR]

    def look_for(
        self,
        storage: int,
        sequence: int | None,
        is_output: bool,
        is_leaf: bool,
        shape: Any,
        maker: int | None = None,
        told: str | None = None,
    ) -> None:
        """Find what may have written a tensor: steps and writes after its save, else any at all.

        What stands for the tensor is its ``storage`` where the script knows a write to that, else (unless it
        ``is_leaf``, a parameter) the operands or the result of the operation that made the Node numbered ``sequence``.
        ``shape`` is the region of its base. ``maker`` is the number of the tensor's own Node: an operation in place
        that autograd recorded has made itself that. ``told`` is what PyTorch calls that Node's operation.
        """
        self.target, self._shape, self._is_leaf = storage, shape, is_leaf
        place = next(iter(self.places_of(sequence)), None) if sequence is not None else None
        saved_at = -1 if place is None else place.event
        tiers = [frozenset((storage,))]
        if place is not None and not is_leaf:
            event = self.events[place.event]
            tiers.append((event.result if is_output else frozenset().union(*event.operands)) - event.leaves)
        tiers += [
            self.events[one.event].written
            for one in (self.places_of(maker)[:1] if maker is not None else [])
            if self.events[one.event].kind == "write"
        ]
        tiers += [event.written for event in self.events if told and event.kind == "write" and fits(event.name, told)]
        for memory in tiers:
            met = [number for number, event in enumerate(self.events) if event.written & memory]
            after = [number for number in met if number > saved_at]
            if after or met:
                self._met = after or met
                # The loop went round more often than it was read: what stands before the save came after it, too.
                self._later = 0 if after else len(self.events)
                self.clock += self._later
                break
        self.records = [record for record in self.records if record.clock - 1 in self._met]
        for record in self.records:
            record.storages = array("q", {*record.storages, storage})
            count = len(record.storages)
            record.before, record.after = array("q", [-1] * count), array("q", [-2] * count)
            record.clock += self._later
            record.end = record.clock

    def _numbered(self) -> list[int]:
        """For each event the number that the next Node would have got."""
        highest = min(self._row, default=0)
        made: dict[int, int] = {}
        surely = max((found[0].score for found in self._places if found), default=0.0) - _NEAR
        for row, found in enumerate(self._places):
            if found and found[0].score >= surely and not is_glue(self._nodes[row].name):
                made[found[0].event] = max(made.get(found[0].event, 0), self._nodes[row].sequence + 1)
        numbers = []
        for number in range(len(self.events)):
            highest = max(highest, made.get(number, 0))
            numbers.append(highest)
        return numbers

    def _steps_before(self, number: int) -> int:
        return sum(event.kind == "step" for event in self.events[:number])

    def _step_records(self) -> list[StepRecord]:
        found: list[StepRecord] = []
        for number, event in enumerate(self.events):
            if event.kind == "step":
                storages = array("q", sorted(event.written))
                # Versions that fit none: only that each was written is known.
                before, after = array("q", [-1] * len(storages)), array("q", [-2] * len(storages))
                found.append(
                    StepRecord(
                        number + 1,
                        len(found),
                        event.name,
                        Site(event.frames),
                        self._numbers[number],
                        storages,
                        before,
                        after,
                        number + 1,
                    )
                )
        return found


class RehearsedSteps:
    """What is asked of a recorder's :class:`gradsan.capture.steps.Steps`."""

    def __init__(self, log: RehearsedLog) -> None:
        """Tell the steps of ``log``."""
        self.steps = log.records

    def current_backward(self) -> None:
        """None: no backward is running."""


def rehearse(frames: Sequence[FrameType], used: Frame | None, nodes: Sequence[Any], thread: int) -> RehearsedLog:
    """The log of a program that failed with ``frames`` on its stack (outermost first), at the line ``used``.

    ``nodes`` are the Nodes of the graph, any order; the one that is asked about first. What cannot be read is left out.
    """
    script = Script()
    own = [frame for frame in frames if is_user_file(frame.f_code.co_filename)]
    try:
        _read(own, used, script)
    except Exception:
        if os.environ.get("GRADSAN_DEBUG"):
            traceback.print_exc()
    most = max(_FEWEST_NODES, min(_MOST_NODES, _PAIRS // max(1, len(script.events))))
    described = _described(nodes, own[-1] if own else None, most)
    youngest = max((number for node in nodes if (number := _torch.node_sequence(node)) is not None), default=0)
    ends_with_root = bool(described) and described[-1].sequence == youngest
    return RehearsedLog(script, described, used, thread, ends_with_root)


def _read(own: Sequence[FrameType], used: Frame | None, script: Script) -> None:
    """Read from the outermost frame; where that does not lead to the failing line, from the next one."""
    walk = Walk(script)
    walk.live_frames = {_key(frame): frame.f_locals for frame in own}
    cells = [place for place, frame in enumerate(own) if source.is_cell(file_of(frame.f_code))]
    if cells:
        # What runs a notebook is no part of it, but the cells that ran before are.
        own = own[cells[0] :]
        with contextlib.suppress(EnoughError):
            _read_cells_before(walk, own[0])
    for depth, frame in enumerate(own):
        before = len(script.events)
        walk.statements_read = 0
        with contextlib.suppress(EnoughError):
            _read_frame(walk, frame)
        if _last_use(script.events, used) >= before:
            return
        if depth < len(own) - 1:
            del script.events[before:]


def _read_cells_before(walk: Walk, frame: FrameType) -> None:
    """Read the cells that were run before the one of ``frame``, in the order in which Python came to know them."""
    files = [file for file in linecache.cache if source.is_cell(file)]
    last = file_of(frame.f_code)
    for file in files[: files.index(last) if last in files else len(files)][-_CELLS_READ:]:
        text = read_source(file)
        if text is not None:
            module = walk.module_of(frame.f_globals, last)
            walk.block(text.module.body, Namespace(file, "<module>", module.names, module.live, None, module))


def _read_frame(walk: Walk, frame: FrameType) -> None:
    code = frame.f_code
    text = read_source(file_of(code))
    if text is None:
        return
    walk.frames, walk.bound, walk.records = (), (), True
    module = walk.module_of(frame.f_globals, file_of(code))
    if frame.f_locals is frame.f_globals:
        module.file = file_of(code)
        walk.block(text.module.body, module)
        return
    definition = definition_at(text, code.co_firstlineno, code.co_name)
    if definition is None:
        return
    space = Namespace(file_of(code), _key(frame)[1], {}, frame.f_locals, None, module)
    body = definition.body
    if isinstance(body, ast.expr):
        walk.value(body, space)
    else:
        walk.block(body, space)


def _within(rounds: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    return [(first, min(last, count)) for first, last in rounds if first < count]


def _itself(one: Any) -> Any:
    return one


def _key(frame: FrameType) -> tuple[str, str]:
    code = frame.f_code
    return file_of(code), getattr(code, "co_qualname", code.co_name)


def _last_use(events: Sequence[Event], used: Frame | None) -> int:
    """The number of the last backward at the line ``used``, -1 where there is none."""
    found = -1
    for number, event in enumerate(events):
        place = event.place
        if event.kind == "backward" and used is not None and place is not None:
            last = used.end_line or used.line
            if place.file == used.file and used.line <= (place.end_line or place.line) and place.line <= last:
                found = number
    return found


def _until(events: list[Event], used: Frame | None) -> list[Event]:
    last = _last_use(events, used)
    return events if last < 0 else events[: last + 1]


def _described(nodes: Sequence[Any], frame: FrameType | None, most: int) -> list[Made]:
    """What is known of the ``most`` Nodes around the first of ``nodes``, by their numbers."""
    numbered = {number: node for node in nodes if (number := _torch.node_sequence(node)) is not None}
    if not numbered:
        return []
    centre = _torch.node_sequence(nodes[0])
    order = sorted(numbered)
    middle = order.index(centre) if centre in numbered else len(order) - 1
    last = min(len(order), middle + most // 2)
    near = order[max(0, last - most) : last]
    holders: dict[Any, set[tuple[str, str, str]]] = {}
    if frame is not None:
        for found in variables.search(frame, lambda tensor: tensor.grad_fn is not None):
            scope = found.scope
            holders.setdefault(found.tensor.grad_fn, set()).add((scope.file, scope.function, found.path))
    return [
        Made(node.name(), number, _leaves_of(node), frozenset(holders.get(node, ())))
        for number in near
        for node in (numbered[number],)
    ]


def _leaves_of(node: Any) -> frozenset[int]:
    """The storages of the parameters that went into a Node, themselves or as a view."""
    found: set[int] = set()
    for child, _ in node.next_functions:
        if child is None:
            continue
        inner = [child]
        if is_glue(child.name()):
            inner = [one for one, _ in child.next_functions if one is not None]
        for one in inner:
            leaf = getattr(one, "variable", None)
            if leaf is not None:
                found.add(_torch.storage_identity(leaf))
    return frozenset(found)
