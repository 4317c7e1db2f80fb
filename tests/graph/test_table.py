"""One table: every way of writing that PyTorch counts × every kind of saved tensor.

The truth of a cell is what plain PyTorch does. Under gradsan the same must happen, and where PyTorch raises, gradsan
must name the line that saved, the line that wrote and the operation, with no move of the counter left unexplained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from gradsan.record import log
from gradsan.record.recorder import Recorder

Way = Callable[[torch.Tensor], Any]
CORES = [False, pytest.param(True, marks=pytest.mark.skipif(not log.native_available(), reason="C core not built"))]


def no_grad(way: Way) -> Way:
    def quietly(t: torch.Tensor) -> None:
        with torch.no_grad():
            way(t)

    return quietly


def add_with_operator(t: torch.Tensor) -> None:
    t += 1


def multiply_with_operator(t: torch.Tensor) -> None:
    t *= 2


def power_with_operator(t: torch.Tensor) -> None:
    t **= 2


def set_item(t: torch.Tensor) -> None:
    t[0] = 5.0


def set_masked(t: torch.Tensor) -> None:
    t[t > 0] = 0.25


def through_a_slice(t: torch.Tensor) -> None:
    t[:2].mul_(3)


def in_inference_mode(t: torch.Tensor) -> None:
    with torch.inference_mode():
        t.add_(1)


def loaded(t: torch.Tensor) -> None:
    module = nn.Module()
    module.register_buffer("kept", t.detach())
    module.load_state_dict({"kept": torch.zeros_like(t)})


def stepped(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Way:
    def step(t: torch.Tensor) -> None:
        parameter = nn.Parameter(t.detach())
        parameter.grad = torch.ones_like(parameter)
        optimizer([parameter], **options).step()

    return step


def clipped(t: torch.Tensor) -> None:
    parameter = nn.Parameter(torch.zeros_like(t))
    parameter.grad = t.detach()
    nn.utils.clip_grad_norm_([parameter], 0.01)


WAYS: dict[str, tuple[Way, bool]] = {
    # name: (way, whether it also works on a leaf that requires grad)
    "add_": (lambda t: t.add_(1), False),
    "add_ under no_grad": (no_grad(lambda t: t.add_(1)), True),
    "+=": (add_with_operator, False),
    "+= under no_grad": (no_grad(add_with_operator), True),
    "*=": (multiply_with_operator, False),
    "**=": (power_with_operator, False),
    "t[0] = v": (set_item, False),
    "t[0] = v under no_grad": (no_grad(set_item), True),
    "t[mask] = v under no_grad": (no_grad(set_masked), True),
    "slice.mul_": (no_grad(through_a_slice), True),
    "detach().mul_": (lambda t: t.detach().mul_(2), True),
    "view().zero_": (lambda t: t.detach().view(-1).zero_(), True),
    "inference_mode": (in_inference_mode, True),
    "torch.relu_": (lambda t: torch.relu_(t.detach().neg_()), True),
    "F.relu(inplace)": (lambda t: nn.functional.relu(t.detach(), inplace=True).add_(1), True),
    "F.silu(inplace)": (lambda t: nn.functional.silu(t.detach(), inplace=True), True),
    "F.dropout(inplace)": (lambda t: nn.functional.dropout(t.detach(), 1.0, inplace=True), True),
    "nn.ELU(inplace)": (lambda t: nn.ELU(inplace=True)(t.detach().neg_()), True),
    "torch.add(out=)": (no_grad(lambda t: torch.add(t, 1, out=t)), True),
    "torch.sort(out=)": (
        no_grad(lambda t: torch.sort(t, descending=True, out=(t.detach(), torch.zeros(4, dtype=torch.long)))),
        True,
    ),
    "torch.linalg.vector_norm(out=)": (lambda t: torch.linalg.vector_norm(torch.ones(2), out=t.detach()[0]), True),
    "torch.fft.irfft(out=)": (lambda t: torch.fft.irfft(torch.ones(3, dtype=torch.cfloat), out=t.detach()), True),
    "torch.special.expit(out=)": (lambda t: torch.special.expit(torch.zeros(4), out=t.detach()), True),
    "_foreach_mul_": (no_grad(lambda t: torch._foreach_mul_([t], 2.0)), True),
    "_foreach_add_ of several": (no_grad(lambda t: torch._foreach_add_([torch.zeros(1), t], 1.0)), True),
    "torch.ops.aten.add_": (lambda t: torch.ops.aten.add_.Tensor(t.detach(), torch.ones(4)), True),
    "copy_": (no_grad(lambda t: t.copy_(torch.zeros(4))), True),
    "index_fill_": (no_grad(lambda t: t.index_fill_(0, torch.tensor([0, 2]), 9.0)), True),
    "scatter_": (no_grad(lambda t: t.scatter_(0, torch.tensor([0]), 9.0)), True),
    "masked_fill_": (no_grad(lambda t: t.masked_fill_(t > 0, 0.5)), True),
    "nn.init.normal_": (lambda t: nn.init.normal_(t.detach()), True),
    "nn.init.constant_": (lambda t: nn.init.constant_(t.detach(), 3.0), True),
    "load_state_dict": (loaded, True),
    "clip_grad_norm_": (clipped, True),
    "SGD foreach": (stepped(torch.optim.SGD, lr=0.1, foreach=True), True),
    "SGD for-loop": (stepped(torch.optim.SGD, lr=0.1, foreach=False), True),
    "Adam foreach": (stepped(torch.optim.Adam, foreach=True), True),
    "AdamW for-loop": (stepped(torch.optim.AdamW, foreach=False), True),
    "Adadelta": (stepped(torch.optim.Adadelta), True),
    "RMSprop": (stepped(torch.optim.RMSprop), True),
    "Adagrad": (stepped(torch.optim.Adagrad), True),
}


class Kept(NamedTuple):
    """A saved tensor and the loss whose backward needs it."""

    tensor: torch.Tensor
    loss: torch.Tensor


def non_leaf_input() -> Kept:
    t = torch.rand(4, requires_grad=True) * 1.0
    return Kept(t, (t * t).sum())


def non_leaf_output() -> Kept:
    t = torch.rand(4, requires_grad=True).exp()
    return Kept(t, t.sum())


def leaf() -> Kept:
    t = torch.rand(4, requires_grad=True)
    return Kept(t, (t * t).sum())


def plain_buffer() -> Kept:
    t = torch.rand(4)
    return Kept(t, (torch.rand(4, requires_grad=True) * t).sum())


def output_written_to_a_view() -> Kept:
    """The Node that saved it stands inside a CopySlices, and no variable holds the view."""
    t = torch.rand(6, requires_grad=True) * 1.0
    return Kept(t[2:], t[:2].sigmoid_().sum())


SAVES: dict[str, Callable[[], Kept]] = {
    "input": non_leaf_input,
    "output": non_leaf_output,
    "output on a view": output_written_to_a_view,
    "leaf": leaf,
    "buffer": plain_buffer,
}


def outcome(make: Callable[[], Kept], way: Way) -> str | None:
    """What backward says after the write: the message's beginning, or None where it says nothing."""
    torch.manual_seed(3)
    kept = make()
    way(kept.tensor)
    try:
        kept.loss.backward()
    except RuntimeError as error:
        return str(error).partition(":")[0]
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("native", CORES, ids=["pure", "native"])
def test_every_cell(native: bool) -> None:
    cells = {
        f"{saved}, {written}": (SAVES[saved], way)
        for written, (way, works_on_a_leaf) in WAYS.items()
        for saved in SAVES
        # PyTorch refuses the write itself on a leaf that requires grad.
        if saved != "leaf" or works_on_a_leaf
    }
    truths = {name: outcome(*cell) for name, cell in cells.items()}
    assert [name for name, truth in truths.items() if truth is None] == [], "every way of this table moves the counter"
    recorder = Recorder(native)
    stretch = recorder.start()
    try:
        faults = {name: fault_of(recorder, *cell, truths[name]) for name, cell in cells.items()}
    finally:
        recorder.stop(stretch)
    assert {name: fault for name, fault in faults.items() if fault is not None} == {}


def fault_of(recorder: Recorder, make: Callable[[], Kept], way: Way, truth: str | None) -> str | None:
    """What is wrong with what the recorder holds of a cell that it watches, after those of other cells."""
    recorder.core.clear()
    before = len(recorder.conflicts)
    came = outcome(make, way)
    if came != truth:
        return f"watched, PyTorch says {came}"
    found = recorder.conflicts[before:]
    if len(found) != 1:
        return f"{len(found)} conflicts"
    (conflict,) = found
    saved, used = conflict.save.site.user_frame, conflict.use.site.user_frame  # type: ignore[union-attr]
    if (conflict.raised, conflict.unexplained) != (True, 0) or not conflict.writes:
        return f"raised {conflict.raised}, unexplained {conflict.unexplained}, {len(conflict.writes)} writes"
    if (saved.function, used.function) != (make.__name__, "outcome"):
        return f"saved in {saved.function}, used in {used.function}"
    frames = [write.site.user_frame for write in conflict.writes]
    if any(frame is None or frame.file != __file__ or frame.function == "outcome" for frame in frames):
        return f"written at {frames}"
    return None
