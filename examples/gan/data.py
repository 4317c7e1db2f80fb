import torch
from torch.utils.data import TensorDataset


def make_shapes(n, size=32, seed=0):
    """Return n grey pictures (n, 1, size, size) in [-1, 1]: a bright disc or square on a dark ground."""
    generator = torch.Generator().manual_seed(seed)
    axis = torch.arange(size, dtype=torch.float32)
    y, x = axis[:, None], axis[None, :]
    pictures = []
    for _ in range(n):
        cy, cx = (size * (0.35 + 0.3 * torch.rand(2, generator=generator))).tolist()
        radius = size * (0.15 + 0.1 * torch.rand((), generator=generator))
        dy, dx = (y - cy).abs(), (x - cx).abs()
        disc = bool(torch.rand((), generator=generator) < 0.5)
        distance = (dy.square() + dx.square()).sqrt() if disc else torch.maximum(dy, dx)
        pictures.append(torch.tanh((radius - distance) / 1.5))
    pictures = torch.stack(pictures).unsqueeze(1)
    return TensorDataset(pictures + 0.02 * torch.randn(pictures.shape, generator=generator))
