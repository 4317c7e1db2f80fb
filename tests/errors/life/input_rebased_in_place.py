import torch

a = torch.ones(3, requires_grad=True) * 1
score = (a * a).sum()
a.mul_(2)
(gradient,) = torch.autograd.grad(score, [a])
