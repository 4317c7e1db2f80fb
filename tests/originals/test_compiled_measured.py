"""The error of a gradient past a compiled graph is measured, and the program's own backward is untouched."""

import pytest
import torch

import gradsan
from forked import call_forked


# No pointwise operation: Inductor has a C++ compiler started for each kernel that it writes.
def matrix(x, weight):
    return x @ weight


def flattened(x, weight):
    return torch.nn.functional.linear(x.flatten(0, 1), weight.T)


def gated(x, weight):
    gate = torch.sigmoid(x @ weight)
    return gate * gate.exp()


def measured(function, backend, shape, keeps):
    """(code, error that was told, error that there was, gradients with gradsan and without)."""
    torch.manual_seed(0)
    weight = torch.randn(5, 3, requires_grad=True)
    batch = torch.randn(shape)
    right = torch.autograd.grad(function(batch, weight).square().sum(), weight)[0]

    def trained():
        torch._dynamo.reset()
        found = []
        compiled = torch.compile(function, backend=backend)
        for _ in range(2):
            kept = batch.clone()
            out = compiled(kept, weight)
            loss = out.square().sum()
            kept.add_(1.0)
            for again in range(1 + keeps):
                found.append(torch.autograd.grad(loss, weight, retain_graph=keeps and not again)[0])
        return found

    plain = trained()
    with gradsan.watch("deep") as watched:
        deep = trained()
    (diagnosis,) = {one.code: one for one in watched.diagnoses}.values()
    true = float((plain[0] - right).norm() / right.norm())
    return (
        diagnosis.code,
        diagnosis.gradient.status,
        diagnosis.gradient.relative_error,
        true,
        torch.equal(*map(torch.stack, (plain, deep))),
    )


@pytest.mark.parametrize(("function", "shape", "keeps"), [(matrix, (4, 5), False), (flattened, (2, 4, 5), True)])
def test_the_error_that_inductor_lets_pass(function, shape, keeps):
    code, state, told, true, is_same = call_forked(measured, function, "inductor", shape, keeps, compiles=True)
    assert (code, state, is_same) == ("GS219", "wrong", True)
    assert told == pytest.approx(true, rel=1e-3)
    assert true > 0.1


def raised():
    torch.manual_seed(0)
    weight, batch = torch.randn(5, 3, requires_grad=True), torch.randn(4, 5)
    kept = batch.clone()
    with gradsan.watch("deep") as watched:
        loss = torch.compile(gated, backend="aot_eager")(kept, weight).sum()
        kept.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    (diagnosis,) = watched.diagnoses
    return diagnosis.gradient.status, diagnosis.gradient.relative_error


def test_the_error_behind_a_backward_that_raises():
    # Of all that the backward reads, the batch alone is twice what it was.
    state, told = call_forked(raised, compiles=True)
    assert state == "raised"
    assert told == pytest.approx(1.0, rel=1e-3)
