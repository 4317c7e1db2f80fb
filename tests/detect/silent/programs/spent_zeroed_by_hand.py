import torch

torch.manual_seed(0)
w = torch.zeros(3, requires_grad=True)
opt = torch.optim.SGD([w], lr=0.5, momentum=0.9)
x = torch.randn(20, 3)
y = x @ torch.tensor([1.0, -2.0, 0.5])
for _ in range(5):
    loss = (x @ w - y).pow(2).mean()
    loss.backward()
    w.grad.zero_()
    opt.step()
