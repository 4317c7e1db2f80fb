"""Deep and heal mode: the gradients of the program as written, whatever wrote, and nothing else changed."""

import contextlib
import ctypes
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import dlpack
from torch.utils.checkpoint import checkpoint

import gradsan
from cases import each
from gradsan import _torch

WAYS = {
    "no_grad": lambda t: t.mul_(0),
    "setitem": lambda t: t.__setitem__(1, 5.0),
    "slice": lambda t: t[1:].zero_(),
    "data": lambda t: t.data.mul_(0),
    "numpy": lambda t: t.detach().numpy().__setitem__(1, 7.0),
    "dlpack": lambda t: torch.from_dlpack(t.detach()).add_(1),
    "from_numpy": lambda t: torch.from_numpy(t.detach().numpy()).add_(1),
    "storage": lambda t: t.untyped_storage().fill_(0),
    "set_": lambda t: torch.empty(0).set_(t.detach().untyped_storage(), 0, (3,)).add_(1),
    "out": lambda t: torch.add(torch.ones(3), 1, out=t.detach()),
    "foreach": lambda t: torch._foreach_add_([t.detach()], 1.0),
    "bits": lambda t: t.detach().view(torch.int32).zero_(),
    "map_": lambda t: t.detach().map_(torch.ones(3), lambda a, b: a + b),
    "sort": lambda t: torch.sort(torch.tensor([3.0, 1.0, 2.0]), out=(t.detach(), torch.empty(3, dtype=torch.long))),
}
SAVED = {
    "operand": lambda t: (t * t).sum(),
    "result": None,
    "view": lambda t: (t[1:] * t[1:]).sum(),
}


def build(saved):
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    t = x * 1.5
    if saved == "result":
        t = x.exp()
        return x, t, t.sum()
    return x, t, SAVED[saved](t)


@each("saved", SAVED)
@each("way", WAYS)
def test_every_way_of_writing_is_healed_and_reported(way, saved):
    x, _, loss = build(saved)
    loss.backward()
    right = x.grad
    with gradsan.watch("heal") as watched:
        x, t, loss = build(saved)
        with torch.no_grad():
            WAYS[way](t)
        loss.backward()
    assert torch.equal(x.grad, right)
    [found] = {one.code: one for one in watched.diagnoses}.values()
    assert found.severity == "warning"
    assert not found.silent
    assert found.gradient.status == "right"
    assert found.gradient.relative_error > 0


@each("way", ["data", "numpy", "dlpack", "storage", "map_"])
def test_deep_reports_writes_that_pytorch_misses_and_leaves_them(way):
    x, t, loss = build("operand")
    with torch.no_grad():
        WAYS[way](t)
    loss.backward()
    wrong = x.grad
    with gradsan.watch("deep") as watched:
        x, t, loss = build("operand")
        with torch.no_grad():
            WAYS[way](t)
        loss.backward()
    assert torch.equal(x.grad, wrong)
    [found] = watched.diagnoses
    assert found.silent
    assert found.gradient.status == "wrong"


def test_an_alias_made_before_the_save():
    with gradsan.watch("heal") as watched:
        x = torch.ones(3, requires_grad=True)
        t = x * 2
        alias = t.detach().numpy()
        loss = (t * t).sum()
        alias[:] = 0
        loss.backward()
    assert x.grad.tolist() == [8.0, 8.0, 8.0]
    assert len(watched.diagnoses) == 1


def test_memory_that_came_from_numpy_stays_shared():
    array = np.ones(3, dtype=np.float32)
    with gradsan.watch("heal"):
        x = torch.ones(3, requires_grad=True)
        data = torch.from_numpy(array)
        loss = (x * data).sum()
        array[:] = 5
        assert data.tolist() == [5.0, 5.0, 5.0]
        data.add_(1)
        assert array.tolist() == [6.0, 6.0, 6.0]
        loss.backward()
    assert x.grad.tolist() == [1.0, 1.0, 1.0]


def test_deep_raises_as_pytorch_does():
    def broken():
        _, t, loss = build("result")
        with torch.no_grad():
            t.mul_(2)
        loss.backward()

    with pytest.raises(RuntimeError) as plain:
        broken()
    with gradsan.watch("deep") as watched, pytest.raises(RuntimeError) as deep:
        broken()
    assert str(deep.value) == str(plain.value)
    [found] = watched.diagnoses
    assert found.code == "GS101"
    assert found.gradient.status == "raised"


@pytest.mark.parametrize("mode", ["deep", "heal"])
def test_a_write_elsewhere_is_a_false_alarm(mode):
    with gradsan.watch(mode) as watched:
        base = torch.ones(4, requires_grad=True) * 1
        loss = base[:2].exp().sum() + (base[:2] * base[:2]).sum()
        with torch.no_grad():
            base[2:].mul_(5)
        if mode == "deep":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
    assert {one.code for one in watched.diagnoses} == {"GS120"}
    assert {one.severity for one in watched.diagnoses} == ({"error"} if mode == "deep" else {"note"})


def test_a_value_that_has_changed_is_reported_before_one_whose_neighbour_has():
    w = torch.ones(3, requires_grad=True)
    with gradsan.watch("deep") as watched:
        rows = torch.ones(2, 3)
        loss = (w * rows[0]).sum()
        rows[0].mul_(5)
        loss = loss + (w * rows[1]).sum()
        rows[0].mul_(5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert [one.code for one in watched.diagnoses] == ["GS105"]


def test_other_threads_are_healed():
    grads = []

    def work():
        x, t, loss = build("operand")
        t.data.zero_()
        loss.backward()
        grads.append(x.grad.tolist())

    with gradsan.watch("heal"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert grads == [[4.5, 9.0, 13.5]]


def test_backward_may_come_after_healing_has_ended():
    with gradsan.watch("heal"):
        x, t, loss = build("operand")
        with torch.no_grad():
            t.zero_()
    loss.backward()
    assert x.grad.tolist() == [4.5, 9.0, 13.5]


def test_functorch_may_forbid_hooks():
    with gradsan.watch("heal") as watched:
        gradient = torch.func.grad(lambda t: (t * t).sum())(torch.ones(3))
        assert torch.func.vmap(torch.func.grad(lambda t: (t * t).sum()))(torch.ones(2, 3)).shape == (2, 3)
        x, t, loss = build("operand")
        t.data.zero_()
        loss.backward()
    assert gradient.tolist() == [2.0, 2.0, 2.0]
    assert x.grad.tolist() == [4.5, 9.0, 13.5]
    assert len(watched.diagnoses) == 1


def test_the_graph_is_freed_as_before():
    import gc
    import weakref

    class Probe(torch.Tensor):
        pass

    with gradsan.watch("deep"):
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        z = y.exp()
        gone = weakref.ref(y)
        del y
        gc.disable()
        try:
            del z
            assert gone() is None
        finally:
            gc.enable()


@pytest.fixture(params=["plain", "rnn", "batchnorm", "checkpoint", "reentrant", "double", "function", "autocast"])
def training(request):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 3 * x**2

    def train():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 4))
        if request.param == "batchnorm":
            net = nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(), nn.Linear(6, 2))
        rnn = nn.LSTM(4, 5, batch_first=True)
        optimizer = torch.optim.Adam([*net.parameters(), *rnn.parameters()], lr=0.01)
        told = []
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.randn(6, 2, 4)
            if request.param == "rnn":
                loss = rnn(x)[0].pow(2).mean()
            elif request.param == "batchnorm":
                loss = net(x).pow(2).mean()
            elif request.param in ("checkpoint", "reentrant"):
                y = checkpoint(net, x.requires_grad_(), use_reentrant=request.param == "reentrant")
                loss = y.pow(2).mean()
            elif request.param == "function":
                loss = Cube.apply(net(x)).mean()
            elif request.param == "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    loss = net(x).float().pow(2).mean()
            else:
                loss = net(x).pow(2).mean()
            if request.param == "double":
                grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
                loss = loss + sum(g.pow(2).sum() for g in grads)
            loss.backward()
            optimizer.step()
            told.append(loss.item())
        return told, [p.detach().clone() for p in net.parameters()], torch.get_rng_state()

    return train


@pytest.mark.parametrize("mode", ["deep", "heal"])
def test_a_right_program_computes_the_same(training, mode):
    losses, parameters, state = training()
    with gradsan.watch(mode) as watched:
        again, same, after = training()
    assert again == losses
    assert all(torch.equal(one, other) for one, other in zip(parameters, same, strict=True))
    assert torch.equal(state, after)
    assert [one for one in watched.diagnoses if one.severity != "note"] == []


def floats_at(place):
    return (ctypes.c_float * 4).from_address(place)


@each("mode", ["deep", "heal"])
@each("when", ["before", "after"])
@each(
    "seen",
    [
        lambda t: t.numpy(),
        lambda t: torch.from_dlpack(t),
        lambda t: dlpack.from_dlpack(dlpack.to_dlpack(t)),
        lambda t: floats_at(t.data_ptr()),
        lambda t: floats_at(getattr(t, "const_data_ptr", t.data_ptr)()),
        lambda t: floats_at(t.untyped_storage().data_ptr()),
        lambda t: floats_at(t.storage().data_ptr()),
    ],
    ids=["numpy", "DLPack", "capsule", "pointer", "pointer to read from", "storage", "typed storage"],
)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_an_alias_of_a_saved_value_sees_writes_to_it(mode, when, seen):
    with gradsan.watch(mode):
        weights, data = torch.ones(4, requires_grad=True), torch.ones(4)
        early = seen(data) if when == "before" else None
        loss = (weights * data).sum()
        outside = seen(data) if early is None else early
        data.add_(1)
        assert [float(one) for one in outside] == [2.0] * 4
        del loss


def test_everything_is_put_back():
    names = ("numpy", "__array__", "__dlpack__", "data_ptr", "add_")
    before = [getattr(torch.Tensor, name) for name in names]
    run = threading.Thread._bootstrap_inner
    with gradsan.watch("deep"), gradsan.watch("heal"), gradsan.watch():
        assert torch.Tensor.numpy is not before[0]
    assert [getattr(torch.Tensor, name) for name in names] == before
    assert torch.Tensor.numpy is before[0]
    assert threading.Thread._bootstrap_inner is run
    assert not _torch.has_hooks()


@each("mode", ["deep", "heal"])
@each(
    "grow",
    [
        lambda t: t.detach().resize_(10).fill_(2),
        lambda t: t.detach().resize_as_(torch.ones(10)).fill_(2),
        lambda t: t.untyped_storage().resize_(40).fill_(0),
    ],
    ids=["resize_", "resize_as_", "storage"],
)
def test_memory_of_a_saved_value_may_grow(mode, grow):
    with gradsan.watch(mode) as watched:
        x, t, loss = build("operand")
        grow(t)
        if mode == "heal":
            loss.backward()
            assert x.grad.tolist() == [4.5, 9.0, 13.5]
    assert [one.severity for one in watched.diagnoses] in ([], ["warning"])


def test_statistics_that_training_does_not_read_are_not_measured():
    ran = []
    with gradsan.watch("deep"):
        norm = nn.BatchNorm1d(2)
        x = torch.randn(3, 2, requires_grad=True)
        y = norm(x)
        y.register_hook(lambda gradient: ran.append(gradient))
        y.sum().backward()
    assert len(ran) == 1


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_the_error_has_the_words_of_this_torch():
    def told(mode, anomaly):
        with gradsan.watch(mode) if mode else contextlib.nullcontext(), torch.autograd.set_detect_anomaly(anomaly):
            result = torch.ones(2, requires_grad=True).exp()
            result.add_(1)
            with pytest.raises(RuntimeError) as caught:
                result.sum().backward()
        return str(caught.value)

    for anomaly in (False, True):
        assert told("deep", anomaly) == told(None, anomaly)
