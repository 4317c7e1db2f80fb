"""Script of a post-mortem analysis: inferred operations in order, and the base of the interpreter that adds them."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from gradsan.model import Frame
from gradsan.postmortem.lookup import Namespace, Value, memory_in, of_thing
from gradsan.record.stacks import is_user_file
from gradsan.source.tree import read_source

EVENTS_KEPT = 8_000

EventKind = Literal["op", "write", "step", "backward"]


class ScriptFullError(Exception):
    """The script is full; the analysis ends here."""


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """One event at ``frames`` (outermost first).

    ``name`` is the callee (``sigmoid``, ``add_``, ``SGD``). ``operands``, one by one, and ``result`` are the memory it
    reads and makes, ``written`` the memory it changes, ``leaves`` the real storages of parameters among the operands.
    ``bound`` are the names to which its statement binds the result. ``records`` says whether autograd would record it.
    ``retain_graph`` is that of a backward. ``expanded`` says that the written tensor was expanded.
    """

    kind: EventKind
    frames: tuple[Frame, ...]
    name: str
    operands: tuple[frozenset[int], ...] = ()
    result: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()
    leaves: frozenset[int] = frozenset()
    bound: tuple[str, ...] = ()
    records: bool = True
    retain_graph: bool = False
    expanded: bool = False

    @property
    def place(self) -> Frame | None:
        """The innermost frame of the user's own code."""
        return next((frame for frame in reversed(self.frames) if frame.is_user), None)


@dataclass(slots=True)
class Script:
    """The events, oldest first; at most ``EVENTS_KEPT``.

    ``repeated`` are the last iterations of loops, each as (first event, event after the last): a loop may run more
    often than it is analysed. ``known`` maps real storages to the numbers that the script has for them.
    """

    events: list[Event] = field(default_factory=list)
    repeated: list[tuple[int, int]] = field(default_factory=list)
    known: dict[int, frozenset[int]] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Append ``event``. Raises ScriptFullError where the script is full."""
        if len(self.events) >= EVENTS_KEPT:
            raise ScriptFullError
        self.events.append(event)

    def note_round(self, first: int) -> None:
        """Note that the events from ``first`` on were a loop's last iteration."""
        if len(self.events) > first:
            self.repeated.append((first, len(self.events)))


class Reader:
    """State of the analysis."""

    def __init__(self, script: Script) -> None:
        """Start with an empty analysis that writes into ``script``."""
        self.script = script
        self.frames: tuple[Frame, ...] = ()
        self.bound: tuple[str, ...] = ()
        self.yielded: list[Value] = []
        self.records = True
        self.statement: ast.stmt | None = None
        self.statements_read = 0
        self.fields: dict[int, dict[str, Value]] = {}
        self.modules: dict[int, Namespace] = {}
        self.expanded: frozenset[int] = frozenset()
        self._spaces: dict[tuple[str, str], Namespace] = {}

    def note(
        self,
        kind: EventKind,
        name: str,
        node: ast.expr | ast.stmt,
        space: Namespace,
        *,
        operands: list[Value],
        result: Value | None = None,
        written: Value | None = None,
        frame: Frame | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Append one event at ``node`` to the script; ``frame`` is a library's frame below it."""
        leaves = frozenset(memory for one in operands for memory in _leaves_in(one.thing))
        frames = (*self.frames, self.frame_at(node, space), *(() if frame is None else (frame,)))
        self.script.add(
            Event(
                kind,
                frames,
                name,
                tuple(memory_in(one) for one in operands),
                frozenset() if result is None else result.memory,
                frozenset() if written is None else written.memory,
                leaves,
                self.bound,
                self.records,
                retain_graph,
                written is not None and bool(written.memory & self.expanded),
            )
        )

    def frame_at(self, node: ast.AST, space: Namespace) -> Frame:
        """The frame of a function at the position of ``node``."""
        source = read_source(space.file)
        is_user = is_user_file(space.file)
        if source is None or not is_user:
            return Frame(space.file, getattr(node, "lineno", 1), space.qualname, is_user=is_user)
        span = source.span(node)
        return Frame(space.file, span.line, space.qualname, span.column, span.end_line, span.end_column, is_user)

    # ---- defined by the subclasses

    live_frames: dict[tuple[str, str], dict[str, Any]]

    def value(self, node: ast.expr, space: Namespace) -> Value:
        """See :class:`Expressions`."""
        raise NotImplementedError

    def iterated(self, value: Value) -> list[Value]:
        """See :class:`Expressions`."""
        raise NotImplementedError

    def called(
        self, function: Value, args: list[Value], keywords: dict[str, Value], node: ast.expr, space: Namespace
    ) -> Value:
        """See :class:`Calls`."""
        raise NotImplementedError

    def block(self, body: Any, space: Namespace) -> list[Value]:
        """See :class:`Walk`."""
        raise NotImplementedError


def _leaves_in(thing: Any) -> frozenset[int]:
    """The storages of a parameter, or of the parameters in a list."""
    if torch.is_tensor(thing):
        return of_thing(thing).memory if thing.is_leaf and thing.requires_grad else frozenset()
    if isinstance(thing, list | tuple):
        return frozenset(memory for one in thing if torch.is_tensor(one) for memory in _leaves_in(one))
    return frozenset()
