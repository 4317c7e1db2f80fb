"""With gradsan on, a correct program computes the same bits, draws the same random numbers, frees memory as before."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradsan
from cases import each
from forked import run_forked
from gradsan import _torch
from gradsan.record import log

Program = Callable[[], list[torch.Tensor]]
CORES = [False, pytest.param(True, marks=pytest.mark.skipif(not log.native_available(), reason="C core not built"))]


def train(
    model: nn.Module, loss_of: Callable[[], torch.Tensor], steps: int = 3, optimizer: Any = None
) -> list[torch.Tensor]:
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-2)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [*seen, *(p.detach().clone() for p in model.parameters())]


def mlp() -> list[torch.Tensor]:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))
    return train(net, lambda: net(torch.randn(5, 8)).square().mean())


def cnn() -> list[torch.Tensor]:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout2d(0.3),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(4),
    )
    net(torch.randn(2, 3, 12, 12))
    return train(net, lambda: nn.functional.cross_entropy(net(torch.randn(4, 3, 12, 12)), torch.randint(0, 4, (4,))))


def recurrent() -> list[torch.Tensor]:
    layers = {"lstm": nn.LSTM(3, 6, batch_first=True), "rnn": nn.RNN(6, 5, batch_first=True), "cell": nn.GRUCell(5, 5)}
    net = nn.ModuleDict(layers)

    def loss() -> torch.Tensor:
        middle, _ = net["rnn"](net["lstm"](torch.randn(2, 7, 3))[0])
        state = torch.zeros(2, 5)
        for part in middle.unbind(1):
            state = net["cell"](part, state)
        return state.pow(2).mean()

    return train(net, loss, optimizer=torch.optim.Adadelta(net.parameters()))


def transformer() -> list[torch.Tensor]:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    net = nn.Sequential(nn.Embedding(11, 16), encoder, nn.Linear(16, 11))
    ids = torch.randint(0, 11, (3, 6))
    return train(net, lambda: nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()))


def gan() -> list[torch.Tensor]:
    generator = nn.Linear(3, 4)
    critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2, inplace=True), nn.Linear(8, 1))
    g_step = torch.optim.Adam(generator.parameters(), lr=1e-2)
    d_step = torch.optim.RMSprop(critic.parameters(), lr=1e-2)
    seen = []
    for _ in range(3):
        fake = generator(torch.randn(6, 3))
        d_loss = critic(fake.detach()).mean() - critic(torch.randn(6, 4)).mean()
        d_step.zero_grad()
        d_loss.backward()
        d_step.step()
        g_loss = -critic(fake).mean()
        g_step.zero_grad()
        g_loss.backward()
        g_step.step()
        seen += [d_loss.detach(), g_loss.detach()]
    return [*seen, *(p.detach().clone() for p in [*generator.parameters(), *critic.parameters()])]


def autocast() -> list[torch.Tensor]:
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net(torch.randn(4, 8)).float().square().mean()

    return train(net, loss)


def checkpointed(use_reentrant: bool) -> list[torch.Tensor]:
    block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh())
    net = nn.ModuleList([nn.Linear(6, 6), block, nn.Linear(6, 1)])

    def loss() -> torch.Tensor:
        middle = checkpoint(block, net[0](torch.randn(4, 6)), use_reentrant=use_reentrant)
        return net[2](middle).square().mean()

    return train(net, loss)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grad * x * x


def double_backward() -> list[torch.Tensor]:
    net = nn.Linear(4, 1)

    def loss() -> torch.Tensor:
        x = torch.randn(5, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(Cube.apply(net(x)).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    return train(net, loss)


def compiled() -> list[torch.Tensor]:
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 1))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.add(net(x), 1.0)
        hidden.mul_(2)
        return torch.cat([hidden, torch.exp(hidden)])

    return train(net, lambda: forward(torch.randn(3, 6)).mean())


def threads() -> list[torch.Tensor]:
    """Replicas in threads, each with its own part of the batch, as DataParallel runs them."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss() -> torch.Tensor:
        parts = torch.randn(8, 6).chunk(2)
        results: dict[int, torch.Tensor] = {}

        def work(number: int) -> None:
            results[number] = net(parts[number]).square().sum()

        workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return results[0] + results[1]

    return train(net, loss)


PROGRAMS: dict[str, Program] = {
    "mlp": mlp,
    "cnn": cnn,
    "recurrent": recurrent,
    "transformer": transformer,
    "gan": gan,
    "autocast": autocast,
    "checkpoint": lambda: checkpointed(False),
    "checkpoint_reentrant": lambda: checkpointed(True),
    "double_backward": double_backward,
    "compile": compiled,
    "threads": threads,
}


def run(program: Program) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(7)
    return program(), torch.get_rng_state()


@pytest.mark.parametrize("native", CORES, ids=["pure", "native"])
@each("name", PROGRAMS)
def test_same_bits_and_same_random_state(name: str, native: bool) -> None:
    plain, plain_state = run(PROGRAMS[name])
    with gradsan.watch(native=native) as watched:
        seen, seen_state = run(PROGRAMS[name])
    assert len(plain) == len(seen)
    for expected, got in zip(plain, seen, strict=True):
        assert torch.equal(expected, got)
    assert torch.equal(plain_state, seen_state)
    assert watched.diagnoses == ()
    assert watched.report.seen.saves > 0


class Mark:
    """Put into a Node's metadata, it lives exactly as long as the Node."""


def peak_bytes(program: Program) -> int:
    """Peak of the allocator's own count of live bytes on the CPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run(program)
    live = peak = 0
    for event in record.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("native", CORES, ids=["pure", "native"])
@each("name", ["mlp", "cnn", "recurrent", "transformer", "checkpoint", "double_backward"])
def test_peak_of_live_tensors_is_no_higher(name: str, native: bool) -> None:
    run(PROGRAMS[name])
    plain = peak_bytes(PROGRAMS[name])
    with gradsan.watch(native=native):
        watched = peak_bytes(PROGRAMS[name])
    assert plain > 0
    assert watched <= plain * 1.02


@pytest.mark.parametrize("native", CORES, ids=["pure", "native"])
def test_a_graph_is_freed_when_it_was_before(native: bool) -> None:
    with gradsan.watch(native=native):
        x = torch.randn(4, requires_grad=True)
        y = (x * x).exp().tanh()
        mark = Mark()
        y.grad_fn.next_functions[0][0].metadata["mark"] = mark
        alive = weakref.ref(mark)
        del mark
        gc.disable()
        try:
            del y
            assert alive() is None, "reference counting alone frees a dropped graph"
        finally:
            gc.enable()


@pytest.mark.parametrize("native", CORES, ids=["pure", "native"])
def test_backward_frees_what_was_saved(native: bool) -> None:
    with gradsan.watch(native=native):
        x = torch.randn(1000, requires_grad=True)
        y = x.exp()
        alias = weakref.ref(y)
        loss = (y * y).sum()
        del y
        loss.backward()
        assert alias() is None


@pytest.mark.parametrize("native", CORES, ids=["pure", "native"])
def test_everything_is_taken_out_again(native: bool) -> None:
    thread_start = threading.Thread.start
    hooks = _torch.top_hooks()
    methods = dict(vars(torch.Tensor))
    functions = dict(vars(torch))
    with gradsan.watch(native=native), gradsan.watch():
        assert _torch.top_hooks() == hooks, "watching needs no saved-tensor hooks"
        assert vars(torch.Tensor)["add_"] is not methods.get("add_")
    assert _torch.top_hooks() == hooks
    assert threading.Thread.start is thread_start
    assert dict(vars(torch.Tensor)) == methods
    now = dict(vars(torch))
    assert all(now[name] is functions[name] for name in functions)


@pytest.mark.parametrize("native", CORES, ids=["pure", "native"])
def test_dispatch_tables_keyed_by_torch_functions_still_work(native: bool) -> None:
    handled: dict[Any, str] = {torch.add: "add", torch.Tensor.mul_: "mul_"}

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return handled.get(func) or super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(2).as_subclass(Logged)
    with gradsan.watch(native=native):
        handled[torch.cat] = "cat"
        assert torch.add(x, x) == "add"
        assert x.mul_(2) == "mul_"
        assert torch.cat([x, x]) == "cat"


LOOKED_AT = """
import torch, gradsan
from gradsan.record.recorder import recorder

layers = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 1)
net = torch.nn.Sequential(*layers)
optimizer = torch.optim.Adam(net.parameters())
with gradsan.watch():
    for _ in range(20):
        optimizer.zero_grad()
        net(torch.randn(3, 4)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    listeners = recorder().listeners
    # The core looks at the loss itself; nobody else looks at anything.
    before = [type(one.__self__).__name__ for one in listeners.before_backward]
    print(before, listeners.after_backward, listeners.after_nodes)
"""


def test_of_a_plain_training_only_the_losses_are_looked_at() -> None:
    """In a process of its own: what other tests have made, such as wrapper classes, is reason enough to look."""
    done = run_forked(["-c", LOOKED_AT], Path.cwd())
    assert done.stdout == "[] () ()\n"
