"""DistributedDataParallel told what it cannot see: that every round is alike, or that buffers are each rank's own."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import partial

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Change, edited, with_keyword
from gradsan.source.identifiers import leaf_name
from gradsan.source.tree import SourceFile

_WRAPPERS = frozenset({"DistributedDataParallel", "DDP"})
_STATIC_GRAPH, _KEEP_BUFFERS_LOCAL = "static_graph", "keep_buffers_local"


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """The argument that the diagnosis advises, at every place where a file of its stacks wraps a module."""
    found: list[Fix] = []
    for kind in (_STATIC_GRAPH, _KEEP_BUFFERS_LOCAL):
        if blocks.advice(diagnosis, kind) is None:
            continue
        lines = blocks.lines_in_files(diagnosis, partial(_told, kind=kind))
        if lines:
            found.append(blocks.fix(kind, lines))
    return tuple(found)


def _told(source: SourceFile, kind: str) -> Change | None:
    calls = [
        node for node in ast.walk(source.module) if isinstance(node, ast.Call) and leaf_name(node.func) in _WRAPPERS
    ]
    edits = [edit for call in calls if (edit := with_keyword(source, call, *_argument(call, kind))) is not None]
    return edited(source, edits, kind)


def _argument(call: ast.Call, kind: str) -> tuple[str, str]:
    if kind == _STATIC_GRAPH:
        return "static_graph", "True"
    is_named = any(keyword.arg == "broadcast_buffers" for keyword in call.keywords)
    return ("forward_sync_buffers" if _knows_forward_sync() and not is_named else "broadcast_buffers"), "False"


def _knows_forward_sync() -> bool:
    """Whether the program's torch has the argument that, since 2.12, takes the place of ``broadcast_buffers``."""
    parallel = getattr(sys.modules.get("torch.nn.parallel"), "DistributedDataParallel", None)
    return parallel is not None and "forward_sync_buffers" in inspect.signature(parallel).parameters
