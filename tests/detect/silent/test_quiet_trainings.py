"""Right trainings as people write them: no finding, in either mode."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradsan
from cases import each
from gradsan.record.recorder import recorder

ROUNDS = 9


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm(self.conv(x))
        out += x
        out = self.relu(out)
        return self.head(out.mean((2, 3)))


def head_trained_after_a_warm_up() -> None:
    body, start = torch.randn(8, 4, requires_grad=True), [torch.randn(1, 8, requires_grad=True)]
    optimizer = torch.optim.Adam([body, *start], lr=1e-2)
    for turn in range(ROUNDS):
        x, y = torch.randn(10, 4), torch.randn(10, 1)
        fast = list(start)
        for _ in range(2):
            inner = F.mse_loss(torch.tanh(x @ body.t()) @ fast[0].t(), y)
            fast = [w - 0.1 * g for w, g in zip(fast, torch.autograd.grad(inner, fast, create_graph=True), strict=True)]
        loss = F.mse_loss(torch.tanh(x @ body.t()) @ fast[0].t(), y)
        optimizer.zero_grad()
        if turn < 2:
            (body.grad,) = torch.autograd.grad(loss, [body])
        else:
            loss.backward()
        optimizer.step()


def images_normalised_in_place() -> None:
    net = Residual()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for _ in range(ROUNDS):
        x, y = torch.rand(4, 3, 6, 6), torch.randint(0, 2, (4,))
        x.sub_(0.5).div_(0.5)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def language_model_with_carried_state() -> None:
    words, lstm, head = nn.Embedding(9, 4, max_norm=1.0), nn.LSTM(4, 4), nn.Linear(4, 9)
    held = [*words.parameters(), *lstm.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(held)
    state = None
    for _ in range(ROUNDS):
        ids = torch.randint(0, 9, (5, 2))
        out, state = lstm(words(ids), state)
        loss = F.cross_entropy(head(out).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(held, 1.0)
        optimizer.step()
        state = tuple(one.detach_() for one in state)


def transformer_in_mixed_precision_with_accumulation() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    net = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    for number in range(1, ROUNDS + 1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(torch.rand(2, 5, 8)).float().pow(2).mean() / 4
        loss.backward()
        if number % 4 == 0:
            nn.utils.clip_grad_value_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 8 == 0)
            schedule.step()


def critic_with_clipped_weights() -> None:
    maker, judge = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.2, inplace=True), nn.Linear(4, 1))
    of_maker, of_judge = (torch.optim.RMSprop(one.parameters(), lr=0.01) for one in (maker, judge))
    for _ in range(ROUNDS):
        for _ in range(2):
            of_judge.zero_grad()
            loss = judge(maker(torch.randn(4, 2)).detach()).mean() - judge(torch.randn(4, 3)).mean()
            loss.backward()
            of_judge.step()
            for one in judge.parameters():
                one.data.clamp_(-0.05, 0.05)
        of_maker.zero_grad()
        (-judge(maker(torch.randn(4, 2))).mean()).backward()
        of_maker.step()


def critic_with_gradient_penalty() -> None:
    judge = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(judge.parameters())
    for _ in range(ROUNDS):
        x = torch.randn(4, 3, requires_grad=True)
        (g,) = torch.autograd.grad(judge(x).sum(), x, create_graph=True)
        optimizer.zero_grad()
        (judge(torch.randn(4, 3)).mean() + (g.norm(dim=1) - 1).pow(2).mean()).backward()
        optimizer.step()


def values_with_a_slow_target() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    target = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters())
    memory = torch.zeros(16, 3)
    for number in range(ROUNDS):
        memory[number] = torch.randn(3)
        rows = memory[: number + 1]
        with torch.no_grad():
            wanted = target(rows).max(1).values
        loss = F.smooth_l1_loss(net(rows).max(1).values, wanted + 1)
        optimizer.zero_grad()
        loss.backward()
        for one in net.parameters():
            one.grad.data.clamp_(-1, 1)
        optimizer.step()
        for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
            slow.data.copy_(0.9 * slow.data + 0.1 * fast.data)


def actor_and_critic() -> None:
    actor, critic, temperature = nn.Linear(3, 2), nn.Linear(5, 1), torch.zeros(1, requires_grad=True)
    of_actor, of_critic = (torch.optim.Adam(one.parameters()) for one in (actor, critic))
    of_temperature = torch.optim.Adam([temperature])
    for _ in range(ROUNDS):
        state = torch.randn(4, 3)
        mean = actor(state)
        act = mean + torch.randn_like(mean)
        of_critic.zero_grad()
        F.mse_loss(critic(torch.cat([state, act.detach()], 1)), torch.ones(4, 1)).backward()
        of_critic.step()
        of_actor.zero_grad()
        (temperature.exp().detach() * mean.pow(2).sum(1) - critic(torch.cat([state, act], 1))[:, 0]).mean().backward()
        of_actor.step()
        of_temperature.zero_grad()
        (-temperature * mean.detach().mean()).sum().backward()
        of_temperature.step()


def attack_as_it_should_be() -> None:
    net, x, y = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), torch.rand(4, 3), torch.zeros(4)
    for clear in (True, False):
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(ROUNDS):
            loss = F.cross_entropy(net(x + delta), y.long())
            if clear:
                loss.backward()
                delta.data = (delta.data + 0.1 * delta.grad.sign()).clamp_(-0.3, 0.3)
                delta.grad.zero_()
                net.zero_grad()
            else:
                (g,) = torch.autograd.grad(loss, delta)
                delta = (delta.detach() + 0.1 * g.sign()).clamp_(-0.3, 0.3).requires_grad_()


def adversarial_training_for_free() -> None:
    net, delta = nn.Linear(3, 2), torch.zeros(4, 3, requires_grad=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        F.cross_entropy(net(torch.rand(4, 3) + delta), torch.zeros(4).long()).backward()
        delta.data += 0.1 * torch.sign(delta.grad)
        delta.data.clamp_(-0.3, 0.3)
        optimizer.step()
        delta.grad.zero_()


def sharpness_aware() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(ROUNDS):
        x = torch.rand(4, 3)
        net(x).pow(2).mean().backward()
        with torch.no_grad():
            moved = [0.05 * one.grad for one in net.parameters()]
            for one, by in zip(net.parameters(), moved, strict=True):
                one.add_(by)
        optimizer.zero_grad()
        net(x).pow(2).mean().backward()
        with torch.no_grad():
            for one, by in zip(net.parameters(), moved, strict=True):
                one.sub_(by)
        optimizer.step()
        optimizer.zero_grad()


def normed_weights_and_averages() -> None:
    net = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
        nn.GELU(),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 1)),
    )
    slow = torch.optim.swa_utils.AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        net(torch.rand(4, 3)).pow(2).mean().backward()
        optimizer.step()
        slow.update_parameters(net)


def hooks_that_return_new_gradients() -> None:
    net, norms = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.zeros(())
    net[0].weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
    net[1].register_full_backward_hook(lambda _, inner, outer: norms.add_(outer[0].norm()) and None)
    net[0].register_forward_hook(lambda _, inputs, output: output * 1.5)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(ROUNDS):
        x = torch.rand(4, 3, requires_grad=True)
        h = x * 1
        h.register_hook(lambda g: g * 0.5)
        optimizer.zero_grad()
        (net(h) + h.sum()).pow(2).mean().backward()
        optimizer.step()


def checkpointed_blocks() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2, inplace=True), nn.ReLU(inplace=True), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(net.parameters())
    for reentrant in (False, True):
        for _ in range(ROUNDS):
            x = torch.rand(4, 3, requires_grad=True)
            optimizer.zero_grad()
            (checkpoint(net, x, use_reentrant=reentrant) + x.sum()).pow(2).mean().backward()
            optimizer.step()


def optimizer_within_backward() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    each = {one: torch.optim.SGD([one], lr=0.1) for one in net.parameters()}

    def step(parameter: Any) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for one in net.parameters():
        one.register_post_accumulate_grad_hook(step)
    for _ in range(ROUNDS):
        net(torch.rand(4, 3)).pow(2).mean().backward()


def codebook_kept_by_averages() -> None:
    encoder, decoder = nn.Linear(3, 2), nn.Linear(2, 3)
    book, sizes = torch.randn(5, 2), torch.ones(5)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    for _ in range(ROUNDS):
        x = torch.rand(6, 3)
        z = encoder(x)
        near = torch.cdist(z.detach(), book).argmin(1)
        hot = F.one_hot(near, 5).float()
        sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        book.mul_(0.9).add_(hot.t() @ z.detach() / sizes[:, None], alpha=0.1)
        q = book[near]
        loss = F.mse_loss(decoder(z + (q - z).detach()), x) + F.mse_loss(z, q)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def quasi_newton() -> None:
    w = torch.rand(3, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=6)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (w - 1).pow(4).sum()
        loss.backward()
        return loss

    for _ in range(ROUNDS):
        optimizer.step(closure)


def gradient_descent_by_hand() -> None:
    w, b = torch.rand(3, requires_grad=True), torch.zeros(1, requires_grad=True)
    for _ in range(ROUNDS):
        loss = (torch.rand(4, 3) @ w + b).pow(2).mean()
        loss.backward()
        for one in (w, b):
            one.data.add_(one.grad.data, alpha=-0.1)
            one.grad.data.zero_()


def several_losses_one_after_the_other() -> None:
    trunk, one, other = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*trunk.parameters(), *one.parameters(), *other.parameters()], lr=0.1)
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        h = torch.tanh(trunk(torch.rand(4, 3)))
        one(h).pow(2).mean().backward(retain_graph=True)
        other(h).abs().mean().backward()
        optimizer.step()


def networks_that_share_memory_and_states_that_are_kept() -> None:
    shared, local, shown = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1)
    checkpoints = []
    for at in range(ROUNDS):
        for mine, theirs in zip(local.parameters(), shared.parameters(), strict=True):
            mine.data = theirs.data
        local.zero_grad()
        local(torch.randn(5, 4)).pow(2).mean().backward()
        for mine, theirs in zip(local.parameters(), shared.parameters(), strict=True):
            theirs._grad = mine.grad
        optimizer.step()
        for mine, theirs in zip(shown.parameters(), shared.parameters(), strict=True):
            mine.data.mul_(1 - 0.01).add_(0.01 * mine.data.sign())
            if at % 3 == 2:
                mine.data = theirs.data
        checkpoint = {"round": at, "model": shared.state_dict()}
        checkpoints.append(copy.deepcopy(checkpoint))
        latest = shared.state_dict()
        if at % 4 == 3:
            shared.load_state_dict(checkpoints[at // 2]["model"])
    latest["bias"] = torch.zeros(2)
    shared.load_state_dict(latest)


def arrays_that_are_filled_anew_or_copied() -> None:
    rng, net = np.random.default_rng(0), nn.Linear(12, 1)
    frames, curve = np.zeros((3, 12), np.float32), np.exp(-np.arange(40) / 9).astype(np.float32)
    traces = rng.normal(size=(3, 12)).astype(np.float32)
    for at in range(3 * ROUNDS):
        frames[at % 3] = rng.uniform(0, 255, 12)
        frame, piece = torch.from_numpy(frames[at % 3]), torch.from_numpy(curve[at % 5 : at % 5 + 12].copy())
        frame /= 255
        piece /= 2
        trace = traces[at % 3]
        trace *= 0.9
        loss = sum((net(one).pow(2).mean() for one in (frame, piece, torch.from_numpy(trace))), torch.zeros(()))
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for one in net.parameters():
                one -= 0.01 * one.grad


def blocks_thawed_one_by_one() -> None:
    blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    for turn in range(ROUNDS):
        x = torch.randn(6, 4)
        for block in blocks[: 1 + turn // 3]:
            x = x + block(x).tanh()
        optimizer.zero_grad()
        x.pow(2).mean().backward()
        optimizer.step()
    blocks.load_state_dict(copy.deepcopy(blocks.state_dict()))


def heads_that_two_optimizers_train() -> None:
    make, trunk, real, kind = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 3)
    judges = [*trunk.parameters(), *real.parameters(), *kind.parameters()]
    judging = torch.optim.Adam(judges)
    informing = torch.optim.Adam([*make.parameters(), *judges])
    for _ in range(ROUNDS):
        judging.zero_grad()
        F.softplus(real(trunk(make(torch.randn(6, 5)).detach()))).mean().backward()
        judging.step()
        informing.zero_grad()
        F.cross_entropy(kind(trunk(make(torch.randn(6, 5)))), torch.randint(0, 3, (6,))).backward()
        informing.step()


def thresholds_that_decay_to_a_floor() -> None:
    net, thresholds = nn.Linear(5, 3), torch.full((3, 4), 0.9)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    decay, floor = 0.95, 0.02
    for _ in range(ROUNDS):
        for kind in range(3):
            row = thresholds[kind]
            row.mul_(decay).add_(floor)
        optimizer.zero_grad()
        (net(torch.randn(6, 5)).softmax(1) * thresholds.mean(1)).sum().backward()
        optimizer.step()


TRAININGS = [
    arrays_that_are_filled_anew_or_copied,
    networks_that_share_memory_and_states_that_are_kept,
    head_trained_after_a_warm_up,
    images_normalised_in_place,
    language_model_with_carried_state,
    transformer_in_mixed_precision_with_accumulation,
    critic_with_clipped_weights,
    critic_with_gradient_penalty,
    values_with_a_slow_target,
    actor_and_critic,
    attack_as_it_should_be,
    adversarial_training_for_free,
    sharpness_aware,
    normed_weights_and_averages,
    hooks_that_return_new_gradients,
    checkpointed_blocks,
    optimizer_within_backward,
    codebook_kept_by_averages,
    quasi_newton,
    gradient_descent_by_hand,
    several_losses_one_after_the_other,
    blocks_thawed_one_by_one,
    heads_that_two_optimizers_train,
    thresholds_that_decay_to_a_floor,
]


@each("mode", ["watch", "deep"])
@each("training", TRAININGS)
def test_nothing_is_said(training: Any, mode: str) -> None:
    recorder().core.clear()
    torch.manual_seed(0)
    with gradsan.watch(mode) as watched:
        training()
    assert [(one.code, one.severity) for one in watched.diagnoses] == []
    assert watched.report.seen.blind_spots == ()
