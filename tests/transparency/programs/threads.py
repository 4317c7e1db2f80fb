"""Models trained in threads of a pool, one shared under a lock, a backward in another thread."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn as nn


def job(seed):
    g = torch.Generator().manual_seed(seed)
    net = nn.Linear(4, 1)
    nn.init.constant_(net.weight, 0.1)
    nn.init.zeros_(net.bias)
    opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    out = []
    for i in range(10):
        x = torch.randn(8, 4, generator=g)
        l = (net(x).exp() - 1).pow(2).mean()
        opt.zero_grad()
        l.backward()
        opt.step()
        out.append(l.item())
    return out[-1], net.weight.sum().item()


with ThreadPoolExecutor(4) as ex:
    print(list(ex.map(job, range(8))))
res = {}
ts = [threading.Thread(target=lambda k=k: res.__setitem__(k, job(k))) for k in range(4)]
[t.start() for t in ts]
[t.join() for t in ts]
print(sorted(res.items()))
lock = threading.Lock()
shared = nn.Linear(4, 1)
nn.init.zeros_(shared.weight)
nn.init.zeros_(shared.bias)
o = torch.optim.SGD(shared.parameters(), 0.1)


def worker(k):
    for i in range(5):
        with lock:
            l = (shared(torch.ones(2, 4) * (k + 1)) - 1).pow(2).mean()
            o.zero_grad()
            l.backward()
            o.step()


for k in range(3):
    t = threading.Thread(target=worker, args=(k,))
    t.start()
    t.join()
print(shared.weight.sum().item())
a = torch.ones(3, requires_grad=True)
loss = a.exp().sum()
t = threading.Thread(target=loss.backward)
t.start()
t.join()
print(a.grad)
