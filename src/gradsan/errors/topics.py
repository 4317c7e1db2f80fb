"""Topics of clues: which rows of the catalogue each serves, and what it looks for.

A topic is a pair of names in a module of its theme: ``<TOPIC>_ROWS``, the slugs of the catalogue's rows it serves, and
``gather_<topic>(context)``, which gives the clues of a :class:`gradsan.errors.failures.Context` and names their
roles in its docstring. It is registered in ``_TOPICS``. A clue holds no tensor and no frame; what it says is decided
here, what it means in ``diagnose/failures``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from gradsan.errors import (
    checkpoints,
    compiled,
    distributed,
    freed_graphs,
    functions,
    graph_nodes,
    leaves,
    refused_writes,
)
from gradsan.model import Clue

if TYPE_CHECKING:
    from gradsan.errors.failures import Context

_TOPICS: tuple[tuple[tuple[str, ...], Callable[[Context], tuple[Clue, ...]]], ...] = (
    (refused_writes.WRITTEN_ROWS, refused_writes.gather_written),
    (freed_graphs.SECOND_BACKWARD_ROWS, freed_graphs.gather_second_backward),
    (refused_writes.VIEWS_ROWS, refused_writes.gather_views),
    (graph_nodes.LATER_ROWS, graph_nodes.gather_later),
    (leaves.LIVE_ROWS, leaves.gather_live),
    (graph_nodes.GRAPH_NODES_ROWS, graph_nodes.gather_graph_nodes),
    (leaves.NON_LEAF_ROWS, leaves.gather_non_leaf),
    (checkpoints.CHECKPOINTED_ROWS, checkpoints.gather_checkpointed),
    (compiled.TRACED_ROWS, compiled.gather_traced),
    (functions.CUSTOM_FUNCTIONS_ROWS, functions.gather_custom_functions),
    (checkpoints.CACHED_ROWS, checkpoints.gather_cached),
    (functions.OPERATORS_ROWS, functions.gather_operators),
    (distributed.DATA_PARALLEL_ROWS, distributed.gather_data_parallel),
    (functions.HOOKS_REFUSED_ROWS, functions.gather_hooks_refused),
    (distributed.SHARDED_ROWS, distributed.gather_sharded),
)


def gather(context: Context) -> tuple[Clue, ...]:
    """The clues of every topic that serves the row; empty where none does. A topic that fails is left out."""
    found: list[Clue] = []
    for rows, look in _TOPICS:
        if context.row in rows:
            try:
                found += look(context)
            except Exception:
                if os.environ.get("GRADSAN_DEBUG"):
                    raise
    return tuple(found)
