import torch

w = torch.tensor([1.0, -1.0], requires_grad=True)
x, y = torch.tensor([[1.0, 2.0], [3.0, 1.0]]), torch.tensor([0.5, 1.0])
for _ in range(4):
    loss = (x @ w - y).pow(2).mean()
    loss.backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
