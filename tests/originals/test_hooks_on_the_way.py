"""Effect of a changed value on gradients, with hooks in between: measured with those that only compute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradsan

SEEN: list[Any] = []


def logs(gradient: torch.Tensor) -> None:
    SEEN.append(gradient)


def halves(gradient: torch.Tensor) -> torch.Tensor:
    SEEN.append(gradient)
    return gradient * 0.5


class Clips:
    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(-0.1, 0.1)


def told(hook: Callable[..., Any] | None, *, reaches_hook: bool = True) -> Any:
    """What is said of a value that NumPy overwrites, with a hook on the way from it to the leaf."""
    a = torch.tensor([0.2, 0.5], requires_grad=True)
    with gradsan.watch("deep") as watched:
        b = a * 2
        f = b + 1
        if hook is not None:
            f.register_hook(hook)
        # Without the hook the ways over f and b cancel out.
        loss = (f - b).pow(2).sum() if reaches_hook else f.sum() + (b * b).sum()
        written = loss.grad_fn.next_functions[0][0]._saved_self if reaches_hook else b
        written.detach().numpy()[:] += 3
        loss.backward()
    (found,) = watched.diagnoses
    return found, a.grad


def error_of(right: torch.Tensor, wrong: torch.Tensor) -> float:
    return float((right - wrong).norm() / right.norm())


def test_a_hook_that_computes_is_applied() -> None:
    found, wrong = told(lambda gradient: gradient * 0.5)
    assert found.gradient.status == "wrong"
    right = 2 * torch.tensor([1.0, 1.0]) * (0.5 - 1) * 2
    assert found.gradient.relative_error == pytest.approx(error_of(right, wrong))


def test_without_the_hook_both_ways_cancel_out() -> None:
    found, _ = told(None)
    assert (found.severity, found.gradient.status) == ("note", "right")


def test_the_hook_of_another_threads_graph_is_not_this_ones() -> None:
    # The numbers of Nodes begin anew in every thread.
    kept, found = [], []

    def with_hook() -> None:
        a = torch.tensor([0.2, 0.5], requires_grad=True)
        b = a * 2
        f = b + 1
        f.register_hook(lambda gradient: gradient * 0.5)
        kept.append(f)

    with gradsan.watch("deep"):
        for work in (with_hook, lambda: found.append(told(None)[0])):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    assert [(one.severity, one.gradient.status) for one in found] == [("note", "right")]


@pytest.mark.parametrize("hook", [logs, halves, Clips()])
def test_gradients_past_other_hooks_are_not_measured(hook: Any) -> None:
    SEEN.clear()
    found, _ = told(hook)
    assert found.gradient.status == "unknown"
    assert len(SEEN) == (0 if isinstance(hook, Clips) else 1), "a hook runs no more often than without gradsan"


@pytest.mark.parametrize("hook", [logs, halves, Clips()])
def test_a_hook_that_gets_the_same_gradient_makes_the_same_of_it(hook: Any) -> None:
    found, _ = told(hook, reaches_hook=False)
    assert found.gradient.status == "wrong"


def test_a_hook_that_fails_on_the_side_is_the_programs_own_matter() -> None:
    a = torch.tensor([0.2, 0.5], requires_grad=True)
    with gradsan.watch("deep") as watched:
        f = a.exp()
        f.register_hook(lambda gradient: gradient @ torch.ones(3))
        loss = f.exp().sum()
        loss.grad_fn.next_functions[0][0]._saved_result.detach().numpy()[:] += 3
        with pytest.raises(RuntimeError, match="size"):
            loss.backward()
    assert [one.gradient.status for one in watched.diagnoses if one.silent] == ["unknown"]
