"""Every write past the version counter × every saved value: a finding where the gradient is wrong, and only there."""

import copy

import numpy
import torch

import gradsan
from cases import each

WAYS = {
    "nothing": (lambda t: None, None),
    "data": (lambda t: t.data.add_(1), "GS202"),
    "data_item": (lambda t: t.data.__setitem__(0, 5.0), "GS202"),
    "data_out": (lambda t: torch.add(torch.ones(3), 5, out=t.data), "GS202"),
    "parameter_of_data": (lambda t: torch.nn.Parameter(t.data).detach().add_(1), "GS202"),
    "set_data": (lambda t: setattr(t, "data", torch.full((3,), 7.0)), "GS202"),
    "data_read": (lambda t: t.data.sum(), None),
    "numpy": (lambda t: t.detach().numpy().__setitem__(slice(None), 7), "GS203"),
    "numpy_read": (lambda t: t.detach().numpy().sum(), None),
    "asarray": (lambda t: numpy.asarray(t.detach()).fill(7), "GS203"),
    "memoryview": (lambda t: memoryview(t.detach().numpy()).__setitem__(0, 7.0), "GS203"),
    "from_numpy": (lambda t: torch.from_numpy(t.detach().numpy()).add_(1), "GS203"),
    "dlpack": (lambda t: torch.from_dlpack(t.detach()).add_(1), None),
    "copy": (lambda t: copy.copy(t.detach()).add_(1), "GS204"),
    "storage": (lambda t: t.untyped_storage().fill_(0), "GS204"),
    "storage_tensor": (lambda t: torch.empty(0).set_(t.detach().untyped_storage()).add_(1), "GS204"),
    "unsafe_chunk": (lambda t: t.detach().unsafe_chunk(3)[0].add_(1), "GS204"),
    "unsafe_split": (lambda t: torch.unsafe_split(t.detach(), 1)[0].add_(1), "GS204"),
    "apply": (lambda t: t.detach().apply_(lambda value: value + 1), "GS208"),
    "map": (lambda t: t.detach().map_(torch.ones(3), lambda value, other: value + other), "GS208"),
}


def input_saved():
    x = torch.ones(3, requires_grad=True)
    t = x * 2
    return x, t, (t * t).sum()


def output_saved():
    x = torch.ones(3, requires_grad=True)
    t = x.exp()
    return x, t, t.sum()


def leaf_saved():
    x = torch.ones(3, requires_grad=True)
    return x, x, (x * x).sum()


def buffer_saved():
    x, t = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    return x, t, (x * t).sum()


@each("saved", [input_saved, output_saved, leaf_saved, buffer_saved])
@each("way", WAYS)
def test_the_verdict_is_the_truth(way, saved):
    x, _, loss = saved()
    loss.backward()
    right = x.grad
    write, code = WAYS[way]
    with gradsan.watch() as watched:
        x, t, loss = saved()
        write(t)
        loss.backward()
    wrong = not torch.equal(x.grad, right)
    said = [diagnosis for diagnosis in watched.diagnoses if diagnosis.severity == "error"]
    assert bool(said) == wrong
    assert all(one.silent for one in said)
    if wrong and code:
        assert {one.code for one in said} == {code}


def test_bytes_handed_out_before_the_save_are_compared():
    x, b = torch.ones(3, requires_grad=True), torch.ones(3)
    array = b.numpy()
    with gradsan.watch() as watched:
        outside = b.numpy()
        loss = (b * x).sum()
        outside[:] = 7
        loss.backward()
    assert [one.code for one in watched.diagnoses] == ["GS203"]
    assert array[0] == 7


def test_a_write_to_other_bytes_is_none():
    x = torch.ones(4, requires_grad=True)
    with gradsan.watch() as watched:
        y = x * 1
        z = y[:2].sin()
        y.data[2:].mul_(3)
        z.sum().backward()
    assert watched.diagnoses == ()


def test_the_same_conflict_again_is_counted():
    with gradsan.watch() as watched:
        for _ in range(5):
            x = torch.ones(3, requires_grad=True)
            y = x.exp()
            y.data.add_(1)
            y.sum().backward()
    assert [one.count for one in watched.diagnoses] == [5]
