"""Writes to what the program's own saved-tensor hooks keep, and to the inside of a wrapper subclass.

The truth is the gradient of plain PyTorch beside that of the program without the write.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor

import gradsan

HOOKS = {
    "save_on_cpu": save_on_cpu,
    "an alias": lambda: saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
    "an array": lambda: saved_tensors_hooks(lambda t: t.detach().numpy(), torch.from_numpy),
    "a copy": lambda: saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
    "none": lambda: torch.enable_grad(),
}
WRITES = {
    "nothing": lambda t: None,
    "add_": lambda t: t.add_(1),
    "data": lambda t: t.data.add_(1),
    "numpy": lambda t: t.detach().numpy().fill(7),
}
# docs/blind-spots.md, "The program's own saved-tensor hooks": versions are compared, of the tensors in what was packed.
MISSED = {("save_on_cpu", "data"), ("save_on_cpu", "numpy"), ("an alias", "data"), ("an alias", "numpy")} | {
    ("an array", write) for write in ("add_", "data", "numpy")
}


def run(hooks: str, write: str) -> Any:
    x = torch.ones(3, requires_grad=True)
    t = x * 2
    with HOOKS[hooks]():
        loss = (t * t).sum()
    with torch.no_grad():
        WRITES[write](t)
    try:
        loss.backward()
    except RuntimeError:
        return "raises"
    return x.grad


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["watch", "deep"])
@pytest.mark.parametrize("hooks", HOOKS)
def test_what_hooks_keep(hooks: str, mode: Any) -> None:
    with gradsan.watch(mode):
        for write in WRITES:
            with gradsan.watch(mode) as watched:
                gradient = run(hooks, write)
            wrong = isinstance(gradient, str) or gradient.tolist() != [8.0] * 3
            said = any(one.severity == "error" for one in watched.diagnoses)
            assert said == (wrong and (hooks, write) not in MISSED), (write, watched.diagnoses)


@pytest.mark.parametrize("mode", ["watch", "deep"])
@pytest.mark.parametrize(("write", "seen"), [("outer", True), ("inner", False)])
def test_a_wrapper_subclass(write: str, seen: bool, mode: Any) -> None:
    """``inner`` is missed (docs/blind-spots.md): the outer tensor has no memory of its own to be compared."""
    x = torch.ones(3, requires_grad=True)
    pair = TwoTensor(torch.full((3,), 2.0), torch.full((3,), 2.0))
    with gradsan.watch(mode) as watched:
        loss = (x * pair).sum()
        (pair if write == "outer" else pair.a).add_(1)
        if seen:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
            assert x.grad.a.tolist() == [3.0] * 3, "the gradient is wrong, and PyTorch does not know"
    assert bool(watched.diagnoses) == seen
