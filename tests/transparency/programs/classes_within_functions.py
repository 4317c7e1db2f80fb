"""Classes and closures made within a function are gone with what they hold when it is left."""

import gc
import weakref

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)


def function_with_a_graph():
    held = torch.rand(3, requires_grad=True)
    inner = (held * held).sum()

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.factor, ctx.kept = 2.0, x
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            inner.backward()
            return grad * ctx.factor

    leaf = torch.rand(3, requires_grad=True)
    Nested.apply(leaf).sum().backward()
    return [Nested, Nested._backward_cls, held, leaf], leaf.grad


def function_that_fails():
    held = torch.rand(3, requires_grad=True)
    inner = held * held

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            inner.backward()

    leaf = torch.rand(3, requires_grad=True)
    try:
        Failing.apply(leaf).sum().backward()
    except RuntimeError as error:
        message = str(error)
    return [Failing, held, leaf], message


def function_with_setup():
    class Cubed(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 3 * x**2

    x = torch.rand(3)
    return [Cubed, x], torch.func.vmap(torch.func.grad(Cubed.apply))(x)


def checkpointed_module():
    scale = torch.full((2,), 0.5)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.calls = nn.Linear(2, 2), 0
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x):
            self.calls += 1
            return super().__getattr__("inner")(x).tanh() * scale + self.seen

    block = Block()
    loss = checkpoint(block, torch.ones(1, 2), use_reentrant=False).sum()
    loss.backward()
    return [Block, block, scale, block.inner.weight], block.inner.bias.grad


def frozen_by_data():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused, self.used = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.used + (self.unused.detach() if self.training else self.unused)

    model = Frozen()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    return [Frozen, model, optimizer, model.unused], model.used.detach()


def tensor_subclass():
    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.rand(3).as_subclass(Named).requires_grad_()
    x.exp().sum().backward()
    return [Named, x], x.grad


def own_optimizer():
    class Descent(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure):
            with torch.enable_grad():
                loss = closure()
            for group in self.param_groups:
                for one in group["params"]:
                    one.add_(one.grad, alpha=-0.1)
            return loss

    weight = torch.ones(2, requires_grad=True)
    optimizer = Descent([weight])

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return [Descent, optimizer, weight, closure], weight.detach()


def data_and_hooks():
    class Rows(Dataset):
        rows = torch.rand(4, 2)

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return self.rows[index]

    model, seen = nn.Linear(2, 1), []

    def hook(module, inputs, output):
        seen.append(output.detach())

    handle = model.register_forward_hook(hook)
    model.weight.register_hook(lambda grad: grad * len(seen))
    for batch in DataLoader(Rows(), batch_size=2):
        model(batch).sum().backward()
    handle.remove()
    return [Rows, model, hook, model.weight], model.weight.grad


for made in (
    function_with_a_graph,
    function_that_fails,
    function_with_setup,
    checkpointed_module,
    frozen_by_data,
    tensor_subclass,
    own_optimizer,
    data_and_hooks,
):
    for _ in range(2):
        things, result = made()
        kept = [weakref.ref(one) for one in things]
        shown = result.tolist() if torch.is_tensor(result) else result
        del things, result
        gc.collect()
        print(made.__name__, [one() is None for one in kept], shown)
