"""Right programs that look like faults, each beside a twin that is one: silence here, the finding there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import gradsan
from gradsan.record import log
from gradsan.record.recorder import recorder
from gradsan.source.tree import source_line

both = pytest.mark.parametrize("mode", ["watch", "deep"])


@pytest.fixture(autouse=True)
def rounds_begin_anew() -> None:
    """Lines are known by their stacks, which equal each other in all cases of a test."""
    recorder().core.clear()
    torch.manual_seed(0)


def found(program: Callable[[], object], mode: str = "watch", native: bool | None = None) -> list[Any]:
    with gradsan.watch(mode, native=native) as watched:
        program()
    return list(watched.diagnoses)


def alarms(program: Callable[[], object], mode: str = "watch", native: bool | None = None) -> list[str]:
    return [one.code for one in found(program, mode, native) if one.severity != "note"]


def notes(diagnosis: Any) -> set[str]:
    return {note.key for note in diagnosis.notes}


def gaussian(floor: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    net = nn.Linear(4, 2)
    mean, raw = net(torch.randn(16, 4)).chunk(2, 1)
    floor(mean, torch.randn(16, 1), F.softplus(raw)).backward()


def own_likelihood(mean: torch.Tensor, target: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    variance = variance.clone()
    with torch.no_grad():
        variance.clamp_(min=0.7)
    return (variance.log() + (mean - target) ** 2 / variance).mean()


@both
def test_writes_of_torch_into_its_own_copy_are_no_finding(mode: str) -> None:
    assert alarms(lambda: gaussian(F.gaussian_nll_loss), mode) == []
    assert alarms(lambda: gaussian(own_likelihood), mode) == ["GS215"]


def floored(least: float) -> None:
    variance = F.softplus(nn.Linear(4, 1)(torch.randn(16, 4))).clone()
    with torch.no_grad():
        variance.clamp_(min=least)
    variance.log().mean().backward()


CORES = [False, pytest.param(True, marks=pytest.mark.skipif(not log.native_available(), reason="C core not built"))]


@pytest.mark.parametrize("native", CORES)
@both
def test_writes_under_no_grad_are_compared(mode: str, native: bool) -> None:
    assert alarms(lambda: floored(1e-6), mode, native) == []
    (diagnosis,) = found(lambda: floored(0.7), mode, native)
    assert (diagnosis.code, "note.may_be_unchanged" in notes(diagnosis)) == ("GS215", False)


def check_gradients() -> None:
    x = torch.randn(3, dtype=torch.double, requires_grad=True)
    assert gradcheck(torch.sin, (x,))
    assert gradgradcheck(torch.sin, (x,))
    assert gradgradcheck(nn.Linear(3, 2).double(), (x,))


def inner_steps_past_the_graph() -> None:
    weight = torch.ones(3, requires_grad=True)
    for _ in range(4):
        (gradient,) = torch.autograd.grad((weight * torch.randn(3)).exp().sum(), weight, create_graph=True)
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.sub_(0.1 * gradient)
        (weight * torch.randn(3)).exp().sum().backward()
        with torch.no_grad():
            weight.copy_(kept)


@both
def test_inputs_that_torch_moves_to_check_a_gradient(mode: str) -> None:
    assert alarms(check_gradients, mode) == []
    assert alarms(inner_steps_past_the_graph, mode) == ["GS218"]


calls = 0
seen: dict[str, int] = {"forward": 0}


class Counting(nn.Module):
    """A block that counts its calls in all ways that people have for it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls, self.stats, self.usage = 0, {"calls": 0}, torch.zeros(3)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global calls
        calls += 1
        seen["forward"] += 1
        self.calls += 1
        self.stats["calls"] += 1
        self.usage[1] += x.shape[0]
        self.count += 1
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return torch.relu(self.linear(x)) + x


class Counted(nn.Module):
    """The same, and the count has a part in what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return torch.relu(self.linear(x)) * self.count + x


def three_times(block: nn.Module, reentrant: bool) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(3):
        x = checkpoint(block, x, use_reentrant=reentrant)
    x.pow(2).mean().backward()


@both
@pytest.mark.parametrize("reentrant", [False, True])
def test_call_counters_in_a_checkpointed_function(mode: str, reentrant: bool) -> None:
    assert found(lambda: three_times(Counting(), reentrant), mode) == []
    assert set(alarms(lambda: three_times(Counted(), reentrant), mode)) == {"GS210"}


def in_eval_mode(writes: bool) -> None:
    net, drop = nn.Linear(4, 4), nn.Dropout(0.5, inplace=True).train(writes)
    for _ in range(3):
        h = net(torch.randn(3, 4, requires_grad=True))
        with torch.set_grad_enabled(not writes):
            drop(h)
        h = h * 2
        h += 1
        with torch.set_grad_enabled(not writes):
            drop(h)
        h.pow(2).sum().backward()


@both
def test_in_place_layers_that_do_nothing_in_eval_mode(mode: str) -> None:
    assert alarms(lambda: in_eval_mode(writes=False), mode) == []
    assert set(alarms(lambda: in_eval_mode(writes=True), mode)) == {"GS215"}


def without_memory() -> None:
    norm = nn.BatchNorm1d(4).eval()
    x = torch.randn(3, 4, requires_grad=True)
    norm(x).exp().sum().backward()
    weight = torch.randn(3, 2, requires_grad=True)
    (torch.eye(3).to_sparse() @ weight).pow(2).sum().backward()
    (torch.eye(3).to_sparse_csr() @ weight).pow(2).sum().backward()


@pytest.mark.parametrize("mode", ["watch", "deep", "heal"])
def test_saved_tensors_without_memory_of_their_own(mode: str) -> None:
    assert found(without_memory, mode) == []


def forces(use: Callable[[list[torch.Tensor]], object]) -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    kept = []
    for _ in range(40):
        position = torch.randn(5, 3, requires_grad=True)
        (force,) = torch.autograd.grad(net(position).sum(), position, create_graph=True)
        kept.append(-force)
    use(kept)


def fakes(use: Callable[[list[torch.Tensor]], object]) -> None:
    generator, critic = nn.Linear(3, 4), nn.Linear(4, 1)
    kept = []
    for _ in range(40):
        fake = generator(torch.randn(5, 3))
        kept.append(fake)
        critic(fake.detach()).mean().backward()
    use(kept)


def inner_steps(use: Callable[[list[torch.Tensor]], object], sums: bool = False) -> None:
    weights = start = torch.randn(3, requires_grad=True)
    total = torch.zeros(())
    for _ in range(40):
        loss = torch.tanh(weights).pow(2).mean()
        (step,) = torch.autograd.grad(loss, weights, create_graph=True)
        weights = weights - 0.1 * step
        total = total + (loss * start).sum() if sums else total
    use([weights])


@both
@pytest.mark.parametrize("program", [forces, fakes, inner_steps])
def test_graphs_of_many_rounds_that_one_backward_uses(mode: str, program: Callable[[Any], None]) -> None:
    assert alarms(lambda: program(lambda kept: torch.cat(kept).pow(2).mean().backward()), mode) == []
    assert alarms(lambda: program(lambda kept: torch.cat(kept).pow(2).mean().item()), mode) == ["GS422"]


def test_a_sum_that_nobody_uses_beside_inner_steps_that_are_used() -> None:
    (one,) = found(lambda: inner_steps(lambda kept: kept[0].sum().backward(), sums=True))
    assert (one.code, str(one.title).partition(" ")[0]) == ("GS422", "total")


class Merging(nn.Module):
    """A frozen layer with a low-rank addition that can be merged into it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.base = nn.Linear(features, features).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, features) / features)
        self.up = nn.Parameter(torch.randn(features, 2) / features)

    def merge(self) -> None:
        self.base.weight.data += self.up @ self.down

    def unmerge(self) -> None:
        self.base.weight.data -= self.up @ self.down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def merged(features: int, unmerges: bool) -> None:
    net = nn.Sequential(Merging(features), nn.Tanh(), Merging(features))
    loss = net(torch.randn(4, features)).pow(2).mean()
    for layer in (net[0], net[2]):
        layer.merge()
    if unmerges:
        for layer in (net[0], net[2]):
            layer.unmerge()
    loss.backward()


@both
def test_weights_merged_and_unmerged(mode: str) -> None:
    assert alarms(lambda: merged(64, unmerges=True), mode) == []
    assert alarms(lambda: merged(64, unmerges=False), mode) == ["GS202"]


def test_weights_too_large_to_be_copied_may_have_been_put_back() -> None:
    (diagnosis,) = found(lambda: merged(1100, unmerges=True))
    assert (diagnosis.code, diagnosis.severity) == ("GS202", "warning")
    assert "note.may_be_undone" in notes(diagnosis)
    (diagnosis,) = found(lambda: merged(1100, unmerges=False))
    assert (diagnosis.code, diagnosis.severity) == ("GS202", "error")
    assert alarms(lambda: merged(1100, unmerges=True), "deep") == []


def swapped(restores: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    backup = [one.detach().clone() for one in net.parameters()]
    loss = net(torch.randn(8, 4)).mean()
    with torch.no_grad():
        for one in net.parameters():
            one.copy_(torch.zeros_like(one))
        if restores:
            for one, before in zip(net.parameters(), backup, strict=True):
                one.copy_(before)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_restored_values_and_their_wrong_twins() -> None:
    (diagnosis,) = found(lambda: swapped(restores=True), "deep")
    assert (diagnosis.code, diagnosis.title.key) == ("GS120", "title.false_alarm_restored")
    assert "note.same_bytes_again" in notes(diagnosis)
    (diagnosis,) = found(lambda: swapped(restores=True))
    assert (diagnosis.code, "note.may_be_undone" in notes(diagnosis)) == ("GS110", True)
    for mode in ("watch", "deep"):
        (diagnosis,) = found(lambda: swapped(restores=False), mode)
        assert (diagnosis.code, "note.may_be_undone" in notes(diagnosis)) == ("GS110", False)


def with_update_operator() -> None:
    x = torch.randn(8, 4, 3, 3, requires_grad=True)
    weight, bias = torch.ones(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    mean, variance = torch.zeros(4), torch.ones(4)
    for _ in range(2):
        out = torch.ops.aten._batch_norm_with_update(x, weight, bias, mean, variance, 0.1, 1e-5)[0]
        out.pow(2).sum().backward()


def test_statistics_that_the_kernel_itself_updates() -> None:
    assert found(with_update_operator, "deep") == []


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    """In place, where gradsan does not look."""
    y = x.exp()
    y.add_(1)
    return y


@both
def test_an_in_place_operation_of_a_scripted_function_is_shown(mode: str) -> None:
    def program() -> None:
        y = scripted(torch.ones(3, requires_grad=True))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    (diagnosis,) = found(program, mode)
    suspects = [label.message.key for label in diagnosis.labels if label.role == "suspect"]
    assert (diagnosis.code, suspects) == ("GS121", ["label.suspect.scripted"])
    assert "note.no_suspect" not in notes(diagnosis)


def updated(in_thread: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(torch.randn(8, 4)).sum().backward()
    loss = net(torch.randn(8, 4)).sum()

    def update() -> None:
        optimizer.step()

    if in_thread:
        thread = threading.Thread(target=update)
        thread.start()
        thread.join()
    else:
        update()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@both
def test_an_update_in_another_thread_is_said_to_be_one(mode: str) -> None:
    (diagnosis,) = found(lambda: updated(in_thread=True), mode)
    told = [note.values["function"] for note in diagnosis.notes if note.key == "note.other_thread"]
    assert [name.rpartition(".")[2] for name in told] == ["update"]
    (diagnosis,) = found(lambda: updated(in_thread=False), mode)
    assert "note.other_thread" not in notes(diagnosis)


def rest(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Saved before a graph break, overwritten after it."""
    h = (x * weight).exp()
    torch._dynamo.graph_break()
    h.add_(1)
    return h.sum()


def added(h: torch.Tensor) -> torch.Tensor:
    """Overwrites its argument."""
    k = h * 2
    h.add_(1)
    return k


def run_rest() -> torch.Tensor:
    return torch.compile(rest, backend="aot_eager")(torch.ones(3), torch.ones(3, requires_grad=True))


def run_added() -> torch.Tensor:
    h = torch.ones(3, requires_grad=True).exp()
    torch.compile(added, backend="aot_eager")(h)
    return h.sum()


@pytest.mark.parametrize("program", [run_rest, run_added])
def test_writes_of_a_compiled_graph_are_attributed_to_it(program: Any) -> None:
    def both_ways() -> None:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            program().backward()

    (diagnosis,) = found(both_ways)
    (written,) = [label for label in diagnosis.labels if label.role == "written"]
    assert written.message.key == "label.written.op"
    assert (source_line(written.frame.file, written.frame.line) or "").strip() == "h.add_(1)"
    assert diagnosis.tensor is not None
    assert diagnosis.tensor.name not in ("rest", "added")
