"""Right losses with a part that was computed from their own graph and has none: not a warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from quiet_programs import warnings_about
from torch import nn

import gradsan
from cases import each
from gradsan.detect.meaning.terms import constant_terms

ROUNDS = 6
FROZEN = nn.Linear(3, 2).requires_grad_(False)


def _fit(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def density_that_a_library_adds_up() -> None:
    """The log density of a point mass: ``log(x == v) + bonus``, 0 where the two are equal."""
    names: dict[str, Any] = {}
    text = "def density(x, v, bonus):\n    return (x == v).to(x.dtype).log().sum() + bonus\n"
    exec(compile(text, "/lib/site-packages/points/delta.py", "exec"), names)
    where = nn.Parameter(torch.randn(3))
    optimizer = torch.optim.SGD([where], lr=0.1)
    for _ in range(ROUNDS):
        x = where * 1
        _fit(optimizer, names["density"](x, x.view(3), (x - 1).pow(2).sum()))


def constants_that_a_library_adds_in_the_line_of_a_number() -> None:
    """``loss.item()`` is printed in the line in which a library adds a constant to the next loss."""
    names: dict[str, Any] = {}
    text = "def likelihood(x):\n    return x.pow(2).sum() + 0.9189385332046727\n"
    exec(compile(text, "/lib/site-packages/points/normal.py", "exec"), names)
    net, data, density = nn.Linear(5, 4), torch.randn(8, 5), names["likelihood"]
    optimizer, logged = torch.optim.SGD(net.parameters(), lr=0.01), list[float]()
    # fmt: off
    for _ in range(ROUNDS):
        optimizer.zero_grad(); loss = density(net(data)); loss.backward(); logged.append(loss.item()); optimizer.step()  # noqa: E702
    # fmt: on


def parameters_that_are_only_checked() -> None:
    """A head of a later phase is looked at like all others, and the norm of what is trained is printed."""
    net, later = nn.Linear(5, 4), nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*net.parameters(), *later.parameters()], lr=0.1)
    for _ in range(ROUNDS):
        loss = net(torch.randn(8, 5)).pow(2).mean()
        assert not any(bool(p.isnan().any()) or bool((p != p).any()) for p in (*net.parameters(), *later.parameters()))
        with torch.no_grad():
            assert sum(float(p.norm()) for p in later.parameters()) > 0
        _fit(optimizer, loss)


def bounds_that_the_rest_takes_away_again() -> None:
    net = nn.Linear(5, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(ROUNDS):
        x = net(torch.randn(5))
        each = net(torch.randn(16, 5)).pow(2).sum(1)
        with torch.no_grad():
            highest, worst = x.max(), torch.quantile(each, 0.8)
        tail = worst + torch.relu(each - worst).mean() / 0.2
        _fit(optimizer, highest + (x - highest).exp().sum().log() - x[1] + tail)


def entropies_of_what_is_fixed_in_this_step() -> None:
    means, data = nn.Parameter(torch.randn(3, 2)), torch.randn(30, 2)
    optimizer = torch.optim.SGD([means], lr=0.1)
    for _ in range(ROUNDS):
        likelihood = -0.5 * torch.cdist(data, means).pow(2)
        with torch.no_grad():
            shares = likelihood.softmax(1)
            entropy = -(shares * shares.clamp_min(1e-9).log()).sum()
        _fit(optimizer, -((shares * likelihood).sum() + entropy) / len(data))


def _width(mean: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Normal(mean, spread).entropy().mean()


def entropies_of_a_fixed_spread() -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(ROUNDS):
        mean = net(torch.randn(8, 4))
        spread = torch.exp(torch.zeros_like(mean))
        error = ((torch.randn(8, 2) - mean) / spread).square().mean()
        _fit(optimizer, error - 0.01 * _width(mean, spread))


def baselines_and_running_averages() -> None:
    net, average = nn.Linear(4, 1), torch.zeros(())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(ROUNDS):
        out = net(torch.randn(8, 4))
        loss = out.pow(2).mean()
        with torch.no_grad():
            before = (out - 0.1).pow(2).mean()
            average = 0.9 * average + 0.1 * loss
        _fit(optimizer, loss / (average + 1) + 0.1 * loss - before + 0.1 * loss.detach())


def choices_that_weigh_and_point() -> None:
    gate, experts = nn.Linear(4, 3), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    optimizer = torch.optim.Adam([*gate.parameters(), *experts.parameters()])
    for _ in range(ROUNDS):
        x = torch.randn(16, 4)
        shares = gate(x).softmax(1)
        chosen = shares.argmax(1)
        load = F.one_hot(chosen, 3).float().mean(0)
        out = torch.stack([experts[int(j)](x[k]) * shares[k, j] for k, j in enumerate(chosen)])
        with torch.no_grad():
            likeness = out @ out.t()
            nearest, count = likeness.fill_diagonal_(-9).argmax(1), (likeness > 0).sum().clamp_min(1)
        _fit(optimizer, (out - out[nearest]).pow(2).sum() / count + 0.03 * (load * shares.mean(0)).sum())


def measures_that_are_only_listed() -> None:
    net = nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(ROUNDS):
        y = torch.randint(0, 5, (7,))
        logits = net(torch.randn(7, 6))
        total = torch.zeros_like(logits.mean()) + logits.new_zeros(())
        parts = {"ce": F.cross_entropy(logits, y), "size": logits.pow(2).mean()}
        parts["error"] = (logits.argmax(1) != y).float().mean()
        _fit(optimizer, total + sum(parts[name] for name in ("ce", "size")))


def numbers_that_shift_and_scale() -> None:
    net, total, shown = nn.Linear(4, 2), 0.0, torch.zeros(())
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(ROUNDS):
        out = net(torch.randn(8, 4))
        one, other = out.pow(2).mean(), out.abs().mean()
        loss = one - other.item() + other / other.item()
        loss = loss + one * other.item()
        total += loss.item()
        shown += loss.item()
        _fit(optimizer, torch.relu(loss + out.max().item()) + one)


def numbers_that_are_meant_as_such() -> None:
    net, lag, ratio, before = nn.Linear(4, 3), 0.1, 1.0, 0.0
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(ROUNDS):
        out = net(torch.randn(8, 4))
        fit, size, rough = out[:, 0].pow(2).mean(), out.abs().mean(), (out[1:] - out[:-1]).pow(2).mean()
        highest, known, own = out.max().item(), size.detach().item(), float(size)
        bound = highest + (out - highest).exp().sum().log()
        following, straight = 0.4 * out[1, 2].item(), (rough - fit).item()
        shown, apart = [one.item() for one in (out[1, 2], 3 * fit - rough)]
        loss = fit + ratio * size + bound + 0.1 * known + (following - out[0, 2]) + straight + 0.2 * own / own
        loss = loss + 0.3 * rough + 0.1 * rough.item() + 0.1 * before + max(0.5, 0.1 * fit.item())
        ratio, before, lag = fit.item() / own, fit.item(), lag + 0.1 * (own - 1)
        _fit(optimizer, loss + lag * size + apart + 0 * shown)


def _consistency(cons: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[tuple[str, str]]:
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gradsan.watch() as watched:
        for _ in range(ROUNDS):
            out, other = net(torch.randn(8, 6)), net(torch.randn(8, 6))
            _fit(optimizer, out.pow(2).mean() + 0.5 * cons(out, other))
    return [(one.code, one.severity) for one in watched.diagnoses]


def test_a_term_of_detached_values_is_a_note() -> None:
    assert _consistency(lambda a, b: (a.detach() - b.detach()).pow(2).mean()) == [("GS220", "note")]


@each(
    "cons",
    [
        lambda a, b: (a.detach() - b).pow(2).mean(),
        lambda a, b: (a - b).pow(2).mean().detach(),
        lambda a, b: -2 * a.detach().mean(),
        lambda a, b: FROZEN(a.detach()).pow(2).mean(),
        lambda a, b: ((a.detach() - b.detach()).pow(2).mean() * b).mean(),
        lambda a, b: b.mean() - (0.1 * b.detach()).exp().mean(),
    ],
)
def test_a_constant_on_purpose_is_not_reported(cons: Any) -> None:
    assert _consistency(cons) == []


def _policy(q_of: Any) -> list[tuple[str, str]]:
    torch.manual_seed(0)
    policy, critic = nn.Linear(4, 3), nn.Linear(7, 1)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with gradsan.watch() as watched:
        for _ in range(5):
            x = torch.randn(8, 4)
            action = policy(x).tanh()
            cost = action.pow(2).sum(1)
            loss = q_of(cost, critic(torch.cat([x, action], 1)).squeeze(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [(one.code, one.severity) for one in watched.diagnoses]


def test_a_detached_term_of_each_element_is_a_note() -> None:
    assert _policy(lambda cost, q: (0.2 * cost - q.detach()).mean()) == [("GS220", "note")]


def test_a_term_that_numpy_has_computed_is_a_note() -> None:
    assert _policy(lambda cost, q: cost.mean() + torch.from_numpy(np.exp(-q.detach().numpy())).mean()) == [
        ("GS220", "note")
    ]


@each(
    "objective",
    [
        lambda cost, q: (0.2 * cost - q).mean(),
        lambda cost, q: (cost + (q.tanh() - cost).detach()).mean(),
        lambda cost, q: ((cost - q.detach()) * cost).mean(),
        lambda cost, q: (cost - torch.as_tensor(q.detach().numpy()).mean() * cost).mean(),
    ],
)
def test_values_that_only_shift_or_weigh_are_not_reported(objective: Any) -> None:
    assert _policy(objective) == []


PROGRAMS = (
    constants_that_a_library_adds_in_the_line_of_a_number,
    density_that_a_library_adds_up,
    parameters_that_are_only_checked,
    entropies_of_a_fixed_spread,
    numbers_that_are_meant_as_such,
    numbers_that_shift_and_scale,
    bounds_that_the_rest_takes_away_again,
    entropies_of_what_is_fixed_in_this_step,
    baselines_and_running_averages,
    choices_that_weigh_and_point,
    measures_that_are_only_listed,
)


@pytest.mark.parametrize("mode", ["watch", "deep"])
def test_not_a_warning(mode: str) -> None:
    assert warnings_about(PROGRAMS, mode) == {}


def test_a_line_that_adds_many_terms_looks_for_a_name_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver adds hundreds of detached values to its losses; a search for names takes milliseconds."""
    looked = list[int]()
    monkeypatch.setattr(constant_terms.Terms, "_found", lambda *_: looked.append(1))
    net = nn.Linear(5, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with gradsan.watch():
        for _ in range(ROUNDS):
            out = net(torch.randn(8, 5))
            loss = out.pow(2).mean()
            for _ in range(30):
                loss = loss + (out.detach() + 1).norm()
            _fit(optimizer, loss)
    assert len(looked) == 1
