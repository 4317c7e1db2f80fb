"""Predict the heating and cooling load of buildings: a two-layer regression with hand-written gradient descent."""

import argparse

import torch
from tqdm import trange

from data import FEATURES, TARGETS, make_buildings


def init_params(hidden, seed):
    generator = torch.Generator().manual_seed(seed)
    w1 = 0.3 * torch.randn(len(FEATURES), hidden, generator=generator)
    b1 = torch.zeros(hidden)
    w2 = 0.3 * torch.randn(hidden, len(TARGETS), generator=generator)
    b2 = torch.zeros(len(TARGETS))
    return [p.requires_grad_() for p in (w1, b1, w2, b2)]


def predict(params, x):
    w1, b1, w2, b2 = params
    return torch.tanh(x @ w1 + b1) @ w2 + b2


def losses(params, x, y):
    heating, cooling = (predict(params, x) - y).square().mean(dim=0)
    return heating, cooling


def zero_grad(params):
    for p in params:
        p.grad = None


def step_in_place(params, x, y, lr):
    heating, cooling = losses(params, x, y)
    loss = heating + cooling
    loss.backward()
    with torch.no_grad():  # an update is not part of the function that is differentiated
        for p in params:
            p -= lr * p.grad
    zero_grad(params)
    return params, loss.item()


def step_rebind(params, x, y, lr):
    heating, cooling = losses(params, x, y)
    loss = heating + cooling
    loss.backward()
    # The result of p - lr * p.grad is no leaf: cut it off and make it one, so that the next backward fills its .grad.
    params = [(p - lr * p.grad).detach().requires_grad_() for p in params]
    return params, loss.item()


def step_per_target(params, x, y, lr):
    heating, cooling = losses(params, x, y)
    # Both backwards first (they add up in .grad), then one update: cooling is differentiated at the weights it was
    # computed with. Two updates per step would need a forward of its own for cooling, after the first update.
    heating.backward(retain_graph=True)
    cooling.backward()
    with torch.no_grad():
        for p in params:
            p -= lr * p.grad
    zero_grad(params)
    return params, heating.item() + cooling.item()


STEPS = {"in-place": step_in_place, "rebind": step_rebind, "per-target": step_per_target}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", choices=list(STEPS), default="per-target", help="how the parameters are updated")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    x, y = make_buildings(256, args.seed)
    params = init_params(args.hidden, args.seed)
    step = STEPS[args.update]

    with trange(args.steps, desc=args.update) as bar:
        for i in bar:
            params, loss = step(params, x, y, args.lr)
            if i % 50 == 0 or i == args.steps - 1:
                bar.write(f"step {i}  loss {loss:.4f}")


if __name__ == "__main__":
    main()
