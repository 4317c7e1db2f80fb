"""Lines that update a tensor from another: in which rounds gradsan looks at the results of calls for them."""

from __future__ import annotations

import copy

import pytest
import torch

import gradsan
from gradsan.detect.one_tensor.own_operands import OwnOperands
from gradsan.record.recorder import recorder


def test_a_line_that_runs_every_few_rounds_is_awaited_until_it_has_run():
    net = torch.nn.Linear(3, 3)
    average, optimizer = copy.deepcopy(net), torch.optim.SGD(net.parameters(), lr=0.1)
    awaited = []
    with gradsan.watch() as watched:
        detector = recorder().watching.run.get(OwnOperands)
        for step in range(40):
            net(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 4:
                with torch.no_grad():
                    for slow, fast in zip(average.parameters(), net.parameters(), strict=True):
                        slow.mul_(0.9).add_(fast, alpha=0.1)
            awaited.append(detector._followed)
    assert not watched.diagnoses
    assert awaited[-1] <= 5


LIBRARY = """
def attack(model, images, labels, steps):
    moved = torch.nn.Parameter(images)
    for _ in range(steps):
        loss = (moved - images).square().sum() + model(moved).logsumexp(1).sum()
        loss.backward()
        moved.grad = None
    return moved.detach()
"""


@pytest.mark.parametrize("is_library", [True, False])
def test_what_a_library_compares_is_not_named_by_the_arguments_of_its_caller(tmp_path, is_library):
    folder = tmp_path / ("site-packages" if is_library else "project")
    folder.mkdir()
    file = folder / "attacks.py"
    file.write_text(LIBRARY)
    names = {"torch": torch}
    exec(compile(LIBRARY, str(file), "exec"), names)
    images, labels = torch.rand(2, 3), torch.tensor([0, 1])
    with gradsan.watch() as watched:
        names["attack"](torch.nn.Linear(3, 2), images, labels, 3)
    assert [one.code for one in watched.diagnoses] == ([] if is_library else ["GS216"])
