import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.out = nn.Linear(4, 3), nn.Linear(3, 4)

    def decode(self, code):
        return code @ self.out.weight.detach().t()

    def forward(self, x):
        return self.decode(torch.tanh(self.encoder(x)))


torch.manual_seed(0)
model = Tied()
optimizer = torch.optim.Adam([model.encoder.weight, model.encoder.bias, model.out.weight])
x = torch.rand(5, 4)
loss = nn.functional.mse_loss(model(x), x)
loss.backward()
optimizer.step()
