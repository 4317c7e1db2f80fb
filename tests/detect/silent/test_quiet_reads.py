"""Right programs that read gradients by hand, or give them to others: not a warning about what becomes of them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from quiet_programs import warnings_about
from torch import nn

import gradsan
from gradsan.record.recorder import recorder

ROUNDS = 12


def _fit(net: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def gradients_that_are_only_looked_at() -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y, seen = torch.randn(16, 4), torch.randn(16, 1), []
    for _ in range(ROUNDS):
        F.l1_loss(net(x), y).backward()
        assert net.bias.grad is not None
        seen.append(net.bias.grad.item())
        _fit(net, optimizer, F.mse_loss(net(x), y))


def gradients_given_to_another_copy() -> None:
    meta = nn.Linear(2, 1)
    learner = copy.deepcopy(meta)
    inner = torch.optim.SGD(learner.parameters(), lr=0.1)
    outer = torch.optim.Adam(meta.parameters(), lr=0.01)
    for _ in range(ROUNDS):
        x = torch.randn(10, 2)
        learner.load_state_dict(meta.state_dict())
        _fit(learner, inner, learner(x[:5]).pow(2).mean())
        inner.zero_grad()
        learner(x[5:]).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(learner.parameters(), 0.5)
        for own, given in zip(meta.parameters(), learner.parameters(), strict=True):
            own.grad = given.grad
        outer.step()


def gradients_of_a_judge_written_down() -> None:
    net, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(judge.parameters(), lr=0.1)
    sizes = []
    for _ in range(ROUNDS):
        x = torch.randn(5, 4)
        for one in optimizers:
            one.zero_grad()
        loss = (net(x) - x).pow(2).mean() + judge(x).pow(2).mean()
        loss.backward()
        sizes.append(judge.bias.grad.tolist())
        optimizers[0].step()
        _fit(judge, optimizers[1], judge(x).mean())


def gradients_kept_as_copies_and_as_handles() -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(ROUNDS):
        out, kept, dropped = net(torch.randn(8, 4)), [], []
        for task in range(2):
            net.zero_grad()
            out[:, task].pow(2).mean().backward(retain_graph=True)
            kept.append([p.grad.clone() for p in net.parameters()])
            dropped.append(net.weight.grad)
        alike = F.cosine_similarity(dropped[0].flatten(), dropped[1].flatten(), dim=0)
        for p, one, other in zip(net.parameters(), *kept, strict=True):
            p.grad = one + other * alike.sign()
        optimizer.step()
    optimizer.zero_grad()
    net(torch.randn(8, 4)).sum().backward()
    handles = [p.grad for p in net.parameters()]
    for _ in range(ROUNDS):
        for handle in handles:
            handle.zero_()
        net(torch.randn(8, 4)).pow(2).mean().backward()
        with torch.no_grad():
            for p, handle in zip(net.parameters(), handles, strict=True):
                p -= 0.1 * handle
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        for _ in range(3):
            net(torch.randn(8, 4)).pow(2).mean().backward()
            so_far = [p.grad for p in net.parameters()]
            assert torch.stack([one.norm() for one in so_far]).norm() >= 0
        optimizer.step()


def gradient_looked_at_in_two_shapes() -> None:
    w = nn.Parameter(torch.randn(5, 3))
    for _ in range(ROUNDS):
        w.grad = None
        (torch.randn(8, 5) @ w).pow(2).mean().backward()
        assert w.grad is not None
        flat = w.grad.view(-1)
        (torch.randn(8, 5) @ w).exp().mean().backward()
        rows = w.grad
        with torch.no_grad():
            w -= 0.1 * rows / (flat.norm() + 1)


def memory_that_is_given_to_be_filled() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(5, 1)

        def forward(self, keys: torch.Tensor, coverage: torch.Tensor) -> torch.Tensor:
            weights = self.score(keys).squeeze(-1).softmax(-1)
            coverage += weights.detach()
            return (weights.unsqueeze(-1) * keys).sum(1)

    def smooth(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.add(x, x.roll(1, -1), out=out)
        return out

    attention, net = Attention(), nn.Linear(5, 2)
    optimizer = torch.optim.SGD([*attention.parameters(), *net.parameters()], lr=0.1)
    for _ in range(ROUNDS):
        keys = torch.randn(2, 7, 5)
        coverage = torch.zeros(2, 7)
        scratch = keys.new_empty(2, 5).float()
        first = attention(keys, coverage)
        second = attention(keys + 1, coverage)
        _fit(net, optimizer, (first * second).mean() + coverage.clamp(max=1).sum())
        smoothed = smooth(keys[:, 0], scratch)
        _fit(net, optimizer, net(smoothed).pow(2).mean())
        smoothed = smooth(keys[:, 1], scratch)
        _fit(net, optimizer, net(smoothed).abs().mean())


def head_that_is_trained_now_and_then(rounds_between: int = 4) -> None:
    body, choice, worth = nn.Linear(3, 6), nn.Linear(6, 2), nn.Linear(6, 2)
    owned = [*body.parameters(), *choice.parameters(), *worth.parameters()]
    optimizer = torch.optim.SGD(owned, lr=0.1)
    for turn in range(ROUNDS):
        hidden = body(torch.randn(4, 3)).tanh()
        loss = F.cross_entropy(choice(hidden), worth(hidden).argmax(-1))
        if turn % rounds_between == rounds_between - 1:
            loss = loss + worth(body(torch.randn(4, 3)).tanh()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def head_that_is_trained_in_the_last_round() -> None:
    head_that_is_trained_now_and_then(ROUNDS)


class Codebook(nn.Module):
    """Replaces its codes by averages of what was assigned to them, as parameters that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.sums = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(5, 3))
        self.counts = torch.ones(5)

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distances = given.square().sum(1, keepdim=True) - 2 * given @ self.codes.t() + self.codes.square().sum(1)
        chosen = F.one_hot(distances.argmin(1), 5).float()
        code = (chosen @ self.codes).detach()
        self.counts = 0.9 * self.counts + 0.1 * chosen.sum(0)
        self.sums = nn.Parameter(0.9 * self.sums + 0.1 * chosen.t() @ given)
        self.codes = nn.Parameter(self.sums / self.counts.unsqueeze(1))
        return given + (code - given).detach(), F.mse_loss(given, code)


def codebook_replaced_by_averages() -> None:
    net = nn.ModuleDict({"into": nn.Linear(4, 3), "book": Codebook(), "back": nn.Linear(3, 4)})
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(ROUNDS):
        given = torch.randn(8, 4)
        code, off = net["book"](net["into"](given))
        _fit(net, optimizer, F.mse_loss(net["back"](code), given) + off)


def target_that_the_optimizer_was_given() -> None:
    online, target, head = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 3)
    owned = [*online.parameters(), *target.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(owned, lr=0.1)
    for _ in range(ROUNDS):
        given = torch.randn(8, 4)
        with torch.no_grad():
            wanted = target(given)
        loss = F.mse_loss(head(online(given)), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
            slow.data = 0.9 * slow.data + 0.1 * fast.data
            fast.data = fast.data - 1e-3 * fast.data


def body_that_is_trained_after_other_rounds() -> None:
    trunk, head = nn.Linear(4, 3), nn.Linear(3, 2)
    optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.1)
    for turn in range(ROUNDS):
        with torch.set_grad_enabled(turn > 100):
            given = trunk(torch.randn(8, 4)).tanh()
        optimizer.zero_grad()
        head(given).square().mean().backward()
        optimizer.step()


def stem_that_another_function_trains() -> None:
    stem, head = nn.Linear(4, 3), nn.Linear(3, 2)
    optimizer = torch.optim.SGD([*stem.parameters(), *head.parameters()], lr=0.1)

    def warm(given: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = stem(given)
        return head(hidden)

    def whole(given: torch.Tensor) -> torch.Tensor:
        return head(stem(given))

    for forward, rounds in ((warm, ROUNDS), (whole, 0)):
        for _ in range(rounds):
            optimizer.zero_grad()
            forward(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()


def frozen_by_a_rate_of_zero() -> None:
    frozen, head = nn.Linear(4, 3), nn.Linear(3, 2)
    groups = [{"params": frozen.parameters(), "lr": 0.0}, {"params": head.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    for _ in range(ROUNDS):
        with torch.no_grad():
            hidden = frozen(torch.randn(8, 4))
        optimizer.zero_grad()
        head(hidden).square().mean().backward()
        optimizer.step()


PROGRAMS = (
    stem_that_another_function_trains,
    frozen_by_a_rate_of_zero,
    codebook_replaced_by_averages,
    target_that_the_optimizer_was_given,
    body_that_is_trained_after_other_rounds,
    head_that_is_trained_in_the_last_round,
    head_that_is_trained_now_and_then,
    gradient_looked_at_in_two_shapes,
    memory_that_is_given_to_be_filled,
    gradients_kept_as_copies_and_as_handles,
    gradients_that_are_only_looked_at,
    gradients_given_to_another_copy,
    gradients_of_a_judge_written_down,
)


@pytest.mark.parametrize("mode", ["watch", "deep"])
def test_not_a_warning(mode: str) -> None:
    assert warnings_about(PROGRAMS, mode) == {}


def test_calls_are_listened_to_up_to_the_first_backward_of_each_stretch() -> None:
    net = nn.Linear(2, 1)
    heard = []
    for rounds in (9, 6):
        with gradsan.watch():
            before = bool(recorder().listeners.on_result)
            for _ in range(rounds):
                net(torch.ones(1, 2)).sum().backward()
            heard.append((before, bool(recorder().listeners.on_result)))
    assert heard == [(True, False), (True, False)]
