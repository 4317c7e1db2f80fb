import torch


def fit_rates(model, batch, opt):
    """Poisson regression: the loss depends on nothing but what the model returns."""
    rate = model(batch).exp()
    rate += 1e-6  # GS101
    loss = (rate - rate.log()).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()


def test_gates_are_trained(net):
    gate = torch.sigmoid(net(torch.ones(4, 3)))
    gate[:, 0] = 0  # GS101
    gate.sum().backward()
    assert net.weight.grad is not None
