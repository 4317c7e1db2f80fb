import torch
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        x -= x.mean(1, keepdim=True)
        x /= x.std(1, keepdim=True)
        return self.lin(x)


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch), batch)


torch.manual_seed(0)
loss_of(Autoencoder(), torch.rand(4, 3)).backward()
