"""Arguments: ``inplace``, ``fused``, ``use_reentrant``, and those of DistributedDataParallel.

That mends nothing by itself; tried, it shows that it was the step, and the program fails as loudly as it should.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import partial

from gradsan.model import Diagnosis, Fix, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Change, Edit, changed_lines, edited, with_keyword
from gradsan.source.identifiers import leaf_name
from gradsan.source.locate import expressions_at
from gradsan.source.modules import inplace_attribute_false, inplace_layers_false
from gradsan.source.tree import SourceFile

_MOST_PLACES = 5


def disable_inplace_module(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Each place alone in which the program makes a layer of the writing class, all of them, and set flags.

    Which of several layers wrote cannot be read off a stack; that a single one is enough, a run shows.
    """
    writer = diagnosis.title.values.get("writer") or diagnosis.explanation.values.get("writer")
    if diagnosis.cause != "inplace_module" or not isinstance(writer, str):
        return ()
    found: list[Fix] = []
    for file in _files(diagnosis):
        changes = inplace_layers_false(file, writer)
        flags = inplace_attribute_false(file)
        kept = changes if len(changes) <= _MOST_PLACES else changes[-1:]
        for change in (*kept, *(() if flags is None else (flags,))):
            fix = blocks.fix("disable_inplace_module", changed_lines(file, change), writer=writer)
            found.append(fix)
    return tuple(found)


def _files(diagnosis: Diagnosis) -> list[str]:
    """The user's files that the stacks pass through, those nearest to the write first."""
    labels = (*blocks.labels(diagnosis, "written"), *blocks.labels(diagnosis, "saved", "used"))
    frames = [frame for label in labels for frame in reversed(label.site.frames) if frame.is_user]
    return list(dict.fromkeys(frame.file for frame in frames))


def disable_fused(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``fused=False`` where a file of the stacks makes an optimizer of the class whose step wrote."""
    if diagnosis.cause != "fused_optimizer":
        return ()
    classes = {label.op.partition(".")[0] for label in blocks.labels(diagnosis, "written") if label.op}
    lines = blocks.lines_in_files(diagnosis, lambda source: _unfused(source, classes))
    return (blocks.fix("disable_fused", lines),) if lines else ()


def _unfused(source: SourceFile, classes: set[str]) -> Change | None:
    edits = [
        Edit(source.span(keyword.value), "False")
        for call in source.nodes
        if isinstance(call, ast.Call) and leaf_name(call.func) in classes
        for keyword in call.keywords
        if keyword.arg == "fused" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
    ]
    return edited(source, edits, "disable_fused")


_CALLED = frozenset({"checkpoint", "checkpoint_sequential"})


def not_reentrant(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Say so in every call of checkpoint that the labels name, where the diagnosis advises it."""
    if blocks.advice(diagnosis, "not_reentrant") is None:
        return ()
    calls = {call: source for label in diagnosis.labels for source, call in _calls(label)}
    lines: list[tuple[str, int, str]] = []
    for source in dict.fromkeys(calls.values()):
        own = [call for call, where in calls.items() if where is source]
        edits = [with_keyword(source, call, "use_reentrant", "False") for call in own]
        change = edited(source, [edit for edit in edits if edit is not None], "not_reentrant")
        lines += () if change is None else changed_lines(source.file, change)
    return (blocks.fix("not_reentrant", tuple(lines)),) if lines else ()


def _calls(label: Label) -> list[tuple[SourceFile, ast.Call]]:
    return [
        (place.source, place.node)
        for frame in (label.frame, *(one for one in label.site.frames if one.is_user))
        for place in expressions_at(frame)
        if isinstance(place.node, ast.Call) and leaf_name(place.node.func) in _CALLED
    ]


_WRAPPERS = frozenset({"DistributedDataParallel", "DDP"})
_STATIC_GRAPH, _KEEP_BUFFERS_LOCAL = "static_graph", "keep_buffers_local"


def find_unused_parameters_in_ddp(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """The argument that the diagnosis advises, at every place where a file of its stacks wraps a module."""
    found: list[Fix] = []
    for kind in (_STATIC_GRAPH, _KEEP_BUFFERS_LOCAL):
        if blocks.advice(diagnosis, kind) is None:
            continue
        lines = blocks.lines_in_files(diagnosis, partial(_described, kind=kind))
        if lines:
            found.append(blocks.fix(kind, lines))
    return tuple(found)


def _described(source: SourceFile, kind: str) -> Change | None:
    calls = [node for node in source.nodes if isinstance(node, ast.Call) and leaf_name(node.func) in _WRAPPERS]
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
