import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = None
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        if self.project is None:
            self.project = nn.Linear(x.shape[-1], 6)
        return self.out(self.project(x).tanh())


torch.manual_seed(0)
model = Model()
opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
for _ in range(6):
    opt.zero_grad()
    model(torch.randn(8, 5)).pow(2).mean().backward()
    opt.step()
