import torch


def make_series(batch, length, seed):
    """Return a series of shape (length, batch, 1): two sine waves of random phase per row, and noise."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.arange(length, dtype=torch.float32)[:, None]
    phase = 6.283 * torch.rand(2, 1, batch, generator=generator)
    series = torch.sin(0.2 * t + phase[0]) + 0.5 * torch.sin(0.45 * t + phase[1])
    return (series + 0.05 * torch.randn(length, batch, generator=generator)).unsqueeze(-1)


def chunks(series, size):
    """Yield (input, target) of shape (size, batch, 1), the target one time step later, from front to back."""
    for start in range(0, len(series) - size, size):
        yield series[start : start + size], series[start + 1 : start + size + 1]
