import torch


def fit_rates(model, batch, opt):
    """Poisson regression: the loss depends on nothing but what the model returns."""
    rate = model(batch).exp()
    rate = rate + 1e-6
    loss = (rate - rate.log()).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()


def fit_masked(model, reference, batch):
    """Another value may be the one with a graph."""
    weight = torch.sigmoid(reference(batch))
    weight *= 2
    (model(batch) * weight).sum().backward()


def fit_scales(x, scale):
    height = torch.sigmoid(x)
    height *= 3
    (height * scale).sum().backward()


def fit_written(x, scale):
    height = torch.sigmoid(x)
    height *= scale
    height.sum().backward()


def fit_either(x, other, chosen):
    height = torch.sigmoid(x)
    height *= 3
    if chosen:
        height = other
    height.sum().backward()
