"""When tensors, graphs, contexts, hooks, optimizers and modules die; their copies, pickles and swaps; shared memory."""

import copy
import gc
import pickle
import weakref

import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(0)
died = []
w = torch.ones(3, requires_grad=True)


class Marked:
    def __init__(self, name):
        self.name = name

    def __del__(self):
        died.append(self.name)


def mark(thing, name):
    thing.mark = Marked(name)
    return thing


def told(label):
    print(label, died)
    died.clear()


def local():
    x = mark(torch.ones(2), "local")
    return (x * w[:2]).exp().sum()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        mark(ctx, "ctx")
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        died.append("backward")
        return g * ctx.saved_tensors[0]


gc.collect()
gc.disable()
a = mark(w * 2, "a")
b = mark(a.exp(), "b")
loss = b.sin().sum()
del a
died.append("|")
del b
loss.backward()
died.append("|")
del loss
told("chain")

loss = Twice.apply(w).sum()
loss.backward()
died.append("|")
del loss
told("function")

h = w * 2
h.register_hook(lambda g, hook=Marked("hook"): died.append("called"))
h.sum().backward()
died.append("|")
del h
told("hook")

loss = local()
died.append("|")
loss.backward()
died.append("|")
del loss
told("local")

y = mark(torch.utils.checkpoint.checkpoint(lambda t: t.sin().exp(), w, use_reentrant=False), "checkpointed")
z = y.sum()
del y
died.append("|")
z.backward()
del z
told("checkpoint")

t = mark(torch.ones(2), "t")
view, plain = mark(t.view(1, 2), "view"), t.detach()
del t
died.append("|")
del view
told("views")

gc.enable()
net = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid())
net[0].act = torch.Tensor.sigmoid_
opt = torch.optim.Adam(net.parameters(), 0.01)
net(torch.ones(1, 2)).sum().backward()
opt.step()
copied, loaded = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
print([one[0].act == torch.Tensor.sigmoid_ for one in (net, copied, loaded)], copied[0].act is net[0].act)
print([torch.equal(one[0].weight, net[0].weight) for one in (copied, loaded)], copied[0].weight.grad is not None)
weak, died_too = weakref.ref(net[0].weight), weakref.ref(opt)
del net, opt
gc.collect()
print(weak() is None, died_too() is None)

one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
torch.utils.swap_tensors(one, other)
(one * 3 + other).sum().backward()
print(one.tolist(), other.tolist(), one.grad.tolist())

shared = torch.arange(4.0)
array = shared.numpy()
array += 1
twin = torch.from_dlpack(array)
twin.mul_(2)
print(shared.tolist(), shared._version, twin._version)
gone = weakref.ref(shared)
del shared, twin
print(gone() is None, array.tolist(), np.from_dlpack(torch.ones(2)).tolist())
try:
    w.grad_fn_of_nothing = w.exp().grad_fn._raw_saved_result.register_hooks(3, 4)
except TypeError as error:
    print(str(error).splitlines()[0])
print(w.grad.tolist())
