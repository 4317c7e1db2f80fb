"""What is found out about a failure, one file a topic.

A topic is a module with ``ROWS``, the slugs of the catalogue's rows it serves, and ``gather(context)``, which gives the
clues of a :class:`gradsan.capture.failures.Context` and names their roles in its docstring. It is registered in
``_TOPICS``. A clue holds no tensor and no frame; what it says is decided here, what it means in ``diagnose/failures``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gradsan.capture.clues import (
    cached,
    checkpoints,
    distributed,
    functions,
    graph_nodes,
    hooks_refused,
    later,
    live,
    non_leaf,
    operators,
    second_backward,
    sharded,
    traced,
    views,
    written,
)
from gradsan.model import Clue

if TYPE_CHECKING:
    from gradsan.capture.failures import Context

_TOPICS = (
    written,
    second_backward,
    views,
    later,
    live,
    graph_nodes,
    non_leaf,
    checkpoints,
    traced,
    functions,
    cached,
    operators,
    distributed,
    hooks_refused,
    sharded,
)


def gather(context: Context) -> tuple[Clue, ...]:
    """The clues of every topic that serves the row; empty where none does. A topic that fails is left out."""
    found: list[Clue] = []
    for topic in _TOPICS:
        if context.row in topic.ROWS:
            try:
                found += topic.gather(context)
            except Exception:
                if os.environ.get("GRADSAN_DEBUG"):
                    raise
    return tuple(found)
