"""Right programs in which something looks thrown away, left out or constant, and is meant so: not a warning.

None reads a gradient by hand: those that do are in ``test_quiet_reads.py``, as a file with one is judged otherwise.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from quiet_programs import warnings_about
from torch import nn

import gradsan

ROUNDS = 18


def _fit(net: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def penalties_that_others_train_or_take_care_of() -> None:
    w, multipliers, rows = nn.Parameter(torch.randn(4)), nn.Parameter(torch.zeros(3)), torch.randn(3, 4)
    outer, inner = torch.optim.SGD([w], lr=0.01), torch.optim.SGD([multipliers], lr=0.01, maximize=True)
    sparse = nn.Parameter(torch.zeros(4))
    by_steps = torch.optim.SGD([sparse], lr=0.05)
    for _ in range(ROUNDS):
        with torch.no_grad():
            price = F.softplus(multipliers)
            free = (price * 0.1).sum()
            size = 0.1 * sparse.abs().sum()
        outer.zero_grad()
        ((w - 1).pow(2).sum() + price.dot(rows @ w) - free).backward()
        outer.step()
        inner.zero_grad()
        (multipliers * (rows @ w).detach()).sum().backward()
        inner.step()
        by_steps.zero_grad()
        ((rows @ sparse - 1).pow(2).mean() + size).backward()
        by_steps.step()
        with torch.no_grad():
            sparse.copy_(sparse.sign() * (sparse.abs() - 0.005).clamp(min=0))


def both_sides_of_one_value() -> None:
    maker, judge = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    of_maker, of_judge = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())

    def value(real: torch.Tensor) -> torch.Tensor:
        return F.logsigmoid(judge(real)).mean() + F.logsigmoid(-judge(maker(torch.randn(6, 3)))).mean()

    for _ in range(ROUNDS):
        real = torch.randn(6, 4)
        of_judge.zero_grad()
        loss_of_judge = -value(real)
        loss_of_judge.backward()
        of_judge.step()
        of_maker.zero_grad()
        loss_of_maker = value(real)
        loss_of_maker.backward()
        of_maker.step()


def one_loss_whose_optimizers_take_turns() -> None:
    coder, judge = nn.Linear(6, 6), nn.Linear(6, 2)
    first, second = torch.optim.Adam(coder.parameters()), torch.optim.Adam(judge.parameters())
    for at in range(ROUNDS):
        x, y = torch.randn(8, 6), torch.randint(0, 2, (8,))
        features = x.detach()
        loss = F.mse_loss(coder(x), x) + F.cross_entropy(judge(features), y)
        first.zero_grad()
        second.zero_grad()
        loss.backward()
        (first if at % 2 else second).step()


def heads_that_take_turns_and_all_step() -> None:
    trunk, heads = nn.Linear(4, 6), [nn.Linear(6, 1) for _ in range(3)]
    optimizers = [torch.optim.Adam(one.parameters()) for one in (trunk, *heads)]
    scales = torch.full((3, 6), 0.01)
    for at in range(12):
        x = torch.relu(trunk(torch.randn(8, 4)))
        for one in optimizers:
            one.zero_grad()
        heads[at % 3](x * scales[at % 3]).pow(2).mean().backward()
        for one in optimizers:
            one.step()
        scale = scales[at % 3]
        scale *= 2


class _Tap(torch.autograd.Function):
    seen: list[float] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, given):
        _Tap.seen.append(given.norm().item())
        return given


def a_backward_that_a_function_listens_to() -> None:
    first, second = nn.Linear(3, 5), nn.Linear(5, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    x = torch.randn(8, 3)
    for _ in range(ROUNDS):
        optimizer.zero_grad(set_to_none=False)
        second(_Tap.apply(first(x))).mean().backward()
        optimizer.zero_grad(set_to_none=False)
        second(first(x).tanh()).pow(2).mean().backward()
        optimizer.step()


def clips_of_heads_whose_turn_it_is_not_and_of_losses_that_are_met() -> None:
    trunk, heads = nn.Linear(4, 8), nn.ModuleList(nn.Linear(8, 2) for _ in range(2))
    optimizer = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=0.1)
    judge = nn.Linear(4, 1)
    of_judge = torch.optim.SGD(judge.parameters(), lr=0.1)
    for at in range(ROUNDS):
        x = torch.randn(6, 4)
        optimizer.zero_grad()
        heads[at % 2](trunk(x).relu()).pow(2).mean().backward()
        for head in heads:
            nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        of_judge.zero_grad()
        (float(at > ROUNDS // 2) * judge(x).mean()).backward()
        nn.utils.clip_grad_norm_(judge.parameters(), 0.5)
        of_judge.step()


def schedules_of_optimizers_that_take_turns_and_of_a_rate_alone() -> None:
    net, rate = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizers = torch.optim.Adam(net.parameters()), torch.optim.SGD(net.parameters(), lr=0.01)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 3) for one in optimizers]
    real = torch.optim.Adam(rate.parameters(), lr=0.1)
    shown = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD(rate.parameters(), lr=0.1), 0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for at in range(ROUNDS):
            _fit(net, optimizers[at >= ROUNDS // 2], net(torch.randn(6, 4)).pow(2).mean())
            real.param_groups[0]["lr"] = shown.get_last_lr()[0]
            _fit(rate, real, rate(torch.randn(6, 4)).pow(2).mean())
            for one in (*schedules, shown):
                one.step()


def data_that_requires_gradients() -> None:
    dense, conv, att = nn.Linear(5, 4), nn.Conv2d(1, 4, 3), nn.MultiheadAttention(4, 2, batch_first=True)
    lstm = nn.LSTM(4, 4, num_layers=2)
    held = [one for net in (dense, conv, att, lstm) for one in net.parameters()]
    optimizer = torch.optim.SGD(held, lr=0.1)
    x, image = torch.randn(6, 3, 5, requires_grad=True), torch.randn(6, 1, 5, 5, requires_grad=True)
    target = torch.randn(6, 3, 4).requires_grad_()
    state = tuple(torch.zeros(2, 3, 4, requires_grad=True) for _ in range(2))
    for _ in range(ROUNDS):
        h = att(dense(x), dense(x), dense(x))[0] + conv(image).mean((2, 3)).unsqueeze(1)
        optimizer.zero_grad()
        (lstm(h, state)[0] - target).pow(2).mean().backward()
        optimizer.step()


class _Judged(nn.Module):
    def __init__(self, judge: nn.Module) -> None:
        super().__init__()
        self.net, self.judge = nn.Linear(4, 6), [judge]


class _WithPrior(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.prior, self.net, self.out = (nn.Linear(*one) for one in ((4, 16), (16, 1), (16, 1), (1, 1)))


def networks_that_are_left_as_they_are() -> None:
    own, prior = _Judged(nn.Linear(6, 5)), _WithPrior()
    chosen = [one for name, one in prior.named_parameters() if "prior" not in name]
    optimizers = torch.optim.SGD(own.parameters(), lr=0.1), torch.optim.SGD(chosen, lr=0.1)
    for _ in range(ROUNDS):
        x = torch.randn(5, 4)
        _fit(own, optimizers[0], (own.judge[0](own.net(x)) - own.judge[0](torch.randn(5, 6))).pow(2).mean())
        h = prior.body(x).relu()
        _fit(prior, optimizers[1], prior.out(prior.net(h) + 3 * prior.prior(h)).pow(2).mean())


def states_that_fade() -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    traces, widths, level = [torch.zeros(4), torch.zeros(4)], {"a": torch.ones(4), "b": torch.ones(4)}, torch.zeros(4)
    for _ in range(70):
        x = torch.randn(3, 4) * widths["a"]
        level = level.to(x.device)
        level += x.mean(0)
        level *= 0.8
        _fit(net, optimizer, net(x + level).pow(2).mean())
        for one in traces:
            one += x.mean(0)
            one *= 0.3
        for name in widths:
            width = widths[name]
            width.mul_(0.95)
            width.sub_(0.01)


def states_that_drift() -> None:
    net, clean = nn.Linear(3, 3), torch.randn(12, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    chains, walkers = torch.randn(12, 3), torch.randn(12, 3)
    for _ in range(6):
        noisy = clean.clone()
        for _ in range(4):
            parts = (one.split(4) for one in (noisy, clean, chains, walkers))
            for x, x0, chain, walker in zip(*parts, strict=True):
                x += 0.2 * torch.randn_like(x)
                slope = chain - chain.mean(0)
                chain -= 0.1 * slope
                chain += 0.4 * torch.randn_like(chain)
                before = walker.clone()
                walker += 0.3 * torch.randn_like(walker)
                walker[walker.norm(dim=1) > 2] = before[walker.norm(dim=1) > 2]
                _fit(net, optimizer, (net(x) - x0).pow(2).mean() + net(chain).pow(2).mean() + net(walker).mean())


def particles_that_walk() -> None:
    net, particles = nn.Linear(2, 1), torch.randn(16, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(16):
        some = particles[4 * (step % 4) : 4 * (step % 4) + 4]
        some += 0.1 * torch.randn(4, 2)
        _fit(net, optimizer, (net(some).squeeze(1) - some.norm(dim=1)).pow(2).mean())


def a_rate_for_an_update_by_hand() -> None:
    net = nn.Linear(4, 1)
    holder = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(holder, 3)
    for _ in range(6):
        slopes = torch.autograd.grad((net(torch.randn(5, 4)) - 1).pow(2).mean(), list(net.parameters()))
        with torch.no_grad():
            for p, slope in zip(net.parameters(), slopes, strict=True):
                p -= holder.param_groups[0]["lr"] * slope
        holder.step()
        schedule.step()


def steps_that_wait_for_a_later_phase() -> None:
    trunk, early, late = nn.Linear(4, 6), nn.Linear(6, 1), nn.Linear(6, 1)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (trunk, early, late)]
    every = torch.optim.SGD([*trunk.parameters(), *late.parameters()], lr=0.1)
    for turn in range(30):
        shared = trunk(torch.randn(5, 4)).relu()
        every.zero_grad()
        optimizers[1].zero_grad()
        ((early(shared) - 1).pow(2).mean() + (late(shared) - 2).pow(2).mean()).backward()
        for optimizer in optimizers[: 2 if turn < 26 else 3]:
            optimizer.step()


class _Rounded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copied, kept = x.clone(), x * 1.0
        copied.data.copy_(x.data / (1 + x.data.abs()))
        kept.data = kept.data.sign()
        return copied + kept.tanh()


def straight_through_estimates() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Hardtanh(), _Rounded(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(ROUNDS):
        _fit(net, optimizer, net(torch.randn(8, 6)).pow(2).mean())


class _Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", nn.init.normal_(nn.Parameter(torch.empty(1, 4))).mul(3.0))
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((x @ self.rates).sin())


def data_computed_from_leaves_that_nothing_holds() -> None:
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    fourier, head = _Fourier(), nn.Linear(6, 1)
    moment = torch.linspace(0, 1, 12, requires_grad=True).view(-1, 1)
    edge = torch.cat([torch.rand(3, 1, requires_grad=True), torch.ones(3, 1)])
    wanted = torch.rand(12, requires_grad=True).view(-1, 1)
    features = nn.Linear(2, 6)(torch.rand(12, 2)).cos()
    modules = nn.ModuleList([net, fourier, head])
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.01)
    for _ in range(ROUNDS):
        value = net(moment)
        (slope,) = torch.autograd.grad(value.sum(), moment, create_graph=True)
        loss = (slope + value).pow(2).mean() + net(edge).pow(2).mean() + (head(features) - wanted).pow(2).mean()
        optimizer.zero_grad()
        (loss + fourier(torch.rand(5, 1)).pow(2).mean()).backward(retain_graph=True)
        optimizer.step()


def values_that_move_all_the_way() -> None:
    prior, observed = nn.Linear(4, 3), nn.Linear(4, 3)
    net = nn.ModuleList([prior, observed])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(ROUNDS):
        x, wanted = torch.randn(8, 4), torch.randn(8, 3)
        expected = prior(x)
        level = expected + (observed(x) - expected)
        surprise = wanted - expected
        _fit(net, optimizer, level.pow(2).mean() + surprise.pow(2).mean() + (expected + surprise).pow(2).mean())


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, target, back):
        ctx.save_for_backward(target, back)
        return hidden.clone()

    @staticmethod
    def backward(ctx, given):
        target, back = ctx.saved_tensors
        return target @ back, None, None


def gradients_that_another_one_replaces() -> None:
    first, second, back = nn.Linear(4, 8), nn.Linear(8, 3), torch.randn(3, 8) * 0.1
    net = nn.ModuleList([first, second])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(ROUNDS):
        y = F.one_hot(torch.randint(3, (16,)), 3).float()
        hidden = _Projected.apply(first(torch.randn(16, 4)).tanh(), y, back)
        _fit(net, optimizer, (second(hidden) - y).pow(2).mean())


def _seconds(weight: torch.Tensor) -> float:
    weight.add(1.0)
    begun = time.perf_counter()
    weight.add(1.0)
    return time.perf_counter() - begun


def _correlate(grad: torch.Tensor) -> None:
    matrix = grad @ grad.t()  # noqa: F841


def results_that_are_only_timed() -> None:
    net = nn.Linear(4, 3)
    net.weight.register_hook(_correlate)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(ROUNDS):
        _fit(net, optimizer, net(torch.randn(8, 4)).pow(2).mean())
        assert _seconds(net.weight.data) >= 0


def values_made_once_that_stay_true() -> None:
    embedding, start = nn.Embedding(12, 5), nn.Parameter(torch.zeros(1, 5))
    optimizer = torch.optim.SGD([start, *embedding.parameters()], lr=0.1)
    decode, begin, balance = embedding.weight.t(), start.expand(4, 5), start.sum()
    filled = embedding.weight.clone()
    for _ in range(ROUNDS):
        with torch.no_grad():
            filled.copy_(embedding.weight)
        ids = torch.randint(12, (4,))
        logits = (embedding(ids) + begin) @ decode + filled.sum(1)
        _fit(embedding, optimizer, F.cross_entropy(logits, ids) + 0.1 * balance)


def casts_made_anew_in_each_round() -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(4):
                net(torch.randn(8, 4)).float().pow(2).mean().backward()
        optimizer.step()


def made_by_a_network_that_waits() -> None:
    maker, head = nn.Linear(3, 8), nn.Linear(2, 1)
    outer, inner = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (maker, head))
    for _ in range(2):
        outer.zero_grad()
        weight = maker(torch.ones(3)).view(2, 4) + 0
        for _ in range(6):
            inner.zero_grad()
            head(torch.randn(8, 4) @ weight.t()).pow(2).mean().backward(retain_graph=True)
            inner.step()
        outer.step()


def updates_whose_sides_are_one_tensor_on_purpose() -> None:
    trunk, heads = nn.Linear(4, 6), [nn.Linear(6, 2) for _ in range(2)]
    online, target = (nn.Sequential(trunk, nn.Tanh(), head) for head in heads)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.1)
    flat = torch.zeros(2, 2)
    heads[0].bias.data, views = flat[0], [flat[0]]
    for _ in range(ROUNDS):
        x = torch.randn(8, 4)
        x += x
        _fit(online, optimizer, (online(x) - target(x).detach()).pow(2).mean())
        with torch.no_grad():
            for own, other in zip(target.parameters(), online.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)
                own.data.copy_(own.detach())
            for view, held in zip(views, [heads[0].bias], strict=True):
                view.copy_(held)


class Calm(nn.Module):
    """A gain for each channel behind a root mean square: nobody calls it a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain


def layers_tied_by_their_memory() -> None:
    embedding, decoder = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    for _ in range(4):
        decoder.weight.data = embedding.weight.data
        for _ in range(3):
            ids = torch.randint(0, 10, (8,))
            _fit(embedding, optimizer, F.cross_entropy(decoder(embedding(ids)), ids))


def gains_that_stay_as_they_are() -> None:
    net = nn.Sequential(nn.Linear(6, 8), Calm(8), nn.Tanh(), nn.Linear(8, 8), Calm(8), nn.Linear(8, 1))
    layers = [one for one in net if isinstance(one, nn.Linear)]
    optimizer = torch.optim.SGD([held for one in layers for held in one.parameters()], lr=0.1)
    for _ in range(ROUNDS):
        _fit(net, optimizer, net(torch.randn(5, 6)).pow(2).mean())


def results_and_lists_that_nobody_keeps_from_before() -> None:
    class Meter:
        def __init__(self) -> None:
            self.total = torch.zeros(4)

        def add(self, value: torch.Tensor) -> torch.Tensor:
            self.total += value
            return self.total

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.act = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.LeakyReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept, sizes = [], []
            for layer in self.layers:
                x = layer(x)
                sizes.append(x.shape)
                x = self.act(x)
                kept.append(x)
            return x + kept[0] * len(sizes)

    net, meter = Encoder(), Meter()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(ROUNDS):
        first = meter.add(torch.randn(4))
        assert first.shape == (4,)
        second = meter.add(torch.randn(4))
        _fit(net, optimizer, (net(torch.randn(8, 4)) + second).pow(2).mean())


PROGRAMS = (
    results_and_lists_that_nobody_keeps_from_before,
    updates_whose_sides_are_one_tensor_on_purpose,
    gains_that_stay_as_they_are,
    values_made_once_that_stay_true,
    casts_made_anew_in_each_round,
    made_by_a_network_that_waits,
    layers_tied_by_their_memory,
    heads_that_take_turns_and_all_step,
    penalties_that_others_train_or_take_care_of,
    both_sides_of_one_value,
    one_loss_whose_optimizers_take_turns,
    a_backward_that_a_function_listens_to,
    clips_of_heads_whose_turn_it_is_not_and_of_losses_that_are_met,
    schedules_of_optimizers_that_take_turns_and_of_a_rate_alone,
    data_that_requires_gradients,
    networks_that_are_left_as_they_are,
    states_that_fade,
    states_that_drift,
    particles_that_walk,
    a_rate_for_an_update_by_hand,
    steps_that_wait_for_a_later_phase,
    straight_through_estimates,
    data_computed_from_leaves_that_nothing_holds,
    values_that_move_all_the_way,
    gradients_that_another_one_replaces,
    results_that_are_only_timed,
)


@pytest.mark.parametrize("mode", ["watch", "deep"])
def test_not_a_warning(mode: str) -> None:
    assert warnings_about(PROGRAMS, mode) == {}


def test_noise_that_a_memory_gathers_as_a_whole_is_a_note() -> None:
    net, place = nn.Linear(2, 1), torch.randn(8, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gradsan.watch() as watched:
        for _ in range(6):
            place += 0.1 * torch.randn_like(place)
            _fit(net, optimizer, net(place).pow(2).mean())
    assert [(one.code, one.severity) for one in watched.diagnoses] == [("GS222", "note")]


def test_phases_of_one_objective_are_no_note() -> None:
    x = torch.randn(12, 2)
    means, shares = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.zeros(3))
    first, second = torch.optim.SGD([means], lr=0.1), torch.optim.SGD([shares], lr=0.1)

    def joint() -> torch.Tensor:
        return shares.log_softmax(0) - (x[:, None] - means).pow(2).sum(-1)

    with gradsan.watch() as watched:
        for _ in range(9):
            with torch.no_grad():
                weights = joint().softmax(-1)
            first.zero_grad()
            loss = -(weights * joint()).sum(-1).mean()
            loss.backward()
            first.step()
            second.zero_grad()
            loss = -(weights * joint()).sum(-1).mean()
            loss.backward()
            second.step()
    assert watched.diagnoses == ()


def test_two_parameters_over_one_memory_are_a_note_where_their_updates_add_up() -> None:
    first, second = nn.Linear(4, 1), nn.Linear(4, 1)
    second.weight = nn.Parameter(first.weight.data)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.9)
    with gradsan.watch() as watched:
        for _ in range(3):
            x = torch.randn(6, 4)
            _fit(first, optimizer, (first(x) - 1).pow(2).mean() + second(x).pow(2).mean())
    assert [(one.code, one.severity, one.tensor.name) for one in watched.diagnoses] == [
        ("GS216", "note", "second.weight")
    ]


def test_running_product_of_an_optimizer_is_no_note() -> None:
    class Corrected(torch.optim.Optimizer):
        """SGD whose rate is corrected by a product of factors, one for each element, that it keeps in its state."""

        def __init__(self, params: Iterator[nn.Parameter]) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                state = self.state[param]
                state.setdefault("product", torch.ones_like(param))
                factor = 1 / (1 + param.grad.abs())
                product = state["product"]
                product.mul_(factor)
                param.sub_(0.1 * param.grad / (2 - product))

    net = nn.Linear(4, 2)
    optimizer = Corrected(net.parameters())
    with gradsan.watch() as watched:
        for _ in range(40):
            _fit(net, optimizer, net(torch.randn(6, 4)).pow(2).mean())
    assert watched.diagnoses == ()
