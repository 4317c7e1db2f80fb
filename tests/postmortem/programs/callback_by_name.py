# GS110 net.gain
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x.tanh() * self.gain  # saved


class Clip:
    @torch.no_grad()
    def on_loss(self, trainer):
        trainer.net.gain.clamp_(0.5, 0.9)  # written


class Trainer:
    def __init__(self, net, *callbacks):
        self.net, self.callbacks = net, callbacks

    def emit(self, event):
        for callback in self.callbacks:
            method = getattr(callback, f"on_{event}", None)
            if method is not None:
                method(self)

    def step(self, x):
        loss = self.net(x).sum()
        self.emit("loss")
        loss.backward()  # used


net = Net()
Trainer(net, Clip()).step(torch.randn(4, 3, requires_grad=True))
