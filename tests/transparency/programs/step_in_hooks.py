"""Steps in hooks during backward, layers thawed one by one, states saved and loaded."""

import io

import torch
import torch.nn as nn

torch.manual_seed(5)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
od = {p: torch.optim.Adam([p], 1e-2, foreach=False) for p in net.parameters()}


def hook(p):
    od[p].step()
    od[p].zero_grad()


hs = [p.register_post_accumulate_grad_hook(hook) for p in net.parameters()]
for i in range(5):
    x = torch.randn(8, 4)
    l = (net(x) - 1).pow(2).mean()
    l.backward()
    print(l.item())
for h in hs:
    h.remove()
net.requires_grad_(False)
net[4].requires_grad_(True)
opt = torch.optim.SGD(net[4].parameters(), 0.1)
for ep, layer in enumerate((None, 2, 0)):
    if layer is not None:
        net[layer].requires_grad_(True)
        opt.add_param_group({"params": net[layer].parameters(), "lr": 0.01})
    for k in range(3):
        x = torch.randn(8, 4)
        l = (net(x) - x.mean(1, keepdim=True)).pow(2).mean()
        opt.zero_grad()
        l.backward()
        opt.step()
    print(l.item())
net[4] = nn.Linear(8, 2)
opt = torch.optim.Adagrad(net.parameters())
opt.zero_grad()
l = net(x).pow(2).mean()
l.backward()
opt.step()
file = io.BytesIO()
torch.save(net.state_dict(), file)
file.seek(0)
net.load_state_dict(torch.load(file))
sd = opt.state_dict()
opt.load_state_dict(sd)
opt.zero_grad()
net(x).pow(2).mean().backward()
opt.step()
print(sum(p.sum().item() for p in net.parameters()))
