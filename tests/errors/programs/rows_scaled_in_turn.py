import torch

x = torch.ones(2, 3, requires_grad=True)
images = x * 1.0
for image in images:
    image.mul_(2.0)
images.sum().backward()
