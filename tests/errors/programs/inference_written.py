import torch

with torch.inference_mode():
    features = torch.ones(3)
features.add_(1.0)
