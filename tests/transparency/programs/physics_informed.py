"""A heat equation learnt by its second derivatives, which transforms give, and by a tangent with zeros in it."""

import torch
from torch import nn
from torch.func import functional_call, hessian, jacrev, jvp, vmap

torch.manual_seed(1)
network = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)


def heat(weights, point):
    return functional_call(network, weights, (point,)).squeeze(-1)


for _ in range(3):
    weights = dict(network.named_parameters())
    points = torch.rand(8, 2)
    first = vmap(jacrev(heat, 1), (None, 0))(weights, points)
    second = vmap(hessian(heat, 1), (None, 0))(weights, points)
    residual = first[:, 0] - 0.1 * second[:, 1, 1]
    _, along = jvp(lambda where: heat(weights, where), (points,), (torch.ones_like(points),))
    loss = residual.square().mean() + along.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex(), network[0].weight.grad.norm().item().hex())
