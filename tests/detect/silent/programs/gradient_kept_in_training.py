import torch
from torch import nn


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x)))


def train(model, batches):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


torch.manual_seed(0)
train(Regression(), [(torch.rand(4, 3), torch.rand(4, 1)) for _ in range(6)])
