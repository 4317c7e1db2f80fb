import torch

layer = torch.nn.Linear(2, 1)
loss = layer(torch.ones(3, 2)).pow(2).mean()
loss.backward()
layer.weight = layer.weight - 0.1 * layer.weight.grad
layer.bias = layer.bias - 0.1 * layer.bias.grad
