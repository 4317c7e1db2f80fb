import torch
from torch.utils._python_dispatch import TorchDispatchMode

cache = {}


class Keep(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.view.default:
            if "v" not in cache:
                cache["v"] = func(*args, **(kwargs or {}))
            return cache["v"]
        return func(*args, **(kwargs or {}))


x = torch.ones(4, requires_grad=True).clone()
with Keep():
    y = x.view(2, 2)
    y = x.view(2, 2)
