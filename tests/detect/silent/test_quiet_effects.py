"""Right programs that look as if a call had no effect (GS423 to GS426): no finding, in either mode."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from quiet_programs import warnings_about
from torch import nn

import gradsan


def head_alone_and_its_bias() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    for held in (net[-1].parameters(), [p for n, p in net.named_parameters() if n.endswith("bias")]):
        opt = torch.optim.SGD(held, lr=0.1)
        for _ in range(6):
            net.zero_grad()
            net(torch.randn(5, 4)).pow(2).mean().backward()
            opt.step()


def judged_by_a_network_that_stays() -> None:
    maker, judge = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1))
    patch = nn.Parameter(torch.zeros(6))
    for held in (list(maker.parameters()), [patch]):
        opt = torch.optim.Adam(held)
        for _ in range(6):
            opt.zero_grad()
            x = maker(torch.randn(3, 4)).detach() + patch if held == [patch] else maker(torch.randn(3, 4))
            judge(x).mean().backward()
            opt.step()


def adapters_between_layers() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.down, self.up = nn.Linear(16, 16), nn.Linear(16, 2), nn.Linear(2, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.lin(x).relu()
            return x + self.up(self.down(x))

    net = nn.Sequential(Block(), Block(), nn.Linear(16, 1))
    opt = torch.optim.AdamW([p for n, p in net.named_parameters() if "down" in n or "up" in n])
    for _ in range(6):
        net(torch.randn(3, 16)).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()


def parts_updated_by_hand_and_by_turns() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.scale = nn.Linear(4, 4), torch.ones(4, requires_grad=True)
            self.teacher = [copy.deepcopy(self.lin)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                wanted = self.teacher[0](x)
            return F.mse_loss(self.lin(x) * self.scale, wanted)

    net, extra = Net(), nn.Linear(1, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(6):
        opt.zero_grad()
        net(torch.randn(5, 4)).backward()
        opt.step()
        with torch.no_grad():
            net.scale -= 0.1 * net.scale.grad
            for mine, own in zip(net.teacher[0].parameters(), net.lin.parameters(), strict=True):
                mine.lerp_(own, 0.1)
        net.scale.grad = None
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1), extra)
    for held in (model[0], model[2], model[3], model):
        opt = torch.optim.SGD(held.parameters(), lr=0.1)
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(5, 4)).pow(2).mean().backward()
            opt.step()


def single_precision_written_back() -> None:
    """Conversions that copy nothing here: whether or not they did, the parameter gets what was computed."""
    net = nn.Linear(4, 2)

    def by_assignment(p: torch.Tensor, g: torch.Tensor) -> None:
        master = p.float()
        master -= 0.1 * g
        p.copy_(master)

    def by_name(p: torch.Tensor, g: torch.Tensor) -> None:
        row = p.data.contiguous()
        row.mul_(0.99)
        row = row.add_(g, alpha=-0.1)
        p.data.copy_(row)

    def by_type(p: torch.Tensor, g: torch.Tensor) -> None:
        wide = p.to(torch.float32)
        wide.add_(g, alpha=-0.1)
        p.copy_(wide)

    for update in (by_assignment, by_name, by_type):
        for _ in range(5):
            net.zero_grad()
            net(torch.randn(5, 4)).pow(2).mean().backward()
            with torch.no_grad():
                for p in net.parameters():
                    update(p, cast("torch.Tensor", p.grad))


def layer_added_with_its_group() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(12):
        if number == 6:
            model.append(nn.Linear(4, 4))
            opt.add_param_group({"params": model[1].parameters()})
        opt.zero_grad()
        model(torch.randn(5, 4)).pow(2).mean().backward()
        opt.step()


def gradients_read_before_they_are_cleared() -> None:
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(6):
        x = torch.randn(5, 4)
        parts = []
        for loss in (net(x).pow(2).mean(), net(x).abs().mean()):
            opt.zero_grad()
            loss.backward()
            parts.append([p.grad for p in net.parameters()])
        opt.zero_grad()
        for p, one, two in zip(net.parameters(), *parts, strict=True):
            p.grad = one + two
        opt.step()


def sharpness_aware_and_adversarial() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(6):
        x, y = torch.randn(5, 4, requires_grad=True), torch.randint(0, 2, (5,))
        F.cross_entropy(net(x), y).backward()
        worse = (x + 0.1 * x.grad.sign()).detach()
        opt.zero_grad(set_to_none=False)
        F.cross_entropy(net(worse), y).backward()
        with torch.no_grad():
            eps = [0.05 * p.grad for p in net.parameters()]
            torch._foreach_add_(list(net.parameters()), eps)
        opt.zero_grad()
        F.cross_entropy(net(worse), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(net.parameters()), eps)
        opt.step()
        opt.zero_grad()


def attention_maps_by_hooks() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(6):
        h = net[:2](torch.randn(5, 4))
        h.retain_grad()
        net[2](h)[:, 0].sum().backward(retain_graph=True)
        weight = h.grad.mean(0).relu().detach()
        opt.zero_grad()
        net[2](h * weight).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()


def clipped_where_a_part_waits_for_its_turn() -> None:
    model = nn.ModuleDict({"body": nn.Linear(4, 6), "head": nn.Linear(6, 1)})
    model["body"].requires_grad_(False)
    optimizer = torch.optim.SGD(model["head"].parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        model["head"](model["body"](torch.randn(8, 4)).tanh()).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model["body"].parameters(), 0.5)
        optimizer.step()


def clipped_in_every_way_that_counts() -> None:
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        opt,
        [torch.optim.lr_scheduler.ConstantLR(opt), torch.optim.lr_scheduler.CosineAnnealingLR(opt, 8)],
        milestones=[3],
    )
    for number in range(9):
        (net(torch.randn(5, 4)).pow(2).mean() / 2).backward()
        nn.utils.clip_grad_norm_(parameters=net.parameters(), max_norm=1.0)
        if number % 2:
            opt.step()
            nn.utils.clip_grad_norm_(net.parameters(), float("inf"))
            opt.zero_grad()
        schedule.step()
    lbfgs = torch.optim.LBFGS(net.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = net(torch.ones(5, 4)).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_value_(net.parameters(), 0.5)
        return loss

    for _ in range(3):
        lbfgs.step(closure)


def schedules_of_two_phases_and_of_numbers() -> None:
    net = nn.Linear(4, 2)
    numbers = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 2)
    for kind in (torch.optim.SGD, torch.optim.Adam):
        opt = kind(net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        for _ in range(9):
            opt.zero_grad()
            (net(torch.randn(5, 4)).pow(2).mean() * numbers.get_last_lr()[0]).backward()
            opt.step()
            schedule.step()
            numbers.optimizer.step()
            numbers.step()


def second_names_that_are_meant() -> None:
    net, memory, mask, history = nn.Linear(4, 4), [], torch.ones(3, 4), []
    state, total = torch.zeros(3, 4), torch.zeros(())
    for step in range(6):
        clean = torch.randn(3, 4)
        noisy = clean.clone()
        noisy += 0.1
        shown = state
        state = state + 1
        state *= 0.9
        inputs = torch.randn(3, 4)
        scaled = inputs
        scaled /= 2
        size = inputs.shape[0] + len(inputs)
        kept = net(scaled)
        kept += 1
        memory.append(kept)
        total += kept.detach().mean()
        buffer = torch.empty(3, 4)
        part = buffer
        part[:2] = 1.0
        part[2:] = float(step)
        keep = mask
        keep[step % 3] = 0.0
        kept = kept * keep * mask
        loss = kept.mean()
        total_loss = loss
        total_loss += 0.1 * kept.pow(2).mean()
        history.append((loss.item(), f"{float(loss)} {loss}"))
        kept = kept + total_loss
        residual = kept
        kept = torch.sin(kept)
        kept += residual
        (F.mse_loss(net(noisy), clean) + kept.mean() / size + (buffer * shown).mean()).backward()
        for p in net.parameters():
            held = p.data
            held.sub_(0.1)
            p.grad = None
    assert len(memory) == 6


def _jittered(x: torch.Tensor) -> torch.Tensor:
    x.add_(0.1 * torch.randn_like(x))
    return x


def _pushed(memory: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    memory[:-1] = memory[1:].clone()
    memory[-1] = x
    return memory


def _kept(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    keep = target != 255
    target[~keep] = 0
    return (F.cross_entropy(predicted, target, reduction="none") * keep).sum() / keep.sum()


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        x.clamp_(min=0)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (result,) = ctx.saved_tensors
        return gradient * (result > 0)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.clone(), scale)
        y = x.clone()
        y.mul_(scale)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum()


def functions_that_save_what_they_need() -> None:
    net, scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))
    for _ in range(3):
        _Clamped.apply(_Doubled.apply(net(torch.randn(5, 4)), scale)).sum().backward()


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.5).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 0.5


def a_function_in_threads_that_have_ended() -> None:
    # The next thread has the ident of the one before, and numbers its Nodes from 0 again.
    net = nn.Linear(4, 4)

    def evaluate() -> None:
        _Halved.apply(net(torch.randn(3, 4)))

    def train() -> None:
        hidden = net(torch.randn(3, 4))
        (hidden + hidden.tanh()).sum().backward()

    for work in (evaluate, train, evaluate, train):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()


class _Normalised(nn.Module):
    """A layer that begins its power iteration when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("u", torch.zeros(0))

    def begin(self) -> None:
        with torch.no_grad():
            self.u.resize_(4).normal_()
            self.u.copy_(self.u / self.u.norm())

    def weight(self) -> torch.Tensor:
        if self.u.numel() == 0:
            self.begin()
        return self.lin.weight / torch.dot(self.u, torch.mv(self.lin.weight, self.u)).abs()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight()


class _Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _Normalised()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net(x)


def _computed_first(flow: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = flow(x)
    return y.detach()


def _computed_again(flow: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return flow(x)


def states_that_an_object_begins_itself() -> None:
    for _ in range(3):
        flow, x = _Flow(), torch.randn(3, 4)
        y = _computed_first(flow, x)
        assert torch.equal(y, _computed_again(flow, x))
        _computed_again(flow, x).pow(2).sum().backward()


def _moved(point: torch.Tensor, step: torch.Tensor, momentum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return point - 0.1 * step, momentum  # a flat space: what is moved along stays as it is


def results_that_may_be_the_argument() -> None:
    net = nn.Linear(4, 3)
    state = {p: torch.zeros_like(p) for p in net.parameters()}
    for _ in range(6):
        net(torch.randn(5, 4)).pow(2).mean().backward()
        with torch.no_grad():
            for p in net.parameters():
                momentum = state[p]
                momentum.mul_(0.9).add_(p.grad)
                point, moved = _moved(p, momentum, momentum)
                momentum.copy_(moved)
                p.copy_(point)
        net.zero_grad()


def arguments_that_are_meant_to_change() -> None:
    net, memory = nn.Linear(4, 4), torch.zeros(5, 4)
    for _ in range(3):
        x = _jittered(torch.randn(6, 4))
        x = _jittered(x)
        noisy = _jittered(x.clone())
        target = torch.tensor([0, 1, 255, 2, 3, 255])
        loss = _kept(net(noisy), target)
        image = torch.rand(6, 4)
        scaled = _jittered(image)
        print(image, file=io.StringIO())
        seen = _pushed(memory, torch.randn(4))
        (loss + net(scaled).mean() / image.shape[0] + F.mse_loss(net(memory), memory) + net(seen).mean()).backward()
        assert float((net(noisy).argmax(1) == target).float().mean()) >= 0
        net.zero_grad()


class _Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x.clone() if mask is None else x * mask
        x -= x.mean(1, keepdim=True)
        x[:, 0] = 0
        return self.inner(x)


def arguments_copied_before_they_are_changed() -> None:
    net, mask = _Centred(), torch.ones(8, 4)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(6):
        x = torch.randn(8, 4)
        loss = F.mse_loss(net(x), x) + x.mean() * net(x, mask).mean()
        centred = net(x)
        loss = loss + (centred - x).abs().mean() + len(x) * net(x.view(8, 4)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


def averages_that_a_setting_leaves_out() -> None:
    for wanted in (True, False):
        net = nn.Linear(4, 2)
        average = copy.deepcopy(net) if wanted else net
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(8):
            loss = (net(torch.randn(8, 4)) - average(torch.randn(8, 4)).detach()).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            with torch.no_grad():
                for own, given in zip(average.parameters(), net.parameters(), strict=True):
                    own.lerp_(given, 0.1)
        for _ in range(4):
            average.load_state_dict(net.state_dict())
            opt.zero_grad()
            net(torch.randn(8, 4)).mean().backward()
            opt.step()


PROGRAMS = (
    arguments_copied_before_they_are_changed,
    averages_that_a_setting_leaves_out,
    arguments_that_are_meant_to_change,
    states_that_an_object_begins_itself,
    results_that_may_be_the_argument,
    functions_that_save_what_they_need,
    a_function_in_threads_that_have_ended,
    second_names_that_are_meant,
    head_alone_and_its_bias,
    judged_by_a_network_that_stays,
    adapters_between_layers,
    parts_updated_by_hand_and_by_turns,
    single_precision_written_back,
    layer_added_with_its_group,
    gradients_read_before_they_are_cleared,
    sharpness_aware_and_adversarial,
    attention_maps_by_hooks,
    clipped_in_every_way_that_counts,
    clipped_where_a_part_waits_for_its_turn,
    schedules_of_two_phases_and_of_numbers,
)


class _Unfinished(nn.Module):
    """A module whose constructor has not run: it has no tables of what it holds."""

    def __init__(self) -> None:
        pass


def test_layers_in_a_list_are_reported_beside_an_unfinished_module() -> None:
    unfinished = _Unfinished.__new__(_Unfinished)
    unfinished.__dict__["itself"] = unfinished
    del unfinished  # no variable reaches it, and only the garbage collection would end it
    torch.manual_seed(0)
    net = nn.Linear(3, 4)
    net.layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with gradsan.watch() as watched:
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(5):
            opt.zero_grad()
            net.layers[1](net.layers[0](net(torch.randn(5, 3)))).pow(2).mean().backward()
            opt.step()
    assert [(one.code, one.severity) for one in watched.diagnoses] == [("GS423", "warning")]


@pytest.mark.parametrize("mode", ["watch", "deep"])
def test_not_a_warning(mode: str) -> None:
    assert warnings_about(PROGRAMS, mode) == {}
