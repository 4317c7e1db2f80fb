"""Analysis of a program from the outermost frame of its stack to the line that failed."""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import Node

from gradsan import _torch, source
from gradsan.graph import variables
from gradsan.model import Frame
from gradsan.postmortem.align import Made, is_view_node
from gradsan.postmortem.functions import definition_at
from gradsan.postmortem.log import ScriptLog, last_use
from gradsan.postmortem.lookup import Namespace, of_thing
from gradsan.postmortem.script import Script, ScriptFullError
from gradsan.postmortem.walk import Walk
from gradsan.record.stacks import file_of, is_user_file, qualified_name
from gradsan.source.tree import read_source

_PAIRS = 300_000
_CELLS_READ = 40
_FEWEST_NODES, _MOST_NODES = 40, 240


def log_of(
    frames: Sequence[FrameType], used: Frame | None, nodes: Sequence[Node], thread: int, *, is_backward: bool = True
) -> ScriptLog:
    """The log of a program that failed with ``frames`` on its stack (outermost first), at the line ``used``.

    ``is_backward`` distinguishes a backward that failed from another statement.

    ``nodes`` are the Nodes of the graph, any order; the one in question first. Unreadable source is left out.
    """
    script = Script()
    own = [frame for frame in frames if is_user_file(frame.f_code.co_filename)]
    try:
        _read(own, used, script, is_backward)
    except Exception:
        if os.environ.get("GRADSAN_DEBUG"):
            traceback.print_exc()
    most = max(_FEWEST_NODES, min(_MOST_NODES, _PAIRS // max(1, len(script.events))))
    described = _described(nodes, own[-1] if own else None, most)
    youngest = max((number for node in nodes if (number := _torch.node_sequence(node)) is not None), default=0)
    ends_with_root = bool(described) and described[-1].sequence == youngest
    return ScriptLog(
        script, described, used, thread, is_backward=is_backward, ends_with_root=is_backward and ends_with_root
    )


def _read(own: Sequence[FrameType], used: Frame | None, script: Script, is_backward: bool) -> None:
    """Analyse from the outermost frame; where that does not lead to the failing line, from the next one."""
    walk = Walk(script)
    walk.live_frames = {_key(frame): _torch.locals_of(frame) for frame in own}
    cells = [place for place, frame in enumerate(own) if source.is_cell(file_of(frame.f_code))]
    if cells:
        # The code that runs a notebook is no part of it, but the cells that ran before are.
        own = own[cells[0] :]
        with contextlib.suppress(ScriptFullError):
            _read_cells_before(walk, own[0])
    for depth, frame in enumerate(own):
        before = len(script.events)
        walk.statements_read = 0
        with contextlib.suppress(ScriptFullError):
            _read_frame(walk, frame)
        if last_use(script.events, used, is_backward) >= before:
            break
        if depth < len(own) - 1:
            del script.events[before:]
    for space in walk.spaces_with_frames():
        _learn(space, script.known)


def _learn(space: Namespace, known: dict[int, frozenset[int]]) -> None:
    """Map memory of the script to real storages, by the live variables."""
    for name, value in space.names.items():
        live = space.live.get(name)
        if not torch.is_tensor(live) or value.is_known:
            continue
        for storage in of_thing(live).memory:
            known[storage] = known.get(storage, frozenset()) | {one for one in value.memory if one < 0}


def _read_cells_before(walk: Walk, frame: FrameType) -> None:
    """Analyse the cells that were run before the one of ``frame``, in the order in which Python compiled them."""
    files = [file for file in linecache.cache if source.is_cell(file)]
    last = file_of(frame.f_code)
    for file in files[: files.index(last) if last in files else len(files)][-_CELLS_READ:]:
        text = read_source(file)
        if text is not None:
            module = walk.module_of(frame.f_globals, last)
            walk.block(text.module.body, Namespace(file, "<module>", module.names, module.live, None, module))


def _read_frame(walk: Walk, frame: FrameType) -> None:
    code = frame.f_code
    text = read_source(file_of(code))
    if text is None:
        return
    walk.frames, walk.bound, walk.records = (), (), True
    module = walk.module_of(frame.f_globals, file_of(code))
    if _torch.is_module_level(frame):
        module.file = file_of(code)
        walk.block(text.module.body, module)
        return
    definition = definition_at(text, code.co_firstlineno, code.co_name)
    if definition is None:
        return
    space = Namespace(file_of(code), _key(frame)[1], {}, _torch.locals_of(frame), None, module)
    body = definition.body
    if isinstance(body, ast.expr):
        walk.value(body, space)
    else:
        walk.block(body, space)


def _key(frame: FrameType) -> tuple[str, str]:
    code = frame.f_code
    return file_of(code), qualified_name(code)


def _described(nodes: Sequence[Node], frame: FrameType | None, most: int) -> list[Made]:
    """The known facts of the ``most`` Nodes around the first of ``nodes``, in order of their numbers."""
    numbered = {number: node for node in nodes if (number := _torch.node_sequence(node)) is not None}
    if not numbered:
        return []
    centre = _torch.node_sequence(nodes[0])
    order = sorted(numbered)
    middle = order.index(centre) if centre in numbered else len(order) - 1
    last = min(len(order), middle + most // 2)
    near = order[max(0, last - most) : last]
    holders: dict[Any, set[tuple[str, str, str]]] = {}
    if frame is not None:
        for found in variables.search(frame, lambda tensor: tensor.grad_fn is not None):
            scope = found.scope
            holders.setdefault(found.tensor.grad_fn, set()).add((scope.file, scope.function, found.path))
    return [
        Made(node.name(), number, _leaves_of(node), frozenset(holders.get(node, ())))
        for number in near
        for node in (numbered[number],)
    ]


def _leaves_of(node: Node) -> frozenset[int]:
    """The storages of the parameters that are inputs of a Node, themselves or as a view."""
    found: set[int] = set()
    for child, _ in node.next_functions:
        if child is None:
            continue
        inner = [child]
        if is_view_node(child.name()):
            inner = [one for one, _ in child.next_functions if one is not None]
        for one in inner:
            leaf = getattr(one, "variable", None)
            if leaf is not None:
                found.add(_torch.storage_identity(leaf))
    return frozenset(found)
