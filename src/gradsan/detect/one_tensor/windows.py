"""Overlapping windows computed with in place: ``series.unfold(0, 3, 1).mul_(weights)``.

PyTorch refuses to write an expanded tensor in place, and not windows that overlap: several elements are one number in
memory, each of which the operation reads and writes, so that values depend on the order, and no gradient is that of the
function. Checked in a few rounds. Fills and copies may give all of them the same value.

Row: ``windows_written``. Role: ``written`` (the write; ``op``; ``values``: ``shape``, ``dtype``, ``device``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from gradsan import _torch
from gradsan.detect.meaning.rounds import RoundDetector
from gradsan.model import Clue, Failure
from gradsan.record.stacks import is_of_program, symbolise

ROW = "windows_written"
_COMPUTING = frozenset(
    {"add_", "addcdiv_", "addcmul_", "div_", "exp_", "lerp_", "mul_", "neg_", "pow_", "sigmoid_", "sqrt_", "square_"}
    | {"sub_", "tanh_", "__iadd__", "__imul__", "__ipow__", "__isub__", "__itruediv__"}
)
_LISTENER_FRAMES = 3


class Windows(RoundDetector):
    """Checks the targets of in-place operations in a few rounds; findings go to ``found``."""

    from_start = True

    def result(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Check whether several elements of what a call has computed with in place are one number in memory."""
        if op not in _COMPUTING or not args or type(args[0]) not in _torch.PLAIN_TENSORS:
            return
        target: torch.Tensor = args[0]
        if target.layout is not torch.strided or target.is_contiguous():
            return
        if not _share_elements(target.shape, target.stride()):
            return
        stack = self._core.stack(_LISTENER_FRAMES)
        if stack in self._described or not is_of_program(stack):
            return
        self._described.add(stack)
        written = symbolise(stack)
        clue = Clue("written", written, op=op, values=_torch.facts_of(target))
        self._found(Failure(ROW, "", "", written, (clue,), raised=False))


def _share_elements(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a step along one dimension leads to where several steps along another do, as in windows of one row."""
    dims = [(stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1]
    return 0 not in shape and any(
        stride > 0 and outer % stride == 0 and outer // stride < size
        for (outer, _), (stride, size) in itertools.permutations(dims, 2)
    )
