import torch

image = torch.ones(3)
image.register_hook(print)
