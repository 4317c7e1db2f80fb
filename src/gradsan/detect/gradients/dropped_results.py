"""Statements that compute a new tensor from a parameter or a gradient, and drop it: they change nothing.

What computes the same of one tensor several times in a round measures how long that takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from gradsan import source
from gradsan.model import Clue
from gradsan.record.log import RawStack
from gradsan.record.stacks import symbolise


def updates(
    bound: Mapping[RawStack, dict[str, Any]], taken: Counter[tuple[RawStack, tuple[str, int, int]]]
) -> Iterator[Clue]:
    """Yield what gives a new value to a variable that held a gradient, and that nobody reads: ``g = g / n``.

    ``bound`` has the facts of the gradients by the stack of the call, ``taken`` how often a call computed from one
    memory; of these calls the operation is ``=``.
    """
    again = {symbolise(stack) for (stack, what), number in taken.items() if what[0] == "=" and number > 1}
    for stack, held in bound.items():
        frame = None if (site := symbolise(stack)) in again else site.user_frame
        dropped = None if frame is None else source.dropped_update(frame)
        if dropped is not None and dropped[1] is not None:
            yield Clue("written", site, name=dropped[0], op=dropped[1], values=held)


def results(
    dropped: Mapping[RawStack, tuple[str, dict[str, Any] | None]], taken: Counter[tuple[RawStack, tuple[str, int, int]]]
) -> Iterator[Clue]:
    """Yield the statements that call a method without a use of its result; of a gradient, without ``values``.

    ``dropped`` has the operation and the facts of the parameter by the stack of the call.
    """
    sites = {stack: symbolise(stack) for stack in dropped}
    drops = {stack for stack, one in sites.items() if one.user_frame and source.drops_result(one.user_frame)}
    times = Counter[tuple[str, int, int]]()
    for (stack, what), number in taken.items():
        times[what] += number if stack in drops else 0
    measured = {stack for stack, what in taken if times[what] > 1}
    for stack, (op, facts) in dropped.items():
        frame = sites[stack].user_frame
        if frame is not None and stack in drops - measured:
            named = None if facts is None else source.method_receiver(frame)
            yield Clue("written", sites[stack], name=named, op=op, values=facts or {})
