"""Optimizers that wait for their phase while others step: a note, as the program names their step or chooses one."""

from __future__ import annotations

import inspect
import runpy
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradsan
from gradsan.record.recorder import recorder

ROUNDS = 20


def discriminator_that_waits_for_the_generator() -> None:
    G, D = nn.Linear(4, 3), nn.Linear(3, 1)
    og, od = torch.optim.Adam(G.parameters(), 1e-2), torch.optim.Adam(D.parameters(), 1e-2)
    for turn in range(ROUNDS):
        fake = G(torch.randn(8, 4))
        if turn >= 1000:
            od.zero_grad()
            (F.softplus(-D(torch.randn(8, 3))) + F.softplus(D(fake.detach()))).mean().backward()
            od.step()
        og.zero_grad()
        od.zero_grad()
        loss = F.softplus(-D(fake)).mean()
        loss.backward()
        og.step()
        print(loss.item())


def trunk_behind_a_warm_up() -> None:
    trunk, head = nn.Linear(4, 8), nn.Linear(8, 2)
    of_trunk, of_head = torch.optim.SGD(trunk.parameters(), 0.1), torch.optim.SGD(head.parameters(), 0.1)
    for turn in range(ROUNDS):
        for one in (of_trunk, of_head):
            one.zero_grad()
        loss = head(trunk(torch.randn(8, 4)).relu()).pow(2).mean()
        loss.backward()
        of_head.step()
        if turn >= 100:
            of_trunk.step()
        print(loss.item())


def parts_that_a_list_names() -> None:
    nets = {"encoder": nn.Linear(4, 3), "decoder": nn.Linear(3, 4)}
    optimizers = {name: torch.optim.Adam(net.parameters(), 1e-2) for name, net in nets.items()}
    tuned = ["decoder"]
    for _ in range(ROUNDS):
        x = torch.randn(8, 4)
        for one in optimizers.values():
            one.zero_grad()
        loss = F.mse_loss(nets["decoder"](nets["encoder"](x)), x)
        loss.backward()
        for name in tuned:
            optimizers[name].step()
        print(loss.item())


def better_one_of_two() -> None:
    a, b = nn.Linear(4, 2), nn.Linear(4, 2)
    oa, ob = torch.optim.SGD(a.parameters(), 0.1), torch.optim.SGD(b.parameters(), 0.1)
    for _ in range(ROUNDS):
        x = torch.randn(8, 4)
        first, second = a(x).pow(2).mean(), (b(x) - 9).pow(2).mean()
        oa.zero_grad()
        ob.zero_grad()
        (first + second).backward()
        (oa if first < second else ob).step()
        print(first.item(), second.item())


def trained_by_nobody() -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for turn in range(ROUNDS):
        optimizer.zero_grad()
        loss = net(torch.randn(8, 4)).pow(2).mean()
        loss.backward()
        if turn >= 100:
            optimizer.step()
        print(loss.item())


def rate_of_an_optimizer_that_trains_nothing() -> None:
    net = nn.Linear(4, 1)
    holder = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(holder, 5, 0.5)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for _ in range(ROUNDS):
        optimizer.param_groups[0]["lr"] = schedule.get_last_lr()[0]
        optimizer.zero_grad()
        loss = net(torch.randn(8, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        holder.step()
        schedule.step()
        print(loss.item())


def layer_that_another_optimizer_has() -> None:
    net, spare = nn.Linear(4, 3), nn.Linear(4, 3)
    first = torch.optim.SGD(spare.parameters(), 0.1)
    net.requires_grad_(True)
    second = torch.optim.SGD(net.parameters(), 0.1)
    del spare
    for _ in range(ROUNDS):
        second.zero_grad()
        net(torch.randn(8, 4)).pow(2).mean().backward()
        second.step()
        first.step()


_OF_AN_EARLIER_WATCH: list[torch.optim.Optimizer] = []


def layers_left_out_on_purpose() -> None:
    body, head = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 1)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        head(body(torch.randn(8, 4))).pow(2).mean().backward()
        optimizer.step()


def told(program: Callable[[], None], file: Path) -> list[tuple[str, str]]:
    """Run the body of a function in a file of its own: who reads gradients beside it is judged otherwise."""
    body = textwrap.dedent(inspect.getsource(program).partition("\n")[2])
    imports = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\ntorch.manual_seed(0)\n"
    file.write_text(f"{imports}ROUNDS = {ROUNDS}\n{body}", encoding="utf-8")
    recorder().core.clear()
    watch = gradsan.watch()
    thread = threading.Thread(target=watch(runpy.run_path), args=(str(file),))
    thread.start()
    thread.join()
    return [(one.code, one.severity) for one in watch.diagnoses]


@pytest.mark.parametrize(
    "program",
    [
        discriminator_that_waits_for_the_generator,
        trunk_behind_a_warm_up,
        parts_that_a_list_names,
        better_one_of_two,
    ],
)
def test_a_step_that_is_a_matter_of_choice_is_a_note(program: Callable[[], None], tmp_path: Path) -> None:
    assert told(program, tmp_path / "train.py") == [("GS424", "note")]


def test_without_another_step_it_is_a_warning(tmp_path: Path) -> None:
    assert told(trained_by_nobody, tmp_path / "train.py") == [("GS424", "warning")]


def test_a_number_that_only_an_optimizer_has_is_there_for_its_schedule(tmp_path: Path) -> None:
    assert told(rate_of_an_optimizer_that_trains_nothing, tmp_path / "train.py") == []


def test_a_parameter_that_another_optimizer_has_replaces_none(tmp_path: Path) -> None:
    assert "GS420" not in dict(told(layer_that_another_optimizer_has, tmp_path / "train.py"))


def test_a_group_that_an_earlier_watch_saw_empty_is_no_evidence(tmp_path: Path) -> None:
    used_up = filter(lambda one: one.dim() > 3, nn.Linear(4, 1).parameters())
    with gradsan.watch():
        groups = [{"params": [torch.zeros(2, requires_grad=True)]}, {"params": used_up}]
        assert next(used_up, None) is None
        _OF_AN_EARLIER_WATCH.append(torch.optim.SGD(groups, lr=0.1))
    assert told(layers_left_out_on_purpose, tmp_path / "train.py") == []
    _OF_AN_EARLIER_WATCH.clear()
