"""Tensors that were given other memory (``v.data = …``) after they were saved: what they held is not taken as known."""

import torch

import gradsan


def loss_of_two_scalings(weight, start, given):
    """Each call gives ``v`` the vector that the next entry of ``given`` makes of it, reads it, and saves it."""
    v = torch.nn.Parameter(start.clone(), requires_grad=False)
    total = torch.zeros(())
    for make in given:
        v.data = make(v)
        total = total + weight.mv(v).sum() + v.data.sum()
    return total


def test_a_copy_of_the_memory_given_later_is_no_value_of_the_save():
    weight, start = torch.randn(3, 4, requires_grad=True), torch.randn(4)
    with gradsan.watch() as watched:
        for _ in range(2):
            loss_of_two_scalings(weight, start, [lambda v: v.data * 2, lambda v: v.data + 1]).backward()
    assert [one.code for one in watched.diagnoses] == ["GS202"]
    assert watched.diagnoses[0].severity == "error"
    assert watched.diagnoses[0].gradient.status != "right"


def test_memory_that_is_given_back_has_the_value_of_the_save():
    weight, vector = torch.randn(3, 4, requires_grad=True), torch.nn.Parameter(torch.randn(4), requires_grad=False)
    with gradsan.watch() as watched:
        for _ in range(2):
            loss = weight.mv(vector).sum()
            kept = vector.data
            vector.data = torch.zeros(4)
            loss = loss + vector.data.sum()
            vector.data = kept
            loss.backward()
    assert all(one.severity != "error" for one in watched.diagnoses)
