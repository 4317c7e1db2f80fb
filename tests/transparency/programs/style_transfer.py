"""An image that is the parameter, clamped in the closure of LBFGS; then updated by hand."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)
cnn = (
    nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True)
    )
    .eval()
    .requires_grad_(False)
)


def gram(x):
    b, c, h, w = x.shape
    f = x.view(b * c, h * w)
    return f @ f.t() / (b * c * h * w)


class Style(nn.Module):
    def __init__(s, t):
        super().__init__()
        s.t = gram(t).detach()

    def forward(s, x):
        s.loss = F.mse_loss(gram(x), s.t)
        return x


class Content(nn.Module):
    def __init__(s, t):
        super().__init__()
        s.t = t.detach()

    def forward(s, x):
        s.loss = F.mse_loss(x, s.t)
        return x


st, ct = torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8)
model = nn.Sequential()
losses = []
for i, l in enumerate(cnn):
    if isinstance(l, nn.ReLU):
        l = nn.ReLU(inplace=False)
    model.add_module(str(i), l)
    if isinstance(l, nn.Conv2d):
        a, b = Style(model(st)), Content(model(ct))
        model.add_module(f"s{i}", a)
        model.add_module(f"c{i}", b)
        losses += [a, b]
img = ct.clone().requires_grad_(True)
opt = torch.optim.LBFGS([img])
run = [0]
while run[0] <= 30:

    def closure():
        with torch.no_grad():
            img.clamp_(0, 1)
        opt.zero_grad()
        model(img)
        l = sum(m.loss for m in losses)
        l.backward()
        run[0] += 1
        if run[0] % 10 == 0:
            print(l.item())
        return l

    opt.step(closure)
with torch.no_grad():
    img.clamp_(0, 1)
print(img.sum().item())
d = torch.rand(1, 3, 8, 8, requires_grad=True)
for k in range(5):
    cnn(d).norm().backward()
    d.data += 0.1 * d.grad.data / (d.grad.data.abs().mean() + 1e-8)
    d.grad.data.zero_()
    d.data.clamp_(0, 1)
print(d.sum().item())
