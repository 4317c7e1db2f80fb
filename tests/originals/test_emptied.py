"""Memory taken away from saved values: a report instead of a crash, and silence where it has come back."""

import textwrap
from pathlib import Path

import pytest
import torch

import gradsan
from cases import each
from forked import run_forked
from gradsan.originals.originals import fits_its_memory

MODES = ["watch", "deep", "heal"]
BEGIN = """
import torch, gradsan
x = torch.ones(300_000, requires_grad=True)
y = x * 2
"""
ENDING = {
    "result": "z = y.exp(); loss = z.sum(); z.untyped_storage().resize_(0); loss.backward()",
    "operand": "loss = (y * y).sum(); y.untyped_storage().resize_(0); loss.backward()",
    "typed": "loss = (y * y).sum(); y.storage().resize_(0); loss.backward()",
    "view": "v = y[1000:]; loss = (v * v).sum(); y.untyped_storage().resize_(8); loss.backward()",
    "no_grad": "d = torch.ones(300_000); loss = (x * d).sum(); d.untyped_storage().resize_(0); loss.backward()",
    "grad": "loss = (y * y).sum(); y.untyped_storage().resize_(0); torch.autograd.grad(loss, x)",
}


def run(program, *, mode="watch"):
    code = textwrap.dedent(program)
    watched = ["-m", "gradsan", "run", *([] if mode == "watch" else [f"--{mode}"])] if mode is not None else []
    return run_forked([*watched, "-c", code], Path.cwd())


@pytest.mark.parametrize("way", ["result", "operand"])
def test_without_gradsan_the_process_ends(way):
    assert run(BEGIN + ENDING[way], mode=None).returncode < 0


@pytest.mark.parametrize("mode", ["watch", "deep"])
@each("way", ENDING)
def test_the_program_ends_with_an_error_and_a_report(way, mode):
    ended = run(BEGIN + ENDING[way], mode=mode)
    assert ended.returncode == 1
    assert "gradsan.MemoryFreedError: " in ended.stderr
    assert "error[GS209]" in ended.stderr
    assert "src/gradsan/" not in ended.stderr


@each("way", ENDING)
def test_healed_it_runs_on(way):
    shown = "" if way == "grad" else "; print('sum', x.grad.double().sum().item())"
    ended = run(BEGIN + ENDING[way] + shown, mode="heal")
    assert ended.returncode == 66
    assert "warning[GS209]" in ended.stderr
    if shown:
        plain = run(BEGIN + ENDING[way].replace("resize_(0)", "nbytes()").replace("resize_(8)", "nbytes()") + shown)
        assert plain.returncode == 0
        assert ended.stdout == plain.stdout


@pytest.mark.parametrize("mode", MODES)
def test_the_program_may_go_on_after_the_error(mode):
    with gradsan.watch(mode) as watched:
        x = torch.ones(300_000, requires_grad=True)
        for _ in range(2):
            y = x.exp()
            loss = y.sum()
            y.untyped_storage().resize_(0)
            if mode == "heal":
                loss.backward()
            else:
                with pytest.raises(gradsan.MemoryFreedError, match=r"\[300000\].*0 bytes"):
                    loss.backward()
    [found] = watched.diagnoses
    assert (found.code, found.count, found.silent) == ("GS209", 2, False)
    assert [label.role for label in found.labels] == ["saved", "freed", "used"]
    assert found.tensor.name == "y"


@pytest.mark.parametrize("mode", MODES)
def test_memory_that_came_back_in_time_is_no_finding(mode):
    with gradsan.watch(mode) as watched:
        x = torch.ones(4, requires_grad=True)
        y = x.exp()
        loss = y.sum()
        storage, elsewhere = y.untyped_storage(), y.detach().clone()
        storage.resize_(0)
        storage.resize_(16)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(y):
            y.copy_(elsewhere)
        loss.backward()
    assert torch.equal(x.grad, torch.ones(4).exp())
    assert [one for one in watched.diagnoses if one.code == "GS209"] == []


def sharded(parameter):
    """A layer as sharded training has it: memory away after forward, back in a hook of backward, and away again."""
    elsewhere = parameter.detach().clone()
    storage = parameter.untyped_storage()
    size = storage.nbytes()

    def gather(*_):
        if storage.nbytes() < size:
            storage.resize_(size)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameter):
                parameter.copy_(elsewhere)

    def free(*_):
        storage.resize_(0)

    return gather, free


@pytest.mark.parametrize("mode", MODES)
def test_memory_given_back_in_a_hook_of_backward_is_no_finding(mode):
    def train():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(3)]
        x = torch.randn(4, 8, requires_grad=True)
        pairs = [sharded(layer.weight) for layer in layers]
        for _ in range(2):
            h = x
            for layer, (gather, free) in zip(layers, pairs, strict=True):
                gather()
                h = layer(h).relu()
                h.register_hook(gather)
                free()
            h.sum().backward()
            for _, free in pairs:
                free()
        return x.grad, [layer.weight.grad for layer in layers]

    right = train()
    with gradsan.watch(mode) as watched:
        found = train()
    assert torch.equal(found[0], right[0])
    assert all(torch.equal(one, other) for one, other in zip(found[1], right[1], strict=True))
    assert watched.diagnoses == ()


@pytest.mark.parametrize("mode", ["deep", "heal"])
def test_memory_that_came_back_without_its_content(mode):
    with gradsan.watch(mode) as watched:
        x = torch.ones(4, requires_grad=True)
        y = x.exp()
        loss = y.sum()
        y.untyped_storage().resize_(0)
        y.untyped_storage().resize_(16)
        y.untyped_storage().fill_(0)
        loss.backward()
    [found] = watched.diagnoses
    assert found.code == "GS209"
    assert found.explanation.key == "explanation.storage_refilled"
    assert found.silent == (mode == "deep")
    assert torch.equal(x.grad, torch.ones(4).exp() if mode == "heal" else torch.zeros(4))


def test_a_custom_function_may_give_memory_back_itself():
    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(weight)
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            (weight,) = ctx.saved_tensors
            weight.untyped_storage().resize_(16)
            weight.untyped_storage().copy_(torch.full((4,), 3.0).untyped_storage())
            return gradient * weight, None

    for mode in MODES:
        with gradsan.watch(mode):
            x, weight = torch.ones(4, requires_grad=True), torch.full((4,), 3.0)
            y = Gathered.apply(x, weight)
            weight.untyped_storage().resize_(0)
            y.sum().backward()
        assert x.grad.tolist() == [3.0] * 4


def test_the_hook_keeps_no_graph_alive():
    import gc
    import weakref

    class Probe:
        pass

    with gradsan.watch():
        x = torch.ones(4, requires_grad=True)
        y = x.exp()
        loss = y.sum()
        y.untyped_storage().resize_(0)
        other = (x * 2).sum()
        # The hook is put on a Node that does not run: its branch leads to no input that was asked for.
        z = torch.ones(4, requires_grad=True)
        torch.autograd.grad(loss + other + z.sum(), z, retain_graph=True)
        probe = Probe()
        gone = weakref.ref(probe)
        y.grad_fn.metadata["probe"] = probe
        del probe
        gc.disable()
        try:
            del y, loss, other
            assert gone() is None
        finally:
            gc.enable()


def test_resize_is_put_back():
    before = vars(torch.UntypedStorage).get("resize_")
    with gradsan.watch():
        assert vars(torch.UntypedStorage).get("resize_") is not before
    assert vars(torch.UntypedStorage).get("resize_") is before


@each(
    ("tensor", "fits"),
    [
        (torch.ones(4)[1:], True),
        (torch.ones(1).expand(1_000), True),
        (torch.ones(0), True),
        (torch.ones(2, 3).t(), True),
        (torch.eye(3).to_sparse(), True),
    ],
    ids=["view", "expanded", "empty", "transposed", "sparse"],
)
def test_tensors_within_their_memory(tensor, fits):
    assert fits_its_memory(tensor) is fits


def test_tensors_larger_than_their_memory():
    tensor = torch.ones(6)
    tail = tensor[4:]
    tensor.untyped_storage().resize_(20)
    assert not fits_its_memory(tensor)
    assert not fits_its_memory(tail)
    assert fits_its_memory(tensor[:5])
