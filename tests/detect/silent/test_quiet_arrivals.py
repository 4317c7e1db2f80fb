"""Values written without autograd's knowledge: a warning only where a gradient reaches what was written."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from quiet_programs import warnings_about
from torch import nn

INDICES = torch.tensor([[1, 2, 0], [3, 0, 0]])
LENGTHS = (5, 3, 2)


def padding_that_is_masked_out() -> None:
    out = nn.Embedding(9, 4)(INDICES)
    with torch.no_grad():
        out[INDICES == 0] = 0.0
    mask = (INDICES != 0).float()[..., None]
    ((out * mask).sum(1) / mask.sum(1)).pow(2).mean().backward()


def scores_of_minus_infinity() -> None:
    query, key, x = nn.Linear(8, 8), nn.Linear(8, 8), torch.randn(2, 5, 8)
    scores = query(x) @ key(x).transpose(1, 2)
    with torch.no_grad():
        scores.masked_fill_(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
    (scores.softmax(-1) @ x).pow(2).mean().backward()


def oneself_left_out_of_contrast() -> None:
    z = F.normalize(nn.Linear(6, 4)(torch.randn(8, 6)), dim=1)
    similar = z @ z.t() / 0.5
    similar.data.fill_diagonal_(-9e15)
    F.cross_entropy(similar, torch.arange(8).roll(4)).backward()


def steps_after_the_end_of_a_sequence() -> None:
    recurrent, head = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 1)
    for _ in range(3):
        hidden, _ = recurrent(torch.randn(3, 5, 4))
        with torch.no_grad():
            for row, length in enumerate(LENGTHS):
                hidden[row, length:] = 0
        out = head(hidden).squeeze(-1)
        sum(out[row, :length].pow(2).mean() for row, length in enumerate(LENGTHS)).backward()


def a_mask_multiplied_in_and_used_again() -> None:
    net, mask = nn.Linear(4, 4), torch.tensor([[1.0, 1, 1, 0, 0], [1, 1, 0, 0, 0]])[..., None]
    for _ in range(3):
        hidden = net(torch.randn(2, 5, 4))
        hidden.data *= mask
        ((hidden * hidden) * mask).sum().backward()


def a_column_that_no_loss_reads() -> None:
    net = nn.Linear(4, 5)
    for _ in range(2):
        out = net(torch.randn(6, 4))
        with torch.no_grad():
            out[:, 0] = 7.0
        (out * torch.tensor([0.0, 1, 1, 1, 1])).sum().backward()


RIGHT = (
    padding_that_is_masked_out,
    scores_of_minus_infinity,
    oneself_left_out_of_contrast,
    steps_after_the_end_of_a_sequence,
    a_mask_multiplied_in_and_used_again,
    a_column_that_no_loss_reads,
)


def padding_that_is_averaged() -> None:
    out = nn.Embedding(9, 4)(INDICES)
    with torch.no_grad():
        out[INDICES == 0] = 0.0
    (out.mean(1) @ torch.randn(4)).sum().backward()


def halved_before_a_rectifier() -> None:
    net, head = nn.Linear(4, 4), nn.Linear(4, 1)
    for _ in range(2):
        hidden = net(torch.randn(6, 4))
        with torch.no_grad():
            hidden.mul_(0.5)
        head(F.relu(hidden)).mean().backward()


def some_rows_doubled() -> None:
    net, head = nn.Linear(4, 4), nn.Linear(4, 1)
    for _ in range(2):
        out = net(torch.randn(6, 4))
        with torch.no_grad():
            out[:3] *= 2
        head(out).pow(2).mean().backward()


def harmless_in_the_first_round_only() -> None:
    net = nn.Linear(4, 4)
    for used in (0.0, 1.0, 1.0):
        out = net(torch.randn(6, 4))
        out.data[:, 0] = 3.0
        (out.exp() * torch.tensor([used, 1.0, 1.0, 1.0])).sum().backward()


def backward_that_fails_afterwards() -> None:
    out = nn.Linear(4, 4)(torch.randn(6, 4))
    out.data.mul_(3)
    loss = out.exp().sum()
    loss.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()


WRONG = (
    padding_that_is_averaged,
    halved_before_a_rectifier,
    some_rows_doubled,
    harmless_in_the_first_round_only,
)


@pytest.mark.parametrize("mode", ["watch", "deep"])
def test_warned_where_a_gradient_arrives(mode: str) -> None:
    assert warnings_about(RIGHT, mode) == {}
    assert warnings_about(WRONG, mode) == {program.__name__: ["GS215"] for program in WRONG}
    said = warnings_about([backward_that_fails_afterwards], mode)
    assert "GS215" not in said.get("backward_that_fails_afterwards", []), "what was saved is stale, as GS202 says"
