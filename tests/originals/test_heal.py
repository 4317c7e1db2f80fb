"""``gradsan.heal()``: heal mode with a bound."""

import pytest
import torch

import gradsan


def overwritten():
    x = torch.ones(4, requires_grad=True)
    y = x.exp()
    y.detach().zero_()
    return x, y.sum()


def test_backward_gets_the_original():
    with gradsan.heal() as watched:
        x, loss = overwritten()
        loss.backward()
    assert torch.equal(x.grad, torch.ones(4).exp())
    assert watched.diagnoses[0].severity == "warning"


@pytest.mark.parametrize("mode", ["watch", "deep", "heal"])
def test_noise_that_the_kernel_fills_after_the_save_is_no_change(mode):
    def gradient():
        torch.manual_seed(0)
        x = torch.randn(20).requires_grad_()
        torch.nn.functional.rrelu(x * 1, training=True).sum().backward()
        return x.grad

    right = gradient()
    with gradsan.watch(mode) as watched:
        assert torch.equal(gradient(), right)
    assert watched.diagnoses == ()
