import torch

raw = torch.zeros(4, requires_grad=True)
width = raw.exp()
torch.optim.SGD([width], lr=0.1)
