import torch

distance = torch.zeros(3, requires_grad=True)
with torch.autograd.detect_anomaly():
    scaled = distance.sqrt() * 0
    scaled.sum().backward()
