import torch
import torch.nn.functional as F


@torch.no_grad()
def sliced_wasserstein(a, b, directions=128, seed=0):
    """Return the mean Wasserstein distance of two equally large sets of pictures over random directions."""
    generator = torch.Generator().manual_seed(seed)
    slices = F.normalize(torch.randn(a[0].numel(), directions, generator=generator), dim=0)
    return ((a.flatten(1) @ slices).sort(dim=0).values - (b.flatten(1) @ slices).sort(dim=0).values).abs().mean().item()


@torch.no_grad()
def distance_to(pictures, G, z):
    G.eval()
    distance = sliced_wasserstein(pictures, G(z))
    G.train()
    return distance
