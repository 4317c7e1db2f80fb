import torch

image = torch.ones(3)
weight = torch.ones(3, requires_grad=True)
score = (image * weight).sum()
(saliency,) = torch.autograd.grad(score, [image])
