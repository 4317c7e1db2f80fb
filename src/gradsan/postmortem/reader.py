"""Reader's position in a program, and the operations it adds to the script."""

from __future__ import annotations

import ast
from typing import Any

import torch

from gradsan.model import Frame
from gradsan.postmortem.script import Event, EventKind, Script
from gradsan.postmortem.values import Namespace, Value, memory_in, of_thing
from gradsan.record.stacks import is_user_file
from gradsan.source.tree import read_source


class Reader:
    """Keeps where reading stands."""

    def __init__(self, script: Script) -> None:
        """Begin an empty reading into ``script``."""
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
        """Put one event at ``node`` into the script; ``frame`` is a library's frame below it."""
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
        """The frame of a function that stands at ``node``."""
        source = read_source(space.file)
        is_user = is_user_file(space.file)
        if source is None or not is_user:
            return Frame(space.file, getattr(node, "lineno", 1), space.qualname, is_user=is_user)
        span = source.span(node)
        return Frame(space.file, span.line, space.qualname, span.column, span.end_line, span.end_column, is_user)

    # ---- given by the classes that build on this one

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
