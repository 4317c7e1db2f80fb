import torch
from torch import nn
import torch.nn.functional as F


class Tracker(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.cell = nn.GRUCell(d, d)
        self.out = nn.Linear(d, 2)
        self.h = None

    def forward(self, x):
        if self.h is None:
            self.h = torch.zeros(x.size(0), x.size(1))
        self.h = self.cell(x, self.h)
        return self.out(self.h)


def main():
    model = Tracker(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        x, y = torch.randn(3, 6), torch.randn(3, 2)
        pred = model(x)
        loss = F.mse_loss(pred, y)
        optimizer.zero_grad()
        loss.backward()  # GS401 (maybe)
        optimizer.step()


if __name__ == "__main__":
    main()
