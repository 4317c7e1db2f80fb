"""Log of a post-mortem analysis: script and graph with the interface of the recorder's logs."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.autograd.graph import Node

from gradsan import source
from gradsan.graph.live import tensor_of
from gradsan.model import Frame, Site
from gradsan.postmortem.align import Made, fits, is_view_node, places
from gradsan.postmortem.script import Event, Script
from gradsan.record.backwards import MadeByEngine, PastBackward
from gradsan.record.steps import StepRecord

_NEAR = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """A place where a Node may have been made: the event's number in the script, and how well both match."""

    event: int
    score: float


class ScriptLog:
    """A recorder's core, its steps and its backwards, answered from the script.

    Clocks are positions in the script, from 1. ``target`` is the real storage of the overwritten tensor, set by
    :meth:`look_for`.
    """

    running: tuple[Any, ...] = ()
    backward_log: tuple[Any, ...] = ()
    saves = 0

    def __init__(
        self,
        script: Script,
        nodes: Sequence[Made],
        used: Frame | None,
        thread: int,
        *,
        is_backward: bool = True,
        ends_with_root: bool = False,
    ) -> None:
        """Align ``nodes`` with ``script``, which ends at the backward (or the statement) at ``used``.

        ``ends_with_root`` says that the last of ``nodes`` is the root of that backward.
        """
        self.events = _until(script.events, used, is_backward)
        self._known = script.known
        self._thread = thread
        self._nodes = list(nodes)
        found = places(self._nodes, self.events, _within(script.repeated, len(self.events)), ends_with_root)
        self._places = [[Place(column, score) for score, column in ways] for ways in found]
        self._row = {node.sequence: row for row, node in enumerate(self._nodes)}
        self._numbers = self._numbered()
        self._sites: dict[int, Site] = {}
        self._losses: dict[int, tuple[Any, ...]] = {}
        self.target = 0
        self._seen: list[int] = []
        self._is_leaf = False
        self._moments: dict[int, int] = {}
        self._later = 0
        self._shape: tuple[Any, ...] = (0, (), None, 1)
        self.clock = len(self.events) + 1
        self.write_count = sum(event.kind == "write" for event in self.events)
        self.backwards = sum(event.kind == "backward" for event in self.events)
        self.records = self._step_records()

    # ---- interface of a recorder's core

    @property
    def steps(self) -> int:
        """The number of steps; see :attr:`records` for the records themselves."""
        return len(self.records)

    def stack(self) -> Site:
        """An empty site: no stack was recorded."""
        return Site()

    def node_threads(self) -> tuple[int, ...]:
        """The one known thread."""
        return (self._thread,)

    def nodes_near(self, sequence: int, thread: int) -> list[tuple[int, int, int, Site]]:
        """The operation that made the Node with this number, in a core's format."""
        found, site = self.places_of(sequence), self._sites.get(sequence)
        if found:
            event = found[0].event
            return [(sequence, sequence + 1, event + 1, site or Site(self.events[event].frames))]
        return [] if site is None else [(sequence, sequence + 1, 0, site)]

    def ran_since(self, stack: Site, sequence: int, thread: int) -> bool:
        """Whether the operation at ``stack`` occurs again, and made Nodes numbered ``sequence`` or later."""
        return any(
            event.frames == stack.frames and number > sequence
            for event, number in zip(self.events, self._numbers, strict=True)
            if event.kind in ("op", "write")
        )

    def lost_writes_after(self, clock: int) -> bool:
        """Whether writes are missing: never, a script has all of them."""
        return False

    def writes(self) -> list[tuple[Any, ...]]:
        """The writes that may have hit the overwritten tensor, in a core's format; all, where none is looked for."""
        if self.target:
            return [self._raw(number, self.target) for number in self._seen if self.events[number].kind == "write"]
        found = []
        for number, event in enumerate(self.events):
            if event.kind == "write":
                known = [storage for storage, one in self._known.items() if event.written & (one | {storage})]
                found += [self._raw(number, storage) for storage in known or [0]]
        return found

    def writes_after(self, clock: int) -> list[tuple[Any, ...]]:
        """The writes that are younger than ``clock``."""
        return [raw for raw in self.writes() if raw[0] > clock]

    def _raw(self, number: int, storage: int) -> tuple[Any, ...]:
        """One write in a core's format; the region of an expanded tensor only shows that it is expanded."""
        event = self.events[number]
        offset, shape, strides, itemsize = (0, (2,), (0,), 0) if event.expanded else self._shape
        kind = "out" if not event.name.endswith("_") else "setitem" if event.name == "__setitem__" else "inplace"
        is_parameter = self._is_leaf and not event.records
        # Versions are not known; below zero they only give the order.
        version = None if self.target else number - len(self.events)
        sequence = self._moments.get(number, self._numbers[number])
        return (
            *(number + 1 + self._later, storage, version, event.name, kind, offset, shape, strides, itemsize, None),
            *(Site(event.frames), sequence, event.records, is_parameter, self._steps_before(number)),
        )

    # ---- interface of a recorder's backwards

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

    def before(self, clock: int) -> list[PastBackward]:
        """The same: the script is read for one thread."""
        return self.before_in_thread(clock)

    # ---- interface of this log alone

    def places_of(self, sequence: int) -> list[Place]:
        """The places where the Node with this number may have been made: each line once, best first."""
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
        """Set ``site`` as the place where the Node with this number was made: anomaly mode has recorded it."""
        self._sites[sequence] = site
        own, row = site.user_frame, self._row.get(sequence)
        if own is not None and row is not None:
            places = [(self.events[one.event].place, one) for one in self._places[row]]
            self._places[row] = [
                one for place, one in places if place is not None and (place.file, place.line) == (own.file, own.line)
            ]

    def know_losses(self, frame: FrameType | None, roots: Sequence[Node]) -> None:
        """Find the losses of earlier backward calls among the live variables of ``frame``.

        ``roots`` are those of the backward that failed: a name that holds them now held another loss before.
        """
        for number, event in enumerate(self.events[:-1]):
            name = source.method_receiver(event.place) if event.kind == "backward" and event.place is not None else None
            loss = None if name is None or frame is None else tensor_of(frame, name)
            if loss is not None and loss.grad_fn is not None and loss.grad_fn not in roots:
                self._losses[number] = (functools.partial(_itself, loss),)

    def rivals(self, sequence: int) -> list[Place]:
        """Other lines that match the Node with this number nearly as well as the best one."""
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
        named: str | None = None,
    ) -> None:
        """Find the events that may have written a tensor: steps and writes after its save, else any at all.

        The tensor is identified by its ``storage`` where the script knows a write to that, else (unless it ``is_leaf``,
        a parameter) by the operands or the result of the operation that made the Node numbered ``sequence``. ``shape``
        is the region of its base. ``maker`` is the number of the tensor's own Node: an in-place operation that autograd
        recorded has made that itself. ``named`` is PyTorch's name for that Node's operation.
        """
        self.target, self._shape, self._is_leaf = storage, shape, is_leaf
        place = next(iter(self.places_of(sequence)), None) if sequence is not None else None
        saved_at = -1 if place is None else place.event
        tiers = [self._known.get(storage, frozenset()) | {storage}]
        if place is not None and not is_leaf:
            event = self.events[place.event]
            tiers.append((event.result if is_output else frozenset().union(*event.operands)) - event.leaves)
        tiers += [
            self.events[one.event].written
            for one in (self.places_of(maker)[:1] if maker is not None else [])
            if self.events[one.event].kind == "write"
        ]
        tiers += [event.written for event in self.events if named and event.kind == "write" and fits(event.name, named)]
        for memory in tiers:
            writing = [number for number, event in enumerate(self.events) if event.written & memory]
            after = [number for number in writing if number > saved_at]
            if after or writing:
                self._seen = after or writing
                # The loop ran more often than it was analysed: events before the save also came after it.
                self._later = 0 if after else len(self.events)
                self.clock += self._later
                break
        row = None if sequence is None else self._row.get(sequence)
        if row is not None:
            self._moments = {number: self._moment(number, row) for number in self._seen}
        self.records = [record for record in self.records if record.clock - 1 in self._seen]
        for record in self.records:
            record.sequence = self._moments.get(record.clock - 1, record.sequence)
            record.storages = array("q", {*record.storages, storage})
            count = len(record.storages)
            record.before, record.after = array("q", [-1] * count), array("q", [-2] * count)
            record.clock += self._later
            record.end = record.clock

    def _moment(self, write: int, row: int) -> int:
        """The number of the next Node when the event ``write`` happened first after the Node of ``row``.

        It is found on the path of the Nodes through the script, which may contain loops.
        """
        at = next(iter(self._places[row]), None)
        if at is None:
            return self._numbers[write]
        before, number, has_gap = at.event, self._nodes[row].sequence, False
        made = number
        for later in range(row + 1, len(self._nodes)):
            following = self._nodes[later].sequence
            has_gap, number = has_gap or following > number + 1, following
            if not self._places[later] or is_view_node(self._nodes[later].name):
                continue
            event = self._places[later][0].event
            # The same operation again, after others whose Nodes are not in this graph: another iteration.
            went_round = event < before or (event == before and has_gap)
            if (write > before or write < event) if went_round else before < write < event:
                return made + 1
            before, made, has_gap = event, following, False
        return max(self._numbers[write], number + 1)

    def _numbered(self) -> list[int]:
        """For each event the number that the next Node would have got."""
        highest = min(self._row, default=0)
        made: dict[int, int] = {}
        surely = max((found[0].score for found in self._places if found), default=0.0) - _NEAR
        for row, found in enumerate(self._places):
            if found and found[0].score >= surely and not is_view_node(self._nodes[row].name):
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
                # No version matches: it is only known that each was written.
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


class ScriptSteps:
    """A recorder's :class:`gradsan.record.steps.Steps`, answered from the script."""

    def __init__(self, log: ScriptLog) -> None:
        """Take the steps of ``log``."""
        self.steps = log.records
        self.made_by_engine = MadeByEngine()

    def current_backward(self) -> None:
        """None: no backward is running."""


def _within(rounds: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    return [(first, min(last, count)) for first, last in rounds if first < count]


def _itself(one: Any) -> Any:
    return one


def last_use(events: Sequence[Event], used: Frame | None, is_backward: bool) -> int:
    """The number of the last backward, or of the last event at all, at the line ``used``; -1 where there is none."""
    found = -1
    for number, event in enumerate(events):
        place = event.place
        fits_kind = event.kind == "backward" or not is_backward
        if fits_kind and used is not None and place is not None:
            last = used.end_line or used.line
            if place.file == used.file and used.line <= (place.end_line or place.line) and place.line <= last:
                found = number
    return found


def _until(events: list[Event], used: Frame | None, is_backward: bool) -> list[Event]:
    """The events up to the backward that failed, or before the failed statement."""
    last = last_use(events, used, is_backward)
    if last < 0:
        return events
    if is_backward:
        return events[: last + 1]
    while last > 0 and last_use(events[last - 1 : last], used, False) == 0:
        last -= 1
    return events[:last]
