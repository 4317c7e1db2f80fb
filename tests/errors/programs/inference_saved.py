import torch

w = torch.ones(3, requires_grad=True)
with torch.inference_mode():
    features = torch.ones(3)
(features * w).sum().backward()
