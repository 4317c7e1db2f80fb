"""Where a Node was made: its sequence number looked up in the log of operations.

Sequence numbers are counted per thread. The thread in which backward runs is asked first; what it did not make is
looked for in the other threads' entries, and only taken where one entry alone fits.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from gradsan.capture import _torch, ledger
from gradsan.capture.autopsy import Stale


class Origin(NamedTuple):
    """The call that made a Node, or the one watched just before it where ``is_exact`` is False."""

    clock: int
    stack: Any
    thread: int
    is_exact: bool


def of_node(core: Any, steps: Any, node: Any, thread: int, stale: Stale, storage: int) -> Origin | None:
    """The call that made ``node``, which saved ``stale`` of ``storage``; ``thread`` is where backward ran."""
    number = _torch.node_sequence(node)
    if number is None:
        return None
    found: list[Origin] = []
    before: Origin | None = None
    for one in (thread, *(other for other in _threads(core) if other != thread)):
        for first, end, clock, stack in core.nodes_near(number, one):
            if first <= number < end:
                found.append(Origin(clock, stack, one, True))
            elif one == thread and end <= number:
                before = Origin(clock, stack, one, False)
    if len(found) > 1:
        latest = ledger.first_move(core, steps, storage, stale.saved_version, stale.version)
        # Where none was early enough, what the log has of this address was written while it belonged to another.
        found = [one for one in found if one.clock <= latest] or found
    # Nearly every backward runs in the thread of its forward; only a Node unknown there may be another thread's.
    if found and (len(found) == 1 or found[0].thread == thread):
        return found[0]
    return before if not found else None


def _threads(core: Any) -> tuple[int, ...]:
    """The threads that made Nodes, where the core tells; else those that live."""
    told = getattr(core, "node_threads", None)
    return tuple(told()) if told else tuple(one.ident for one in threading.enumerate() if one.ident is not None)
