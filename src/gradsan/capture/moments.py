"""The steps and backward calls still in the logs, as plain data: what a conflict's own events are told among."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradsan.capture.stacks import symbolise
from gradsan.model import Moment

if TYPE_CHECKING:
    from gradsan.capture.backwards import Backwards
    from gradsan.capture.steps import Steps


def moments(steps: Steps, backwards: Backwards, since: int, until: int) -> tuple[Moment, ...]:
    """Every step and backward call in the logs that began after ``since`` and before ``until``, by the clock.

    A step stands where it ended, as the writes of a step do; a backward call where it began.
    """
    found = [
        Moment(
            kind="step",
            clock=record.clock if record.end is None else record.end,
            step=record.number,
            op=f"{record.optimizer}.step",
            site=symbolise(record.stack),
        )
        for record in steps.steps
        if record.clock > since
    ]
    found += [
        Moment(kind="backward", clock=call.clock, step=call.step, op=call.via, site=symbolise(call.stack))
        for call in backwards.before(until)
        if call.clock > since
    ]
    return tuple(sorted(found, key=lambda moment: moment.clock))
