"""Gradients kept by reference while a later backward adds to them: ``first = w.grad; ...; second = w.grad - first``.

``.grad`` is one tensor, to which each backward adds in place; a reference to it without a copy has the sum of both.
Checked at the 1st, 2nd and 4th backward of a line: a variable of the program's that holds the gradient of a leaf of
this graph, and whose source reads it afterwards as if it were the earlier one. Reported if the backward has added to
it.

Row: ``kept_gradient_changed``. Roles: ``bound`` (where it was kept), ``written`` (the backward; ``name`` of the
gradient; ``values``: ``shape``, ``dtype``, ``device``), ``read`` (``name`` of the variable).
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch

from gradsan import _torch, source
from gradsan.detect.gradients.kept_gradients import others_run, reads_gradient
from gradsan.detect.one_tensor.second_names import at_line
from gradsan.graph import walk
from gradsan.model import Clue, Failure, Frame, Site
from gradsan.record.detector import Finder, Run
from gradsan.record.stacks import is_own_file, is_user_file, symbolise
from gradsan.record.steps import RawBackward, read_backward

ROW = "kept_gradient_changed"
_ROUNDS = (1, 2, 4)
_FRAMES, _ITEMS = 3, 64


class _Kept(NamedTuple):
    """A gradient kept by reference, in its state before the backward at ``clock``."""

    clock: int
    gradient: _torch.weak_tensor
    version: int
    failure: Failure


class KeptReferences(Finder):
    """Checks the variables of the functions that call backward; findings go to ``found``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._kept = self._notes(list[_Kept]())
        self._seen = self._notes(set[Hashable]())

    @_torch.hushed()
    def before_round(self, entry: RawBackward, rounds: int) -> None:
        if rounds not in _ROUNDS or not entry.accumulates:
            return
        callers = list(_program_frames(sys._getframe(1)))
        if not any(reads_gradient(frame.f_code) for frame in callers) or others_run(self._core, entry):
            return
        gradients = {}
        for leaf in walk.leaves_of(walk.engine_order(read_backward(entry).roots)):
            if leaf.grad is not None and not leaf.grad.is_sparse:
                gradients[_torch.storage_or_none(leaf.grad)] = leaf.grad
        if not gradients:
            return
        site = symbolise(entry.stack)
        for frame in callers:
            place = next((one for one in site.frames if _is_at(one, frame)), None)
            for name, gradient in _held(frame, gradients) if place is not None else ():
                if (frame.f_code, name) not in self._seen:
                    self._keep(entry, site, place, name, gradient)
                    self._seen.add((frame.f_code, name))

    def _keep(self, entry: RawBackward, site: Site, place: Frame | None, name: str, gradient: torch.Tensor) -> None:
        second = None if place is None else source.kept_gradient(place, name)
        if place is None or second is None:
            return
        clues = (
            Clue("bound", at_line(site, place, second.bound)),
            Clue("written", at_line(site, place, place.line), name, op="backward", values=_torch.facts_of(gradient)),
            Clue("read", at_line(site, place, second.read), name=name),
        )
        failure = Failure(ROW, "", "", symbolise(entry.stack), clues, raised=False)
        self._kept.append(_Kept(entry.clock, _torch.weak_tensor(gradient), int(gradient._version), failure))
        self._listeners.call_after_backward(self.after_backward)

    @_torch.hushed()
    def after_backward(self, entry: RawBackward) -> None:
        """Report the kept gradients that this backward has added to; as ``listeners.AfterBackward``."""
        due = [one for one in self._kept if one.clock == entry.clock]
        self._kept[:] = [one for one in self._kept if one.clock > entry.clock]
        self._listeners.call_after_backward(self.after_backward, bool(self._kept))
        for one in due:
            gradient = one.gradient()
            if gradient is not None and int(gradient._version) > one.version:
                self._found(one.failure)


def _program_frames(frame: FrameType | None) -> Iterator[FrameType]:
    found = 0
    while frame is not None and found < _FRAMES:
        file = frame.f_code.co_filename
        if is_user_file(file) and not is_own_file(file):
            found += 1
            yield frame
        frame = frame.f_back


def _is_at(place: Frame, frame: FrameType) -> bool:
    is_same_function = place.function.rpartition(".")[2] == frame.f_code.co_name
    return is_same_function and (place.file, place.line) == (frame.f_code.co_filename, frame.f_lineno)


def _held(frame: FrameType, gradients: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a frame that hold one of the gradients, directly or in lists and dicts."""
    for name, value in _torch.locals_of(frame).items():
        for tensor in _torch.tensors_in(value, most=_ITEMS):
            storage = _torch.storage_or_none(tensor)
            if storage in gradients:
                yield name, gradients[storage]
                break
