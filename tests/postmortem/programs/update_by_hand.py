# GS110 weights[1]
import torch

weights = [torch.randn(3, 5, requires_grad=True), torch.randn(5, 1, requires_grad=True)]


def forward(x):
    return torch.tanh(x @ weights[0]) @ weights[1]  # saved


x = torch.randn(4, 3)
out = forward(x)
for target in (0.0, 1.0):
    (out - target).pow(2).mean().backward(retain_graph=True)  # used
    with torch.no_grad():
        for w in weights:
            w -= 0.1 * w.grad  # written
            w.grad = None
