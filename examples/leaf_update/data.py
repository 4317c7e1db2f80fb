import torch

FEATURES = ["compactness", "surface", "wall", "roof", "height", "glazing"]
TARGETS = ["heating", "cooling"]


def make_buildings(n, seed):
    """Return features (n, 6) and the heating and cooling load (n, 2) of made-up buildings, both standardised."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, len(FEATURES), generator=generator)
    heating = 1.2 * x[:, 0] - 0.8 * x[:, 1] + torch.sin(x[:, 4]) + 0.3 * x[:, 5]
    cooling = 0.9 * x[:, 0] - 0.5 * x[:, 3] + 0.7 * x[:, 4] * x[:, 5]
    y = torch.stack([heating, cooling], dim=1) + 0.1 * torch.randn(n, len(TARGETS), generator=generator)
    return x, (y - y.mean(0)) / y.std(0)
