"""The conflicts of custom Functions as plain data: a tensor kept on ``ctx``, an input written without mark_dirty."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradsan.capture import _torch, conflicts, naming
from gradsan.capture.noted import Noted, Overwritten
from gradsan.capture.stacks import definition_site, symbolise
from gradsan.capture.steps import BackwardRecord
from gradsan.model import Bridge, Conflict, Name, Save, Site

CONTEXT, UNMARKED = "context_attribute", "missing_mark_dirty"


class Kept(NamedTuple):
    """What a Function has left on ``ctx``: tensors by (attribute, note). ``code`` is that of its forward."""

    name: str
    code: Any
    stack: Any
    clock: int
    tensors: tuple[tuple[str, Noted], ...]
    number: int


@dataclass(slots=True, eq=False)
class Unmarked:
    """An input that a forward has overwritten and not marked dirty.

    ``edge`` and ``whole`` are the ends by which users of the input, and of the tensor it is a view of, hang on the
    graph; ``number`` is that of the Function's Node, ``rounds`` the backward calls in which it was looked at.
    """

    name: str
    code: Any
    parameter: str | None
    position: int
    stack: Any
    clock: int
    thread: int
    number: int
    edge: tuple[int, int]
    whole: tuple[int, int] | None
    weak: Any
    overwritten: Overwritten
    version: int
    rounds: list[int] = field(default_factory=list)


def of_kept(
    core: Any,
    steps: Any,
    backward: BackwardRecord,
    node: Any,
    kept: Kept,
    path: str,
    noted: Noted,
    overwritten: Overwritten,
) -> Conflict:
    """The conflict of a tensor that was kept as ``ctx.<path>`` and written since."""
    tensor = noted.weak()
    return Conflict(
        save=Save(
            clock=kept.clock,
            site=symbolise(kept.stack),
            tensor=overwritten.info,
            version=noted.version,
            node=node.name(),
            slot=path,
            sequence=kept.number,
            step=conflicts.steps_before(steps, kept.clock, core.steps),
        ),
        writes=overwritten.writes,
        use=conflicts.use_of(core, backward, overwritten.version),
        names=() if tensor is None else naming.names_of(tensor, sys._getframe(1)),
        unexplained=overwritten.unexplained,
        root_sequence=backward.root_sequence,
        raised=False,
        log_was_cut=core.lost_writes_after(kept.clock),
        way=CONTEXT,
        alias_site=overwritten.door,
        function_site=None if kept.code is None else definition_site(kept.code),
    )


def of_unmarked(core: Any, steps: Any, backward: BackwardRecord, unmarked: Unmarked, use: Any) -> Conflict:
    """The conflict of an input that a Function has overwritten and the Node ``use`` was given afterwards.

    ``save`` is where it was used again, ``alias_site`` the call of the Function, ``slot`` what forward calls it.
    """
    tensor = unmarked.weak()
    number = _torch.node_sequence(use) or 0
    near = [entry for entry in core.nodes_near(number, unmarked.thread) if entry[0] <= number < entry[1]]
    clock, site = (near[0][2], symbolise(near[0][3])) if near else (unmarked.clock, Site())
    names: tuple[Name, ...] = () if tensor is None else naming.names_of(tensor, sys._getframe(1))
    return Conflict(
        save=Save(
            clock=clock,
            site=site,
            tensor=unmarked.overwritten.info,
            version=unmarked.version,
            node=use.name(),
            slot=unmarked.parameter,
            sequence=number,
            step=conflicts.steps_before(steps, clock, core.steps),
        ),
        writes=unmarked.overwritten.writes,
        use=conflicts.use_of(core, backward, unmarked.overwritten.version),
        names=names,
        unexplained=unmarked.overwritten.unexplained,
        root_sequence=backward.root_sequence,
        bridge=Bridge(older=unmarked.name, younger=use.name()),
        raised=False,
        log_was_cut=core.lost_writes_after(clock),
        way=UNMARKED,
        alias_site=symbolise(unmarked.stack),
        function_site=None if unmarked.code is None else definition_site(unmarked.code),
    )
