import torch

weight = torch.ones(3, requires_grad=True)
weight.pow(2).sum().backward(create_graph=True)
