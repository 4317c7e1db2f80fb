"""Context of an error: topics of its clues, the tensors that several need, operands that a step has changed since."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Set
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.graph import naming
from gradsan.graph.live import is_loop_variable
from gradsan.model import Clue, Site
from gradsan.record.backwards import BackwardLog
from gradsan.record.ledger import call_that_made
from gradsan.record.log import Log, logged_writes
from gradsan.record.stacks import symbolise
from gradsan.record.steps import BackwardRecord, StepLog

_WRITES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Context:
    """The state that a topic of clues may read; it lives only while they are collected.

    ``site`` is where the error was raised, ``frames`` the frames of that stack, innermost last, with their variables;
    ``frame`` is the one of the user frame (None where the stack has none). ``values`` are the groups of the row's
    pattern. ``backward`` is the call that failed, ``inputs`` the leaves it was asked for; None and empty for an error
    raised at the statement. ``backwards`` is the recorder's log of earlier backward calls.
    """

    core: Log
    steps: StepLog
    backwards: BackwardLog | None
    error: BaseException
    row: str
    values: dict[str, str]
    site: Site
    frames: tuple[FrameType, ...]
    frame: FrameType | None
    backward: BackwardRecord | None = None
    inputs: tuple[Any, ...] = ()

    @property
    def is_at_statement(self) -> bool:
        """Whether a line of the user's raised it, outside of any backward or in code called by one."""
        if self.backward is None or self.frame is None:
            return self.backward is None
        entries = [at for at, frame in enumerate(self.frames) if _torch.enters_engine(frame)]
        return not entries or any(frame is self.frame for frame in self.frames[entries[-1] + 1 :])


def described(tensor: torch.Tensor, frame: FrameType, name: str | None = None) -> dict[str, object]:
    """Return the facts of ``tensor`` for the role ``target`` in :mod:`gradsan.errors.refused_writes`.

    ``name`` is its name in the statement.
    """
    is_passing = name is not None and is_loop_variable(frame, name)
    facts: dict[str, object] = {**_torch.facts_of(tensor), "is_parameter": isinstance(tensor, nn.Parameter)}
    if _torch.is_refused(tensor):
        return facts
    names = [found.text for found in naming.names_of(tensor, frame) if is_passing or found.origin == "module"]
    is_leaf = bool(tensor.is_leaf)
    return {
        **facts,
        "is_leaf": is_leaf,
        "requires_grad": bool(tensor.requires_grad),
        "has_grad": is_leaf and tensor.grad is not None,
        "known_as": names[0] if names and names[0] != name else "",
    }


def made_by(core: Log, tensor: torch.Tensor) -> Clue | None:
    """Return the call that made ``tensor``, as the role ``made``, if it has a Node."""
    if tensor is None or _torch.is_refused(tensor) or tensor.grad_fn is None:
        return None
    return of_node(core, tensor.grad_fn, "made")


def of_node(core: Log, node: Node, role: str) -> Clue | None:
    """Return the call that made an autograd Node; None where no watched call did."""
    made = call_that_made(core, _torch.node_sequence(node), threading.get_ident())
    return None if made is None else Clue(role, symbolise(made.stack), op=node.name(), values={"clock": made.clock})


def writes_to(core: Log, tensor: torch.Tensor) -> tuple[Clue, ...]:
    """Return the last logged writes to the memory of ``tensor``, at most three, oldest first: ``base_written``.

    Backwards in the log the versions of one memory fall; where they do not, another tensor had its address.
    """
    storage, version = _torch.storage_identity(tensor), tensor._version + 1
    found: list[Clue] = []
    for raw in reversed(logged_writes(core)):
        if raw.storage != storage or len(found) == _WRITES_SHOWN:
            continue
        if raw.version is None or raw.version >= version:
            break
        version = raw.version
        found.insert(0, Clue("base_written", symbolise(raw.stack), op=raw.op))
    return tuple(found)


_MOST = 50


def written_operands(nodes: Iterable[Node], moved: Set[int]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The names of the Nodes that computed with a leaf in ``moved``, or a view of it, and their operands.

    Of each operand: ``written``, ``asked`` (it has a gradient), ``constant``. Whether the Node has saved what was
    written depends on its operation and on which operands have a gradient.
    """
    found: dict[tuple[str, tuple[str, ...]], None] = {}
    for node in nodes:
        operands = tuple(_state(child, moved) for child, _ in node.next_functions)
        if "written" in operands:
            found[node.name(), operands] = None
            if len(found) == _MOST:
                break
    return tuple(found)


def _state(child: Any, moved: Set[int]) -> str:
    if child is None:
        return "constant"
    while _torch.makes_view(child) and len(child.next_functions) == 1 and child.next_functions[0][0] is not None:
        child = child.next_functions[0][0]
    leaf = getattr(child, "variable", None)
    return "written" if _torch.is_tensor(leaf) and _torch.storage_identity(leaf) in moved else "asked"
