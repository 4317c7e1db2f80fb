"""Random programs in which one line is singular in one round: what the lines are, and where the origin lies."""

import random
from dataclasses import dataclass

# Of numbers of 1 and more; each gives such numbers again.
SAFE = (
    "x = x * 0.5 + 1",
    "x = torch.tanh(x) + 1",
    "x = F.softplus(x) + 1",
    "x = (x @ mix).abs() + 1",
    "x = torch.log(x) + 1",
    "x = x / x.detach().amax() + 1",
    "x = torch.where(x > 2, x.sqrt(), x) + 1",
    "x = x.masked_fill(mask, float('-inf')).softmax(-1) + 1",
    "x = x.clone().mul_(0.5).add_(1)",
    "x = checkpoint(torch.sigmoid, x, use_reentrant=False) + 1",
    "x = helped(x)",
    "x = torch.cat([x[:, 1:], x[:, :1]], 1)",
)
# ``zero`` is 0 in the round that is chosen, else 1.
FORWARD = (
    "x = x / zero",
    "x = x + torch.log(zero)",
    "x = (x * 1e30 * (1 - zero) + x) * 1e30 * 1e-30 * (1e30 * (1 - zero) + zero)",
    "x = x + (x[x < zero - 1].mean() if zero == 0 else 0)",
    "x = x + torch.acos(1.5 - zero * 0.7)",
    "x = x * (x - x.detach() * (1 - zero)).rsqrt()",
    "x = x + (x[:1].std(0) if zero == 0 else x.std(0))",
)
BACKWARD = (
    "x = x + (x * zero).square().sum().sqrt()",
    "x = torch.where(x * zero > 0, (x * zero).sqrt(), x)",
    "x = x + (x * zero).abs().pow(0.5)",
    "x = x + torch.acos(x.detach() / x * (1 - zero))",
    "x = x + root(x * zero)",
)
OPENING = """
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed({seed})
mix = torch.rand(4, 4)
mask = torch.eye(4, dtype=torch.bool)


def helped(x):
    y = x.exp().log1p()
    return y / y.detach().mean() + 1


def root(x):
    return (x * x).sum(-1, keepdim=True).sqrt()  # inside


weight = torch.nn.Parameter(torch.rand(4, 4) + 1)
optimizer = torch.optim.{optimizer}
for number in range({rounds}):
    zero = torch.tensor(0.0 if number == {bad} else 1.0)
    x = weight * (torch.rand(4, 4) + 0.5)
"""
CLOSING = """    loss = x.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
OPTIMIZERS = ("SGD([weight], lr=0.01)", "Adam([weight], lr=0.01)", "RMSprop([weight], lr=0.01, momentum=0.5)")


@dataclass(frozen=True)
class Planted:
    """A program, the line where the value is made, and the round."""

    text: str
    line: int
    round: int


def planted(seed: int) -> Planted:
    """The program of a seed."""
    choose = random.Random(seed)
    rounds = choose.randint(1, 4)
    bad = choose.randrange(rounds)
    singular = choose.choice(FORWARD + BACKWARD)
    lines = [choose.choice(SAFE) for _ in range(choose.randint(0, 6))]
    lines.insert(choose.randint(0, len(lines)), singular)
    opening = OPENING.format(seed=seed, optimizer=choose.choice(OPTIMIZERS), rounds=rounds, bad=bad)
    text = opening + "".join(f"    {line}\n" for line in lines) + CLOSING
    wanted = "# inside" if "root(" in singular else singular
    line = next(number for number, line in enumerate(text.split("\n"), 1) if line.endswith(wanted))
    return Planted(text, line, bad)
