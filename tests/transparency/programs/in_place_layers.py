"""Images edited in place before a network of in-place layers, in train and eval mode."""

import torch
import torch.nn as nn

torch.manual_seed(8)


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.register_buffer("mean", torch.tensor(0.5))
        s.c = nn.Conv2d(1, 4, 3)
        s.b = nn.BatchNorm2d(4)
        s.i = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        s.l = nn.Linear(4, 3)
        s.d = nn.Dropout(0.3, inplace=True)
        s.a = nn.ELU(inplace=True)
        s.h = nn.Hardswish(inplace=True)

    def forward(s, x):
        x = x.clone()
        x -= s.mean
        x /= 0.3
        x = s.a(s.b(s.c(x)))
        x = s.h(s.i(x))
        x = s.d(x.mean((2, 3)))
        return s.l(x)


net = Net()
opt = torch.optim.NAdam(net.parameters(), 1e-2)
for i in range(5):
    x, y = torch.rand(8, 1, 8, 8), torch.randint(0, 3, (8,))
    p = torch.randperm(8)
    lam = 0.7
    if i % 2:
        x[:, :, 2:5, 2:5] = x[p, :, 2:5, 2:5]
    else:
        x.mul_(lam).add_(x[p], alpha=1 - lam)
    x[:, :, :, 3] = 0
    x.clamp_(0, 1)
    o = net(x)
    l = lam * nn.functional.cross_entropy(o, y) + (1 - lam) * nn.functional.cross_entropy(o, y[p])
    opt.zero_grad()
    l.backward()
    opt.step()
    print(l.item())
    pr = o.softmax(1)
    pr.sub_(pr.mean())
    print(pr.argmax().item())
    with torch.no_grad():
        o.zero_()
        x.zero_()
net.eval()
x = torch.rand(4, 1, 8, 8, requires_grad=True)
(s,) = torch.autograd.grad(net(x)[:, 0].sum(), x)
s.abs_()
s /= s.max()
print(s.sum().item())
r = nn.RReLU(inplace=True)
q = torch.randn(20, requires_grad=True)
r(q * 1).sum().backward()
nn.functional.threshold_(w := q.exp(), 1.0, 0.0) if False else None
print(q.grad.sum().item())
