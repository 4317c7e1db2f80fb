import torch
from torch import nn


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 8)
        self.left, self.right = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x):
        shared = torch.tanh(self.trunk(x))
        return self.left(shared).exp(), self.right(shared).sin()


torch.manual_seed(0)
model = TwoHeads()
compiled = torch.compile(model, backend="aot_eager", dynamic=True)
left, right = compiled(torch.randn(5, 4))
left.mean().backward(retain_graph=True)
right.mean().backward()
