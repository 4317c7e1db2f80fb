"""Values changed before they are used: a finding where backward differentiates something else, else none."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradsan
from cases import each
from gradsan.record.recorder import recorder

MODES = ("watch", "deep")
every_mode = pytest.mark.parametrize("mode", MODES)


def begin_anew() -> None:
    """Forget what was logged: lines are known by their stacks, which equal each other in all cases of a test."""
    recorder().core.clear()


rounds_begin_anew = pytest.fixture(autouse=True)(begin_anew)
each_anew = functools.partial(each, before=begin_anew)


def leaf() -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def codes(watched: Any) -> list[str]:
    return [one.code for one in watched.diagnoses if one.severity != "note"]


def named(watched: Any) -> tuple[str, str | None]:
    (one,) = [one for one in watched.diagnoses if one.severity != "note"]
    assert one.silent
    assert one.severity == "warning"
    return one.code, None if one.tensor is None else one.tensor.name


def under_no_grad(h: torch.Tensor) -> None:
    with torch.no_grad():
        h.mul_(0.5)


def by_decorator(h: torch.Tensor) -> None:
    torch.no_grad()(lambda t: t.mul_(0.5))(h)


def under_set_grad_enabled(h: torch.Tensor) -> None:
    with torch.set_grad_enabled(False):
        h.mul_(0.5)


def through_data(h: torch.Tensor) -> None:
    h.data.mul_(0.5)


def through_detach(h: torch.Tensor) -> None:
    h.detach().mul_(0.5)


def by_operator(h: torch.Tensor) -> None:
    with torch.no_grad():
        h *= 0.5


def by_assignment(h: torch.Tensor) -> None:
    with torch.no_grad():
        h[:2] = 0.25


def by_copy(h: torch.Tensor) -> None:
    with torch.no_grad():
        h.copy_(h * 0.5)


def by_foreach(h: torch.Tensor) -> None:
    with torch.no_grad():
        torch._foreach_mul_([h], 0.5)


def by_out(h: torch.Tensor) -> None:
    with torch.no_grad():
        torch.mul(h, 0.5, out=h)


def through_a_view(h: torch.Tensor) -> None:
    with torch.no_grad():
        h[1:].mul_(0.5)


def by_a_dispatched_operator(h: torch.Tensor) -> None:
    with torch.no_grad():
        torch.ops.aten.mul_(h, 0.5)


UNRECORDED = [
    under_no_grad,
    by_decorator,
    under_set_grad_enabled,
    through_data,
    through_detach,
    by_operator,
    by_assignment,
    by_copy,
    by_foreach,
    by_out,
    through_a_view,
    by_a_dispatched_operator,
]


@every_mode
@each_anew("change", UNRECORDED)
def test_a_value_changed_unrecorded_and_used_on(change: Any, mode: str) -> None:
    with gradsan.watch(mode) as watched:
        x = leaf()
        h = x * 2
        change(h)
        h.pow(2).sum().backward()
    # As the program is written: d/dx of (what was done to 2x)^2, which the gradient is not.
    assert torch.equal(x.grad, 4 * h.detach())
    assert codes(watched) == ["GS215"]


@every_mode
@each_anew("change", [through_data, through_detach])
def test_the_name_is_that_of_the_value_and_not_of_its_alias(change: Any, mode: str) -> None:
    with gradsan.watch(mode) as watched:
        x = leaf()
        hidden = x * 2
        change(hidden)
        hidden.pow(2).sum().backward()
    assert named(watched) == ("GS215", "hidden")


@every_mode
def test_a_view_made_after_the_write_leads_to_the_value(mode: str) -> None:
    with gradsan.watch(mode) as watched:
        h = torch.ones(2, 3, requires_grad=True) * 2
        with torch.no_grad():
            h.mul_(0.5)
        h.t().unsqueeze(0).squeeze(0)[0].pow(2).sum().backward()
    assert codes(watched) == ["GS215"]


@every_mode
def test_a_value_computed_after_the_write_is_reported(mode: str) -> None:
    with gradsan.watch(mode) as watched:
        h = leaf() * 2
        with torch.no_grad():
            h.mul_(0.5)
        (h + 1).pow(2).sum().backward()
    assert codes(watched) == ["GS215"]


@every_mode
def test_other_bytes_of_the_memory_do_not_matter(mode: str) -> None:
    with gradsan.watch(mode) as watched:
        h = torch.ones(4, requires_grad=True) * 2
        with torch.no_grad():
            h[2:].zero_()
        h[:2].pow(2).sum().backward()
    assert codes(watched) == []


@every_mode
def test_a_value_saved_before_the_write_is_reported_elsewhere(mode: str) -> None:
    with gradsan.watch(mode) as watched:
        h = leaf() * 2
        y = h.pow(2)
        h.data.zero_()
        y.sum().backward()
    assert codes(watched) == ["GS202"]


@every_mode
def test_looked_for_at_some_rounds_and_in_deep_mode_at_each(mode: str) -> None:
    with gradsan.watch(mode) as watched:
        for number in range(6):
            h = leaf() * 2
            if number == 5:
                h.data.zero_()
            h.pow(2).sum().backward()
    assert codes(watched) == (["GS215"] if mode == "deep" else [])


@every_mode
def test_the_same_place_in_several_rounds_is_counted(mode: str) -> None:
    with gradsan.watch(mode) as watched:
        for _ in range(4):
            h = leaf() * 2
            h.data.mul_(0.5)
            h.pow(2).sum().backward()
    (one,) = watched.diagnoses
    assert (one.code, one.count) == ("GS215", 4 if mode == "deep" else 3)


class Everything(nn.Module):
    """Every activation that can work in place, as a module and as a function."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (
            nn.ReLU, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.SiLU, nn.Mish, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid,
            nn.Hardtanh,
        )  # fmt: skip
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2 * len(kinds))])
        self.acts = nn.ModuleList([kind(inplace=True) for kind in kinds])
        self.acts.append(nn.Threshold(0.1, 0.0, inplace=True))
        self.drop = nn.Dropout(0.5, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, act in zip(self.layers, self.acts, strict=False):
            x = act(self.drop(layer(x)))
        for layer, function in zip(self.layers, (F.relu_, F.elu_, F.leaky_relu_, F.selu_, torch.relu_), strict=False):
            x = function(layer(x))
        for layer, function in zip(self.layers, (F.relu, F.elu, F.silu, F.mish, F.hardswish), strict=False):
            x = function(layer(x), inplace=True)
        return x


def in_place_layers() -> torch.Tensor:
    torch.manual_seed(0)
    return Everything()(torch.randn(5, 4)).sum()


def recorded_writes() -> torch.Tensor:
    h = leaf() * 2
    h.mul_(0.5)
    h = h + 1
    h += 1
    h = h.clone()
    h[1:] = h[1:] * 2
    h = h * 1
    torch._foreach_mul_([h, h[:1] * 2, h[1:] * 3, h * 4], 0.5)
    h = h * 1
    torch.ops.aten.mul_(h, 0.5)
    return h.pow(2).sum()


def recorded_lists() -> torch.Tensor:
    parts = [leaf() * number for number in range(1, 6)]
    torch._foreach_mul_(parts, 0.5)
    return sum(part.pow(2).sum() for part in parts)  # type: ignore[return-value]


def recorded_in_a_loop() -> torch.Tensor:
    h = leaf() * 2
    for _ in range(5):
        h = h.clone()
        h.mul_(0.5)
        h = h.sin()
    return h.sum()


def straight_through() -> torch.Tensor:
    h = leaf() * 2
    q = h + (h.round() - h).detach()
    return q.pow(2).sum()


def a_copy_changed() -> torch.Tensor:
    h = leaf() * 2
    state = h.detach().clone()
    state.zero_()
    return h.pow(2).sum() + state.sum()


def mask_filled() -> torch.Tensor:
    h = leaf() * 2
    mask = torch.empty(3)
    with torch.no_grad():
        mask.bernoulli_(0.5).div_(0.5)
    return (h * mask).sum()


def buffer_of_detached_rows() -> torch.Tensor:
    memory = torch.zeros(2, 3)
    h = leaf() * 2
    memory[0] = h.detach()
    with torch.no_grad():
        memory.mul_(0.5)
    return (h * memory).sum()


def by_hand() -> torch.Tensor:
    w = leaf()
    with torch.no_grad():
        w.mul_(0.5)
    w.data.mul_(0.5)
    return w.pow(2).sum()


def initialised() -> torch.Tensor:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    nn.init.xavier_uniform_(layer.weight)
    layer.bias.data.zero_()
    layer.weight.data.clamp_(-0.1, 0.1)
    return layer(torch.ones(2, 3)).pow(2).sum()


def clipped_gradients() -> torch.Tensor:
    layer = nn.Linear(3, 3)
    layer(torch.ones(2, 3)).pow(2).sum().backward()
    nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
    return layer(torch.ones(2, 3)).pow(2).sum()


def recurrent() -> torch.Tensor:
    torch.manual_seed(0)
    net = nn.GRU(3, 4)
    hidden = torch.zeros(1, 2, 4)
    for _ in range(2):
        out, hidden = net(torch.ones(5, 2, 3), hidden)
        hidden = hidden.detach()
        hidden.mul_(0.9)
    return net(torch.ones(5, 2, 3), hidden)[0].pow(2).sum() + out.sum()


CLEAN = [
    in_place_layers,
    recorded_writes,
    recorded_lists,
    recorded_in_a_loop,
    straight_through,
    a_copy_changed,
    mask_filled,
    buffer_of_detached_rows,
    by_hand,
    initialised,
    clipped_gradients,
]


@every_mode
@each_anew("program", CLEAN)
def test_recorded_changes_are_no_finding(program: Any, mode: str) -> None:
    with gradsan.watch(mode) as watched:
        for _ in range(4):
            program().backward()
    assert codes(watched) == []


@every_mode
def test_the_end_of_a_detached_state_is_the_value_of_the_output(mode: str) -> None:
    # hidden[0] of a GRU shares no memory with out: nothing to be said, although it is written.
    with gradsan.watch(mode) as watched:
        recurrent().backward()
    assert codes(watched) == []


@every_mode
def test_a_forward_in_a_thread_of_its_own(mode: str) -> None:
    results: list[torch.Tensor] = []
    with gradsan.watch(mode) as watched:
        for _ in range(2):
            worker = threading.Thread(target=lambda: results.append(in_place_layers()))
            worker.start()
            worker.join()
            (in_place_layers() + results.pop()).backward()
    assert codes(watched) == []


@pytest.mark.parametrize("threads", [1, 2])
def test_other_threads_log_between_an_operation_and_its_write(threads: int) -> None:
    with gradsan.watch("watch") as watched:
        core = recorder().core
        if threads == 2:
            other = threading.Thread(target=lambda: in_place_layers().backward())
            other.start()
            other.join()
        in_place_layers().backward()
        core.on_nodes = lambda *_: [core.tick() for _ in range(3)]
        h = leaf() * 2
        h.mul_(0.5)
        core.on_nodes = None
        h.pow(2).sum().backward()
    assert codes(watched) == ([] if threads == 2 else ["GS215"]), "the clock alone tells nothing of two threads"


class Subtracts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x -= x.mean(1, keepdim=True)
        return self.lin(x)


class Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x[:, 2] = 0
        x.mul_(lengths)
        return self.lin(x)


def batch() -> torch.Tensor:
    return torch.tensor([[1.0, 2.0, 6.0], [2.0, 0.0, 1.0]])


@every_mode
def test_a_forward_changes_its_argument_and_the_caller_reads_it(mode: str) -> None:
    model = Subtracts()
    with gradsan.watch(mode) as watched:
        data = batch()
        F.mse_loss(model(data), data).backward()
    assert named(watched) == ("GS216", "data")


@every_mode
def test_several_writes_are_one_finding(mode: str) -> None:
    model = Fills()
    with gradsan.watch(mode) as watched:
        data = batch()
        F.mse_loss(model(data, torch.ones(2, 1)), data).backward()
    assert named(watched) == ("GS216", "data")
    (one,) = watched.diagnoses
    assert sum(label.role == "written" for label in one.labels) == 2


def test_writes_to_a_tensor_whose_address_is_used_again_are_not_counted() -> None:
    model, addresses = Fills(), set()
    for _ in range(100):
        with gradsan.watch("deep") as watched:
            data = batch()
            F.mse_loss(model(data, torch.ones(2, 1)), data).backward()
        (one,) = watched.diagnoses
        assert sum(label.role == "written" for label in one.labels) == 2
        address = data.untyped_storage()._cdata
        if address in addresses:
            break
        addresses.add(address)
    else:
        pytest.fail("no address was used again")


@every_mode
def test_the_caller_reads_what_was_written_in_another_function(mode: str) -> None:
    model = Subtracts()

    def step(data: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(data), data)

    with gradsan.watch(mode) as watched:
        step(batch()).backward()
    assert named(watched) == ("GS216", "data")


def shifted(value: torch.Tensor) -> torch.Tensor:
    value -= 1
    return value


def shift_(value: torch.Tensor) -> torch.Tensor:
    return shifted(value)


class Scaler:
    def apply(self, value: torch.Tensor) -> torch.Tensor:
        value *= 2
        return value


@every_mode
def test_a_function_changes_its_argument_and_the_caller_reads_it(mode: str) -> None:
    model = nn.Linear(3, 3)
    with gradsan.watch(mode) as watched:
        data = batch()
        F.mse_loss(model(shifted(data)), data).backward()
    assert named(watched) == ("GS216", "data")


@every_mode
def test_a_method_changes_its_argument_and_the_caller_reads_it(mode: str) -> None:
    model, scaler = nn.Linear(3, 3), Scaler()
    with gradsan.watch(mode) as watched:
        data = batch()
        scaled = scaler.apply(value=data)
        F.mse_loss(model(scaled), data).backward()
    assert named(watched) == ("GS216", "data")


@every_mode
def test_a_function_that_is_called_for_what_it_writes(mode: str) -> None:
    model = nn.Linear(3, 3)
    with gradsan.watch(mode) as watched:
        data = batch()
        shifted(data)
        F.mse_loss(model(data), data).backward()
        F.mse_loss(model(shift_(data)), data).backward()
        new = shifted(data.clone())
        F.mse_loss(model(new), data).backward()
        data = shifted(data)
        F.mse_loss(model(data), data).backward()
        half = shifted(data[:1])
        F.mse_loss(model(half), data[1:]).backward()
    assert codes(watched) == []


class GivesOn(nn.Module):
    """Hands its argument on to a function of its own, or to a module inside, which writes into it."""

    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__()
        self.lin, self.inner = nn.Linear(3, 3), inner

    def shift(self, value: torch.Tensor) -> torch.Tensor:
        value -= 1
        return value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(self.shift(x) if self.inner is None else self.inner(x))


class GivesCopyOn(GivesOn):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clone())


class Shifts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x -= 1
        return x


@every_mode
@each_anew("inner", [None, Shifts()])
def test_results_passed_through_belong_to_the_caller(mode: str, inner: nn.Module | None) -> None:
    model = GivesOn(inner)
    with gradsan.watch(mode) as watched:
        data = batch()
        F.mse_loss(model(data), data).backward()
    assert named(watched) == ("GS216", "data")


@every_mode
@each_anew("inner", [None, Shifts()])
def test_a_copy_that_forward_gives_on_is_its_own(mode: str, inner: nn.Module | None) -> None:
    model = GivesCopyOn(inner)
    with gradsan.watch(mode) as watched:
        data = batch()
        F.mse_loss(model(data), data).backward()
    assert codes(watched) == []


class Averages(nn.Module):
    """Keeps running means of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.mean
        with torch.no_grad():
            mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.mean += 0
        return self.lin(x - self.mean)


class Caches(nn.Module):
    """Writes into memory of its own, made in forward or kept from the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.cache = torch.zeros(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.copy_(x)
        scaled = x.clone()
        scaled *= 2
        x = x + 0
        x -= 1
        return self.lin(x) * self.cache.sum() + scaled


class Reads(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def callers_averages(model: nn.Module, data: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(data), data)


def normalised_in_the_loader() -> None:
    model = nn.Linear(3, 3)
    data = batch()
    data -= data.mean(1, keepdim=True)
    F.mse_loss(model(data), data).backward()


def normalised_in_a_helper() -> None:
    model = nn.Linear(3, 3)

    def normalise(given: torch.Tensor) -> torch.Tensor:
        given -= given.mean(1, keepdim=True)
        return given

    data = normalise(batch())
    F.mse_loss(model(data), data).backward()


def normalised_by_a_collate_function() -> None:
    model = nn.Linear(3, 3)

    def collate(rows: Any) -> torch.Tensor:
        stacked = torch.stack(rows)
        stacked.sub_(0.5).div_(2)
        return stacked

    for data in torch.utils.data.DataLoader(list(batch()), batch_size=2, collate_fn=collate):
        F.mse_loss(model(data), data).backward()


def running_means() -> None:
    model, data = Averages(), batch()
    for _ in range(2):
        callers_averages(model, data).backward()


def caches() -> None:
    model, data = Reads(Caches()), batch()
    for _ in range(2):
        callers_averages(model, data).backward()


def batch_norm() -> None:
    model, data = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True)), batch()
    for _ in range(2):
        callers_averages(model, data).backward()
    (model(data) * model[1].running_mean).sum().backward()


def exponential_average_of_a_model() -> None:
    model, slow, data = nn.Linear(3, 3), nn.Linear(3, 3), batch()
    slow.requires_grad_(False)
    for _ in range(2):
        F.mse_loss(model(data), slow(data)).backward()
        with torch.no_grad():
            for own, other in zip(slow.parameters(), model.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)


def averaged_by_swa_utils() -> None:
    model, data = nn.Linear(3, 3), batch()
    slow = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2):
        F.mse_loss(model(data), slow(data).detach()).backward()
        slow.update_parameters(model)


def the_argument_is_not_read_again() -> None:
    model, data = Subtracts(), batch()
    model(data).pow(2).sum().backward()


def steps_of_an_optimizer() -> None:
    model, data = nn.Linear(3, 3), batch()
    step = torch.optim.Adam(model.parameters())
    for _ in range(4):
        step.zero_grad(set_to_none=False)
        F.mse_loss(model(data), data).backward()
        step.step()


@every_mode
@each_anew(
    "program",
    [
        normalised_in_the_loader,
        normalised_in_a_helper,
        normalised_by_a_collate_function,
        running_means,
        caches,
        batch_norm,
        exponential_average_of_a_model,
        averaged_by_swa_utils,
        the_argument_is_not_read_again,
        steps_of_an_optimizer,
    ],
)
def test_changes_of_what_is_ones_own_are_nothing(program: Any, mode: str) -> None:
    torch.manual_seed(0)
    with gradsan.watch(mode) as watched:
        program()
    assert codes(watched) == []


def test_no_tensor_is_kept_and_the_gradient_is_the_same() -> None:
    def run() -> torch.Tensor:
        x = leaf()
        h = x * 2
        h.data.mul_(0.5)
        h.pow(2).sum().backward()
        return x.grad

    alone = run()
    with gradsan.watch() as watched:
        beside = run()
    assert torch.equal(alone, beside)
    assert codes(watched) == ["GS215"]


class TakesResults(nn.Module):
    """Works on what a module returns, which is its argument with new numbers."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.lin, self.inner, self.again = nn.Linear(3, 3), Shifts(), again

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        if self.again:
            data = self.inner(data)
            return self.lin(data)
        shifted = self.inner(data)
        return self.lin(shifted)


@every_mode
@each_anew("again", [False, True])
def test_a_read_of_the_result_means_the_new_values(mode: str, again: bool) -> None:
    model = TakesResults(again)
    with gradsan.watch(mode) as watched:
        model(batch()).sum().backward()
    assert codes(watched) == []
