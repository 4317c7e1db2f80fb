# GS110 params["2.weight"]
import copy

import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

members = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(2)]
params, buffers = stack_module_state(members)
skeleton = copy.deepcopy(members[0]).to("meta")


def predict(p, b, x):
    return functional_call(skeleton, (p, b), (x,))  # saved


def update(params):
    with torch.no_grad():
        for p in params.values():
            p -= 0.1 * p.grad  # written


out = vmap(predict, in_dims=(0, 0, None))(params, buffers, torch.randn(5, 3))
out.mean().backward(retain_graph=True)
update(params)
out.var(0).mean().backward()  # used
