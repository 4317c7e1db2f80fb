"""Evidence for an exception of an unwatched program, from the remaining graph and variables, and from the source.

The traceback holds the frames, these hold the variables, and the frame in which torch entered the engine holds the
loss. No hook is installed on the graph, since on a stale slot it would switch PyTorch's check off; except where torch
shows a stale tensor only to a hook (``_torch/saved.py``), and there the hook checks.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any

from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.errors import failures
from gradsan.graph import conflicts, naming, stale_slots, walk
from gradsan.model import Confidence, Conflict, Evidence, Failure, Frame, Site
from gradsan.postmortem import ScriptLog, ScriptSteps, log_of
from gradsan.record import ledger
from gradsan.record.stacks import is_user_file, of_traceback
from gradsan.record.steps import BackwardRecord

_FRAME_OF_STACK = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)')
_RESULT_OF = re.compile(r", which is output \d+ of (?P<op>[^,]+),")


def evidence_of(error: BaseException) -> Evidence:
    """The evidence for ``error`` or, if it is not autograd's, for the exception that it was raised from."""
    for one in _chain(error):
        if stale_slots.is_version_error(one):
            conflict = _conflict(one)
            if conflict is not None:
                return Evidence(conflicts=(conflict,))
        else:
            failure = _failure(one)
            if failure is not None:
                return Evidence(failures=(failure,))
    return Evidence()


def evidence_in(loss: Any, frame: FrameType) -> Evidence:
    """The stale saved tensors in the graph of ``loss``; ``frame`` is where that is asked."""
    found = []
    site, frames = _stack_of(frame)
    record = BackwardRecord(0, site, threading.get_ident(), "backward", False, (loss.grad_fn,), (loss,))
    for error in stale_slots.stale_errors(record.roots):
        conflict = _of_record(record, frames, frame, error, ())
        if conflict is not None:
            found.append(replace(conflict, use=replace(conflict.use, via="autopsy")))
    return Evidence(conflicts=tuple(found))


def _stack_of(frame: FrameType) -> tuple[Site, tuple[FrameType, ...]]:
    """The stack at a running frame."""
    frames: list[FrameType] = []
    at: FrameType | None = frame
    while at is not None:
        frames.insert(0, at)
        at = at.f_back
    trace: TracebackType | None = None
    for one in reversed(frames):
        trace = TracebackType(trace, one, one.f_lasti, one.f_lineno)
    site, kept, _ = of_traceback(trace)
    return site, kept


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


class _Call:
    """The failed call into the engine: the loss, the stack that led to it, the backward in the recorder's format."""

    def __init__(self, call: _torch.EngineCall, error: BaseException) -> None:
        self.site, self.frames, self.frame = of_traceback(_up_to(error.__traceback__, call.trace))
        roots = tuple(one.grad_fn for one in call.outputs if getattr(one, "grad_fn", None) is not None)
        roots += tuple(one.node for one in call.outputs if hasattr(one, "node"))
        self.record = BackwardRecord(
            0,
            self.site,
            threading.get_ident(),
            "backward" if call.accumulates else "grad",
            call.retain_graph,
            roots,
            call.outputs,
        )


def _log(record: BackwardRecord, frames: tuple[FrameType, ...], first: Any = None) -> ScriptLog:
    """The log of a program, read around the Node ``first``."""
    order = walk.engine_order(record.roots)
    nodes = [first, *order] if first is not None else order
    return log_of(frames, record.stack.user_frame, nodes, record.thread)


def _conflict(error: BaseException) -> Conflict | None:
    engine = _torch.engine_call(error)
    if engine is None:
        return None
    call = _Call(engine, error)
    return _of_record(call.record, call.frames, call.frame, error, engine.inputs)


def _of_record(
    record: BackwardRecord, frames: tuple[FrameType, ...], frame: FrameType | None, error: BaseException, inputs: Any
) -> Conflict | None:
    accumulates = record.via == "backward"
    stale = stale_slots.find_stale(record.roots, error, inputs, accumulates, record.retain_graph)
    if stale is None:
        return None
    node, tensor = stale.node, stale.tensor
    log = _log(record, frames, node)
    number = _torch.node_sequence(node)
    recorded = None if node is None else _anomaly_site(node)
    if recorded is not None and number is not None:
        log.know_place(number, recorded)
    if tensor is not None:
        base = tensor if tensor._base is None else tensor._base
        is_leaf = bool(base.is_leaf and base.requires_grad)
        _, _, region = _torch.weak_identity(base)
        maker = _torch.node_sequence(tensor.grad_fn)
        log.look_for(_torch.storage_identity(tensor), number, stale.is_output, is_leaf, region, maker, _named_op(error))
    record = replace(record, clock=log.clock)
    found = conflicts.of_failure(log, ScriptSteps(log), record, error, frame)
    if found is None:
        return None
    if node is None and tensor is not None:
        # Without a save the clock is no evidence; every write to it may be the one.
        writes = ledger.writes_since(log, ScriptSteps(log), log.target, 0, stale.saved_version)
        found = replace(found, writes=writes)
    rivals = [] if number is None else log.rivals(number)
    return replace(
        found,
        unexplained=0 if found.writes else found.unexplained,
        confidence=_confidence(found, bool(rivals)),
        also_saved_at=tuple(Site(log.events[one.event].frames) for one in rivals[:2]),
    )


def _anomaly_site(node: Node) -> Site | None:
    """The site where a Node was made, if anomaly mode was on then; its frames have no columns."""
    frames = [
        Frame(parsed["file"], int(parsed["line"]), parsed["name"], is_user=is_user_file(parsed["file"]))
        for line in _torch.anomaly_stack(node)
        if (parsed := _FRAME_OF_STACK.match(line)) is not None
    ]
    return Site(tuple(frames)) if any(frame.is_user for frame in frames) else None


def _named_op(error: BaseException) -> str | None:
    """The operation that PyTorch names as the overwritten tensor's: mostly the last that wrote it."""
    parsed = _RESULT_OF.search(str(error))
    return None if parsed is None else parsed["op"].rpartition(":")[2]


def _confidence(conflict: Conflict, has_rivals: bool) -> Confidence:
    lines = {(place.file, place.line) for write in conflict.writes if (place := write.site.user_frame) is not None}
    all_explained = len(conflict.writes) == conflict.use.version - conflict.save.version
    is_likely = (len(lines) == 1 or all_explained) and not has_rivals and conflict.save.site.frames
    return "likely" if is_likely else "possible"


def _failure(error: BaseException) -> Failure | None:
    engine = _torch.engine_call(error)
    if engine is None:
        site, frames, frame = of_traceback(error.__traceback__)
        nodes = walk.engine_order(_live_roots(frame))
        log = log_of(frames, site.user_frame, nodes, threading.get_ident(), is_backward=False)
        found = failures.of_exception(log, ScriptSteps(log), error, backwards=None)
        return None if found is None else replace(found, confidence="certain")
    call = _Call(engine, error)
    log = _log(call.record, call.frames)
    log.know_losses(call.frame, call.record.roots)
    record = replace(call.record, clock=log.clock)
    found = failures.of_exception(log, ScriptSteps(log), error, backwards=log, backward=record, inputs=engine.inputs)
    return None if found is None else replace(found, confidence="likely")


def _live_roots(frame: FrameType | None) -> list[Any]:
    """The Nodes of the results that live variables hold."""
    if frame is None:
        return []
    return [found.tensor.grad_fn for found in naming.find(frame, lambda tensor: tensor.grad_fn is not None)]


def _up_to(trace: TracebackType | None, last: TracebackType) -> TracebackType | None:
    """The part of a traceback that leads to ``last``, without it."""
    places: list[TracebackType] = []
    while trace is not None and trace is not last:
        places.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for place in reversed(places):
        found = TracebackType(found, place.tb_frame, place.tb_lasti, place.tb_lineno)
    return found
