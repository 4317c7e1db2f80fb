"""Right programs that look like faults of meaning (GS215, GS216, GS220 to GS223): not a warning, in either mode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from quiet_programs import warnings_about
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def hooks_of_values_and_of_views_that_stay() -> None:
    conv = nn.Conv2d(3, 4, 3)
    grads = []
    for _ in range(4):
        out = conv(torch.randn(2, 3, 8, 8))
        out.register_hook(grads.append)
        out = torch.relu_(out)
        flat = out.flatten(1)
        handle = flat.register_hook(lambda g: g * 2)
        flat.sum().backward()
        handle.remove()
        flat.detach().zero_()
        conv.zero_grad()


def hooks_removed_or_registered_after_the_write() -> None:
    net = nn.Linear(4, 4)
    for _ in range(3):
        h = net(torch.randn(5, 4))
        view = h[1:]
        handle = view.register_hook(lambda g: g * 0)
        handle.remove()
        view.add_(1)
        view.sum().backward()
        buf = torch.zeros(8, 4)
        top = buf[:5]
        top.copy_(net(torch.randn(5, 4)))
        top.register_hook(lambda g: g)
        buf[5:]
        buf.relu().sum().backward()


def losses_changed_after_their_backward() -> None:
    model = nn.Linear(5, 3)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    running = torch.zeros(())
    for _epoch in range(5):
        x, y = torch.randn(16, 5), torch.randint(0, 3, (16,))
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        l2 = sum(p.pow(2).sum() for p in model.parameters())
        loss += 1e-2 * l2
        loss.backward()
        opt.step()
        running.data += loss.data
        loss.data /= 16


def losses_added_up_in_place() -> None:
    disc = nn.Linear(5, 1)
    opt = torch.optim.SGD(disc.parameters(), lr=1e-2)

    def hinge(out, real):
        return torch.relu(1 - out if real else 1 + out).mean()

    for _epoch in range(6):
        real, fake = torch.randn(4, 5), torch.randn(4, 5)
        loss = hinge(disc(real), True)
        loss = loss + hinge(disc(fake), False)
        loss.add_(0.01 * disc.weight.square().sum())
        opt.zero_grad()
        loss.backward()
        opt.step()
        for p in disc.parameters():
            p.data.clamp_(-0.1, 0.1)
        avg = loss.data
        avg.mul_(0.9)


def weights_from_gradients() -> None:
    dec = nn.Linear(4, 6)
    disc = nn.Linear(6, 1)
    opt = torch.optim.Adam(dec.parameters(), lr=1e-3)
    for _i in range(5):
        z, x = torch.randn(3, 4), torch.randn(3, 6)
        rec = dec(z)
        nll = F.mse_loss(rec, x)
        g_loss = -disc(rec).mean()
        nll_g = torch.autograd.grad(nll, dec.weight, retain_graph=True)[0]
        g_g = torch.autograd.grad(g_loss, dec.weight, retain_graph=True)[0]
        weight = (nll_g.norm() / (g_g.norm() + 1e-4)).clamp(0, 1e4).detach()
        loss = nll + weight * g_loss
        opt.zero_grad()
        loss.backward()
        opt.step()


def adversarial_examples() -> None:
    model = nn.Linear(4, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _i in range(5):
        x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
        x.requires_grad_()
        g = torch.autograd.grad(F.cross_entropy(model(x), y), x)[0]
        adv = (x + 0.1 * g.sign()).detach()
        loss = F.cross_entropy(model(adv), y) + 0.5 * F.cross_entropy(model(x + 0.01 * g), y)
        loss.item() + g.norm().item()
        opt.zero_grad()
        loss.backward()
        opt.step()


def losses_by_given_gradients() -> None:
    gen, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    opt = torch.optim.SGD(gen.parameters(), lr=0.1)
    w = torch.randn(4, requires_grad=True)
    for _i in range(5):
        latents = gen(torch.randn(3, 4))
        probe = latents.detach().requires_grad_()
        grad = torch.autograd.grad(critic(probe).sum(), probe)[0]
        loss = (latents * grad).sum()
        loss = loss + (latents - (latents - grad).detach()).pow(2).sum() * 0.5
        opt.zero_grad()
        loss.backward()
        opt.step()
        (gw,) = torch.autograd.grad((w * 2).pow(2).sum(), w, retain_graph=True)
        step = w - 0.1 * gw
        out = (step * step).sum()
        out.backward()
        with torch.no_grad():
            w -= 0.01 * w.grad
            w.grad = None


def generator_and_discriminator() -> None:
    G, D = nn.Linear(4, 6), nn.Linear(6, 1)
    opt_g, opt_d = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (G, D))
    for _it in range(6):
        z, real = torch.randn(5, 4), torch.randn(5, 6)
        fake = G(z)
        opt_d.zero_grad()
        d_loss = F.softplus(D(fake.detach())).mean() + F.softplus(-D(real)).mean()
        d_loss.backward()
        opt_d.step()
        opt_g.zero_grad()
        g_loss = F.softplus(-D(fake)).mean() + 10 * F.l1_loss(fake, real)
        g_loss.backward()
        opt_g.step()


def actor_and_critic() -> None:
    actor, q = nn.Linear(3, 2), nn.Linear(5, 1)
    log_alpha = torch.zeros(1, requires_grad=True)
    oa, oq = (torch.optim.Adam(one.parameters()) for one in (actor, q))
    ol = torch.optim.Adam([log_alpha])
    for _it in range(6):
        s = torch.randn(6, 3)
        a = torch.tanh(actor(s))
        q_loss = (q(torch.cat([s, a.detach()], 1)) - torch.randn(6, 1)).pow(2).mean()
        oq.zero_grad()
        q_loss.backward()
        oq.step()
        actor_loss = -q(torch.cat([s, a], 1)).mean() + log_alpha.exp().detach() * a.pow(2).mean()
        oa.zero_grad()
        actor_loss.backward()
        oa.step()
        alpha_loss = -(log_alpha * (a.detach().abs().mean() - 0.5)).sum()
        ol.zero_grad()
        alpha_loss.backward()
        ol.step()


def head_with_an_optimizer_of_its_own() -> None:
    trunk, a, b = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)
    o1 = torch.optim.SGD([*trunk.parameters(), *a.parameters()], lr=0.1)
    o2 = torch.optim.SGD(b.parameters(), lr=0.1)
    for it in range(9):
        h = torch.relu(trunk(torch.randn(6, 4)))
        loss = F.cross_entropy(a(h), torch.randint(0, 2, (6,))) + b(h.detach()).pow(2).mean()
        loss.backward()
        if it % 3 == 2:
            o1.step()
            o2.step()
            o1.zero_grad()
            o2.zero_grad()


def sharpness_aware_with_frozen_network() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    perceptual = nn.Linear(2, 5)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _it in range(6):
        x, y = torch.randn(6, 4), torch.randint(0, 2, (6,))
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            eps = [p.grad * 0.05 for p in net.parameters()]
            for p, e in zip(net.parameters(), eps, strict=False):
                p.add_(e)
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y) + 0.1 * perceptual(net(x)).pow(2).mean() + 0.0 * perceptual.weight.sum()
        loss.backward()
        with torch.no_grad():
            for p, e in zip(net.parameters(), eps, strict=False):
                p.sub_(e)
        opt.step()
        opt.zero_grad()
        perceptual.zero_grad()


def states_that_decay() -> None:
    net = nn.Linear(6, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    mean_obs = torch.zeros(4, 6)
    trace = torch.ones(4, 6)
    hs = [torch.zeros(4, 6) for _ in range(3)]
    noise = torch.randn(4, 6)
    for _step in range(12):
        obs = torch.randn(4, 6)
        mean_obs.mul_(0.9).add_(obs, alpha=0.1)
        trace *= 0.95
        trace += obs.abs()
        noise.mul_(0.99)
        for h in hs:
            h.mul_(0.5).add_(obs)
        loss = sum(
            net(h).pow(2).mean() for h in [mean_obs.clone(), trace.clone(), obs + noise, *(h.clone() for h in hs)]
        )
        opt.zero_grad()
        loss.backward()
        opt.step()


def buffer_filled_anew() -> None:
    net = nn.Linear(6, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    static = torch.empty(4, 6)
    data = torch.rand(16, 6) * 255
    for _epoch in range(6):
        for i in range(0, 16, 4):
            static.copy_(data[i : i + 4])
            static /= 255
            static -= 0.5
            net(static).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()


def batches_copied_by_a_loader() -> None:
    loader = DataLoader(TensorDataset(torch.rand(24, 6) * 255, torch.randint(0, 3, (24,))), batch_size=6, shuffle=True)
    whole = torch.rand(24, 6)
    whole -= whole.mean(0)
    whole /= whole.std(0)
    net = nn.Linear(6, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    pos, vel = torch.randn(8, 6), torch.zeros(8, 6)
    for _epoch in range(6):
        for x, y in loader:
            x = x.float()
            x /= 255
            x.sub_(0.5).div_(0.5)
            opt.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
        vel *= 0.9
        vel -= 0.01 * pos
        pos += vel
        net(pos).pow(2).mean().backward()
        whole.clamp_(-3, 3)
        net(whole).mean().backward()


def in_place_layers_alone() -> None:
    class UnitRelu2(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.relu = nn.ReLU(inplace=True)
            self.fc = nn.Linear(d, d)

        def forward(self, x):
            out = self.relu(x)
            out = self.fc(out)
            return out.view(x.size(0), -1)

    class PositiveRelu2(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.relu = nn.ReLU(inplace=True)
            self.fc = nn.Linear(d, d)

        def forward(self, x):
            x = torch.nn.functional.softplus(x)
            y = self.fc(self.relu(x))
            return y + x

    net = nn.Sequential(nn.Linear(4, 4), UnitRelu2(4), PositiveRelu2(4), UnitRelu2(4))
    for _ in range(4):
        net(torch.randn(3, 4)).pow(2).mean().backward()
        net.zero_grad()


def in_place_layers_of_fresh_values() -> None:
    class PreActRelu4(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.bn1, self.bn2 = nn.BatchNorm1d(c), nn.BatchNorm1d(c)
            self.fc1, self.fc2 = nn.Linear(c, c), nn.Linear(c, c)
            self.relu = nn.ReLU(inplace=True)
            self.drop = nn.Dropout(0.0, inplace=True)

        def forward(self, x):
            out = self.fc1(self.relu(self.bn1(x)))
            out = self.fc2(self.relu(self.bn2(out)))
            kept = self.drop(out)
            out = kept + x
            self.relu(out)
            return out

    class InOneSum(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.bn, self.fc, self.relu = nn.BatchNorm1d(c), nn.Linear(c, c), nn.ReLU(inplace=True)

        def forward(self, x):
            return x + self.relu(self.fc(x)) + self.fc(self.relu(self.bn(x)))

    net = nn.Sequential(nn.Linear(3, 4), PreActRelu4(4), InOneSum(4), PreActRelu4(4))
    for _ in range(4):
        net(torch.randn(3, 3)).pow(2).mean().backward()
        net.zero_grad()


def residuals_of_derivatives() -> None:
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = torch.optim.Adam(net.parameters())
    start = torch.zeros(6, 1)
    for _ in range(5):
        t = torch.linspace(0, 2, 6).view(-1, 1).requires_grad_()
        u = net(t)
        (u_t,) = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)
        # A point that is moved along the gradient, and a target without a graph.
        (slope,) = torch.autograd.grad(u.sum(), t, retain_graph=True)
        moved = t - 0.1 * slope
        loss = (u_t + 0.5 * u).pow(2).mean() + net(moved).pow(2).mean() + F.mse_loss(u, (u + 0.1 * slope).detach())
        opt.zero_grad()
        loss.backward()
        opt.step()
        start += slope


def attributions_added_up() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x, total = torch.randn(5, 4, requires_grad=True), None
    for step in range(40):
        (g,) = torch.autograd.grad(net(step / 40 * x).sum(), x)
        now = g * x
        total = now if total is None else total + now.detach()


def values_of_parameters_in_losses() -> None:
    net, emissions = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
    opt = torch.optim.SGD([*net.parameters(), emissions], lr=0.1)
    anchor = [p.detach().clone() for p in net.parameters()]
    for _ in range(9):
        x = torch.randn(5, 4)
        size = net.weight.data.abs().mean()
        top = emissions.data.max()
        partition = top + (emissions - top).exp().sum().log()
        near = sum((p - old).pow(2).sum() for p, old in zip(net.parameters(), anchor, strict=True))
        norm = sum(p.data.norm() for p in net.parameters())
        with torch.no_grad():
            clean = net(x).pow(2).mean() + (torch.eye(4) @ net.weight).mean()
        loss = clean + net(x).pow(2).mean() / size + 0.1 * near + 0.01 * partition + norm.detach()
        opt.zero_grad()
        loss.backward()
        opt.step()
        (loss + norm).item()


def values_written_where_nothing_reads_them_on() -> None:
    net = nn.Linear(4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        h = net(torch.randn(6, 4))
        logp = h.log_softmax(1)
        shown = h.detach().clone()
        shown *= 2
        h.data.clamp_(-100, 100)
        loss = -logp[:, 0].mean() + h.exp().mean()
        opt.zero_grad()
        loss.backward()
        h.data.zero_()
        opt.step()


def values_as_they_were_after_unrecorded_writes() -> None:
    net = nn.Linear(4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(9):
        h, k = net(torch.randn(6, 4)), net(torch.randn(6, 4))
        with torch.no_grad():
            h.clamp_(-50, 50)
            first = k[0].clone()
            k[0].zero_()
            k.sum()
            k[0].copy_(first)
        loss = h.pow(2).mean() + k.pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


class _Reversible(torch.autograd.Function):
    """Frees its input, as reversible networks do, and computes it anew from its output in backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        with torch.no_grad():
            y = x + 1.0
        x.untyped_storage().resize_(0)
        ctx.inputs, ctx.outputs = [x, x], [y, y]
        return y

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        x, y = ctx.inputs.pop(), ctx.outputs.pop()
        with torch.no_grad():
            x.untyped_storage().resize_(x.numel() * x.element_size())
            x.set_(y - 1.0)
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            (found,) = torch.autograd.grad((given + 1.0).sum(), given)
        return found * grad


def input_freed_by_a_reversible_function() -> None:
    net = nn.Linear(4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(9):
        loss = _Reversible.apply(net(torch.randn(6, 4)) * 2.0).pow(2).mean()
        opt.zero_grad()
        loss.backward(retain_graph=True)
        loss.backward()
        opt.step()


PROGRAMS = (
    input_freed_by_a_reversible_function,
    residuals_of_derivatives,
    attributions_added_up,
    values_of_parameters_in_losses,
    values_written_where_nothing_reads_them_on,
    values_as_they_were_after_unrecorded_writes,
    hooks_of_values_and_of_views_that_stay,
    hooks_removed_or_registered_after_the_write,
    losses_changed_after_their_backward,
    losses_added_up_in_place,
    weights_from_gradients,
    adversarial_examples,
    losses_by_given_gradients,
    generator_and_discriminator,
    actor_and_critic,
    head_with_an_optimizer_of_its_own,
    sharpness_aware_with_frozen_network,
    states_that_decay,
    buffer_filled_anew,
    batches_copied_by_a_loader,
    in_place_layers_alone,
    in_place_layers_of_fresh_values,
)


@pytest.mark.parametrize("mode", ["watch", "deep"])
def test_not_a_warning(mode: str) -> None:
    assert warnings_about(PROGRAMS, mode) == {}
