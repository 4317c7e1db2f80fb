"""Programs in which NaN or Inf is made and does harm, each with the code, the round and the line of the origin."""

# name: (code, round, whether TRAIN follows, program); a comment marks the line of the origin.
HARMFUL = {
    "forward: log of a probability that underflows": (
        "GS601",
        0,
        True,
        """
        logits = nn.Parameter(torch.tensor([0.0, -200.0]))
        parameters = [logits]
        def loss_of(batch):
            chances = F.softmax(logits, 0)
            return -chances.log().sum()  # origin
        """,
    ),
    "forward: a square that half precision cannot hold, in the second round": (
        "GS601",
        1,
        True,
        """
        weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        parameters = [weight]
        def loss_of(batch):
            scale = 1e30 if batch else 1.0
            big = weight * scale
            return (big * big).sum()  # origin
        """,
    ),
    "forward: a cast to half precision, which has no Node that saves a value": (
        "GS601",
        1,
        True,
        """
        weight = nn.Parameter(torch.ones(4))
        parameters = [weight]
        def loss_of(batch):
            wide = (weight * (1e5 if batch else 1.0)).relu()
            short = wide.to(torch.float16)  # origin
            return (short * short).float().sum()
        """,
    ),
    "forward: the mean of nothing": (
        "GS601",
        2,
        True,
        """
        weight = nn.Parameter(torch.arange(3.0))
        parameters = [weight]
        def loss_of(batch):
            chosen = weight[weight > (9 if batch == 2 else 0)]
            return (weight * chosen.mean()).sum()  # origin
        """,
    ),
    "forward: a deviation of one element": (
        "GS601",
        0,
        True,
        """
        weight = nn.Parameter(torch.randn(1, 3))
        parameters = [weight]
        def loss_of(batch):
            spread = weight.std(dim=0)  # origin
            return (weight / (spread + 1)).sum()
        """,
    ),
    "update: a gradient divided by its norm, by hand": (
        "GS603",
        0,
        False,
        """
        weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        for batch in range(2):
            (weight * 0).sum().backward()  # noticed
            with torch.no_grad():
                weight -= 0.1 * (weight.grad / weight.grad.norm())  # origin
            weight.grad = None
        """,
    ),
    "update: a loss that outgrows its type before the parameters do": (
        "GS603",
        6,
        False,
        """
        weight = nn.Parameter(torch.tensor([1.0]))
        optimizer = torch.optim.SGD([weight], lr=1e6)
        for batch in range(8):
            loss = weight.square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # origin
        """,
    ),
    "backward: parameters made anew of what grad() gives": (
        "GS602",
        1,
        False,
        """
        weight = torch.ones(2, requires_grad=True)
        for batch in range(3):
            loss = (weight * (batch != 1)).square().sum().sqrt()  # origin
            (gradient,) = torch.autograd.grad(loss, [weight])  # noticed
            weight = (weight - 0.1 * gradient).detach().requires_grad_()
        """,
    ),
    "data: memory that another process has filled": (
        "GS604",
        0,
        True,
        """
        import ctypes
        weight = nn.Parameter(torch.ones(3))
        parameters = [weight]
        storage = torch.tensor([1.0, 2.0, 3.0]).untyped_storage()
        (ctypes.c_float * 3).from_address(storage.data_ptr())[1] = float("inf")
        def loss_of(batch):
            shared = torch.empty(0).set_(storage, 0, (3,))
            return (weight * shared).sum()  # origin
        """,
    ),
    "forward: memory that nobody wrote": (
        "GS601",
        0,
        True,
        """
        weight = nn.Parameter(torch.ones(3))
        parameters = [weight]
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True)
        def loss_of(batch):
            mask = torch.empty(3)  # origin
            mask[0] = 1.0
            return (weight * mask).sum()
        """,
    ),
    "forward: infinity minus infinity in a helper that knows no gradient": (
        "GS601",
        0,
        True,
        """
        weight = nn.Parameter(torch.ones(2))
        parameters = [weight]
        @torch.no_grad()
        def advantages(batch):
            returns = torch.tensor([800.0, 900.0]).exp()  # origin
            return returns - returns.mean()
        def loss_of(batch):
            return (weight * advantages(batch)).sum()
        """,
    ),
    "backward: the norm at zero": (
        "GS602",
        0,
        True,
        """
        weight = nn.Parameter(torch.zeros(3))
        parameters = [weight]
        def loss_of(batch):
            length = (weight * weight).sum().sqrt()  # origin
            return (length - 1.0) ** 2
        """,
    ),
    "backward: a branch that torch.where does not use": (
        "GS602",
        0,
        True,
        """
        weight = nn.Parameter(torch.tensor([2.0, 0.0]))
        parameters = [weight]
        def loss_of(batch):
            inverse = 1.0 / weight  # origin
            return torch.where(weight > 0, inverse, weight).sum()
        """,
    ),
    "backward: the derivative that a custom Function computes": (
        "GS602",
        1,
        True,
        """
        class Root(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x.sqrt()
            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                return grad / (2 * x.sqrt())  # origin
        weight = nn.Parameter(torch.ones(2))
        parameters = [weight]
        def loss_of(batch):
            return Root.apply(weight * (0.0 if batch == 1 else 1.0)).sum()
        """,
    ),
    "backward: no optimizer at all": (
        "GS602",
        0,
        False,
        """
        weight = torch.tensor([1.0, 0.0], requires_grad=True)
        loss = torch.where(weight > 0, weight.sqrt(), 0.0).sum()  # origin
        loss.backward()  # noticed
        """,
    ),
    "backward: an update by hand": (
        "GS602",
        0,
        False,
        """
        weight = torch.tensor([1.0, 0.0], requires_grad=True)
        for _ in range(3):
            loss = weight.pow(0.5).sum()  # origin
            loss.backward()  # noticed
            with torch.no_grad():
                weight -= 0.1 * weight.grad
            weight.grad = None
        """,
    ),
    "backward: a hook that divides": (
        "GS602",
        0,
        True,
        """
        weight = nn.Parameter(torch.tensor([1.0, 0.0]))
        parameters = [weight]
        def loss_of(batch):
            hidden = weight * 2
            hidden.register_hook(lambda grad: grad / grad.min())  # origin
            return (hidden * torch.tensor([1.0, 0.0])).sum()
        """,
    ),
    "backward: a hook that divides, behind an operation that only hands its gradient on": (
        "GS602",
        1,
        True,
        """
        body, head = nn.Linear(2, 2), nn.Linear(2, 1)
        parameters = [*body.parameters(), *head.parameters()]
        def loss_of(batch):
            hidden = body(torch.ones(3, 2)).tanh()
            branch = hidden.clone()
            branch.register_hook(lambda grad: grad / grad.norm())  # origin
            return (batch != 1) * head(branch).sum() + head(hidden).square().sum()
        """,
    ),
    "data: a gradient that the program gives to backward": (
        "GS604",
        0,
        False,
        """
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        shares = torch.tensor([1.0, 0.0]).log().numpy() * 0
        for batch in range(2):
            optimizer.zero_grad()
            (weight * 2).backward(torch.from_numpy(shares))  # origin
            optimizer.step()
        """,
    ),
    "backward: inside of what torch.compile has written": (
        "GS602",
        0,
        True,
        """
        weight = nn.Parameter(torch.zeros(2))
        parameters = [weight]
        @torch.compile(backend="aot_eager")
        def length(x):
            return (x * x).sum().sqrt()  # origin
        def loss_of(batch):
            return length(weight) + weight.sum()
        """,
    ),
    "forward: inside of a module that torch.compile has written, with random numbers and a count": (
        "GS601",
        2,
        True,
        """
        class Mixed(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(3))
                self.dropout = nn.Dropout(0.25)
                self.register_buffer("calls", torch.tensor(0))
            def forward(self, x, left):
                x = self.dropout(x * self.weight) + 1
                self.calls.add_(1)
                ratio = x / left  # origin
                return ratio.square().mean()
        model = Mixed()
        parameters = list(model.parameters())
        compiled = torch.compile(model, backend="aot_eager")
        def loss_of(batch):
            return compiled(torch.rand(4, 3), torch.tensor(2.0 - batch))
        """,
    ),
    "update: a schedule that begins at infinity": (
        "GS603",
        0,
        False,
        """
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=float("inf"))
        for _ in range(2):
            optimizer.zero_grad()
            loss = weight.sum()
            loss.backward()
            optimizer.step()  # origin
        """,
    ),
    "data: a missing reading of the third batch": (
        "GS604",
        2,
        True,
        """
        rows = torch.randn(4, 2, 3)
        rows[2, 1, 0] = float("nan")
        model = nn.Linear(3, 1)
        parameters = list(model.parameters())
        def loss_of(batch):
            return model(rows[batch]).pow(2).mean()  # origin
        """,
    ),
    "forward: stopped by the program's own check": (
        "GS601",
        0,
        False,
        """
        weight = nn.Parameter(torch.zeros(2))
        loss = torch.log(weight).sum()  # origin
        if not torch.isfinite(loss):
            raise ValueError("the loss is not finite")
        """,
    ),
}

HARMFUL |= {
    "data: an infinite entry that a data set wrote": (
        "GS604",
        1,
        True,
        """
        def row(number):
            x = torch.ones(3)
            if number == 1:
                x[1] = float("inf")
            return x
        model = nn.Linear(3, 1)
        parameters = list(model.parameters())
        def loss_of(batch):
            x = torch.stack([row(batch)])
            return model(x).square().mean()  # origin
        """,
    ),
    "forward: a loss that is NaN while its gradients are finite": (
        "GS601",
        0,
        True,
        """
        logits = nn.Parameter(torch.randn(4))
        target = torch.tensor([0.5, 0.5, 0.0, 0.0])
        parameters = [logits]
        def loss_of(batch):
            return (target * (target.log() - logits.log_softmax(0))).sum()  # origin
        """,
    ),
    "forward: refused by a distribution": (
        "GS601",
        0,
        False,
        """
        weight = nn.Parameter(torch.ones(3, 2))
        scale = (weight - 1) / (weight.detach() - 1)  # origin
        torch.distributions.Normal(scale, 1.0)
        """,
    ),
    "forward: a checkpoint that runs a backward of its own": (
        "GS601",
        0,
        True,
        """
        from torch.utils.checkpoint import checkpoint
        layer = nn.Linear(3, 3)
        parameters = list(layer.parameters())
        def loss_of(batch):
            x = torch.ones(2, 3, requires_grad=True)
            hidden = checkpoint(lambda t: layer(t).square(), x, use_reentrant=True)
            return (hidden * 1e30 * 1e30).sum()  # origin
        """,
    ),
    "forward: one row of attention has nothing to attend to": (
        "GS601",
        1,
        True,
        """
        attention = nn.MultiheadAttention(8, 2, batch_first=True)
        parameters = list(attention.parameters())
        def loss_of(batch):
            x = torch.randn(2, 5, 8)
            padding = torch.zeros(2, 5, dtype=torch.bool)
            padding[1] = batch == 1
            out, _ = attention(x, x, x, key_padding_mask=padding)  # origin
            return out.square().mean()
        """,
    ),
    "backward: the angle between parallel vectors": (
        "GS602",
        0,
        True,
        """
        vector = nn.Parameter(torch.tensor([[1.0, 0.0], [0.3, 0.4]]))
        parameters = [vector]
        def loss_of(batch):
            cosine = F.normalize(vector, dim=-1)[:, 0]
            return torch.acos(cosine).sum()  # origin
        """,
    ),
}

HARMFUL |= {
    "backward: a hook of a parameter that divides": (
        "GS602",
        1,
        True,
        """
        layer = nn.Linear(2, 1)
        layer.weight.register_hook(lambda grad: grad / grad.abs().max())  # origin
        parameters = list(layer.parameters())
        def loss_of(batch):
            return layer(torch.ones(3, 2) * (batch != 1)).square().mean()
        """,
    ),
    "data: an infinite feature that the forward hides": (
        "GS604",
        2,
        True,
        """
        rows = torch.ones(4, 3, 2)
        rows[2, 0, 1] = float("inf")
        net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        parameters = list(net.parameters())
        def loss_of(batch):
            return net((rows[batch] - 0.5) * 2).square().mean()  # origin
        """,
    ),
    "forward: a logarithm of the features, which the forward hides": (
        "GS601",
        1,
        True,
        """
        net = nn.Sequential(nn.Linear(2, 4), nn.Sigmoid(), nn.Linear(4, 1))
        parameters = list(net.parameters())
        def loss_of(batch):
            counts = torch.full((3, 2), 0.0 if batch == 1 else 2.0)
            features = counts.log()  # origin
            return net(features).square().mean()
        """,
    ),
    "data: one number of a table is inf": (
        "GS604",
        1,
        True,
        """
        table = torch.tensor([[1.0, 2.0], [0.5, float("inf")], [0.1, 0.2], [0.3, 0.4]])
        model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        parameters = list(model.parameters())
        def loss_of(batch):
            row = table[(batch + 0) % 4]
            return model(row).square().mean()  # origin
        """,
    ),
}
