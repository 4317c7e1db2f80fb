import torch
from torch import nn


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return self.body(x).squeeze(-1)


def main():
    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = torch.randn(32, 8), torch.randn(32)
    for step in range(10):
        prediction = model(x)
        fit = nn.functional.mse_loss(prediction, y)
        smooth = prediction.diff().pow(2).mean()
        optimizer.zero_grad()
        fit.backward(retain_graph=True)
        (0.1 * smooth).backward()
        optimizer.step()
        print(step, fit.item())


main()
