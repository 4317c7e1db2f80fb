import torch
from torch import nn


def evaluate(model, x, y):
    with torch.no_grad():
        out = model(x)
        error = out - y
    return error.pow(2).mean()


model = nn.Linear(3, 1)
total = 0
for _ in range(2):
    total = total + evaluate(model, torch.randn(4, 3), torch.zeros(4, 1))
total.backward()
