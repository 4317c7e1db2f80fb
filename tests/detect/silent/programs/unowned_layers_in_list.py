import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.end = nn.Linear(3, 4), nn.Linear(4, 1)
        self.layers = [nn.Linear(4, 4) for _ in range(2)]

    def forward(self, x):
        x = self.start(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.end(x)


torch.manual_seed(0)
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(5):
    opt.zero_grad()
    net(torch.randn(5, 3)).pow(2).mean().backward()
    opt.step()
